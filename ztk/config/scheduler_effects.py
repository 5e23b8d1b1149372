"""Which keys of the learning rate have an effect with which schedule."""

from collections.abc import Callable

from ztk.config.effect import Effect, keys_of
from ztk.config.machine import Machine
from ztk.config.scheduler_schema import SchedulerName
from ztk.config.schema import Config

_DECAYED = (SchedulerName.linear, SchedulerName.cosine, SchedulerName.wsd)
_WARMED = (SchedulerName.constant, *_DECAYED)


def _uses_scheduler(*names: SchedulerName) -> Callable[[Config, Machine], bool]:
    return lambda config, machine: config.scheduler.name in names


SCHEDULER_EFFECTS = (
    Effect(
        keys=("scheduler.warmup_steps",),
        when=_uses_scheduler(*_WARMED),
        only="scheduler=constant, linear, cosine or wsd",
        required=False,
    ),
    Effect(
        keys=("scheduler.warmup_shape",),
        when=lambda c, m: c.scheduler.name in _WARMED and c.scheduler.warmup_steps != 0,
        only="scheduler=constant, linear, cosine or wsd with scheduler.warmup_steps above 0",
    ),
    Effect(
        keys=("scheduler.warmup_start",),
        when=lambda c, m: c.scheduler.name in _WARMED and c.scheduler.warmup_steps != 0,
        only="scheduler=constant, linear, cosine or wsd with scheduler.warmup_steps above 0",
        required=False,
    ),
    Effect(keys=("scheduler.final",), when=_uses_scheduler(*_DECAYED), only="scheduler=linear, cosine or wsd"),
    Effect(
        keys=("scheduler.total_steps",),
        when=_uses_scheduler(*_DECAYED),
        only="scheduler=linear, cosine or wsd",
        required=False,
    ),
    Effect(
        keys=("scheduler.decay_steps",),
        when=_uses_scheduler(SchedulerName.wsd),
        only="scheduler=wsd",
        required=False,
    ),
    Effect(keys=("scheduler.decay_shape",), when=_uses_scheduler(SchedulerName.wsd), only="scheduler=wsd"),
    Effect(
        keys=keys_of("scheduler", "start", "rise_stairs", "decay_rate", "decay_interval"),
        when=_uses_scheduler(SchedulerName.one_cycle),
        only="scheduler=one_cycle",
    ),
    Effect(
        keys=keys_of("scheduler", "rise_steps", "fall_steps", "fall_stairs"),
        when=_uses_scheduler(SchedulerName.one_cycle),
        only="scheduler=one_cycle",
        required=False,
    ),
    Effect(
        keys=("scheduler.step_size",),
        when=_uses_scheduler(SchedulerName.range_test),
        only="scheduler=range_test",
        required=False,
    ),
    Effect(
        keys=keys_of("scheduler", "step_rate", "staircase"),
        when=_uses_scheduler(SchedulerName.range_test),
        only="scheduler=range_test",
    ),
)
