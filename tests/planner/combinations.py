"""Every stage with every tier, precision, recompute mode and layout, and a choice of these that has each pair of values."""

import itertools
from collections.abc import Callable, Iterable
from typing import Any

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
        "ranks": 4, "pipeline": 2, "accumulation": 2, "schedule": "interleaved", "virtual_stages": 2, "tied": True
    },
    "ep2 dp2": {"ranks": 4, "experts": 4, "expert": 2},
}  # fmt: skip
VALUES = {
    "layout": tuple(LAYOUTS),
    "stage": (0, 1, 2, 3),
    "tier": ("none", "cpu", "nvme"),
    "dtype": ("fp32", "bf16", "fp16"),
    "recompute": ("none", "full", "selective"),
}
Row = tuple[Any, ...]  # a value of each of VALUES


def every() -> list[Row]:
    """All combinations."""
    return [*itertools.product(*VALUES.values())]


def pairs() -> list[Row]:
    """Combinations in which each value is beside each value of every other subject: greedy, the row with most new pairs first."""
    missing = set(itertools.chain.from_iterable(map(_pairs_of, every())))
    chosen = []
    while missing:
        best = max(every(), key=lambda row: len(missing & _pairs_of(row)))
        missing -= _pairs_of(best)
        chosen.append(best)
    return chosen


def _pairs_of(row: Row) -> set[tuple[Any, ...]]:
    """The pairs of values that a row has, each value with the number of its subject."""
    return set(itertools.combinations(enumerate(row), 2))


def case_of(row: Row) -> Case:
    """The run of a row. At stage 3 parameters are offloaded with the states."""
    layout, stage, tier, dtype, recompute = row
    parameters = tier if stage == 3 else "none"
    return Case(stage=stage, offload=tier, parameters=parameters, dtype=dtype, recompute=recompute, **LAYOUTS[layout])


def faults(rows: Iterable[Row], *, plan_of: Callable[[Case], Plan]) -> list[str]:
    """Plans every row by `plan_of(case)`, and says what contradicts the choice: bytes of states on another tier, disk traffic without a disk.

    Raises what a plan raises: every combination is one that a run accepts.
    """
    found = []
    for row in rows:
        plan = plan_of(case_of(row))
        tier = row[2]
        for trace in plan.classes:
            booked = {place: kinds.get("optimizer", 0) for place, kinds in trace.state.items()}
            wanted = {"none": "device", "cpu": "host", "nvme": "nvme"}[tier]
            if not booked[wanted] or any(nbytes for place, nbytes in booked.items() if place != wanted):
                found.append(f"{row}: optimizer states by tier: {booked}")
            if bool(trace.disk_write) != (tier == "nvme"):
                found.append(f"{row}: {trace.disk_write} bytes to the disk in a step")
    return found
