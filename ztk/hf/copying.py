"""peft's `modules_to_save` at stage 3: a layer that trains beside adapters is a copy of the model's, such as the head of a reward model.

peft gathers the layer before it copies it if its parameters are empty, as DeepSpeed's are while they are sharded. Here they keep their shape
and read as NaN, so that the copy had no values.
"""

import functools
import importlib
from types import ModuleType
from typing import Any

from ztk.zero.parameters.released import is_released


def complete(other: ModuleType) -> None:
    """other: peft.utils.other. A copy has the layer's values, the same on all ranks, which make it together."""
    wrapper = other.ModulesToSaveWrapper
    original = wrapper.update

    @functools.wraps(original)
    def update(self: Any, *given, **options):
        parameters = list(self.original_module.parameters())
        gathered = importlib.import_module("deepspeed").zero.GatheredParameters
        with gathered(parameters, enabled=any(map(is_released, parameters))):
            return original(self, *given, **options)

    wrapper.update = update
