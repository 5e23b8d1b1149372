"""The device, the node and the network that a plan is made for; `conf/hardware/` has the numbers of some, with their sources."""

from dataclasses import dataclass, fields

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """Bytes, bytes per second, operations per second, seconds; per device, one way.

    capacity_bytes: what the driver offers. reserve_bytes: of that, what the context, NCCL and the allocator's rounding take.
    bf16_rate, fp16_rate, fp32_rate: dense products. host_bandwidth: a device's share of its node's main memory. disk: a device's share.
    link: between the devices of a node. network: between nodes. ranks_per_node: devices of a node.

    Raises ValueError for a number that is not positive; latencies and `reserve_bytes` may be zero.
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
    network_latency: float
    network_bandwidth: float
    ranks_per_node: int

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "name":
                continue
            least_is_zero = field.name.endswith("latency") or field.name == "reserve_bytes"
            if value < 0 or (value == 0 and not least_is_zero):
                raise ValueError(
                    f"hardware.{field.name}={value}: must be {'0 or more' if least_is_zero else 'above 0'}"
                )

    @property
    def usable_bytes(self) -> int:
        """What tensors may take."""
        return self.capacity_bytes - self.reserve_bytes

    def rate(self, dtype: torch.dtype) -> float:
        """Operations per second of products in `dtype`."""
        return {torch.bfloat16: self.bf16_rate, torch.float16: self.fp16_rate}.get(dtype, self.fp32_rate)
