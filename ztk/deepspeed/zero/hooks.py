"""What libraries do around generation at stage 3: gather everything, take hooks off, put them back."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from ztk.deepspeed.zero.gathered import GatheredParameters, external_parameters


class DeepSpeedZeRoOffload:
    """`engine.optimizer.parameter_offload` at stage 3, as TRL uses it.

    There are no hooks to take off: parameters that `GatheredParameters` holds stay as they are whatever runs, without any work.
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
    """The order of uses: always followed as it comes, so there is never an old one to forget."""

    def is_invalid_trace(self) -> bool:
        return True


@contextmanager
def unwrap_model_for_generation(model: nn.Module) -> Iterator[nn.Module]:
    """Inside, all parameters of the engine `model` are unsharded: for many forwards without training."""
    with GatheredParameters(model.parameters()):
        yield model
