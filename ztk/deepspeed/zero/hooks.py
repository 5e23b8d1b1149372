"""Objects that libraries use around generation at stage 3, to gather everything and to remove and restore hooks."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from ztk.deepspeed.zero.gathered import GatheredParameters, external_parameters


class DeepSpeedZeRoOffload:
    """`engine.optimizer.parameter_offload` at stage 3, for TRL.

    ztk has no hooks to remove: parameters in `GatheredParameters` stay gathered during any forward.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.forward_hooks: list = []
        self.backward_hooks: list = []
        self.param_coordinator = _Coordinator()
        module.ds_external_parameters = functools.partial(external_parameters, module)

    def _register_deepspeed_module(self, module: nn.Module) -> None:
        if module is not self.module:
            raise ValueError(f"{type(module).__name__} is not the engine's module")


class _Coordinator:
    """Records the order of uses. ztk always follows the current order, so there is nothing to reset."""

    def is_invalid_trace(self) -> bool:
        return True


@contextmanager
def unwrap_model_for_generation(model: nn.Module) -> Iterator[nn.Module]:
    """Unshards all parameters of the engine `model` inside the context, for many forwards without training."""
    with GatheredParameters(model.parameters()):
        yield model
