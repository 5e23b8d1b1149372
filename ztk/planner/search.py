"""`plan.search=true`: finds the fastest layouts that fit. Arithmetic orders all layouts, and the best ones are planned."""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from ztk.planner.layouts import (
    DEGREES,
    Layout,
    Workload,
    activation_bytes,
    legal,
    resident_bytes,
    rough_seconds,
    state_bytes,
)
from ztk.planner.price import Price
from ztk.planner.result import Plan, size

OFFLOADED = ("host", "pcie", "disk")  # lanes that only offloading uses
_TOO_LARGE = "the state alone is more than a device has"
_NOUNS = {"host": "host's update", "pcie": "copies between host and device"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """A layout and its plan. rough: seconds of the arithmetic that selected it."""

    layout: Layout
    plan: Plan
    rough: float

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        assert self.plan.time is not None
        return self.plan.time.seconds

    @property
    def gpu_seconds(self) -> float:
        """Seconds of a step times the number of GPUs."""
        return self.seconds * self.plan.world_size

    @property
    def offload_seconds(self) -> float:
        """Seconds of a step that are waits for the host's update, for copies between host and device, and for the disk."""
        assert self.plan.time is not None
        return sum(self.plan.time.parts.get(lane, 0.0) for lane in OFFLOADED)

    def slower_because(self, best: "Found") -> str:
        """Names the part that makes a step longer than `best`'s, or of more GPU time if the numbers of GPUs differ."""
        assert self.plan.time is not None and best.plan.time is not None
        own, other = self.plan.time.parts, best.plan.time.parts
        ratio = self.plan.world_size / best.plan.world_size
        more = {lane: own.get(lane, 0.0) * ratio - other.get(lane, 0.0) for lane in (*own, *other)}
        lane = max(more, key=lambda lane: more[lane])
        verb = "computes" if lane == "compute" else f"waits for the {_NOUNS.get(lane, lane)}"
        unit = "s" if ratio == 1 else f"s of {best.plan.world_size:,} GPUs"
        return f"{verb} {more[lane]:.3g} {unit} longer" if more[lane] > 0 else "as fast"

    def row(self) -> dict[str, Any]:
        """Flat keys and plain numbers."""
        plan, time = self.plan, self.plan.time
        assert time is not None
        return {
            "launch.ranks": plan.world_size,
            "overrides": " ".join(self.layout.overrides),
            "fits": plan.fits,
            "step_seconds": time.seconds,
            "tokens_per_second_per_gpu": plan.tokens_per_second_per_gpu,
            "mfu": plan.mfu,
            "limit": time.limit,
            "offload_seconds": self.offload_seconds,
            "margin_bytes": plan.margin_bytes,
            "peak_memory.device_bytes": plan.peak_bytes["device"],
            "peak_memory.host_bytes": plan.peak_bytes["host"],
            "peak_memory.nvme_bytes": plan.peak_bytes["nvme"],
            "zero.stage": self.layout.stage,
            "offload.optimizer_fraction": self.layout.fraction,
            **{name: getattr(self.layout, name) for name in ("offload", "recompute")},
            **{f"topology.{name}": getattr(self.layout, name) for name in DEGREES},
            "rough_seconds": self.rough,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Search:
    """found: layouts that fit, ordered by GPU time, then layouts that do not, ordered by their excess. layouts: number of all layouts.

    dropped: number of layouts that were not planned, by reason. The counts and `found` add up to `layouts`.
    usable, resident: bytes available to tensors on a device, and the minimum of bytes that a layout without offloading keeps there between
    steps.
    price: of the training for which the layouts are compared.
    """

    found: tuple[Found, ...]
    layouts: int
    dropped: dict[str, int]
    usable: float
    resident: float
    price: Price = field(default_factory=Price)

    def together(self, other: "Search") -> "Search":
        """Joins this search with one over another number of ranks."""
        return replace(
            self,
            found=tuple(sorted((*self.found, *other.found), key=_order)),
            layouts=self.layouts + other.layouts,
            dropped=dict(Counter(self.dropped) + Counter(other.dropped)),
            resident=min(self.resident, other.resident),
        )

    def rows(self) -> list[dict[str, Any]]:
        """One row per planned layout, with its rank among layouts that fit and the reason why it is slower than the first; for JSON, CSV
        and frames."""
        fitting = iter(range(1, len(self.found) + 1))
        rows = []
        for found in self.found:
            rank = next(fitting) if found.plan.fits else None
            why = found.slower_because(self.found[0]) if rank is not None and rank > 1 else ""
            rows.append({"rank": rank} | found.row() | self.price.row(found.plan) | {"slower_because": why})
        return rows

    def lines(self) -> Iterator[str]:
        """The table, for a terminal."""
        yield f"search: {self.layouts:,} layouts, {len(self.found)} planned"
        for number, row in enumerate(self.rows(), start=1):
            if number == 1:
                yield f"  {'rank':>4}  {'GPUs':>5}  {'s/step':>9}  {'limit':<8}{'device':>9}{'margin':>10}{'host':>9}  overrides"
            rank = str(row["rank"] or "-")
            device, margin, host = (
                size(row[key]) for key in ("peak_memory.device_bytes", "margin_bytes", "peak_memory.host_bytes")
            )
            seconds, limit = f"{row['step_seconds']:>9.3g}", f"{row['limit']:<8}"
            yield f"  {rank:>4}  {row['launch.ranks']:>5}  {seconds}  {limit}{device:>9}{margin:>10}{host:>9}  {row['overrides']}"
        yield from self._reasons()
        for reason, count in self.dropped.items():
            yield f"  dropped {count:,}: {reason}"

    def _reasons(self) -> Iterator[str]:
        """Why the first layout is the best."""
        fitting = [found for found in self.found if found.plan.fits]
        if not fitting:
            yield "  none of them fits: use more ranks, smaller micro-batches or a smaller model"
            return
        first, *others = fitting
        if others:
            slower = others[0].gpu_seconds / first.gpu_seconds - 1
            words = "longer" if others[0].plan.world_size == first.plan.world_size else "more GPU time"
            yield f"  the second takes {slower:.1%} {words}: {others[0].slower_because(first)}"
        yield from self.price.lines(first.plan)
        if all(found.layout.offload != "none" for found in fitting):
            yield f"  {self._without_offload()}"
            cost, parts = first.offload_seconds, first.plan.time.parts if first.plan.time else {}
            words = ", ".join(f"{lane} {parts[lane]:.3g} s" for lane in OFFLOADED if lane in parts)
            share = f"{cost:.3g} s of the {first.seconds:.3g} s of a step" + (f" ({words})" if words else "")
            yield f"  offload={first.layout.offload} costs {share}"

    def _without_offload(self) -> str:
        if self.resident > self.usable:
            return (
                f"no layout without offload fits: its state takes at least {size(self.resident)} of a device that has "
                f"{size(self.usable)}; use more ranks or pay for the offload"
            )
        return "none of the planned layouts without offload fits; raise plan.traced to plan more of them"


def search(
    replan: Callable[[tuple[str, ...]], Plan | str],
    *,
    work: Workload,
    traced: int,
    say: Callable[[str], object] = print,
) -> Search:
    """Plans layouts until `traced` of them fit, at most twice as many, in the order of the arithmetic: layouts that seem to fit first, ordered
    by speed.

    replan: returns the plan with these overrides, or the reason for a refusal. say: prints a line of progress.
    """
    layouts, dropped = legal(work)
    total, usable = len(layouts) + sum(dropped.values()), work.hardware.usable_bytes
    drops = Counter[str](dropped)
    waiting, resident = [], math.inf
    for layout in layouts:
        state = state_bytes(layout, work=work)
        if layout.offload == "none":
            resident = min(resident, state)
        if state > usable:
            drops[_TOO_LARGE] += 1
            continue
        rough = rough_seconds(layout, work=work)
        kept = state + resident_bytes(layout, work=work)
        fits = kept + activation_bytes(layout, work=work) <= usable
        waiting.append((not fits, rough, layout))
    waiting.sort(key=lambda entry: (entry[0], entry[1], _simplicity(entry[2])))
    found: list[Found] = []
    misfits: list[Layout] = []
    for position, (_, rough, layout) in enumerate(waiting):
        if len(found) - len(misfits) == traced or len(found) == 2 * traced:
            drops[f"slower by arithmetic than the {len(found)} that were planned"] += len(waiting) - position
            break
        if any(layout.keeps_more(misfit) for misfit in misfits):
            drops["keeps more than a planned layout that does not fit"] += 1
            continue
        say(f"  plans {len(found) + 1} of {min(traced + len(misfits), len(waiting))}: {' '.join(layout.overrides)}")
        plan = replan(layout.overrides)
        if isinstance(plan, str):
            drops[f"refused: {plan}"] += 1
            continue
        found.append(Found(layout=layout, plan=plan, rough=rough))
        if not plan.fits:
            misfits.append(layout)
    found.sort(key=_order)
    return Search(found=tuple(found), layouts=total, dropped=dict(drops), usable=usable, resident=resident)


def _order(one: Found) -> tuple:
    """Sort key: layouts that fit by GPU time, then seconds, then simplicity; then the others by their excess."""
    if one.plan.fits:
        rounded = (float(f"{seconds:.3g}") for seconds in (one.gpu_seconds, one.seconds))
        return False, *rounded, _simplicity(one.layout), one.seconds
    return True, -(one.plan.margin_bytes or 0)


def _simplicity(layout: Layout) -> tuple[int, ...]:
    """Sort key: among equals the layout with fewer techniques comes first."""
    return (math.prod(getattr(layout, name) for name in DEGREES), layout.stage, len(layout.overrides))
