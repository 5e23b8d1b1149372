"""The timeline of a step in lanes: computing, the wire, the host's update, copies over PCIe, the disk.

Operations run one after the other at the hardware's rates. Collectives inside a node are sent in the order of their issue, and so are
collectives between nodes; the two use different links. The step waits for them where the engine waits. An update in main memory starts when
its gradients and states have arrived, and it blocks the host: the step waits for it, unless it runs in the thread during the next forward
(stage 3). Then each bucket has the time at which its update has ended and its parameters are on the device, and the first gather of the
bucket waits until then. Copies in one direction of the PCIe link follow one another, and so do reads from the disk. No lane can work for
longer than the step, so the busiest lane is a bound.

On a CPU, whose hardware has curves, the same cores compute, reduce and update: the times of all lanes except the disk add up. There the
host's own work counts, too: Python's time for a gradient, for a request to the disk, and for an operation that a dispatch mode intercepts.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from ztk.core.policies.curves import seconds_of
from ztk.core.policies.hardware import FLOAT8, Hardware
from ztk.core.policies.peers import Peer
from ztk.core.runtime.comm.planned import Moved
from ztk.planner.kinds import ATTENTION, ELEMENTWISE, FUSED, GROUPED_PRODUCT, INDEXED, PRODUCT, TORCH_ATTENTION
from ztk.planner.reached import device_seconds

LANES = ("compute", "wire", "host", "pcie", "disk")
TO_DEVICE, TO_HOST = _COPIES = ("to device", "to host")  # directions of the PCIe link, which works in both at one time
# Links inside a node and between nodes. PyTorch gives every process group a communicator and a stream (ProcessGroupNCCL.cpp), so a
# collective of tensor-parallel ranks does not queue behind a gather over the network.
LINK, NETWORK = _WIRES = ("link", "network")
_LIKE = {
    PRODUCT: (),
    GROUPED_PRODUCT: (PRODUCT,),
    ELEMENTWISE: (),
    INDEXED: (),
    ATTENTION: (),
    TORCH_ATTENTION: (ATTENTION,),
}  # substitutes for kinds that were not measured
_COUNTED = (*LANES, *_COPIES, *_WIRES)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """seconds: duration of one step. busy: seconds of work by lane. waits: seconds that computing waited for each lane. waiting: their sum,
    plus the bubble of a pipeline."""

    seconds: float
    busy: dict[str, float]
    waiting: float
    waits: dict[str, float] = field(default_factory=dict)

    @property
    def limit(self) -> str:
        """The busiest lane."""
        return max(self.busy, key=lambda lane: self.busy[lane])

    @property
    def parts(self) -> dict[str, float]:
        """The step's seconds: computing, then waiting by lane, and `bubble` of a pipeline. The remainder goes to the lane that limits the
        step."""
        parts = {"compute": self.busy["compute"], **self.waits}
        parts["bubble"] = max(0.0, self.waiting - sum(self.waits.values()))
        parts[self.limit] = parts.get(self.limit, 0.0) + max(0.0, self.seconds - sum(parts.values()))
        return {lane: seconds for lane, seconds in parts.items() if seconds}


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """A reading of the clock. busy, waits: seconds of work and of waiting since the step began, by lane."""

    now: float
    busy: dict[str, float]
    waits: dict[str, float]


class Lanes:
    """The clock of one planned rank."""

    def __init__(self, hardware: Hardware, *, peer: Peer | None = None) -> None:
        """peer: another library's way to run the step. Defaults to ztk's own."""
        self._hardware, self._peer = hardware, peer or Peer()
        self._now = self._start = 0.0
        self._free = dict.fromkeys(_WIRES, 0.0)  # when the last collective on these links ends
        self._main, self._thread = (
            _Thread(),
            _Thread(),
        )  # the training thread, and the update thread
        self._is_behind = False
        self._busy = dict.fromkeys(_COUNTED, 0.0)
        self._waits: dict[str, float] = {}
        self.transfer = 0.0  # the longest message of this step to a neighbour in a pipeline, in seconds

    @property
    def now(self) -> float:
        """Seconds since the start of this clock."""
        return self._now

    @property
    def loaded(self) -> float:
        """End of the last copy to the device so far."""
        return self._current.copied[TO_DEVICE]

    def restart(self) -> None:
        """Begins a step."""
        self._start, self.transfer = self._now, 0.0
        self._waits = {}
        self._busy = dict.fromkeys(_COUNTED, 0.0)

    def mark(self) -> Mark:
        """Reads the clock."""
        return Mark(now=self._now, busy=dict(self._busy), waits=dict(self._waits))

    def repeat(self, *, start: Mark, stop: Mark, times: int) -> None:
        """Adds the time and the work between two marks to the step, `times` times."""
        self._start -= times * (stop.now - start.now)
        for counted, before, after in ((self._busy, start.busy, stop.busy), (self._waits, start.waits, stop.waits)):
            for lane, seconds in after.items():
                counted[lane] = counted.get(lane, 0.0) + times * (seconds - before.get(lane, 0.0))

    def read(self, *, disk_read: int, disk_write: int) -> StepTime:
        """The step since `restart`. disk_read, disk_write: its bytes."""
        hardware = self._hardware
        busy = {lane: self._busy[lane] for lane in LANES}
        busy["pcie"] = max(self._busy[way] for way in _COPIES)
        busy["wire"] += max(self._busy[wire] for wire in _WIRES)
        busy["disk"] = disk_read / hardware.disk_read_bandwidth + disk_write / hardware.disk_write_bandwidth
        seconds = max(self._now - self._start, *busy.values())
        return StepTime(seconds=seconds, busy=busy, waiting=sum(self._waits.values()), waits=dict(self._waits))

    def compute(
        self,
        *,
        kind: str,
        flops: int,
        device_bytes: int,
        host_bytes: int,
        dtype: torch.dtype,
        copies: bool,
        to_host: bool = False,
        operand: torch.dtype | None = None,
        shape: tuple[int, ...] = (),
    ) -> None:
        """Adds one operation. kind: see `ztk.planner.kinds`. copies: whether it only copies. An operation on host memory runs on the host,
        or is a copy between host and device. to_host: direction of the copy. operand: dtype of the first operand of a product, whose sums
        may be kept in another. shape: rows, columns and inner size of a product; length and head size of attention."""
        hardware = self._hardware
        if hardware.curves is not None:
            nbytes = device_bytes + host_bytes
            dtype = operand if operand is not None and _name(operand) == FLOAT8 else dtype
            self._take("host" if host_bytes else "compute", seconds=self._on_cores(kind, flops or nbytes, dtype=dtype))
            return
        if not host_bytes:
            self._take(
                "compute",
                seconds=device_seconds(
                    kind,
                    flops=flops,
                    nbytes=device_bytes,
                    dtype=_name(operand or dtype),
                    shape=shape,
                    hardware=hardware,
                    peer=self._peer,
                ),
            )
            return
        if device_bytes:
            self._copy(
                TO_HOST if to_host else TO_DEVICE, seconds=device_bytes / hardware.pcie_bandwidth / hardware.pcie_share
            )
        if not (copies and device_bytes):
            self._update(host_bytes / hardware.host_bandwidth / hardware.host_share)

    # In memory of the host

    @contextmanager
    def behind(self) -> Iterator[None]:
        """Context in which the host works in the update thread, without time on the main clock. Starts when the gradients have arrived."""
        thread = self._thread
        thread.now, self._is_behind = max(self._now, self._main.copied[TO_HOST], thread.now), True
        try:
            yield
        finally:
            self._is_behind = False

    def _copy(self, way: str, *, seconds: float) -> None:
        """Adds a copy over the link, without a wait. A copy to the device starts after the data was read or computed."""
        thread = self._current
        ready = max(self._moment, thread.read) if way == TO_DEVICE else self._moment
        thread.copied[way] = max(ready, thread.copied[way]) + seconds
        self._busy[way] += seconds

    def _update(self, seconds: float) -> None:
        """Adds work in main memory on data that was read or copied there before. It blocks the thread."""
        thread, started = self._current, self._moment
        waits = {
            "pcie": thread.copied[TO_HOST] - started,
            "disk": thread.read - max(started, thread.copied[TO_HOST]),
            "host": seconds,
        }
        self._busy["host"] += seconds
        if self._is_behind:
            thread.now = max(started, thread.copied[TO_HOST], thread.read) + seconds
            return
        for lane, waited in waits.items():
            self.wait_until(self._now + max(0.0, waited), lane=lane)

    def disk_reads(self, nbytes: int) -> None:
        """Adds a request to the disk of `nbytes`."""
        thread = self._current
        thread.read = max(self._moment, thread.read) + nbytes / self._hardware.disk_read_bandwidth

    def updated(self) -> float:
        """The time when the host's updates so far are available to the next forward."""
        return max(self._moment, self.loaded)

    @property
    def _current(self) -> "_Thread":
        return self._thread if self._is_behind else self._main

    @property
    def _moment(self) -> float:
        return self._thread.now if self._is_behind else self._now

    def host_work(self, kind: str, *, amount: int = 1, dtype: torch.dtype = torch.float32) -> None:
        """Adds work of the host that is not an operation: GRADIENT, REQUEST (amount: bytes) or INTERCEPTED. On a CPU it blocks the cores;
        otherwise it overlaps with the device."""
        curves = self._hardware.curves or {}
        names = (kind, f"{kind}.{_name(dtype)}", f"{kind}.float32")
        points = next((curves[name] for name in names if name in curves), None)
        if points is not None:
            self._take("host", seconds=seconds_of(points, amount=amount))

    def _take(self, lane: str, *, seconds: float) -> None:
        """Adds work during which nothing else is computed."""
        self._now += seconds
        self._busy[lane] += seconds

    def _on_cores(self, kind: str, amount: int, *, dtype: torch.dtype) -> float:
        """Seconds of an operation by the hardware's curves. Unmeasured dtypes use float32's curve, and unmeasured kinds another fused or
        elementwise operation's."""
        curves = self._hardware.curves or {}
        kinds = (kind, *_LIKE.get(kind, (FUSED,)), ELEMENTWISE)
        names = (kind, *(f"{one}.{name}" for one in kinds for name in (_name(dtype), "float32")))
        points = next(curves[name] for name in names if name in curves)
        return self._hardware.operation_latency + (seconds_of(points, amount=amount) if amount else 0.0)

    def collective(self, *, size: int, in_node: int) -> Moved:
        """The function that a group of `size` ranks, `in_node` of them in each node, calls for each collective.

        Between nodes every device of the group sends over its own network port, as NCCL's rings do.

        Raises:
            ValueError: the group spans nodes and the hardware has no network.
        """
        hardware, one_node = self._hardware, in_node == size
        wire = LINK if one_node else NETWORK
        latency, in_a_node = hardware.link_latency, hardware.link_bandwidth * hardware.link_share
        bandwidth = in_a_node
        if not one_node:
            if hardware.network_latency is None or hardware.network_bandwidth is None:
                raise ValueError(
                    f"hardware={hardware.name}: {size} ranks are on several nodes and there is no network between them: give "
                    "network_latency and network_bandwidth, or use fewer ranks"
                )
            latency = hardware.network_latency
            bandwidth = min(bandwidth, in_node * hardware.network_bandwidth * hardware.network_share)

        # NCCL opens channels, each a block of threads on one multiprocessor, until the slowest link is full (src/graph/search.cc and
        # connect.cc), so a slower network occupies fewer multiprocessors and moves fewer bytes of device memory per second.
        delay = hardware.overlap_cost * bandwidth / in_a_node

        def moved(kind: str, nbytes: int) -> _Sent:
            share = 1.0 if kind in ("send", "ring") else (size - 1) / size
            if kind == "all_gather":
                share *= self._peer.gathered
            seconds = latency + nbytes * share / bandwidth
            if one_node and kind in ("all_gather", "reduce_scatter"):
                seconds *= 1 - self._peer.hidden
            curves = hardware.curves or {}
            if one_node and "all_gather" in curves:
                seconds = seconds_of(curves.get(kind, curves["all_gather"]), amount=max(1, nbytes))
            if kind == "send":
                self.transfer = max(self.transfer, seconds)
            if hardware.curves:
                self._take("wire", seconds=seconds)
                return _Sent(self, ends=self._now)
            ready = max(self._now, self.loaded) if kind == "all_gather" else self._now  # parameters come from the host
            self._free[wire] = max(ready, self._free[wire]) + seconds
            self._busy[wire] += seconds
            if hardware.overlap_cost:
                self._take("compute", seconds=seconds * delay)
            return _Sent(self, ends=self._free[wire])

        return moved

    def wait_until(self, moment: float, *, lane: str = "wire") -> None:
        """Advances the clock to `moment`. lane: the lane that computing waits for."""
        if moment > self._now:
            self._waits[lane] = self._waits.get(lane, 0.0) + moment - self._now
            self._now = moment


class _Thread:
    """State of one thread of the host. now: its own clock, if it is not the training thread. copied: by direction, the end of the last
    copy. read: the end of the last request to the disk."""

    def __init__(self) -> None:
        self.now = self.read = 0.0
        self.copied = dict.fromkeys(_COPIES, 0.0)


class _Sent:
    """A collective on the wire."""

    def __init__(self, lanes: Lanes, *, ends: float) -> None:
        self._lanes, self._ends = lanes, ends

    def is_completed(self) -> bool:
        return self._ends <= self._lanes.now

    def wait(self) -> None:
        self._lanes.wait_until(self._ends)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
