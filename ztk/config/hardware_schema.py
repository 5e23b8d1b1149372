"""The keys of `hardware`: what a plan is made for, and what floors of kernels are counted with."""

from dataclasses import dataclass
from typing import Any

from ztk.config.key import key


@dataclass(kw_only=True)
class HardwareConfig:
    """The device, the node and the network that a plan is made for, and whose floors `kernels.log_every` compares with. Bandwidths are one
    way, per device."""

    name: str | None = key("name of the hardware", default=None)
    capacity_bytes: int | None = key("bytes of device memory that the driver offers", default=None)
    reserve_bytes: int | None = key(
        "bytes of it that the CUDA context, NCCL and the allocator's rounding take", default=None
    )
    bf16_rate: float | None = key("operations per second of dense products in bf16", default=None)
    fp16_rate: float | None = key("operations per second of dense products in fp16", default=None)
    fp32_rate: float | None = key("operations per second of dense products in fp32", default=None)
    memory_bandwidth: float | None = key("bytes per second of device memory", default=None)
    host_bandwidth: float | None = key("bytes per second of main memory, a device's share", default=None)
    pcie_bandwidth: float | None = key("bytes per second between device and host", default=None)
    disk_read_bandwidth: float | None = key("bytes per second read from the disk, a device's share", default=None)
    disk_write_bandwidth: float | None = key("bytes per second written to the disk, a device's share", default=None)
    link_latency: float | None = key("seconds before a collective inside a node moves", default=None)
    link_bandwidth: float | None = key("bytes per second between the devices of a node", default=None)
    network_latency: float | None = key("seconds before a collective between nodes moves", default=None)
    network_bandwidth: float | None = key("bytes per second between nodes", default=None)
    ranks_per_node: int | None = key("devices of a node", default=None)
    operation_latency: float | None = key("seconds that an operation takes at least; null: 0", default=None)
    curves: dict[str, Any] | None = key(
        "of a CPU: seconds by amount of work, `python -m ztk.calibrate` measures them; null: rates alone", default=None
    )
    source: str | None = key("where the numbers are from, in the words of the plan", default=None)
    file: str | None = key(
        "file of hardware=here, which `python -m ztk.calibrate --to FILE` writes; null: ztk/hardware.json below $XDG_CACHE_HOME or ~/.cache",
        default=None,
    )
