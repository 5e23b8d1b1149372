"""`plan.search=true`: finds the fastest layouts that fit. Arithmetic orders all layouts, and the best ones are planned."""

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from ztk.planner.layouts import (
    DEGREES,
    Layout,
    Workload,
    host_state_bytes,
    legal,
    parts_of,
    rough_bytes,
    state_bytes,
)
from ztk.planner.price import Price
from ztk.planner.result import Plan, size
from ztk.planner.rough import rough_seconds

OFFLOADED = ("host", "pcie", "disk")  # lanes that only offloading uses
_TOO_LARGE = "the state alone is more than a device has"
_TOO_LARGE_HOST = "the states in main memory alone are more than a node has"
_PARTIAL = "offload a part of the states, and their full offload was not planned or does not fit"
_NOUNS = {"host": "host's update", "pcie": "copies between host and device"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """A layout and its plan. rough: seconds of the arithmetic that selected it. kept: the plan of the same layout without offload, if no
    planned layout without offload fits and this is the best one."""

    layout: Layout
    plan: Plan
    rough: float
    kept: Plan | None = None

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

    def compared(self, kept: Plan) -> str:
        """Compares it with the plan of the same layout without offload."""
        assert kept.time is not None
        longer = self.seconds / kept.time.seconds - 1
        words = f"{longer:.1%} longer" if longer >= 0 else f"{-longer:.1%} less"
        return f"without offload this layout {kept.answer}; a step would take {kept.time.seconds:.3g} s, and takes {words} with it"

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
            "without_offload.step_seconds": self.kept.time.seconds
            if self.kept is not None and self.kept.time is not None
            else None,
            "without_offload.margin_bytes": self.kept.margin_bytes if self.kept is not None else None,
            "margin_bytes": plan.margin_bytes,
            "host_margin_bytes": plan.host_margin_bytes,
            "peak_memory.device_bytes": plan.peak_bytes["device"],
            "peak_memory.host_bytes": plan.peak_bytes["host"],
            "peak_memory.nvme_bytes": plan.peak_bytes["nvme"],
            "node_memory.host_bytes": plan.node_host_bytes,
            "zero.stage": self.layout.stage,
            "offload.optimizer_fraction": self.layout.fraction,
            **{name: getattr(self.layout, name) for name in ("offload", "recompute")},
            **{f"topology.{name}": getattr(self.layout, name) for name in DEGREES},
            "rough_seconds": self.rough,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Search:
    """found: layouts that fit, ordered by GPU time, then layouts that do not, ordered by their missing bytes. layouts: number of all
    layouts.

    dropped: number of layouts that were not planned, by reason. The counts and `found` add up to `layouts`.
    usable, resident: bytes available to tensors on a device, and the minimum of bytes that a layout without offloading keeps there between
    steps.
    price: limits of the training for which the layouts are compared.
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
            words, left = row["overrides"], row["host_margin_bytes"]
            if left is not None and left < 0:
                words += f"  (a node's main memory lacks {size(-left)})"
            yield f"  {rank:>4}  {row['launch.ranks']:>5}  {seconds}  {limit}{device:>9}{margin:>10}{host:>9}  {words}"
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
            if first.kept is not None:
                yield f"  {first.compared(first.kept)}"

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
    by speed. If only layouts with offload fit, the best one is planned without it, too.

    replan: returns the plan with these overrides, or the reason for a refusal. say: prints a line of progress.
    """
    layouts, dropped = legal(work)
    queue, drops = _Queue(layouts, work=work), Counter[str](dropped)
    found: list[Found] = []
    misfits: list[Layout] = []  # that a device has no room for
    misfit = 0
    while queue.waiting and len(found) - misfit < traced and len(found) < 2 * traced:
        layout = queue.take()
        if any(layout.keeps_more(misfit) for misfit in misfits):
            drops["keeps more than a planned layout that does not fit"] += 1
            continue
        say(f"  plans {len(found) + 1} of {min(traced + misfit, 2 * traced)}: {' '.join(layout.overrides)}")
        plan = replan(layout.overrides)
        if isinstance(plan, str):
            drops[f"refused: {plan}"] += 1
            continue
        found.append(Found(layout=layout, plan=plan, rough=rough_seconds(layout, work=work)))
        misfit += not plan.fits
        if (plan.margin_bytes or 0) >= 0:
            queue.release(parts_of(layout))
        else:
            misfits.append(layout)
    found.sort(key=_order)
    if found and found[0].plan.fits and all(one.layout.offload != "none" for one in found if one.plan.fits):
        _plan_without_offload(found, replan=replan, queue=queue)
    drops += Counter(queue.dropped(planned=len(found)))
    return Search(
        found=tuple(found),
        layouts=len(layouts) + sum(dropped.values()),
        dropped=dict(drops),
        usable=work.hardware.usable_bytes,
        resident=queue.resident,
    )


class _Queue:
    """Layouts in the order in which they are planned.

    Layouts whose state is larger than a device are left out. Layouts that offload a part of the states wait until `release`: the search
    calls it when the same layout with full offload fits. resident: see `Search`.
    """

    def __init__(self, layouts: Iterable[Layout], *, work: Workload) -> None:
        self.work = work
        self._too_large = self._too_large_host = 0
        self._parts: set[Layout] = set()
        self.waiting: list[tuple] = []
        self.resident = math.inf
        for layout in layouts:
            state = state_bytes(layout, work=work)
            if layout.offload == "none":
                self.resident = min(self.resident, state)
            host = work.hardware.usable_host_bytes
            if state > work.hardware.usable_bytes:
                self._too_large += 1
            elif host is not None and host_state_bytes(layout, work=work) > host:
                self._too_large_host += 1
            elif layout.fraction < 1:
                self._parts.add(layout)
            else:
                self._add(layout)

    def take(self) -> Layout:
        """Removes and returns the next layout."""
        return heapq.heappop(self.waiting)[-1]

    def remove(self, layout: Layout) -> None:
        """Removes a layout if it waits."""
        self.waiting = [entry for entry in self.waiting if entry[-1] != layout]
        heapq.heapify(self.waiting)

    def release(self, parts: Iterable[Layout]) -> None:
        """Adds layouts that offload a part of the states."""
        for part in self._parts.intersection(parts):
            self._parts.discard(part)
            self._add(part)

    def dropped(self, *, planned: int) -> dict[str, int]:
        """Numbers of layouts that are not taken, by reason."""
        counts = {
            _TOO_LARGE: self._too_large,
            _TOO_LARGE_HOST: self._too_large_host,
            _PARTIAL: len(self._parts),
            f"slower by arithmetic than the {planned} that were planned": len(self.waiting),
        }
        return {reason: count for reason, count in counts.items() if count}

    def _add(self, layout: Layout) -> None:
        """Adds a layout. Those that seem to fit come first, then the faster ones, then the simpler ones."""
        work = self.work
        is_large = rough_bytes(layout, work=work) > work.hardware.usable_bytes
        seconds = rough_seconds(layout, work=work)
        heapq.heappush(self.waiting, (is_large, seconds, _simplicity(layout), layout.overrides, layout))


def _plan_without_offload(
    found: list[Found], *, replan: Callable[[tuple[str, ...]], Plan | str], queue: _Queue
) -> None:
    """Plans the best layout without its offload. A plan that fits is added to `found`, another one to the best."""
    first = found[0]
    bare = replace(first.layout, offload="none", fraction=1.0)
    plan = next((one.plan for one in found if one.layout == bare), None) or replan(bare.overrides)
    if isinstance(plan, str):
        return
    if plan.fits:  # its rough size was too large
        queue.remove(bare)
        found.append(Found(layout=bare, plan=plan, rough=rough_seconds(bare, work=queue.work)))
        found.sort(key=_order)
    else:
        found[0] = replace(first, kept=plan)


def _order(one: Found) -> tuple:
    """Sort key: layouts that fit by GPU time, then seconds, then simplicity; then the others by their missing bytes."""
    if one.plan.fits:
        rounded = (float(f"{seconds:.3g}") for seconds in (one.gpu_seconds, one.seconds))
        return False, *rounded, _simplicity(one.layout), one.seconds
    return True, one.plan.missing_bytes


def _simplicity(layout: Layout) -> tuple[int, ...]:
    """Sort key: among equals the layout with fewer techniques comes first."""
    return (math.prod(getattr(layout, name) for name in DEGREES), layout.stage, len(layout.overrides))
