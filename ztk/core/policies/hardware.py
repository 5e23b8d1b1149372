"""The device, the node and the network that a plan is made for. `conf/hardware/` has the numbers of some, with their sources.
`python -m ztk.calibrate` writes the numbers of this machine into a file, which `hardware=here` reads."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

from ztk.core.policies.curves import curve_faults
from ztk.core.policies.key import Changes, When, key, key_faults
from ztk.core.policies.paths import Paths
from ztk.core.policies.ranges import COUNT, NOT_NEGATIVE, POSITIVE, SIZE, SIZE_OR_ZERO, Range, refuse
from ztk.core.policies.records import replace_file
from ztk.core.policies.runs import reports_mfu, times_kernels

HERE = "here"
COMMAND = "python -m ztk.calibrate"
CEILINGS = ("memory_bandwidth", "bf16_rate", "fp16_rate", "fp32_rate")  # rates that a kernel's lower bound uses
_SHARE = Range(low=0, high=1, above=True)
_PLANNED = When("task=plan and hardware=NAME", lambda config, machine: config.task.name == "plan")
_COUNTED = When(
    "task=plan or kernels.log_every above 0, and hardware=NAME",
    lambda config, machine: config.task.name == "plan" or times_kernels(config),
)
_NAMED = When(
    "task=plan, kernels.log_every above 0 or task=pretrain on a GPU, and hardware=NAME",
    lambda config, machine: _COUNTED.test(config, machine) or reports_mfu(config, machine=machine),
)


def _rated(dtype: str) -> When:
    """Runs that use the rate of matrix products in this dtype: MFU uses one dtype, plans and floors use all."""
    return When(
        f"task=plan, kernels.log_every above 0 or task=pretrain on a GPU with precision={dtype}",
        lambda config, machine: (
            _COUNTED.test(config, machine) or (reports_mfu(config, machine=machine) and config.precision.dtype == dtype)
        ),
    )


@dataclass(kw_only=True)
class HardwareConfig:
    """The device, the node and the network that a plan is made for. `kernels.log_every` compares with its floors, MFU on a GPU with its peak.
    Bandwidths are one way, per device."""

    acts: ClassVar = _PLANNED
    optional: ClassVar = True
    changes: ClassVar = Changes.experiment

    name: str | None = key("name of the hardware", acts=_NAMED)
    capacity_bytes: int | None = key("bytes of device memory that the driver offers", range=SIZE)
    reserve_bytes: int | None = key(
        "bytes of it that the CUDA context, NCCL and the allocator's rounding take", range=SIZE_OR_ZERO
    )
    host_capacity_bytes: int | None = key(
        "bytes of main memory of a node, shared by its ranks; null: a plan does not check it", range=SIZE
    )
    host_reserve_bytes: int | None = key(
        "bytes of it that the system, the processes and their data take; null: 0", range=SIZE_OR_ZERO
    )
    bf16_rate: float | None = key(
        "operations per second of dense products in bf16", range=POSITIVE, acts=_rated("bf16")
    )
    fp16_rate: float | None = key(
        "operations per second of dense products in fp16", range=POSITIVE, acts=_rated("fp16")
    )
    fp32_rate: float | None = key(
        "operations per second of dense products in fp32", range=POSITIVE, acts=_rated("fp32")
    )
    memory_bandwidth: float | None = key("bytes per second of device memory", range=POSITIVE, acts=_COUNTED)
    host_bandwidth: float | None = key("bytes per second of main memory, a device's share", range=POSITIVE)
    pcie_bandwidth: float | None = key("bytes per second between device and host", range=POSITIVE)
    disk_read_bandwidth: float | None = key("bytes per second read from the disk, a device's share", range=POSITIVE)
    disk_write_bandwidth: float | None = key("bytes per second written to the disk, a device's share", range=POSITIVE)
    link_latency: float | None = key("seconds before a collective inside a node moves", range=NOT_NEGATIVE)
    link_bandwidth: float | None = key("bytes per second between the devices of a node", range=POSITIVE)
    network_latency: float | None = key("seconds before a collective between nodes moves", range=NOT_NEGATIVE)
    network_bandwidth: float | None = key("bytes per second between nodes", range=POSITIVE)
    ranks_per_node: int | None = key("devices of a node", range=COUNT)
    operation_latency: float | None = key("seconds that an operation takes at least; null: 0", range=NOT_NEGATIVE)
    fp8_rate: float | None = key("operations per second of dense products in fp8; null: there are none", range=POSITIVE)
    product_share: float | None = key("share of a rate that large products reach; null: 1", range=_SHARE)
    fp8_share: float | None = key("share of fp8_rate that the products of linear layers reach; null: 1", range=_SHARE)
    attention_share: float | None = key("share of a rate that causal attention reaches; null: 1", range=_SHARE)
    attention_length: float | None = key(
        "sequence length at which attention reaches half of it; null: 0", range=NOT_NEGATIVE
    )
    memory_share: float | None = key("share of memory_bandwidth that operations on rows reach; null: 1", range=_SHARE)
    link_share: float | None = key("share of link_bandwidth that large collectives reach; null: 1", range=_SHARE)
    network_share: float | None = key("share of network_bandwidth that large collectives reach; null: 1", range=_SHARE)
    host_share: float | None = key("share of host_bandwidth that an update reaches; null: 1", range=_SHARE)
    pcie_share: float | None = key("share of pcie_bandwidth that pinned copies reach; null: 1", range=_SHARE)
    overlap_cost: float | None = key(
        "part of a collective's seconds inside a node by which it delays computing meanwhile; null: 0",
        range=Range(low=0, high=1),
    )
    multiprocessors: int | None = key(
        "of a device, over which the tiles of products are spread; null: not counted", range=SIZE_OR_ZERO
    )
    curves: dict[str, Any] | None = key(
        "of a CPU: seconds by amount of work, `python -m ztk.calibrate` measures them; null: rates alone"
    )
    source: str | None = key("where the numbers are from, in the words of the plan")
    file: str | None = key(
        "file of hardware=here, which `python -m ztk.calibrate --to FILE` writes; null: ztk/hardware.json below $XDG_CACHE_HOME or ~/.cache",
        acts=_NAMED,
        paths=Paths(),
    )


FLOAT8 = "float8_e4m3fn"  # dtype of float8 products


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """Bytes, bytes per second, operations per second, seconds; per device, one way.

    capacity_bytes: memory that the driver offers. reserve_bytes: part of it that the context, NCCL and the allocator's rounding take.
    host_capacity_bytes: main memory of a node; if omitted, plans do not check it. host_reserve_bytes: part of it that the system and the
    processes take.
    bf16_rate, fp16_rate, fp32_rate, fp8_rate: dense products. host_bandwidth: a device's share of its node's main memory. disk: a device's
    share. link: between the devices of a node. network: between nodes; if omitted, a plan for several nodes is refused.
    ranks_per_node: devices of a node. operation_latency: minimum time of an operation. source: origin of the numbers.
    curves: measurements of a CPU, where no rate holds at every size: kind of work -> points [amount, seconds], see
    `ztk.core.policies.curves`.
    With curves only the disk overlaps with other work, because the same cores compute, reduce and update, and an operation's latency is
    added to its work.

    Operations reach a share of these rates. product_share, fp8_share: large products whose tiles fill all multiprocessors; fp8_share is for
    linear layers in fp8. multiprocessors: 0 disables the tile model. attention_share: causal attention, forward and backward together, with
    long sequences and heads of 128 numbers; attention_length: the length at which it reaches half of that. memory_share: operations on
    rows.
    link_share, network_share: large collectives. host_share, pcie_share: the update in main memory and pinned copies. overlap_cost: the
    part of a collective's seconds by which it delays concurrent compute, because it uses multiprocessors and memory bandwidth. Between
    nodes, where a collective takes longer for its bytes, the delay is what the same bytes cause inside a node.

    Raises ValueError naming key and value for a number that is not positive, and for curves that do not rise; latencies and
    reserved bytes may be zero.
    """

    name: str
    capacity_bytes: int
    reserve_bytes: int
    host_capacity_bytes: int | None = None
    host_reserve_bytes: int = 0
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
        """This machine, as measured by `python -m ztk.calibrate`. file: defaults to `ztk/hardware.json` in the user's cache.

        Raises:
            ValueError: it was never measured.
        """
        return Hardware(**read_measured(file))

    def __post_init__(self) -> None:
        refuse((*key_faults(self, keys=HardwareConfig, section="hardware"), *curve_faults(self.curves or {})))

    @property
    def usable_bytes(self) -> int:
        """Bytes available for tensors."""
        return self.capacity_bytes - self.reserve_bytes

    @property
    def usable_host_bytes(self) -> int | None:
        """Main memory of a node that is available to tensors of all its ranks. None if unknown."""
        return None if self.host_capacity_bytes is None else self.host_capacity_bytes - self.host_reserve_bytes

    @property
    def is_reached(self) -> bool:
        """Whether seconds are estimates at measured rates, rather than bounds from data sheets."""
        return self.curves is not None or self.product_share < 1

    def reached(self, dtype: str) -> float:
        """Operations per second of large products in `dtype`."""
        return self.rate(dtype) * (self.fp8_share if dtype == FLOAT8 else self.product_share)

    def rate(self, dtype: str) -> float:
        """Operations per second of products in `dtype`, such as "bfloat16". Other dtypes compute as fp32."""
        if dtype == FLOAT8 and self.fp8_rate is not None:
            return self.fp8_rate
        return {"bfloat16": self.bf16_rate, "float16": self.fp16_rate}.get(dtype, self.fp32_rate)


NAMES = tuple(field.name for field in fields(Hardware))
REQUIRED = tuple(  # of an option on the command line
    field.name
    for field in fields(Hardware)
    if field.default is MISSING or (field.name.startswith("network_") and field.default is None)
)


def measured_path(file: str | os.PathLike | None = None) -> Path:
    """`file`, else `ztk/hardware.json` below $XDG_CACHE_HOME or ~/.cache."""
    if file is not None:
        return Path(file).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ztk" / "hardware.json"


def read_measured(file: str | os.PathLike | None = None) -> dict[str, Any]:
    """Keywords of `Hardware`. file: see `measured_path`.

    Raises:
        ValueError: the file does not exist, or was not written by `python -m ztk.calibrate`.
    """
    path = measured_path(file)
    command = COMMAND if file is None else f"{COMMAND} --to {file}"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        values = content["hardware"]
    except FileNotFoundError:
        raise ValueError(f"hardware=here: {path} was never written: run `{command}`") from None
    except (KeyError, TypeError, ValueError, OSError) as error:
        raise ValueError(f"hardware=here: {path} is no description of hardware ({error}): run `{command}`") from None
    if unknown := sorted(set(values) - {"name", *NAMES}):
        raise ValueError(f"hardware=here: {path} has unknown numbers, {', '.join(unknown)}: run `{command}`")
    return values


def write_measured(content: Mapping[str, Any], *, file: str | os.PathLike | None = None) -> Path:
    """Writes `content` (with the keys "hardware" and "sources") atomically and returns the path."""
    path = measured_path(file)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, text=json.dumps(content, indent=2) + "\n")
    return path
