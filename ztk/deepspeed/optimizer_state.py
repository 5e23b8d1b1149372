"""`optimizer.state` where an engine holds the states: empty, and whoever asks for a parameter's or changes it is told where they are."""

from collections import defaultdict
from typing import Any

_ELSEWHERE = (
    "optimizer.state{what}: the states are sharded and live in the engine, so this would have no effect. Use "
    "deepspeed.utils.safe_get_full_optimizer_state(p, name) and safe_set_full_optimizer_state(p, value, name), or "
    "engine.optimizer.state_dict() and load_state_dict(), on every rank; to begin with new states destroy() the engine and initialize again"
)


class StateElsewhere(defaultdict):
    """What stands for `optimizer.state`. It has no entries, as libraries that walk over it expect."""

    def __init__(self) -> None:
        super().__init__(dict)

    def __missing__(self, key: Any) -> dict:
        raise RuntimeError(_ELSEWHERE.format(what="[p]"))

    def __setitem__(self, key: Any, value: Any) -> None:
        raise RuntimeError(_ELSEWHERE.format(what="[p] = ..."))

    def clear(self) -> None:
        """Raises RuntimeError: the states would stay."""
        raise RuntimeError(_ELSEWHERE.format(what=".clear()"))

    def pop(self, key: Any, default: Any = None) -> Any:
        """Raises RuntimeError: the states would stay."""
        raise RuntimeError(_ELSEWHERE.format(what=".pop(p)"))

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Raises RuntimeError: nobody would read them."""
        raise RuntimeError(_ELSEWHERE.format(what=".update(...)"))

    def __deepcopy__(self, memo: dict) -> "StateElsewhere":
        return self


def check_same(state: object, *, expected: StateElsewhere) -> None:
    """Raises RuntimeError if a script has put another object into the place of `expected`."""
    if state is not expected:
        raise RuntimeError(_ELSEWHERE.format(what=" = ..."))
