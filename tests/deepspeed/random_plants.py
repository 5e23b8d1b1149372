"""Faults that random scripts must find: the patched functions, and the seed of a script that then differs in silence. See `random_scripts`."""

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from unittest import mock

import torch
from torch import Tensor, nn

from ztk.zero.parameters.partitioned import PartitionedParameter

_FILL = PartitionedParameter.fill


def _fill_while_full(self: PartitionedParameter, read: Callable) -> None:
    """A load writes to the shard, and a later sharding overwrites it with the old full values."""
    self.shard = lambda source: None
    try:
        _FILL(self, read)
    finally:
        del self.shard


def _copied_as_zeros(parameter: nn.Parameter, memo: dict | None = None) -> nn.Parameter | bool:
    """In the place of `is_released`, if memo is None, and of the `__deepcopy__` of a released parameter."""
    return False if memo is None else nn.Parameter(torch.zeros(parameter.shape))


# Faults that existed: patching these functions, in one place or several, brings one back.
PLANTS = {
    "pretrained": ("ztk.zero.parameters.partitioned.PartitionedParameter.fill", _fill_while_full),
    "loss scale": ("ztk.zero.reduction.GradientReduction.require_scaled_loss", lambda self: None),
    "gathered": ("ztk.deepspeed.zero.gathered._is_changed", lambda parameter, *, versions: False),
    "writes": ("ztk.zero.writes.ParameterWrites.take_over", lambda self: None),
    "replaced": ("ztk.zero.writes.ParameterWrites._check_replaced", lambda self: None),
    "frozen": ("ztk.zero.writes.ParameterWrites.frozen_names", lambda self: frozenset()),
    "aliases": ("ztk.zero.build.check_aliases", lambda model: None),
    "gradients": (
        "ztk.deepspeed.engine.deepspeed_engine.take_changes ztk.deepspeed.optimizers.sharded.take_changes",
        lambda engine: None,
    ),
    "zero_grad": ("ztk.deepspeed.optimizers.sharded.ShardedOptimizer.zero_grad", lambda self, set_to_none=True: None),
    "placeholders": ("torch._C._set_throw_on_mutable_data_ptr", lambda tensor: None),
    "kept": ("ztk.zero.parameters.watched._alive ztk.zero.writes._is_shown_elsewhere", lambda *_, **__: []),
    "hooks": (
        "ztk.zero.parameters.watched._Watched.register_post_accumulate_grad_hook",
        Tensor.register_post_accumulate_grad_hook,
    ),
    "modules": ("ztk.zero.writes.ParameterWrites._check_modules", lambda self: None),
    "elementwise": ("ztk.parallel.apply.is_elementwise ztk.optim.elementwise._compare", lambda *_, **__: True),
    "attributes": ("ztk.optim.torch_step.attributes_of", lambda parameter: {}),
    "options": ("ztk.deepspeed.optimizers.groups.FixedOptions.check", lambda self: None),
    "groups": ("ztk.optim.script_optimizer.FixedGroups.check", lambda self: None),
    "steps": ("ztk.optim.script_optimizer.ScriptOptimizer.check", lambda self: None),
    "step hooks": ("ztk.deepspeed.optimizers.sharded.take_changes", lambda engine: None),
    "states": ("ztk.optim.script_optimizer.StateElsewhere._note", lambda self, what: None),
    # Of `random_edits`.
    "held": ("ztk.zero.build.HeldMemory", lambda model: SimpleNamespace(start=lambda warns: None, check=lambda: None)),
    "entries": ("ztk.zero.parameters.watched.is_for_state_dict", lambda caller: False),
    "arrays": ("ztk.zero.writes._is_shown_elsewhere", lambda bucket, *, own: False),
    "decisions": ("ztk.zero.parameters.released._refuse_values", lambda function, **_: None),
    "one rank": ("ztk.zero.agreement.WriteAgreement.check", lambda self, squares: None),
    "max_norm": ("ztk.zero.agreement.WriteAgreement.check", lambda self, squares: None),
    "loads": ("ztk.zero.writes.ParameterWrites.mark_updated", lambda self, bucket=None, *, names=None: None),
    "copies": ("ztk.zero.hooks.is_released ztk.zero.parameters.released._Released.__deepcopy__", _copied_as_zeros),
}
# The plants for which the script's edit must be of this kind.
EDITS = {
    "held": "alias read",
    "entries": "alias written",
    "arrays": "alias written",
    "decisions": "decision",
    "one rank": "one rank",
    "max_norm": "max_norm",
    "loads": "load",
    "copies": "load",
}
# The seed of a script that differs in silence where the fault is there.
CAUGHT = {
    "pretrained": 22,
    "loss scale": 127,
    "gathered": 21,
    "writes": 0,
    "replaced": 16,
    "frozen": 153,
    "aliases": 100,
    "gradients": 30,
    "zero_grad": 421,
    "placeholders": 275,
    "kept": 0,
    "hooks": 78,
    "modules": 509,
    "elementwise": 53,
    "attributes": 33,
    "options": 66,
    "groups": 64,
    "steps": 107,
    "step hooks": 327,
    "states": 27,
    "held": 126,
    "entries": 421,
    "arrays": 116,
    "decisions": 199,
    "one rank": 137,
    "max_norm": 190,
    "loads": 114,
    "copies": 424,
}


@contextlib.contextmanager
def planted(plant: str) -> Iterator[None]:
    if not plant:
        yield
        return
    places, fault = PLANTS[plant]
    with contextlib.ExitStack() as stack:
        for place in places.split():
            stack.enter_context(mock.patch(place, fault, create=True))
        yield
