"""Warns if `state_dict()` is called on a model of which this rank holds only a part."""

import warnings
import weakref
from collections.abc import Callable

from torch import nn

from ztk.zero.buckets.residency import ParameterState
from ztk.zero.zero import Zero

_TEXT = (
    "state_dict(): this model is sharded. The result has only this rank's part, and parameters that are not gathered are empty. For "
    "full weights use ztk.checkpoint.full_state_dict(engine), `module_state_dict()` of the DeepSpeed engine, or a checkpoint and "
    "`python -m ztk.checkpoint export`"
)


def warn_of_parts(model: nn.Module, *, zero: Zero, is_cut: bool) -> None:
    """Makes `model.state_dict()` warn (RuntimeWarning) while it does not have all weights.

    is_cut: whether tensor, pipeline or expert parallelism also cuts the model, so that a gather by `zero` is not enough.
    """
    if not (is_cut or zero.policy.shards_parameters):
        return
    model.register_state_dict_pre_hook(_Warner(zero, is_cut=is_cut))


class _Warner:
    """The `state_dict` hook. Copies of the model are whole, so a copied hook does nothing."""

    def __init__(self, zero: Zero, *, is_cut: bool) -> None:
        self._zero, self._is_cut = weakref.ref(zero), is_cut  # weak: the model outlives its engine

    def __call__(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        zero = self._zero()
        sharded = zero is not None and any(bucket.state is ParameterState.sharded for bucket in zero.buckets)
        if self._is_cut or sharded:
            warnings.warn(_TEXT, RuntimeWarning, stacklevel=3)

    def __deepcopy__(self, memo: dict) -> Callable:
        return _silent

    def __reduce__(self) -> tuple:
        return _make_silent, ()


def _silent(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    """Replaces the hook in copies."""


def _make_silent() -> Callable:
    return _silent
