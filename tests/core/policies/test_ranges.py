"""Ranges of numbers, and that the policies need no torch."""

import math
import subprocess
import sys

import pytest

from ztk.core.policies.ranges import BELOW_ONE, COUNT, POSITIVE, Range, rounded_to_float32
from ztk.core.policies.zero import ZeroPolicy
from ztk.core.precision import LossScalePolicy
from ztk.core.runtime import Tier
from ztk.optim import OptimizerPolicy, ParameterGroup, SchedulePolicy
from ztk.parallel.recompute import RecomputePolicy

# Below 1 by less than half of float32's spacing there, 2^-24: it rounds to 1.
ALMOST_ONE = 1 - 2.0**-26


def test_the_policies_need_no_torch():
    code = (
        "import sys, pkgutil, importlib, ztk.core.policies as p; "
        "[importlib.import_module('ztk.core.policies.' + m.name) for m in pkgutil.iter_modules(p.__path__)]; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("allowed", "value", "reason"),
    [
        (COUNT, 1, ""),
        (COUNT, 2**31 - 1, ""),
        (COUNT, 0, "must be 1 or more and at most 2147483647"),
        (COUNT, 2**31, "must be 1 or more and at most 2147483647"),
        (POSITIVE, 1e-8, ""),
        (POSITIVE, math.inf, "must be above 0 and finite"),
        (POSITIVE, math.nan, "must be above 0 and finite"),
        (POSITIVE, 1e308, "must be above 0 and finite, also in float32, where it becomes inf"),
        (POSITIVE, 1e-300, "must be above 0 and finite, also in float32, where it becomes 0"),
        (BELOW_ONE, 0.999, ""),
        (BELOW_ONE, ALMOST_ONE, "must be 0 or more and below 1, also in float32, where it becomes 1"),
        (Range(low=0, high=1), ALMOST_ONE, ""),
    ],
)
def test_a_range_says_why_it_refuses(allowed, value, reason):
    assert allowed.fault(value) == reason


def test_rounding_is_that_of_float32():
    assert rounded_to_float32(ALMOST_ONE) == 1.0
    assert rounded_to_float32(1 - 2.0**-24) == 1 - 2.0**-24
    assert rounded_to_float32(-1e308) == -math.inf


@pytest.mark.parametrize(
    ("policy", "options", "key"),
    [
        (OptimizerPolicy, {"lr": 1e308}, "optimizer.lr=1e+308"),
        (OptimizerPolicy, {"eps": 1e308}, "optimizer.eps=1e+308"),
        (OptimizerPolicy, {"eps": math.inf}, "optimizer.eps=inf"),
        (OptimizerPolicy, {"weight_decay": 1e308}, "optimizer.weight_decay=1e+308"),
        (OptimizerPolicy, {"clip_grad_norm": 1e308}, "optimizer.clip_grad_norm=1e+308"),
        (OptimizerPolicy, {"clip_grad_norm": 1e-300}, "optimizer.clip_grad_norm=1e-300"),
        (OptimizerPolicy, {"betas": (0.9, ALMOST_ONE)}, "optimizer.betas="),
        (
            OptimizerPolicy,
            {"name": "sgd", "momentum": 0.9, "groups": (ParameterGroup(pattern="a", momentum=ALMOST_ONE),)},
            "optimizer.groups['a'].momentum=",
        ),
        (ZeroPolicy, {"bucket_size": 10**308}, "zero.bucket_size=1000000000"),
        (LossScalePolicy, {"initial": 1e300}, "precision.loss_scale.initial=1e+300"),
        (SchedulePolicy, {"warmup_steps": 10**308}, "scheduler.warmup_steps=1000000000"),
        (RecomputePolicy, {"mode": "full", "every": 10**308}, "recompute.every=1000000000"),
    ],
)
def test_numbers_that_no_kernel_can_hold_are_refused(policy, options, key):
    with pytest.raises(ValueError) as caught:
        policy(**options)
    assert (str(caught.value).startswith(key) and ": must be " in str(caught.value)) or "number 2 must be" in str(
        caught.value
    )


def test_a_tier_has_one_name_for_each_reader():
    assert [tier.value for tier in Tier] == ["none", "cpu", "nvme"]
    assert [tier.label for tier in Tier] == ["device", "host", "nvme"]
    assert Tier.device is Tier.none and Tier.host is Tier.cpu
