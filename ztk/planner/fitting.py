"""Finds the smallest set of changes that makes a run fit. Every candidate is planned; nothing is estimated."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ztk.planner.result import Plan

MAX_CHANGES = 3
Change = tuple[str, ...]  # overrides that belong together


@dataclass(frozen=True, kw_only=True, slots=True)
class Fix:
    """Overrides with which the run fits, and its plan with them."""

    overrides: tuple[str, ...]
    plan: Plan


def fixes(replan: Callable[[tuple[str, ...]], Plan | None], *, levers: Sequence[Sequence[Change]]) -> list[Fix]:
    """The sets with the fewest changes that fit, ordered by predicted step time. Empty if `MAX_CHANGES` changes do not suffice.

    replan: returns the plan with these overrides, or None if they are refused. levers: for each lever, its alternative changes, ordered by
    the memory they save. A lever's weaker changes are planned only if its last one fits.
    """
    for count in range(1, min(MAX_CHANGES, len(levers)) + 1):
        found: list[Fix] = []
        for chosen in itertools.combinations(levers, count):
            found += _fitting(replan, levers=chosen)
        if found:
            return sorted(found, key=_seconds)
    return []


def _fitting(replan: Callable[[tuple[str, ...]], Plan | None], *, levers: Sequence[Sequence[Change]]) -> Iterator[Fix]:
    """The combinations with one change of every lever that fit. Plans nothing else if the strongest combination does not fit."""
    strongest = tuple(lever[-1] for lever in levers)
    others = (changes for changes in itertools.product(*levers) if changes != strongest)
    for number, changes in enumerate((strongest, *others)):
        overrides = tuple(itertools.chain.from_iterable(changes))
        made = replan(overrides)
        if made is not None and made.fits:
            yield Fix(overrides=overrides, plan=made)
        elif number == 0:
            return


def _seconds(fix: Fix) -> float:
    return float("inf") if fix.plan.time is None else fix.plan.time.seconds
