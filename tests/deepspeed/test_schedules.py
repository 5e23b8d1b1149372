"""The five schedules, entry by entry as DeepSpeed 0.19.8 gives them: its own numbers, before the first step and after eleven."""

import math

import pytest
import torch

from ztk.deepspeed.optimizers.schedules import SCHEDULES, VALID_LR_SCHEDULES

# (schedule, arguments, learning rates, beta1) of AdamW with lr=5e-3
EXPECTED = [
    (
        "WarmupLR",
        {"warmup_min_lr": 0.0001, "warmup_max_lr": 0.01, "warmup_num_steps": 4},
        [0.0001, 0.0001, 0.00505, 0.00794556438, 0.01, 0.01, 0.01, 0.01, 0.01, 0.01, 0.01, 0.01],
        [0.9],
    ),
    (
        "WarmupLR",
        {"warmup_num_steps": 3, "warmup_type": "linear"},
        [0.0, 0.0, 0.00166666667, 0.00333333333, 0.005, 0.005, 0.005, 0.005, 0.005, 0.005, 0.005, 0.005],
        [0.9],
    ),
    (
        "WarmupDecayLR",
        {
            "total_num_steps": 8,
            "warmup_min_lr": 0.0001,
            "warmup_max_lr": 0.01,
            "warmup_num_steps": 3,
            "warmup_type": "linear",
        },
        [0.0001, 0.0001, 0.0034, 0.0067, 0.01, 0.00802, 0.00604, 0.00406, 0.00208, 0.0001, 0.0001, 0.0001],
        [0.9],
    ),
    (
        "WarmupCosineLR",
        {"total_num_steps": 8, "warmup_min_ratio": 0.1, "warmup_num_steps": 3, "cos_min_ratio": 0.05},
        [
            0.0,
            0.0005,
            0.00333918389,
            0.005,
            0.00454641536,
            0.00335891536,
            0.00189108464,
            0.000703584638,
            0.00025,
            0.00025,
            0.00025,
            0.00025,
        ],
        [0.9],
    ),
    (
        "OneCycle",
        {
            "cycle_min_lr": 0.001,
            "cycle_max_lr": 0.01,
            "cycle_first_step_size": 3,
            "cycle_second_step_size": 4,
            "decay_lr_rate": 0.5,
            "decay_step_size": 2,
        },
        [0.001, 0.004, 0.007, 0.01, 0.00775, 0.0055, 0.00325, 0.001, 0.0008, 0.000666666667, 0.000571428571, 0.0005],
        [0.8, 0.866666667, 0.833333333, 0.8, 0.825, 0.85, 0.875, 0.9, 0.9, 0.9, 0.9, 0.9],
    ),
    (
        "OneCycle",
        {
            "cycle_min_lr": 0.001,
            "cycle_max_lr": 0.01,
            "cycle_first_step_size": 4,
            "cycle_first_stair_count": 2,
            "cycle_momentum": False,
        },
        [0.001, 0.001, 0.0055, 0.0055, 0.01, 0.0055, 0.0055, 0.001, 0.001, 0.001, 0.001, 0.001],
        [0.9],
    ),
    (
        "OneCycle",
        {
            "cycle_min_lr": 0.001,
            "cycle_max_lr": 0.01,
            "cycle_first_step_size": 3,
            "cycle_second_step_size": 0,
            "decay_lr_rate": 0.5,
            "decay_step_size": 2,
        },
        [0.001, 0.004, 0.007, 0.001, 0.0008, 0.000666666667, 0.000571428571, 0.0005, 0.000444444444, 0.0004],
        [0.8, 0.866666667, 0.833333333, *[0.9] * 7],
    ),
    (
        "LRRangeTest",
        {"lr_range_test_min_lr": 0.001, "lr_range_test_step_size": 3, "lr_range_test_step_rate": 2.0},
        [
            0.001,
            0.00166666667,
            0.00233333333,
            0.003,
            0.00366666667,
            0.00433333333,
            0.005,
            0.00566666667,
            0.00633333333,
            0.007,
            0.00766666667,
            0.00833333333,
        ],
        [0.9],
    ),
    (
        "LRRangeTest",
        {"lr_range_test_min_lr": 0.001, "lr_range_test_step_size": 3, "lr_range_test_staircase": True},
        [0.001, 0.001, 0.001, 0.002, 0.002, 0.002, 0.003, 0.003, 0.003, 0.004, 0.004, 0.004],
        [0.9],
    ),
]


@pytest.mark.parametrize(("name", "arguments", "rates", "betas"), EXPECTED)
def test_numbers_are_deepspeeds(name, arguments, rates, betas):
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=5e-3)
    schedule = SCHEDULES[name](optimizer, **arguments)
    found, moments = [], []
    for _ in rates:
        found.append(optimizer.param_groups[0]["lr"])
        moments.append(optimizer.param_groups[0]["betas"][0])
        schedule.step()
    assert found == pytest.approx(rates, rel=1e-8, abs=1e-15)
    assert moments == pytest.approx(betas if len(betas) > 1 else betas * len(rates), rel=1e-8)


@pytest.mark.parametrize("name", VALID_LR_SCHEDULES)
def test_a_schedule_goes_on_where_it_stood(name):
    arguments = next(case[1] for case in EXPECTED if case[0] == name)

    def make():
        optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=5e-3)
        return SCHEDULES[name](optimizer, **arguments)

    first, second = make(), make()
    for _ in range(4):
        first.step()
    second.load_state_dict(first.state_dict())
    first.step()
    second.step()
    assert second.get_last_lr() == first.get_last_lr()


def test_a_number_for_every_group():
    parameters = [{"params": [torch.nn.Parameter(torch.zeros(1))]} for _ in range(2)]
    optimizer = torch.optim.AdamW(parameters, lr=5e-3)
    schedule = SCHEDULES["WarmupLR"](optimizer, warmup_max_lr=[1e-2, 1e-3], warmup_num_steps=2)
    for _ in range(4):
        schedule.step()
    assert schedule.get_last_lr() == [1e-2, 1e-3]
    with pytest.raises(ValueError, match="2 parameter groups"):
        SCHEDULES["WarmupLR"](optimizer, warmup_max_lr=[1e-2])


def groups_of(*rates, optimizer=torch.optim.AdamW):
    return optimizer([{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates])


@pytest.mark.parametrize("name", VALID_LR_SCHEDULES)
@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_rate_that_is_a_tensor_stays_that_tensor(name, shape):
    arguments = next(case[1] for case in EXPECTED if case[0] == name)
    rate = torch.full(shape, 5e-3, dtype=torch.float64)
    optimizer, plain = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=rate), groups_of(5e-3)
    schedules = [SCHEDULES[name](of, **arguments) for of in (optimizer, plain)]
    for _ in range(3):
        assert optimizer.param_groups[0]["lr"] is rate and rate.shape == shape
        assert rate.item() == plain.param_groups[0]["lr"]  # float64 holds Python's number
        for schedule in schedules:
            schedule.step()


def test_ratios_of_the_warm_up_then_the_cosine():
    optimizer = groups_of(0.0015, 0.003)
    schedule = SCHEDULES["WarmupCosineLR"](optimizer, total_num_steps=20, warmup_num_steps=10)
    assert (schedule.warmup_num_steps, schedule.warmup_type) == (10, "log")
    assert schedule.get_lr_ratio() == 0.0 and schedule.get_last_lr() == [0.0, 0.0]
    schedule.step(1)
    ratio = math.log(2) / math.log(10)
    assert schedule.get_lr_ratio() == pytest.approx(ratio, rel=1e-12)
    assert schedule.get_last_lr() == pytest.approx([0.0015 * ratio, 0.003 * ratio], rel=1e-12)
    linear = SCHEDULES["WarmupCosineLR"](
        groups_of(0.1), total_num_steps=10, warmup_num_steps=10, warmup_type="linear", cos_min_ratio=0.1
    )
    for step in range(10):
        linear.step(step)
        assert linear.get_lr_ratio() == step / 10
    for step in range(10, 14):  # nothing is left of the cosine
        linear.step(step)
        assert linear.get_lr_ratio() == 0.1
    assert linear.warmup_type == "linear"


def test_bounds_for_every_group():
    optimizer = groups_of(1.0, 1.0)
    cycle = SCHEDULES["OneCycle"](
        optimizer,
        cycle_min_lr=[0.1, 0.0],
        cycle_max_lr=(0.3, 0.0),
        cycle_first_step_size=2,
        cycle_min_mom=[0.5, 0.6],
        cycle_max_mom=[0.7, 0.9],
    )
    assert cycle.min_lrs == [0.1, 0.0] and cycle.max_lrs == [0.3, 0.0]
    found = [(cycle.get_last_lr(), [group["betas"] for group in optimizer.param_groups])]
    assert cycle.get_mom() == [(0.7, 0.99), (0.9, 0.99)]  # as under DeepSpeed before a step
    for _ in range(2):
        cycle.step()
        found.append((cycle.get_last_lr(), [group["betas"] for group in optimizer.param_groups]))
    assert found[0] == ([0.1, 0.0], [(0.5, 0.99), (0.6, 0.99)])
    assert found[1] == ([0.1 + (0.3 - 0.1) / 2, 0.0], [(0.7 - (0.7 - 0.5) / 2, 0.99), (0.9 - (0.9 - 0.6) / 2, 0.99)])
    assert found[2][0] == pytest.approx([0.3, 0.0], rel=1e-12)
    test = SCHEDULES["LRRangeTest"](optimizer, lr_range_test_min_lr=[0.1, 0.2], lr_range_test_step_size=1)
    test.step()
    assert test.get_last_lr() == pytest.approx([0.2, 0.4], rel=1e-12)
    frozen = SCHEDULES["WarmupDecayLR"](optimizer, 10, warmup_max_lr=[0.0, 0.1], warmup_num_steps=2)
    frozen.step(2)
    assert frozen.get_last_lr() == [0.0, 0.1]
    with pytest.raises(ValueError, match="cycle_max_lr.*2 parameter groups"):
        SCHEDULES["OneCycle"](optimizer, [0.5, 0.5], [0.6])
    assert frozen.get_last_lr() == [0.0, 0.1]  # the refused schedule wrote nothing


@pytest.mark.parametrize("name", ["WarmupLR", "WarmupDecayLR", "WarmupCosineLR"])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"warmup_num_steps": None}, "warmup_num_steps=None: must be a whole number"),
        ({"warmup_num_steps": -5}, "warmup_num_steps=-5"),
        ({"warmup_num_steps": 2.5}, "warmup_num_steps=2.5"),
        ({"warmup_type": "exponential"}, "warmup_type='exponential': must be log or linear"),
    ],
)
def test_warm_ups_that_mean_nothing(name, arguments, message):
    optimizer = groups_of(1e-3)
    total = {} if name == "WarmupLR" else {"total_num_steps": 100}
    with pytest.raises(ValueError, match=message):
        SCHEDULES[name](optimizer, **total, **arguments)
    assert optimizer.param_groups[0]["lr"] == 1e-3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"cycle_min_lr": 0.2, "cycle_max_lr": 0.1}, "cycle_min_lr=0.2: must lie from 0 to cycle_max_lr=0.1"),
        ({"cycle_min_lr": -0.2, "cycle_max_lr": 0.1}, "cycle_min_lr=-0.2: must be 0 or more"),
        ({"cycle_min_lr": 0.0, "cycle_max_lr": math.nan}, "cycle_max_lr=nan"),
        ({"cycle_min_lr": 0.1, "cycle_max_lr": 0.2, "decay_lr_rate": -1.0}, "decay_lr_rate=-1.0: must be 0 or more"),
    ],
)
def test_bounds_that_mean_nothing(arguments, message):
    with pytest.raises(ValueError, match=message):
        SCHEDULES["OneCycle"](groups_of(1e-3), **arguments)
