"""The result of a plan, with numbers, flat JSON, a frame and a table."""

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ztk.core.policies.hardware import Hardware
from ztk.core.policies.utilization import utilization
from ztk.core.runtime import Topology
from ztk.core.runtime.mesh import Connections
from ztk.planner.lanes import StepTime
from ztk.planner.trace import RankTrace

# Assumptions, not measured: device memory of one NCCL communicator, and the number of them in `Hardware.reserve_bytes`.
COMMUNICATOR_BYTES, COVERED_COMMUNICATORS = 300_000_000, 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A planned run. Bytes, and operations of one optimizer step.

    parameters: elements of the full model. classes: one rank of each kind with different memory or traffic; every number of the plan is the
    maximum over them. hardware: the hardware that the run is planned for. tokens, model_flops: totals of a step over all ranks, 0 if
    unknown. dtype: the products' dtype.
    """

    world_size: int
    topology: Topology
    parameters: int
    classes: tuple[RankTrace, ...]
    hardware: Hardware | None = None
    tokens: int = 0
    model_flops: int = 0
    dtype: str = "bfloat16"

    @property
    def tokens_per_second_per_gpu(self) -> float | None:
        """None without hardware or tokens."""
        return self.tokens / self.world_size / self.time.seconds if self.time is not None and self.tokens else None

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization, see `ztk.core.policies.utilization`."""
        return self._utilization(self.model_flops / self.world_size)

    @property
    def hfu(self) -> float | None:
        """Hardware FLOPs utilization of the busiest rank, recomputation included."""
        return self._utilization(max(trace.flops for trace in self.classes))

    def _utilization(self, flops: float) -> float | None:
        """The utilization of a rank that computes `flops` operations per step. None without hardware or the model's operations."""
        if self.hardware is None or self.time is None or not self.model_flops:
            return None
        return utilization(flops, seconds=self.time.seconds, rate=self.hardware.rate(self.dtype))

    @property
    def fullest(self) -> RankTrace:
        """The rank with the highest peak on its device."""
        return max(self.classes, key=lambda trace: trace.peak.nbytes)

    @property
    def peak_bytes(self) -> dict[str, int]:
        """Peak bytes by tier: on the device including activations, elsewhere booked bytes."""
        booked = {tier: max(trace.reserved[tier] for trace in self.classes) for tier in self.fullest.reserved}
        return booked | {"device": self.fullest.peak.nbytes}

    @property
    def margin_bytes(self) -> int | None:
        """Free memory of the fullest device at the peak, after its reserve. Negative if it does not fit, None without hardware."""
        return None if self.hardware is None else self.usable_bytes - self.fullest.peak.nbytes

    @property
    def usable_bytes(self) -> int:
        """Memory of a device for tensors: without its reserve, and without the communicators that the reserve does not cover. 0 without
        hardware."""
        if self.hardware is None:
            return 0
        more = 0 if self.hardware.curves is not None else max(0, self.connections.communicators - COVERED_COMMUNICATORS)
        return self.hardware.usable_bytes - more * COMMUNICATOR_BYTES

    @property
    def connections(self) -> Connections:
        """Process groups and communicators of the layout."""
        return self.topology.connections(world_size=self.world_size)

    @property
    def node_ranks(self) -> int | None:
        """Ranks of a full node. None without hardware."""
        return None if self.hardware is None else min(self.world_size, self.hardware.ranks_per_node)

    @property
    def node_host_bytes(self) -> int | None:
        """Main memory that the ranks of a node take at their peaks, page-locked buffers included: the fullest rank's, times the ranks. On a
        CPU the devices' memory is main memory, too. None without hardware."""
        if self.hardware is None or self.node_ranks is None:
            return None
        on_cores = self.hardware.curves is not None
        peak = self.peak_bytes
        return self.node_ranks * (peak["host"] + on_cores * peak["device"])

    @property
    def host_margin_bytes(self) -> int | None:
        """Free main memory of a node at the peaks of its ranks, after its reserve. Negative if it does not fit, None if its size is unknown."""
        if self.hardware is None or self.hardware.usable_host_bytes is None or self.node_host_bytes is None:
            return None
        return self.hardware.usable_host_bytes - self.node_host_bytes

    @property
    def fits(self) -> bool | None:
        """Whether every device and the main memory of a node have enough room. None without hardware."""
        return None if self.margin_bytes is None else self.missing_bytes == 0

    @property
    def missing_bytes(self) -> int:
        """Bytes that a device and the main memory of a node lack together."""
        return sum(max(0, -margin) for margin in (self.margin_bytes, self.host_margin_bytes) if margin is not None)

    @property
    def time(self) -> StepTime | None:
        """The step of the slowest rank. None without hardware."""
        times = [trace.time for trace in self.classes if trace.time is not None]
        return max(times, key=lambda time: time.seconds, default=None)

    @property
    def wire(self) -> dict[str, dict[str, int]]:
        """Bytes by axis and kind of collective, as `CommCounters` counts them."""
        most: dict[str, dict[str, int]] = {}
        for trace in self.classes:
            for axis, kinds in trace.wire.items():
                for kind, nbytes in kinds.items():
                    most.setdefault(axis, {})[kind] = max(nbytes, most.get(axis, {}).get(kind, 0))
        return most

    def as_dict(self) -> dict[str, Any]:
        """Flat keys and plain numbers, for `plan.json`."""
        most, fullest = self.classes, self.fullest
        values: dict[str, Any] = {
            "world_size": self.world_size,
            "parameters": self.parameters,
            "classes": len(self.classes),
            "start.new_groups": self.connections.new_groups,
            "start.communicators": self.connections.communicators,
            **{f"peak_memory.{tier}_bytes": nbytes for tier, nbytes in self.peak_bytes.items()},
            "peak.where": fullest.peak.where,
            "peak.activations_bytes": fullest.peak.activations,
            "io.read_bytes": max(trace.disk_read for trace in most),
            "io.write_bytes": max(trace.disk_write for trace in most),
            "flops": max(trace.flops for trace in most),
        }
        if self.topology.pipeline == 1:
            values["saved_for_backward_bytes"] = max(trace.saved for trace in most)
        for name, booked in (("peak", {"device": fullest.peak.booked}), ("memory", fullest.state)):
            for tier, categories in booked.items():
                for category, nbytes in categories.items():
                    values[f"{name}.{tier}.{category}_bytes".replace(" ", "_")] = nbytes
        if self.hardware is not None and self.time is not None:
            values |= {"hardware": self.hardware.name, "fits": self.fits, "margin_bytes": self.margin_bytes}
            values |= {"host_margin_bytes": self.host_margin_bytes, "node_memory.host_bytes": self.node_host_bytes}
            values |= {
                "step_seconds": self.time.seconds,
                "limit": self.time.limit,
                "seconds.waiting": self.time.waiting,
            }
            values |= {f"seconds.{lane}": seconds for lane, seconds in self.time.busy.items()}
            values |= {f"seconds.waiting.{lane}": seconds for lane, seconds in self.time.waits.items()}
            shares = {"mfu": self.mfu, "hfu": self.hfu, "tokens_per_second_per_gpu": self.tokens_per_second_per_gpu}
            values |= {key: value for key, value in shares.items() if value is not None}
        for axis, kinds in self.wire.items():
            values |= {f"comm.{axis}.{kind}_bytes": nbytes for kind, nbytes in kinds.items()}
        return values

    def frame(self) -> Any:
        """`as_dict` as a pandas frame: columns `quantity`, with the unit in its name, and `value`; one row each."""
        library: Any = importlib.import_module("pandas")  # here: it takes a second
        values = self.as_dict()
        value = library.Series(list(values.values()), dtype="object")  # integers, strings and booleans keep their types
        return library.DataFrame({"quantity": list(values), "value": value})

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> Iterator[str]:
        """The table, for a terminal."""
        fullest, peak = self.fullest, self.fullest.peak
        yield f"plan: {self.parameters:,} parameters on {self.world_size:,} ranks, per rank (the fullest one, rank {fullest.rank})"
        for tier, categories in fullest.state.items():
            if categories:
                yield f"  {tier} between steps"
                yield from _rows(categories)
        yield f"  device at the peak: {size(peak.nbytes)}, in {peak.where}"
        yield from _rows(peak.booked | {"activations and others": peak.activations})
        if self.topology.pipeline == 1:
            yield f"  saved by the forward of a micro-batch: {size(fullest.saved)}"
        yield "  wire, per step"
        yield from _rows(
            {f"{axis} {kind}": nbytes for axis, kinds in self.wire.items() for kind, nbytes in kinds.items()}
        )
        if fullest.disk_read or fullest.disk_write:
            yield "  disk, per step"
            yield from _rows({"read": fullest.disk_read, "written": fullest.disk_write})
        if self.connections.new_groups:
            new, communicators = self.connections.new_groups, self.connections.communicators
            yield f"  at the start: {new:,} calls of new_group on every rank, {communicators} communicators on a GPU"
        step = f" of {self.tokens:,} tokens" if self.tokens else ""
        yield f"  operations of products and attention, per step{step}: {fullest.flops:.4g}"
        if self.hardware is not None and self.time is not None:
            busy = ", ".join(f"{lane} {seconds:.3g} s" for lane, seconds in self.time.busy.items() if seconds)
            source, limit = self.hardware.source, self.time.limit
            yield f"  a step takes {self.step_words}, at the rates {source}; {limit} limits it ({busy})"
            if waits := ", ".join(f"{lane} {seconds:.3g} s" for lane, seconds in self.time.waits.items()):
                yield f"  of it computing waits for: {waits}"
            speed, words = self.tokens_per_second_per_gpu, []
            if speed is not None:
                words.append(f"{speed:,.0f} tokens per second and GPU")
            if self.mfu is not None and self.hfu is not None:
                of = f"{self.hardware.rate(self.dtype) / 1e12:.4g} TFLOPS in {self.dtype}"
                words.append(f"MFU {self.mfu:.1%}, HFU {self.hfu:.1%} (of {of})")
            if words:
                yield f"  {'; '.join(words)}"
            yield f"  {self.answer}"

    @property
    def step_words(self) -> str:
        """Seconds of a step: a lower bound from data sheets, or an estimate from measured rates. Empty without hardware."""
        if self.hardware is None or self.time is None:
            return ""
        return f"about {self.time.seconds:.3g} s" if self.hardware.is_reached else f"{self.time.seconds:.3g} s or more"

    @property
    def answer(self) -> str:
        """Whether it fits, in words; empty without hardware."""
        if self.hardware is None or self.margin_bytes is None:
            return ""
        usable = f"the {size(self.usable_bytes)} that {self.hardware.name} has after its reserve"
        if self.usable_bytes < self.hardware.usable_bytes:
            usable += f" and {self.connections.communicators} communicators"
        if self.fits:
            return f"fits: {size(self.margin_bytes)} of {usable} are left at the peak" + self._host_left
        lacking = [f"{size(-self.margin_bytes)} more than {usable}"] if self.margin_bytes < 0 else []
        return f"does not fit: {'; '.join([*lacking, *self._host_lacking])}"

    @property
    def _host_left(self) -> str:
        if self.host_margin_bytes is None or not self.peak_bytes["host"]:
            return ""
        return f", and {size(self.host_margin_bytes)} of the {self._host_words}"

    @property
    def _host_lacking(self) -> Iterator[str]:
        if self.host_margin_bytes is not None and self.host_margin_bytes < 0:
            taken, lacking = size(self.node_host_bytes or 0), size(-self.host_margin_bytes)
            yield f"{self.node_ranks} ranks of a node take {taken} of main memory, {lacking} more than the {self._host_words}"

    @property
    def _host_words(self) -> str:
        assert self.hardware is not None and self.hardware.usable_host_bytes is not None
        return f"{size(self.hardware.usable_host_bytes)} of main memory that a node has after its reserve"


def _rows(numbers: dict[str, int]) -> Iterator[str]:
    for name, nbytes in numbers.items():
        yield f"    {name:<32}{size(nbytes):>12}{nbytes:>24,}"


def size(nbytes: float) -> str:
    """1234567 -> "1.23 MB"; 1 kB is 1000 bytes."""
    unit, units = "B", ["kB", "MB", "GB", "TB"]
    while abs(nbytes) >= 999.5 and units:
        nbytes, unit = nbytes / 1000, units.pop(0)
    return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.3g} {unit}"
