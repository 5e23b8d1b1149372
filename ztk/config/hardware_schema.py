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
    fp8_rate: float | None = key("operations per second of dense products in fp8; null: there are none", default=None)
    product_share: float | None = key("share of a rate that large products reach; null: 1", default=None)
    fp8_share: float | None = key("share of fp8_rate that the products of linear layers reach; null: 1", default=None)
    attention_share: float | None = key("share of a rate that causal attention reaches; null: 1", default=None)
    attention_length: float | None = key("sequence length at which attention reaches half of it; null: 0", default=None)
    memory_share: float | None = key("share of memory_bandwidth that operations on rows reach; null: 1", default=None)
    link_share: float | None = key("share of link_bandwidth that large collectives reach; null: 1", default=None)
    network_share: float | None = key("share of network_bandwidth that large collectives reach; null: 1", default=None)
    host_share: float | None = key("share of host_bandwidth that an update reaches; null: 1", default=None)
    pcie_share: float | None = key("share of pcie_bandwidth that pinned copies reach; null: 1", default=None)
    overlap_cost: float | None = key(
        "part of a collective's seconds by which it delays computing meanwhile; null: 0", default=None
    )
    multiprocessors: int | None = key(
        "of a device, over which the tiles of products are spread; null: not counted", default=None
    )
    curves: dict[str, Any] | None = key(
        "of a CPU: seconds by amount of work, `python -m ztk.calibrate` measures them; null: rates alone", default=None
    )
    source: str | None = key("where the numbers are from, in the words of the plan", default=None)
    file: str | None = key(
        "file of hardware=here, which `python -m ztk.calibrate --to FILE` writes; null: ztk/hardware.json below $XDG_CACHE_HOME or ~/.cache",
        default=None,
    )
