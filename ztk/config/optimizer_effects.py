"""Which keys of the optimizer have an effect with which optimizer."""

from collections.abc import Callable

from ztk.config.effect import Effect, keys_of
from ztk.config.machine import Machine
from ztk.config.optimizer_schema import OptimizerName
from ztk.config.schema import Config, ZeroEngine


def _uses_optimizer(*names: OptimizerName) -> Callable[[Config, Machine], bool]:
    return lambda config, machine: config.optimizer.name in names


_uses_muon = _uses_optimizer(OptimizerName.muon)

OPTIMIZER_EFFECTS = (
    Effect(
        keys=("optimizer.betas",),
        when=_uses_optimizer(
            OptimizerName.adamw, OptimizerName.adam, OptimizerName.lion, OptimizerName.lamb, OptimizerName.muon
        ),
        only="optimizer=adamw, adam, lion, lamb or muon",
    ),
    Effect(
        keys=("optimizer.eps",),
        when=_uses_optimizer(OptimizerName.adamw, OptimizerName.adam, OptimizerName.lamb, OptimizerName.muon),
        only="optimizer=adamw, adam, lamb or muon",
    ),
    Effect(keys=("optimizer.states",), when=_uses_optimizer(OptimizerName.adamw), only="optimizer=adamw"),
    Effect(
        keys=keys_of("optimizer", "momentum", "nesterov"),
        when=_uses_optimizer(OptimizerName.sgd, OptimizerName.muon),
        only="optimizer=sgd or muon",
    ),
    Effect(
        keys=keys_of("optimizer", "min_coeff", "max_coeff"),
        when=_uses_optimizer(OptimizerName.lamb),
        only="optimizer=lamb",
    ),
    Effect(keys=keys_of("optimizer", "ns_steps", "ns_dtype", "adjust_lr"), when=_uses_muon, only="optimizer=muon"),
    Effect(keys=keys_of("optimizer", "adam_lr", "adam_names"), when=_uses_muon, only="optimizer=muon", required=False),
    Effect(
        keys=("optimizer.skip_unused",),
        when=lambda c, m: c.zero.engine is ZeroEngine.ztk,
        only="zero=stage0 to stage3",
        required=False,
    ),
)
