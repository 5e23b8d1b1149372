"""Schedules against closed formulas, entry by entry."""

import math

import pytest
import torch

from ztk.optim import SchedulePolicy, lr_table


def table(steps: int, **options) -> list[float]:
    return lr_table(SchedulePolicy(**options), steps=steps).tolist()


def same(values: list[float], expected: list[float]) -> bool:
    """Equal to float32's rounding of the expected value."""
    return values == torch.tensor(expected, dtype=torch.float32).tolist()


def test_constant():
    values = lr_table(SchedulePolicy(), steps=3)
    assert values.dtype == torch.float32 and values.tolist() == [1.0, 1.0, 1.0]


def test_warmup_makes_no_update_with_rate_zero_and_arrives():
    assert same(table(6, warmup_steps=4), [1 / 4, 1 / 4 + 3 / 16, 1 / 4 + 6 / 16, 1 / 4 + 9 / 16, 1.0, 1.0])


def test_warmup_lr_of_deepspeed():
    """gamma(t) = t / W and ln(t + 1) / ln(W) between min_lr and max_lr"""
    low, W = 0.2, 5
    linear = [low + (1 - low) * t / W for t in range(W)] + [1.0] * 3
    assert same(table(8, warmup_steps=W, warmup_start=low), linear)
    log = [low + (1 - low) * math.log(t + 1) / math.log(W) for t in range(W)] + [1.0] * 3
    assert same(table(8, warmup_steps=W, warmup_start=low, warmup_shape="log"), log)


def test_warmup_decay_lr_of_deepspeed():
    W, T = 3, 10
    expected = [t / W for t in range(W)] + [max(0.0, (T - t) / (T - W)) for t in range(W, 14)]
    assert same(table(14, name="linear", warmup_steps=W, warmup_start=0.0, total_steps=T), expected)


def test_warmup_cosine_lr_of_deepspeed():
    W, T, low = 3, 10, 0.1
    expected = [t / W for t in range(W)]
    expected += [low + (1 - low) * (1 + math.cos(math.pi * min(1, (t - W + 1) / (T - W)))) / 2 for t in range(W, 14)]
    values = table(14, name="cosine", warmup_steps=W, warmup_start=0.0, total_steps=T, final=low)
    assert same(values, expected)
    assert values[T - 1] == values[-1] == torch.tensor(low).item()


def test_decay_ends_with_the_run_by_default():
    assert table(9, name="linear", final=0.5) == table(9, name="linear", final=0.5, total_steps=9)
    assert table(9, name="cosine")[-1] == 0.0


@pytest.mark.parametrize(
    ("shape", "fall"),
    [
        ("linear", lambda p: 1 - 0.8 * p),
        ("cosine", lambda p: 0.2 + 0.4 * (1 + math.cos(math.pi * p))),
        ("sqrt", lambda p: 1 - 0.8 * math.sqrt(p)),
        ("exponential", lambda p: 0.2**p),
    ],
)
def test_warmup_stable_decay(shape, fall):
    values = table(12, name="wsd", warmup_steps=3, warmup_start=0.0, decay_steps=4, decay_shape=shape, final=0.2)
    assert same(values, [t / 3 for t in range(3)] + [1.0] * 5 + [fall(p / 4) for p in range(1, 5)])
    assert same(values[-1:], [0.2])


def test_a_stable_phase_does_not_depend_on_the_length_of_the_run():
    """A run of any length may go on from a checkpoint of it."""
    short, long = (table(steps, name="wsd", warmup_steps=4, final=0.1) for steps in (20, 200))
    assert short[:18] == long[:18] and same(short[18:], [0.55, 0.1]) and long[179] == 1.0 > long[180]


def test_a_decay_may_end_before_the_run():
    values = table(9, name="wsd", decay_steps=2, total_steps=6, final=0.5)
    assert same(values, [1.0] * 4 + [0.75] + [0.5] * 4)


def test_one_cycle_of_deepspeed():
    """Up, down, then min / (1 + rate * intervals)"""
    low, up, down, rate, interval = 0.25, 4, 8, 0.5, 2
    expected = [low + (1 - low) * t / up for t in range(up + 1)]
    expected += [low + (1 - low) * (up + down - t) / down for t in range(up + 1, up + down + 1)]
    expected += [low / (1 + rate * (t - up - down) / interval) for t in range(up + down + 1, 20)]
    options = {"start": low, "rise_steps": up, "fall_steps": down, "decay_rate": rate, "decay_interval": interval}
    assert same(table(20, name="one_cycle", **options), expected)


def test_one_cycle_without_decay_stays_low():
    assert table(12, name="one_cycle", start=0.5, rise_steps=3)[6:] == [0.5] * 6


def test_one_cycle_in_stairs():
    values = table(13, name="one_cycle", start=0.0, rise_steps=6, rise_stairs=2, fall_stairs=3)
    assert same(values, [0, 0, 0, 0.5, 0.5, 0.5, 1, 2 / 3, 2 / 3, 1 / 3, 1 / 3, 0, 0])


@pytest.mark.parametrize("staircase", [False, True])
def test_range_test_of_deepspeed(staircase):
    interval = (lambda t: t // 4) if staircase else (lambda t: t / 4)
    expected = [1 + 0.5 * interval(t) for t in range(11)]
    assert same(table(11, name="range_test", step_size=4, step_rate=0.5, staircase=staircase), expected)


def test_a_run_shorter_than_its_warmup_ends_within_it():
    assert table(3, name="cosine", warmup_steps=10) == table(20, name="cosine", warmup_steps=10)[:3]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "cos"}, "scheduler.name=cos: must be one of constant, linear, cosine, wsd, one_cycle, range_test"),
        (
            {"name": "constant", "final": 0.1},
            "scheduler.final=0.1 has no effect here, only with scheduler=linear, cosine or wsd",
        ),
        (
            {"name": "one_cycle", "warmup_steps": 5},
            "scheduler.warmup_steps=5 has no effect here, only with scheduler=constant",
        ),
        ({"warmup_steps": -1}, "scheduler.warmup_steps=-1"),
        ({"warmup_steps": 4, "warmup_shape": "cubic"}, "scheduler.warmup_shape=cubic: must be one of linear, log"),
        ({"warmup_steps": 1, "warmup_shape": "log"}, "needs scheduler.warmup_steps=2"),
        (
            {"warmup_start": 0.5},
            "scheduler.warmup_start=0.5 has no effect here, .* with scheduler.warmup_steps above 0",
        ),
        ({"warmup_steps": 4, "warmup_start": 1.5}, "scheduler.warmup_start=1.5: must be 0 or more and at most 1"),
        ({"name": "linear", "total_steps": 0}, "scheduler.total_steps=0: must be 1 or more"),
        ({"decay_steps": 5}, "scheduler.decay_steps=5 has no effect here, only with scheduler=wsd"),
        ({"name": "wsd", "decay_shape": "cubic"}, "scheduler.decay_shape=cubic: must be one of linear, cosine, sqrt"),
        ({"name": "wsd", "decay_shape": "exponential"}, "use scheduler.final=0.1"),
        ({"name": "wsd", "warmup_steps": 4, "decay_steps": 7, "total_steps": 10}, "use scheduler.decay_steps=6"),
        ({"name": "one_cycle", "decay_rate": 0.5}, "one has no effect without the other"),
        ({"name": "one_cycle", "rise_stairs": -1}, "scheduler.rise_stairs=-1"),
        ({"name": "range_test", "step_rate": 0.0}, "scheduler.step_rate=0.0"),
    ],
)
def test_faults_name_key_value_and_fix(options, message):
    with pytest.raises(ValueError, match=message):
        SchedulePolicy(**options)


def test_no_steps():
    with pytest.raises(ValueError, match="train.steps=0"):
        lr_table(SchedulePolicy(), steps=0)
