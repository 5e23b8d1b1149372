"""In which runs some keys have an effect."""

from collections.abc import Callable
from dataclasses import dataclass

from ztk.config.machine import Machine
from ztk.config.schema import Config


@dataclass(frozen=True, kw_only=True, slots=True)
class Effect:
    """`keys` have an effect if `when` is true; `only` is that condition in the words of the command line. `required`: they then need a
    value."""

    keys: tuple[str, ...]
    when: Callable[[Config, Machine], bool]
    only: str
    required: bool = True


def keys_of(section: str, *names: str) -> tuple[str, ...]:
    """The keys of these names in a section."""
    return tuple(f"{section}.{name}" for name in names)
