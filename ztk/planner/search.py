"""`plan.search=true`: the fastest layouts that fit. Arithmetic orders all of them, the best ones are planned."""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ztk.planner.layouts import DEGREES, Layout, Workload, activation_bytes, legal, rough_seconds, state_bytes
from ztk.planner.result import Plan, size


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """A layout and its plan. rough: the seconds by which arithmetic chose it."""

    layout: Layout
    plan: Plan
    rough: float

    @property
    def seconds(self) -> float:
        """Of a step."""
        assert self.plan.time is not None
        return self.plan.time.seconds

    def row(self) -> dict[str, Any]:
        """Flat keys and plain numbers."""
        plan, time = self.plan, self.plan.time
        assert time is not None
        return {
            "overrides": " ".join(self.layout.overrides),
            "fits": plan.fits,
            "step_seconds": time.seconds,
            "limit": time.limit,
            "margin_bytes": plan.margin_bytes,
            "peak_memory.device_bytes": plan.peak_bytes["device"],
            "peak_memory.host_bytes": plan.peak_bytes["host"],
            "peak_memory.nvme_bytes": plan.peak_bytes["nvme"],
            "zero.stage": self.layout.stage,
            **{name: getattr(self.layout, name) for name in ("offload", "recompute")},
            **{f"topology.{name}": getattr(self.layout, name) for name in DEGREES},
            "rough_seconds": self.rough,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Search:
    """found: those that fit, the fastest first, then those that do not, the nearest first. layouts: how many there are.

    dropped: how many of them were not planned, by reason. The counts and `found` add up to `layouts`.
    """

    found: tuple[Found, ...]
    layouts: int
    dropped: dict[str, int]

    def rows(self) -> list[dict[str, Any]]:
        """One per planned layout, with its rank among those that fit; for JSON, CSV and frames."""
        fitting = iter(range(1, len(self.found) + 1))
        return [{"rank": next(fitting) if found.plan.fits else None} | found.row() for found in self.found]

    def lines(self) -> Iterator[str]:
        """The table, for a terminal."""
        yield f"search: {self.layouts:,} layouts, {len(self.found)} planned"
        for number, row in enumerate(self.rows(), start=1):
            if number == 1:
                yield f"  {'rank':>4}  {'s/step':>9}  {'limit':<8}{'device':>9}{'margin':>10}{'host':>9}  overrides"
            rank = str(row["rank"] or "-")
            device, margin, host = (
                size(row[key]) for key in ("peak_memory.device_bytes", "margin_bytes", "peak_memory.host_bytes")
            )
            yield f"  {rank:>4}  {row['step_seconds']:>9.3g}  {row['limit']:<8}{device:>9}{margin:>10}{host:>9}  {row['overrides']}"
        if not any(found.plan.fits for found in self.found):
            yield "  none of them fits: use more ranks, smaller micro-batches or a smaller model"
        for reason, count in self.dropped.items():
            yield f"  dropped {count:,}: {reason}"


def search(
    replan: Callable[[tuple[str, ...]], Plan | str],
    *,
    work: Workload,
    traced: int,
    say: Callable[[str], object] = print,
) -> Search:
    """Plans at most `traced` layouts, in the order of the arithmetic: those that seem to fit first, of them the fastest.

    replan: the plan with these overrides, or why they are refused. say: prints a line of progress.
    """
    layouts, dropped = legal(work)
    total, usable = len(layouts) + sum(dropped.values()), work.hardware.usable_bytes
    drops = Counter[str](dropped)
    waiting = []
    for layout in layouts:
        state = state_bytes(layout, work=work)
        if state > usable:
            drops["the state alone is more than a device has"] += 1
            continue
        rough = rough_seconds(layout, work=work)
        fits = state + activation_bytes(layout, work=work) <= usable
        waiting.append((not fits, rough, layout))
    waiting.sort(key=lambda entry: (entry[0], entry[1], _simplicity(entry[2])))
    found: list[Found] = []
    misfits: list[Layout] = []
    for position, (_, rough, layout) in enumerate(waiting):
        if len(found) == traced:
            drops[f"slower by arithmetic than the {traced} that were planned"] += len(waiting) - position
            break
        if any(layout.keeps_more(misfit) for misfit in misfits):
            drops["keeps more than a planned layout that does not fit"] += 1
            continue
        say(f"  plans {len(found) + 1} of {min(traced, len(waiting))}: {' '.join(layout.overrides)}")
        plan = replan(layout.overrides)
        if isinstance(plan, str):
            drops[f"refused: {plan}"] += 1
            continue
        found.append(Found(layout=layout, plan=plan, rough=rough))
        if not plan.fits:
            misfits.append(layout)
    found.sort(key=lambda one: (not one.plan.fits, one.seconds if one.plan.fits else -(one.plan.margin_bytes or 0)))
    return Search(found=tuple(found), layouts=total, dropped=dict(drops))


def _simplicity(layout: Layout) -> tuple[int, ...]:
    """Among equals the layout with fewer techniques comes first."""
    return (math.prod(getattr(layout, name) for name in DEGREES), layout.stage, len(layout.overrides))
