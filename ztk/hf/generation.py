"""TRL's generation at stage 3.

Before it generates with gathered parameters, TRL takes DeepSpeed's hooks off the model by private names of its optimizer, and puts them back.
ztk has no such hooks: parameters inside `GatheredParameters` stay gathered through any number of forwards.
"""

from types import ModuleType


def complete(utils: ModuleType) -> None:
    """utils: trl.models.utils."""
    # pyrefly: ignore[missing-attribute]  # replaces a function of the module
    utils.remove_hooks = utils.add_hooks = _nothing_to_do


def _nothing_to_do(model: object) -> None:
    """model: the engine."""
