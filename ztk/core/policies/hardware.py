"""The device, the node and the network that a plan is made for; `conf/hardware/` has the numbers of some, with their sources."""

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields

from ztk.core.policies.curves import curve_faults
from ztk.core.policies.ranges import COUNT, NOT_NEGATIVE, POSITIVE, SIZE, SIZE_OR_ZERO, Range, range_faults, refuse

RANGES: dict[str, Range] = {
    "capacity_bytes": SIZE,
    "reserve_bytes": SIZE_OR_ZERO,
    "link_latency": NOT_NEGATIVE,
    "network_latency": NOT_NEGATIVE,
    "ranks_per_node": COUNT,
    "operation_latency": NOT_NEGATIVE,
    "multiprocessors": SIZE_OR_ZERO,
    "overlap_cost": Range(low=0, high=1),
    "attention_length": NOT_NEGATIVE,
    **{
        f"{name}_share": Range(low=0, high=1, above=True)
        for name in ("product", "fp8", "attention", "memory", "link", "network", "host", "pcie")
    },
    **{f"{dtype}_rate": POSITIVE for dtype in ("bf16", "fp16", "fp32", "fp8")},
    **{
        f"{name}_bandwidth": POSITIVE
        for name in ("memory", "host", "pcie", "disk_read", "disk_write", "link", "network")
    },
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """Bytes, bytes per second, operations per second, seconds; per device, one way.

    capacity_bytes: what the driver offers. reserve_bytes: of that, what the context, NCCL and the allocator's rounding take.
    bf16_rate, fp16_rate, fp32_rate, fp8_rate: dense products. host_bandwidth: a device's share of its node's main memory. disk: a device's
    share. link: between the devices of a node. network: between nodes; None: there is none, so a plan for several nodes is refused.
    ranks_per_node: devices of a node. operation_latency: an operation takes at least as long. source: where the numbers are from.
    curves: of a CPU, where no rate holds at every size: kind of work -> points [amount, seconds], see `ztk.core.policies.curves`. With curves
    nothing overlaps but the disk: the same cores compute, reduce and update, and an operation's latency comes before its work.

    Of these rates operations reach a share. product_share, fp8_share: large products whose tiles fill all multiprocessors, in fp8 those of
    linear layers; multiprocessors: 0 leaves the tiles out. attention_share: causal attention, forward and backward together, of long
    sequences and heads of 128 numbers; attention_length: the length at which it reaches half of that. memory_share: operations on rows.
    link_share, network_share: large collectives. host_share, pcie_share: the update in main memory and pinned copies. overlap_cost: the part
    of a collective's seconds by which it delays what is computed meanwhile, because it takes multiprocessors and memory bandwidth.

    Raises ValueError naming key and value for a number that is not positive, and for curves that do not rise; latencies and
    `reserve_bytes` may be zero.
    """

    name: str
    capacity_bytes: int
    reserve_bytes: int
    bf16_rate: float
    fp16_rate: float
    fp32_rate: float
    memory_bandwidth: float
    host_bandwidth: float
    pcie_bandwidth: float
    disk_read_bandwidth: float
    disk_write_bandwidth: float
    link_latency: float
    link_bandwidth: float
    network_latency: float | None = None
    network_bandwidth: float | None = None
    ranks_per_node: int
    operation_latency: float = 0.0
    fp8_rate: float | None = None
    product_share: float = 1.0
    fp8_share: float = 1.0
    attention_share: float = 1.0
    attention_length: float = 0.0
    memory_share: float = 1.0
    link_share: float = 1.0
    network_share: float = 1.0
    host_share: float = 1.0
    pcie_share: float = 1.0
    overlap_cost: float = 0.0
    multiprocessors: int = 0
    source: str = "of data sheets"
    curves: Mapping[str, Sequence[Sequence[float]]] | None = None

    @staticmethod
    def here(*, file: str | None = None) -> "Hardware":
        """This machine, as `python -m ztk.calibrate` has measured it. file: None: `ztk/hardware.json` in the user's cache.

        Raises:
            ValueError: it was never measured.
        """
        from ztk.core.policies.measured import read_measured  # here: that file imports this one

        return Hardware(**read_measured(file))

    def __post_init__(self) -> None:
        refuse((*range_faults(self, section="hardware", ranges=RANGES), *curve_faults(self.curves or {})))

    @property
    def usable_bytes(self) -> int:
        """What tensors may take."""
        return self.capacity_bytes - self.reserve_bytes

    @property
    def is_reached(self) -> bool:
        """Seconds are estimates, at rates that were measured, and no bounds at those of data sheets."""
        return self.curves is not None or self.product_share < 1

    def reached(self, dtype: str) -> float:
        """Operations per second of large products in `dtype`."""
        return self.rate(dtype) * self.product_share

    def rate(self, dtype: str) -> float:
        """Operations per second of products in `dtype`, such as "bfloat16"; those that are not named compute as fp32."""
        return {"bfloat16": self.bf16_rate, "float16": self.fp16_rate}.get(dtype, self.fp32_rate)


NAMES = tuple(field.name for field in fields(Hardware))
REQUIRED = tuple(  # of an option on the command line
    field.name
    for field in fields(Hardware)
    if field.default is MISSING or (field.name.startswith("network_") and field.default is None)
)
