"""TRL's generation at stage 3.

TRL generates with gathered parameters. Before that it removes DeepSpeed's hooks from the model by private names of DeepSpeed's optimizer,
and adds them again afterwards. ztk has no such hooks: parameters inside `GatheredParameters` stay gathered for any number of forwards.
"""

from types import ModuleType


def complete(utils: ModuleType) -> None:
    """Replaces TRL's functions. utils: the module trl.models.utils."""
    # pyrefly: ignore[missing-attribute]  # replaces a function of the module
    utils.remove_hooks = utils.add_hooks = _nothing_to_do


def _nothing_to_do(model: object) -> None:
    """Does nothing. model: the engine."""
