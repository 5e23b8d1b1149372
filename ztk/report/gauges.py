"""Flattens the counters of a rank to numbers."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ztk.core.runtime import MemoryLedger, PhaseClock, Tier
from ztk.core.runtime.io import IoCounters
from ztk.core.runtime.mesh import MeshCounters

# [k] of every rank -> [world, k], bitwise equal everywhere. Passed in, because collectives belong to `ztk.core.runtime`.
Gather = Callable[[Tensor], Tensor]

COMM_KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "ring", "send", "tied", "muon")
PHASES = ("forward", "backward", "bubble", "communication", "optimizer", "io")


@dataclass(frozen=True, kw_only=True, slots=True)
class Gauges:
    """The counters of a rank's engine. `io` is None unless something is offloaded to files."""

    memory: MemoryLedger
    comm: MeshCounters
    clock: PhaseClock
    io: IoCounters | None = None
    device: torch.device = torch.device("cpu")

    def memory_bytes(self) -> dict[str, int]:
        """Returns the currently booked bytes per tier."""
        return {f"memory.{tier.label}_bytes": self.memory.current(tier) for tier in Tier}

    def peak_bytes(self) -> dict[str, int]:
        """Returns the peak of booked bytes per tier, and on a GPU also the allocator's peak, which includes activations."""
        peaks = {f"peak_memory.{tier.label}_bytes": self.memory.peak(tier) for tier in Tier}
        if self.device.type == "cuda":
            peaks["peak_memory.allocator_bytes"] = torch.cuda.max_memory_allocated(self.device)
        return peaks

    def flows(self) -> dict[str, float]:
        """Returns bytes through collectives and files, and seconds per phase and of the disk, since the start."""
        io = self.io
        return {
            **{f"comm.{kind}_bytes": self.comm.bytes.get(kind, 0) for kind in COMM_KINDS},
            "io.read_bytes": 0 if io is None else io.read_bytes,
            "io.write_bytes": 0 if io is None else io.write_bytes,
            "io.read_seconds": 0.0 if io is None else io.read_seconds,
            "io.write_seconds": 0.0 if io is None else io.write_seconds,
            **{f"seconds.{phase}": self.clock.seconds.get(phase, 0.0) for phase in PHASES},
        }

    def holdings(self) -> dict[str, Any]:
        """Returns booked bytes by tier and category, currently and at each tier's peak, and the peaks."""
        at_peak = {tier.label: self.memory.by_category_at_peak(tier) for tier in Tier}
        now = {tier.label: self.memory.by_category(tier) for tier in Tier}
        return {"memory": now, "at_peak": at_peak, "peak": self.peak_bytes()}
