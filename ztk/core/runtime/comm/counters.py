"""Volume and time of collectives, by kind."""

from collections import defaultdict

KINDS = (
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "all_to_all",
    "ring",
    "broadcast",
    "send",
    "tied",
    "muon",
    "scalars",
)


class CommCounters:
    """Calls, elements and bytes per kind, and seconds.

    The volume is the one of the ZeRO paper (Rajbhandari et al. 2020, section 7): a gather or reduce-scatter of a tensor with n elements
    counts n, an all-reduce counts 2 n because it is a reduce-scatter followed by an all-gather. The bytes on the wire are (N-1)/N of that
    on N ranks. `scalars` counts the few numbers that ranks exchange per step (gradient norm, loss) separately, so that the formulas hold
    exactly.

    `busy_seconds` is the time the transport worked, `wait_seconds` the part of it that the step had to wait for.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Everything back to zero."""
        self.calls: dict[str, int] = defaultdict(int)
        self.elements: dict[str, int] = defaultdict(int)
        self.bytes: dict[str, int] = defaultdict(int)
        self.busy_seconds = 0.0
        self.wait_seconds = 0.0

    def count(self, kind: str, *, numel: int, itemsize: int) -> None:
        assert kind in KINDS, kind
        self.calls[kind] += 1
        self.elements[kind] += numel
        self.bytes[kind] += numel * itemsize
