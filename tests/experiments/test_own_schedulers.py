"""Own torch schedulers set torch's rates and momentum, for ztk's optimizers and for own ones, also over a resume."""

import copy
import functools
import inspect
import json
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from ztk.config import Machine, compose, save
from ztk.experiments import policies
from ztk.experiments.pretrain import run as pretrain
from ztk.experiments.user_objects import own_optimizer
from ztk.kernels import Hyper
from ztk.optim import group_parameters
from ztk.train.engine.control import StepControl

STEPS, LR = 12, 0.1
WORDS = (
    *("model=nano", "data=synthetic", "data.seq_len=8", "train.micro_batch_size=1", f"train.steps={STEPS}"),
    *("logger=disabled", "precision=fp32", "launch.ranks=1", "launch.device=cpu", "train.quick=true", "scheduler=own"),
)
TORCHS = "torch.optim.lr_scheduler."


def down(step: int) -> float:
    return 0.9**step


def shrink(step: int) -> float:
    return 0.95


def _function(name: str) -> dict[str, Any]:
    return {"_target_": f"{__name__}.{name}", "_partial_": True}


# class -> its arguments; the arguments of inner schedulers by their class.
CASES: dict[str, dict[str, Any]] = {
    "LambdaLR": {"lr_lambda": _function("down")},
    "MultiplicativeLR": {"lr_lambda": _function("shrink")},
    "StepLR": {"step_size": 3},
    "MultiStepLR": {"milestones": [2, 7], "gamma": 0.5},
    "ConstantLR": {"factor": 0.25, "total_iters": 4},
    "LinearLR": {"start_factor": 0.2, "total_iters": 6},
    "ExponentialLR": {"gamma": 0.8},
    "PolynomialLR": {"total_iters": 8, "power": 2.0},
    "CosineAnnealingLR": {"T_max": STEPS - 1, "eta_min": 0.05},
    "CosineAnnealingWarmRestarts": {"T_0": 4, "eta_min": 0.02},
    "CyclicLR": {"base_lr": 0.01, "max_lr": 0.1, "step_size_up": 3, "base_momentum": 0.7, "max_momentum": 0.95},
    "OneCycleLR": {"max_lr": 0.1, "total_steps": STEPS},
    "SequentialLR": {
        "schedulers": [
            {"_target_": f"{TORCHS}LinearLR", "start_factor": 0.1, "total_iters": 3},
            {"_target_": f"{TORCHS}CosineAnnealingLR", "T_max": 9, "eta_min": 0.01},
        ],
        "milestones": [3],
    },
    "ChainedScheduler": {
        "schedulers": [
            {"_target_": f"{TORCHS}ConstantLR", "factor": 0.5, "total_iters": 4},
            {"_target_": f"{TORCHS}ExponentialLR", "gamma": 0.9},
        ]
    },
}
REFUSED = {"ReduceLROnPlateau"}  # `test_faults_are_said_before_ranks_start`
OPTIMIZERS = {
    "adamw": ("optimizer=adamw",),
    "sgd": ("optimizer=sgd", "optimizer.momentum=0.9"),
    "lion": ("optimizer=lion",),
}


def test_every_scheduler_of_torchs_is_here():
    public = vars(lr_scheduler).values()
    found = {one.__name__ for one in public if inspect.isclass(one) and issubclass(one, lr_scheduler.LRScheduler)}
    assert {name for name in found if not name.startswith("_")} - {"LRScheduler", "SWALR"} == CASES.keys() | REFUSED


def torchs(name: str, *, make: Any, groups: int = 1) -> list[list[dict[str, Any]]]:
    """The groups of torch's optimizer in every step of torch's loop."""
    parameters = [nn.Parameter(torch.zeros(1)) for _ in range(groups)]
    optimizer = make([{"params": [p], "lr": LR / (1 + n)} for n, p in enumerate(parameters)])
    options = dict(CASES[name])
    if "lr_lambda" in options:
        options["lr_lambda"] = globals()[options["lr_lambda"]["_target_"].rpartition(".")[2]]
    if "schedulers" in options:
        options["schedulers"] = [
            getattr(lr_scheduler, node["_target_"].rpartition(".")[2])(
                optimizer, **{key: value for key, value in node.items() if key != "_target_"}
            )
            for node in options["schedulers"]
        ]
    scheduler, found = getattr(lr_scheduler, name)(optimizer=optimizer, **options), []
    for _ in range(STEPS):
        found.append([{key: group.get(key) for key in ("lr", "momentum", "betas")} for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    return found


@functools.cache
def _composed(*words: str):
    return compose(*WORDS, f"scheduler._target_={TORCHS}StepLR", *words, output_dir="/nowhere", machine=MACHINE)


def composed(name: str, *words: str):
    """The configuration of a run with scheduler `name`. Its arguments are not of the command line, which has no functions."""
    config = copy.deepcopy(_composed(*words))
    config.own["scheduler"] = {"_target_": f"{TORCHS}{name}", **CASES[name]}
    return config


MACHINE = Machine(gpus=0, cores=2)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", CASES)
def test_ztks_optimizers_follow_torchs_rates(name, optimizer):
    """The rates and momenta that the update kernel reads, in all steps."""
    config = composed(name, *OPTIMIZERS[optimizer], f"optimizer.lr={LR}")
    policy = policies.optimizer_policy(config)
    make = torch.optim.SGD if optimizer == "sgd" else torch.optim.AdamW
    options = {"momentum": 0.9} if optimizer == "sgd" else {"betas": policy.betas}
    expected = torchs(name, make=partial(make, **options))
    groups = group_parameters(policy, shapes={"weight": (4, 4), "bias": (4,)})
    control = StepControl(
        optimizer=policy,
        groups=groups,
        loss_scale=policies.precision_policy(config).loss_scale,
        lr_table=policies.learning_rates(config),
        gradient_divisor=1,
        device=torch.device("cpu"),
    )
    column = Hyper.momentum if optimizer == "sgd" else Hyper.beta1
    for (group,) in expected:
        control.decide(torch.ones(1, dtype=torch.float64))
        momentum = group["momentum"] if optimizer == "sgd" else group["betas"][0]
        assert control.read().lr == pytest.approx(group["lr"], rel=1e-6, abs=1e-9)
        assert control.hyper[:, column].tolist() == pytest.approx([momentum] * len(groups.rows), rel=1e-6)


def test_the_peaks_and_ends_are_the_users():
    """The rates that were multiplied by optimizer.lr again."""
    for name, place, rate in (("CosineAnnealingLR", -1, 0.05), ("OneCycleLR", 3, 0.1), ("CyclicLR", 3, 0.1)):
        config = composed(name, "optimizer=adamw", f"optimizer.lr={LR}")
        table = policies.learning_rates(config).view(STEPS, -1)[:, 0]
        assert float(table[place]) * LR == pytest.approx(rate, rel=0.01) and float(table.max()) <= 1.0


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("cls", ["SGD", "AdamW"])
def test_own_optimizers_follow_torchs_groups(name, cls):
    """Every group has the values of torch's loop, bit for bit, also if a step is read again, as after a resume."""
    config = composed(name, "optimizer=own", f"optimizer._target_=torch.optim.{cls}")
    config.own["optimizer"] |= {"lr": LR} | ({"momentum": 0.9} if cls == "SGD" else {})
    model = nn.Linear(2, 2)
    made = own_optimizer(config, model=model)
    assert policies.learning_rates(config) is None
    options = {"momentum": 0.9} if cls == "SGD" else {}
    expected = torchs(name, make=partial(getattr(torch.optim, cls), **options))
    for update in (*range(1, STEPS + 1), 5, STEPS):
        (values,) = made["group_schedule"].values(update)
        (group,) = expected[update - 1]
        assert {key: values.get(key) for key in group} == group


def refuse_cases():
    return {
        "a second rate": (
            partial(composed, "CosineAnnealingLR", "optimizer=muon", f"optimizer.lr={LR}", "optimizer.adam_lr=0.01"),
            "optimizer.adam_lr=0.01 is another one",
        ),
        "no rate": (
            partial(composed, "StepLR", "optimizer=sgd", "optimizer.lr=0"),
            "optimizer.lr here: set one above 0",
        ),
        "no momentum": (
            partial(composed, "OneCycleLR", "optimizer=sgd", "optimizer.momentum=0", f"optimizer.lr={LR}"),
            "optimizer.momentum=0 keeps none",
        ),
    }


@pytest.mark.parametrize("case", refuse_cases())
def test_rates_that_cannot_be_torchs_are_refused(case):
    make, words = refuse_cases()[case]
    with pytest.raises(ValueError, match=words):
        policies.learning_rates(make())


def play(process, *, config) -> None:
    pretrain(config, process=process)


def test_a_resumed_run_goes_on_with_the_schedule(ranks, tmp_path):
    """The rates in the rows of a run in two parts, with an own optimizer, equal torch's loop."""
    rows = []
    for part, words in (("first", ("train.steps=5",)), ("second", (f"checkpoint.resume={tmp_path / 'first'}",))):
        folder = tmp_path / part
        folder.mkdir()
        own = ("optimizer=own", "optimizer._target_=torch.optim.AdamW", "checkpoint.every=5")
        base = tuple(word for word in WORDS if part == "second" or not word.startswith("train.steps"))
        config = compose(
            *base, *own, f"scheduler._target_={TORCHS}OneCycleLR", *words, output_dir=str(folder), machine=MACHINE
        )
        config.own["scheduler"] |= CASES["OneCycleLR"]
        config.own["optimizer"]["lr"] = LR
        save(config, path=folder / "config.yaml")
        ranks(1).run(play, config=config)
        rows += [json.loads(line)["lr"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    expected = [group["lr"] for (group,) in torchs("OneCycleLR", make=torch.optim.AdamW)]
    assert rows == pytest.approx(expected, rel=1e-6)
