"""peft's `modules_to_save` at stage 3: layers that train in addition to adapters are copies, such as the head of a reward model.

peft gathers a layer before the copy only if its parameters are empty, as DeepSpeed's sharded parameters are. ztk's sharded parameters
keep their shape and read as NaN, so the copies would contain no values.
"""

import functools
import importlib
from types import ModuleType
from typing import Any

from ztk.zero.parameters.released import is_released


def complete(other: ModuleType) -> None:
    """Makes copies contain the layer's values. A collective call when a copy is made. other: the module peft.utils.other."""
    wrapper = other.ModulesToSaveWrapper
    original = wrapper.update

    @functools.wraps(original)
    def update(self: Any, *given, **options):
        parameters = list(self.original_module.parameters())
        gathered = importlib.import_module("deepspeed").zero.GatheredParameters
        with gathered(parameters, enabled=any(map(is_released, parameters))):
            return original(self, *given, **options)

    wrapper.update = update
