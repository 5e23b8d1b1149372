"""Every stage with every tier, precision, recompute mode and layout, on the model of streams."""

import itertools
from collections.abc import Callable
from typing import Any

from tests.core.streams.model import modelled
from tests.planner.measure import Case
from ztk.planner import Plan

LAYOUTS: dict[str, dict[str, Any]] = {
    "dp1": {"ranks": 1},
    "dp2": {"ranks": 2},
    "dp3": {"ranks": 3},
    "dp8": {"ranks": 8},
    "tp2": {"ranks": 2, "tensor": 2},
    "tp2 dp4": {"ranks": 8, "tensor": 2},
    "tp2 sequence-parallel": {"ranks": 2, "tensor": 2, "sequence_parallel": True},
    "sp2 dp2": {"ranks": 4, "sequence": 2},
    "cp2": {"ranks": 2, "context": 2},
    "sp2 tp2": {"ranks": 4, "sequence": 2, "tensor": 2},
    "pp2": {"ranks": 2, "pipeline": 2, "accumulation": 2},
    "pp2 tp2 zero-bubble": {"ranks": 4, "pipeline": 2, "tensor": 2, "accumulation": 3, "schedule": "zero_bubble"},
    "pp2 interleaved tied": {
        "ranks": 4, "layers": 4, "pipeline": 2, "accumulation": 2, "schedule": "interleaved", "virtual_stages": 2, "tied": True
    },
    "ep2 dp2": {"ranks": 4, "experts": 4, "expert": 2},
}  # fmt: skip
STAGES = (0, 1, 2, 3)
TIERS = ("none", "cpu", "nvme")
DTYPES = ("fp32", "bf16", "fp16")
MODES = ("none", "full", "selective")
Row = tuple[str, int, str, str, str]  # one of each of these


def every() -> list[Row]:
    """All combinations."""
    return [*itertools.product(LAYOUTS, STAGES, TIERS, DTYPES, MODES)]


def sample() -> list[Row]:
    """Nine of the 27 triples of tier, precision and recompute mode for each layout and stage: every pair of the three is there.

    Rows of an orthogonal array (a Latin square), shifted from one layout and stage to the next, so that all triples occur.
    """
    rows = []
    for shift, (layout, stage) in enumerate(itertools.product(LAYOUTS, STAGES)):
        for i, j in itertools.product(range(3), range(3)):
            rows.append((layout, stage, TIERS[i], DTYPES[j], MODES[(i + j + shift) % 3]))
    return rows


def case_of(row: Row) -> Case:
    """The run of a row, of two layers where two are enough. At stage 3 parameters are offloaded with the states."""
    layout, stage, tier, dtype, recompute = row
    parameters = tier if stage == 3 else "none"
    choices = {"layers": 2} | LAYOUTS[layout]
    return Case(stage=stage, offload=tier, parameters=parameters, dtype=dtype, recompute=recompute, **choices)


def faults(row: Row, *, plan_of: Callable[[Case], Plan]) -> list[str]:
    """Plans a row by `plan_of(case)` and lists its faults: an error, bytes of states on another tier, disk traffic without a disk, a use
    of memory without an order, or no use at all."""
    try:
        with modelled() as model:
            plan = plan_of(case_of(row))
    except Exception as error:  # noqa: BLE001  # every combination is one that a run accepts
        return [f"{row}: {type(error).__name__}: {error}"]
    found = [f"{row}: {race}" for race in model.races]
    if not model.checked:
        found.append(f"{row}: no use of memory was looked at")
    tier = row[2]
    for trace in plan.classes:
        booked = {place: kinds.get("optimizer", 0) for place, kinds in trace.state.items()}
        wanted = {"none": "device", "cpu": "host", "nvme": "nvme"}[tier]
        if not booked[wanted] or any(nbytes for place, nbytes in booked.items() if place != wanted):
            found.append(f"{row}: optimizer states by tier: {booked}")
        if bool(trace.disk_write) != (tier == "nvme"):
            found.append(f"{row}: {trace.disk_write} bytes to the disk in a step")
    return found
