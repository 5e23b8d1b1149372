"""The five schedules, entry by entry as DeepSpeed 0.19.8 gives them: its own numbers, before the first step and after eleven."""

import pytest
import torch

from ztk.deepspeed.schedules import SCHEDULES, VALID_LR_SCHEDULES

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
