"""A step's seconds on a simple timeline: what computes, what is sent, what passes between host and device, host and disk.

Operations run one after the other at the hardware's rates; collectives are sent in the order of their issue, and the step waits for them
where the engine waits. The other lanes only add up what they move, because the engine overlaps them with the rest. So the step takes as long
as computing and waiting, or as the busiest lane if that takes longer: a lower bound at the hardware's rates.

On a CPU, whose hardware has curves, the same cores compute, reduce and update: all but the disk adds up. There the host's own work counts,
too: what Python does for a gradient, for a request to the disk, and for an operation that a dispatch mode intercepts.
"""

from dataclasses import dataclass

import torch

from ztk.policies.curves import seconds_of
from ztk.policies.hardware import Hardware
from ztk.runtime.comm.planned import Moved

LANES = ("compute", "wire", "host", "pcie", "disk")
# Kinds of operations, beside ztk's own by their names.
PRODUCT, ATTENTION, TORCH_ATTENTION, ELEMENTWISE = "product", "attention", "torch_attention", "elementwise"
GROUPED_PRODUCT = "grouped_product"  # torch's product of groups of rows, each with a matrix of its own
FUSED = "fused"  # an operation of ztk that was not measured itself
INDEXED = "indexed"  # rows that indices or a mask name
GRADIENT, REQUEST, INTERCEPTED = "gradient", "request", "intercepted"  # work of the host beside operations
_LIKE = {
    PRODUCT: (),
    GROUPED_PRODUCT: (PRODUCT,),
    ELEMENTWISE: (),
    INDEXED: (),
    ATTENTION: (),
    TORCH_ATTENTION: (ATTENTION,),
}  # what stands for a kind that was not measured


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """seconds: of a step. busy: seconds of work by lane. waiting: of `seconds`, those in which computing waited for the wire."""

    seconds: float
    busy: dict[str, float]
    waiting: float

    @property
    def limit(self) -> str:
        """The lane that works the longest."""
        return max(self.busy, key=lambda lane: self.busy[lane])


class Lanes:
    """The clock of one planned rank."""

    def __init__(self, hardware: Hardware) -> None:
        self._hardware = hardware
        self._now = self._wire_free = self._start = self._waiting = 0.0
        self._busy = dict.fromkeys(LANES, 0.0)
        self.transfer = 0.0  # the longest message of this step to a neighbour in a pipeline, in seconds

    @property
    def now(self) -> float:
        """Seconds since the start of this clock."""
        return self._now

    def restart(self) -> None:
        """A step begins."""
        self._start, self._waiting, self.transfer = self._now, 0.0, 0.0
        self._busy = dict.fromkeys(LANES, 0.0)

    def read(self, *, disk_read: int, disk_write: int) -> StepTime:
        """The step since `restart`, in which so many bytes came from the disk and went there."""
        hardware = self._hardware
        self._busy["disk"] = disk_read / hardware.disk_read_bandwidth + disk_write / hardware.disk_write_bandwidth
        seconds = max(self._now - self._start, *self._busy.values())
        return StepTime(seconds=seconds, busy=dict(self._busy), waiting=self._waiting)

    def compute(
        self, *, kind: str, flops: int, device_bytes: int, host_bytes: int, dtype: torch.dtype, copies: bool
    ) -> None:
        """One operation. kind: what takes its time. copies: it does nothing else. With memory of the host it runs there, or is a copy
        between host and device."""
        hardware = self._hardware
        if hardware.curves is not None:
            nbytes = device_bytes + host_bytes
            self._take("host" if host_bytes else "compute", seconds=self._on_cores(kind, flops or nbytes, dtype=dtype))
            return
        if not host_bytes:
            self._take(
                "compute",
                seconds=max(
                    flops / hardware.rate(_name(dtype)),
                    device_bytes / hardware.memory_bandwidth,
                    hardware.operation_latency,
                ),
            )
            return
        self._busy["pcie"] += device_bytes / hardware.pcie_bandwidth
        if not (copies and device_bytes):
            self._busy["host"] += host_bytes / hardware.host_bandwidth

    def host_work(self, kind: str, *, amount: int = 1, dtype: torch.dtype = torch.float32) -> None:
        """Work of the host that no operation shows, of GRADIENT, REQUEST (amount: bytes) or INTERCEPTED: the cores of a CPU do nothing else
        meanwhile. Elsewhere the host works beside the device."""
        curves = self._hardware.curves or {}
        names = (kind, f"{kind}.{_name(dtype)}", f"{kind}.float32")
        points = next((curves[name] for name in names if name in curves), None)
        if points is not None:
            self._take("host", seconds=seconds_of(points, amount=amount))

    def _take(self, lane: str, *, seconds: float) -> None:
        """Nothing else is computed meanwhile."""
        self._now += seconds
        self._busy[lane] += seconds

    def _on_cores(self, kind: str, amount: int, *, dtype: torch.dtype) -> float:
        """Seconds of an operation by the hardware's curves; what is in no measured dtype is as in float32, and what was not measured itself
        as another fused or elementwise operation."""
        curves = self._hardware.curves or {}
        kinds = (kind, *_LIKE.get(kind, (FUSED,)), ELEMENTWISE)
        names = (kind, *(f"{one}.{name}" for one in kinds for name in (_name(dtype), "float32")))
        points = next(curves[name] for name in names if name in curves)
        return self._hardware.operation_latency + (seconds_of(points, amount=amount) if amount else 0.0)

    def collective(self, *, size: int, in_node: int) -> Moved:
        """What a group of `size` ranks, `in_node` of them in each node, calls for each collective.

        Between nodes every device of the group sends over its own network port, as NCCL's rings do.

        Raises:
            ValueError: the group spans nodes and the hardware has no network.
        """
        hardware, one_node = self._hardware, in_node == size
        latency, bandwidth = hardware.link_latency, hardware.link_bandwidth
        if not one_node:
            if hardware.network_latency is None or hardware.network_bandwidth is None:
                raise ValueError(
                    f"hardware={hardware.name}: {size} ranks are on several nodes and there is no network between them: give "
                    "network_latency and network_bandwidth, or use fewer ranks"
                )
            latency = hardware.network_latency
            bandwidth = min(bandwidth, in_node * hardware.network_bandwidth)

        def moved(kind: str, nbytes: int) -> _Sent:
            share = 1.0 if kind in ("send", "ring") else (size - 1) / size
            seconds = latency + nbytes * share / bandwidth
            curves = hardware.curves or {}
            if one_node and "all_gather" in curves:
                seconds = seconds_of(curves.get(kind, curves["all_gather"]), amount=max(1, nbytes))
            if kind == "send":
                self.transfer = max(self.transfer, seconds)
            if hardware.curves:
                self._take("wire", seconds=seconds)
                return _Sent(self, ends=self._now)
            self._wire_free = max(self._now, self._wire_free) + seconds
            self._busy["wire"] += seconds
            return _Sent(self, ends=self._wire_free)

        return moved

    def wait_until(self, moment: float) -> None:
        """Computing goes on when the clock shows `moment`."""
        self._waiting += max(0.0, moment - self._now)
        self._now = max(self._now, moment)


class _Sent:
    """A collective on the wire."""

    def __init__(self, lanes: Lanes, *, ends: float) -> None:
        self._lanes, self._ends = lanes, ends

    def is_completed(self) -> bool:
        return False

    def wait(self) -> None:
        self._lanes.wait_until(self._ends)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
