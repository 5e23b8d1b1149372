"""After an out-of-memory error: compares the plan of the run with the rank's memory. `python -m ztk.cli.out_of_memory` calls it."""

from collections.abc import Iterator, Mapping
from typing import Any

from ztk.config import Config
from ztk.experiments.plan import try_plan
from ztk.planner.result import size


def lines(config: Config, *, rank: int, measured: Mapping[str, Any]) -> Iterator[str]:
    """Yields the lines of the table. measured: a `MemoryState` as a dictionary."""
    booked, device = measured["booked"].get("device", {}), measured["device"]
    yield f"out of memory on rank {rank}: the plan of the run compared with the rank's memory when it failed"
    made = try_plan(config)
    plan, reason = (None, made) if isinstance(made, str) else (made, "")
    columns = {} if plan is None else plan.fullest.peak.booked
    yield f"  {'':<26}{'plan, peak':>14}{'held':>14}"
    for category in dict.fromkeys([*columns, *booked]):
        yield _row(category, planned=columns.get(category, 0) if plan else None, held=booked.get(category, 0))
    allocated = device.get("allocated")
    others = None if allocated is None else allocated - sum(booked.values())
    yield _row("activations and others", planned=plan.fullest.peak.activations if plan else None, held=others)
    yield _row("device, all tensors", planned=plan.fullest.peak.nbytes if plan else None, held=allocated)
    for name, nbytes in device.items():
        if name != "allocated":
            yield _row(name.replace("_", " "), planned=None, held=nbytes)
    if "total" in device:
        outside = device["total"] - device["free"] - device["reserved"]
        yield _row("outside torch's allocator", planned=None, held=outside)
    if plan is None:
        yield f"  there is no plan of this run: {reason}"
        return
    yield f"  the plan has its peak in {plan.fullest.peak.where}; add task=plan hardware=NAME to the command line to find a run that fits"


def _row(name: str, *, planned: int | None, held: int | None) -> str:
    cells = ("-" if nbytes is None else size(nbytes) for nbytes in (planned, held))
    return f"  {name:<26}" + "".join(f"{cell:>14}" for cell in cells)
