"""Keys that change how a step comes about, against plain PyTorch that does the same arithmetic."""

import pytest
import torch
from torch.nn import functional as F

import ztk.deepspeed as deepspeed
from tests.deepspeed import scripts
from tests.deepspeed.test_train import close
from ztk.core.runtime import Process
from ztk.deepspeed.config import DeepSpeedConfigError, parse_config
from ztk.deepspeed.config.top import Averaging

STAGES = (0, 1, 2, 3)
SGD = {"type": "SGD", "params": {"lr": 0.1}}


def summed(*, clip: float) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The gradients of both halves of a batch added up, each half's loss a mean of its own."""
    model = scripts.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(scripts.STEPS):
        x, y = scripts.data(step)
        parts = [F.cross_entropy(model(a), b) for a, b in zip(x.chunk(2), y.chunk(2), strict=True)]
        optimizer.zero_grad()
        sum(parts).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(float(sum(parts).detach()) / 2)
    return losses, {name: value.detach() for name, value in model.state_dict().items()}


@pytest.mark.parametrize(("stage", "accumulation", "clip"), [(0, 1, 0.0), (1, 2, 0.0), (2, 2, 0.5), (3, 1, 0.5)])
def test_a_sum_over_ranks(ranks, stage, accumulation, clip):
    more = {"gradient_allreduce_op": "sum", "gradient_clipping": clip, "optimizer": SGD}
    found = ranks(2).run(scripts.train, ds_config=scripts.config(stage=stage, accumulation=accumulation, **more))[0]
    close(found, summed(clip=clip))


@pytest.mark.parametrize(
    ("stage", "accumulation", "keys"),
    [
        (0, 2, {"prescale_gradients": True}),
        (2, 2, {"prescale_gradients": True}),
        (1, 1, {"gradient_predivide_factor": 2.0}),
        (3, 1, {"gradient_predivide_factor": 8.0, "gradient_clipping": 0.5}),
    ],
)
def test_dividing_before_the_sum_is_the_same_mean(ranks, stage, accumulation, keys):
    """Scales are powers of two, so results are bitwise equal."""
    runs = [
        ranks(2).run(scripts.train, ds_config=scripts.config(stage=stage, accumulation=accumulation, **more), steps=3)[
            0
        ]
        for more in ({"gradient_clipping": keys.get("gradient_clipping", 1.0)}, keys)
    ]
    assert runs[0]["losses"] == runs[1]["losses"] and runs[0]["norm"] == runs[1]["norm"]
    for name, value in runs[0]["weights"].items():
        assert torch.equal(value, runs[1]["weights"][name]), name


def overflowing(process: Process, *, keys: dict) -> tuple[bool, float]:
    """Gradients of 40000 on each rank, in fp16: their sum is infinite, their mean is not."""
    model = torch.nn.Linear(1, 1, bias=False)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "fp16": {"enabled": True, "loss_scale": 1},
        "communication_data_type": "fp16",
        "gradient_clipping": 0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
        **keys,
    }
    engine, *_ = deepspeed.initialize(model=model, config=config)
    try:
        engine.backward(engine(torch.full((1, 1), 200.0)).sum() * 200)
        engine.step()
        return True, engine.get_global_grad_norm()
    except FloatingPointError:
        return False, float("nan")
    finally:
        engine.destroy()


def test_dividing_before_the_sum_keeps_it_finite(ranks):
    """The purpose of the two keys."""
    assert not ranks(2).run(overflowing, keys={})[0][0]
    for keys in ({"prescale_gradients": True}, {"gradient_predivide_factor": 2}):
        assert ranks(2).run(overflowing, keys=keys)[0] == (True, 40000.0)


def unmanaged(process: Process, *, stage: int) -> dict:
    """The script ends a step: after one micro-batch, after three, and after two under `loss.backward()`."""
    config = scripts.config(stage=stage, managed_gradient_accumulation=False, optimizer=SGD, gradient_clipping=0)
    engine, *_ = deepspeed.initialize(model=scripts.build(), config=config)
    seen = []
    for number, step in enumerate(PLAN):
        for part in step:
            x, y = (value.chunk(2)[process.rank] for value in scripts.data(part))
            loss = F.cross_entropy(engine(x), y)
            seen.append(engine.is_gradient_accumulation_boundary())
            if number == 2:
                loss.backward()
            else:
                engine.backward(loss)
        engine.step()
    errors = []
    for call in (
        lambda: engine.set_gradient_accumulation_boundary(True),
        lambda: engine.coalesce_grad_reduction().__enter__(),
    ):
        try:
            call()
        except RuntimeError as error:
            errors.append(str(error))
    found = {
        "weights": scripts.weights(engine),
        "counts": (engine.global_steps, engine.micro_steps, engine.global_samples),
        "seen": any(seen),
        "errors": errors,
    }
    engine.destroy()
    return found


PLAN = ((0,), (1, 2, 3), (4, 5))


@pytest.mark.parametrize("stage", STAGES)
def test_a_script_owns_the_boundary(ranks, stage):
    found = ranks(2).run(unmanaged, stage=stage)[0]
    model = scripts.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in PLAN:
        optimizer.zero_grad()
        for part in step:
            x, y = scripts.data(part)
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
    expected = {name: value.detach() for name, value in model.state_dict().items()}
    for name, value in found["weights"].items():
        torch.testing.assert_close(value, expected[name], atol=1e-6, rtol=1e-5)  # another order of the ranks' sums
    assert found["counts"][:2] == (3, 3) and not found["seen"]
    assert len(found["errors"]) == 2 and all("ends a step there" in text for text in found["errors"])


def uncorrected(parameters) -> torch.optim.Optimizer:
    """Adam without bias correction, by hand."""

    class Plain(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self):
            for p in self.param_groups[0]["params"]:
                state = self.state[p]
                m, v = (state.setdefault(key, torch.zeros_like(p)) for key in ("m", "v"))
                m.lerp_(p.grad, 0.1)
                v.mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
                p.mul_(1 - 1e-2 * 0.1).sub_(1e-2 * m / (v.sqrt() + 1e-8))

    return Plain(parameters, {})


@pytest.mark.parametrize("stage", [0, 3])
def test_adam_without_bias_correction(ranks, stage):
    section = {"type": "Adam", "params": {"lr": 1e-2, "weight_decay": 0.1, "bias_correction": False}}
    found = ranks(2).run(scripts.train, ds_config=scripts.config(stage=stage, optimizer=section))[0]
    close(found, scripts.plain(optimizer=uncorrected))


def fused(parameters) -> torch.optim.Optimizer:
    return deepspeed.ops.adam.FusedAdam(parameters, lr=1e-2, weight_decay=0.1, bias_correction=False)


def test_the_class_without_bias_correction(ranks):
    config = scripts.config(stage=2, optimizer=None)
    close(ranks(2).run(scripts.train, ds_config=config, optimizer=fused)[0], scripts.plain(optimizer=uncorrected))
    with pytest.raises(RuntimeError, match="pass it to initialize"):
        fused([torch.nn.Parameter(torch.zeros(1))]).step()


def autocast_plain(dtype: torch.dtype, *, scale: float = 1.0) -> tuple[list[float], dict[str, torch.Tensor]]:
    """DDP's arithmetic: each half under autocast, gradients averaged in fp32. scale: on the loss, taken off the gradients."""
    model = scripts.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    losses = []
    for step in range(scripts.STEPS):
        x, y = scripts.data(step)
        optimizer.zero_grad()
        total = 0.0
        for a, b in zip(x.chunk(2), y.chunk(2), strict=True):
            with torch.autocast("cpu", dtype=dtype):
                out = model(a)
            loss = F.cross_entropy(out.float(), b) / 2
            (loss * scale).backward()
            total += float(loss.detach())
        for parameter in model.parameters():
            parameter.grad /= scale
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(total)
    return losses, {name: value.detach() for name, value in model.state_dict().items()}


def autocast_outside(process: Process, *, stage: int) -> dict:
    """Around the engine's forward, as scripts write it for any model."""
    engine, *_ = deepspeed.initialize(model=scripts.build(), config=scripts.config(stage=stage))
    losses = []
    for step in range(scripts.STEPS):
        x, y = (value.chunk(2)[process.rank] for value in scripts.data(step))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = engine(x)
        loss = F.cross_entropy(out.float(), y)
        engine.backward(loss)
        engine.step()
        losses.append(scripts.mean(process, float(loss.detach())))
    found = {"losses": losses, "weights": scripts.weights(engine), "dtype": out.dtype}
    engine.destroy()
    return found


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("by_key", [True, False])
def test_autocast(ranks, stage, by_key):
    """The same bf16 products as in plain PyTorch; losses of a model that differs in the last bits of fp32 weights may round another way, so
    they are compared within a bf16 rounding, 2^-8, of values near 2."""
    if by_key:
        config = scripts.config(stage=stage, torch_autocast={"enabled": True, "dtype": "bfloat16"})
        found = ranks(2).run(scripts.train, ds_config=config)[0]
    else:
        found = ranks(2).run(autocast_outside, stage=stage)[0]
        assert found["dtype"] is torch.bfloat16
    losses, weights = autocast_plain(torch.bfloat16)
    assert found["losses"][:2] == pytest.approx(losses[:2], abs=1e-5)
    assert found["losses"] == pytest.approx(losses, abs=2**-7)
    assert found["losses"] != pytest.approx(scripts.plain()[0], abs=1e-5)  # bf16 has been at work
    for name, value in found["weights"].items():
        assert value.dtype is torch.float32 and (value - weights[name]).abs().max() < 0.02, name  # two of Adam's steps


FLOAT16 = {"enabled": True, "dtype": "float16"}


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_autocast_in_float16_scales_the_loss(ranks, stage):
    """fp16 rounds to 2^-11: losses near 2 within that, weights within two of Adam's steps. A large scale is halved, step by step."""
    losses, weights = autocast_plain(torch.float16, scale=2.0**12)
    config = scripts.config(stage=stage, torch_autocast=FLOAT16, fp16={"loss_scale": 2**12})
    found = ranks(2).run(scripts.train, ds_config=config)[0]
    assert found["losses"][:2] == pytest.approx(losses[:2], abs=1e-5)
    assert found["losses"] == pytest.approx(losses, abs=2**-9)
    assert found["losses"] != pytest.approx(scripts.plain()[0], abs=1e-5)  # fp16 has been at work
    for name, value in found["weights"].items():
        assert value.dtype is torch.float32 and (value - weights[name]).abs().max() < 0.02, name
    dynamic = scripts.config(stage=stage, torch_autocast=FLOAT16, fp16={"initial_scale_power": 26, "hysteresis": 1})
    scales = ranks(2).run(scales_of, config=dynamic)[0]
    assert scales[0] == 2.0**25 and scales == sorted(scales, reverse=True) and scales[-1] == scales[-2], scales


def scales_of(process: Process, *, config: dict) -> list[float]:
    """After every step. The script scales the loss itself."""
    engine, *_ = deepspeed.initialize(model=scripts.build(), config=config)
    assert engine.dynamic_loss_scale() and next(engine.parameters()).dtype is torch.float32
    scales = []
    for step in range(12):
        x, y = (value.chunk(2)[process.rank] for value in scripts.data(step % scripts.STEPS))
        engine.scale(F.cross_entropy(engine(x).float(), y)).backward()
        engine.step()
        scales.append(engine.optimizer.cur_scale)
    engine.destroy()
    return scales


@pytest.mark.parametrize(
    ("config", "part"),
    [
        ({"torch_autocast": FLOAT16, "bf16": {"enabled": True}}, "switch one off"),
        ({"torch_autocast": FLOAT16 | {"dtype": "float32"}}, "must be bfloat16 or float16"),
        ({"gradient_allreduce_op": "max"}, "must be one of mean, sum"),
        ({"gradient_predivide_factor": 0}, "must be above 0"),
        ({"managed_gradient_accumulation": "no"}, "must be true or false"),
        ({"optimizer": {"type": "Lion", "params": {"bias_correction": False}}}, "no such key"),
    ],
)
def test_what_stays_refused(config, part):
    with pytest.raises(DeepSpeedConfigError) as caught:
        parse_config({"train_batch_size": 8, **config}, world_size=2)
    assert any(part in fault for fault in caught.value.faults), caught.value.faults


def test_how_often_a_gradient_is_divided():
    made = parse_config(
        {"train_batch_size": 8, "gradient_allreduce_op": "sum", "prescale_gradients": True}, world_size=2
    )
    assert made.averaging == Averaging(mean=False) and any(
        "with gradient_allreduce_op=sum" in note for note in made.notes
    )
    for how in (Averaging(), Averaging(prescales=True), Averaging(predivide=3.0)):
        assert how.divisor(4) == pytest.approx(4 * how.factor(4))
    assert Averaging(mean=False).divisor(4) == Averaging(mean=False).factor(4) == 1
