"""Partitioning of layers into contiguous, nonempty stages with balanced costs."""

import re
from collections.abc import Sequence
from itertools import accumulate, pairwise


def uniform(num_layers: int, *, num_stages: int) -> tuple[range, ...]:
    """Equally many layers per stage; the first stages take the remainder."""
    check_enough(num_layers, num_stages=num_stages)
    size, extra = divmod(num_layers, num_stages)
    starts = [stage * size + min(stage, extra) for stage in range(num_stages + 1)]
    return tuple(range(start, stop) for start, stop in pairwise(starts))


def balanced(costs: Sequence[float], *, num_stages: int) -> tuple[range, ...]:
    """The cut with the smallest maximum cost of a stage; among these, the one with the smallest sum of squares.

    Two dynamic programs over prefixes, O(num_stages * layers^2). Raises ValueError for fewer layers than stages.
    """
    check_enough(len(costs), num_stages=num_stages)
    limit = _best(costs, num_stages=num_stages, combine=max, cost=lambda total: total)[0]
    limit *= 1 + 1e-9  # sums of the same costs in another order round differently
    _, ends = _best(
        costs,
        num_stages=num_stages,
        combine=lambda a, b: a + b,
        cost=lambda total: total * total if total <= limit else float("inf"),
    )
    return tuple(range(start, stop) for start, stop in zip((0, *ends), ends, strict=False))


def by_type(kinds: Sequence[str], *, pattern: str, num_stages: int) -> tuple[range, ...]:
    """Equally many layers whose kind (class name) matches the regular expression `pattern`, ignoring case.

    Raises ValueError if fewer layers match than there are stages.
    """
    matches = [float(re.search(pattern, kind, re.IGNORECASE) is not None) for kind in kinds]
    if sum(matches) < num_stages:
        raise ValueError(
            f"topology.partition=type:{pattern} matches {sum(matches):.0f} of the layers {', '.join(dict.fromkeys(kinds))}: "
            f"{num_stages} stages need as many; use another pattern or topology.partition=uniform"
        )
    return balanced(matches, num_stages=num_stages)


def check_enough(num_layers: int, *, num_stages: int) -> None:
    """Raises ValueError for fewer layers than stages."""
    if num_layers < num_stages:
        raise ValueError(
            f"{num_layers} layers cannot make {num_stages} pipeline stages: use fewer (topology.pipeline, "
            "topology.virtual_stages) or a deeper model"
        )


def _best(costs: Sequence[float], *, num_stages: int, combine, cost) -> tuple[float, tuple[int, ...]]:
    """(value, end of each stage) of the cheapest cut: `combine` over stages of `cost(sum of the stage's costs)`."""
    prefix = [0.0, *accumulate(costs)]
    num_layers = len(costs)
    best = {0: (0.0, ())}  # layers cut so far -> (value, ends)
    for stage in range(num_stages):
        following = {}
        for stop in range(stage + 1, num_layers - (num_stages - stage - 1) + 1):
            candidates = (
                (combine(value, cost(prefix[stop] - prefix[start])), (*ends, stop))
                for start, (value, ends) in best.items()
                if start < stop
            )
            following[stop] = min(candidates, key=lambda candidate: candidate[0])
        best = following
    return best[num_layers]
