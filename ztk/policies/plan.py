"""What a plan does not trace."""

from collections.abc import Iterator


def untraced(*, partition: str | None, inputs_on_cpu: bool | None) -> Iterator[str]:
    """One line per fault. partition: of a pipeline; None without one. inputs_on_cpu: of the recomputation."""
    if partition == "profile":
        yield "topology.partition=profile: a plan computes nothing and cannot measure layers; use topology.partition=parameters"
    if inputs_on_cpu:
        yield "recompute.inputs_on_cpu=true: a plan does not trace inputs in main memory; use recompute.inputs_on_cpu=false"
