"""`p.grad` and `zero_grad` of an engine, compared with a plain model."""

import logging

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ztk.deepspeed as deepspeed
from tests.deepspeed import scripts
from ztk.deepspeed.tools.log import logger


def _clip(model, parameters) -> None:
    nn.utils.clip_grad_norm_(parameters, 0.05)


def _scale(model, parameters) -> None:
    for parameter in model.fc1.parameters():
        parameter.grad.mul_(0.5)


def _assign(model, parameters) -> None:
    model.fc2.weight.grad = torch.ones_like(model.fc2.weight)
    model.fc1.bias.grad = None


def _noise(model, parameters) -> None:
    with torch.no_grad():
        for number, parameter in enumerate(parameters):
            if parameter.grad is not None:
                parameter.grad.data.add_(0.01 * number)


EDITS = {"clip": _clip, "scale": _scale, "assign": _assign, "noise": _noise}


def edited(process, *, stage: int, offload: str, bf16: bool, edit: str) -> dict:
    zero = {} if offload == "none" else {"offload_optimizer": {"device": offload}}
    config = scripts.config(stage=stage, accumulation=2, zero=zero, bf16={"enabled": bf16}, gradient_clipping=0.0)
    config["optimizer"] = {"type": "SGD", "params": {"lr": 0.1}}
    engine, *_ = deepspeed.initialize(model=scripts.build(), config=config)
    dtype, seen = torch.bfloat16 if bf16 else torch.float32, []
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger.addHandler(handler)
    for step in range(3):
        x, y = scripts.data(step)
        x, y = x.chunk(2)[process.rank].to(dtype), y.chunk(2)[process.rank]
        for part in range(2):
            loss = F.cross_entropy(engine(x.chunk(2)[part]).float(), y.chunk(2)[part])
            engine.backward(loss)
            if part:
                seen.append([None if p.grad is None else p.grad.clone() for p in engine.module.parameters()])
                if stage == 0:
                    EDITS[edit](engine.module, list(engine.parameters()))
            engine.step()
    logger.removeHandler(handler)
    found = {"seen": seen, "weights": scripts.weights(engine), "messages": messages}
    engine.destroy()
    return found


def plain(edit: str) -> dict:
    model = scripts.build()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for step in range(3):
        x, y = scripts.data(step)
        sgd.zero_grad()
        F.cross_entropy(model(x), y).backward()
        seen.append([p.grad.clone() for p in model.parameters()])
        EDITS[edit](model, list(model.parameters()))
        sgd.step()
    return {"seen": seen, "weights": {name: value.detach() for name, value in model.named_parameters()}}


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize(("offload", "bf16"), [("none", False), ("cpu", False), ("none", True)])
def test_gradients_are_there_at_stage_0_and_what_a_script_makes_of_them_counts(ranks, edit, offload, bf16):
    expected = plain(edit)
    for found in ranks(2).run(edited, stage=0, offload=offload, bf16=bf16, edit=edit):
        # fp32: other orders of sums. bf16: gradients up to 1 are rounded to 2^-8, three steps of lr 0.1.
        near = {"rtol": 0, "atol": 2e-2 if bf16 else 1e-6}
        for mine, theirs in zip(found["seen"][0], expected["seen"][0], strict=True):
            torch.testing.assert_close(mine.float(), theirs, **near)
        for name, value in expected["weights"].items():
            torch.testing.assert_close(found["weights"][name], value, **near)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_above_stage_0_gradients_are_none_and_the_first_read_warns(ranks, stage):
    first, second = ranks(2).run(edited, stage=stage, offload="none", bf16=False, edit="clip")
    assert all(gradient is None for gradients in first["seen"] for gradient in gradients)
    assert sum("gradient_clipping" in message for message in first["messages"]) == 1 and not second["messages"]


def _halve(parameter: nn.Parameter) -> None:
    parameter.grad = parameter.grad * 0.5


def _clamp(parameter: nn.Parameter) -> None:
    parameter.grad.clamp_(-0.2, 0.2)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_hooks_of_a_script_run_before_the_engine_takes_a_gradient(stage):
    """Registered before `initialize` or after it, on a parameter's gradient or on the accumulated one; the order stays."""
    models, x = [], torch.ones(2, 4)
    for is_plain in (True, False):
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model.bias.register_post_accumulate_grad_hook(_halve)
        step, run = optimizer.step, model
        if not is_plain:
            config = {"train_batch_size": 2, "gradient_clipping": 0.0, "zero_optimization": {"stage": stage}}
            run, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
            step = run.step
        model.weight.register_hook(lambda gradient: gradient * 3)
        model.weight.register_post_accumulate_grad_hook(_halve)
        model.weight.register_post_accumulate_grad_hook(_clamp)
        for _ in range(2):
            loss = run(x).square().mean()
            loss.backward() if is_plain else run.backward(loss)
            step()
            optimizer.zero_grad()
        models.append(scripts.weights(run) if not is_plain else dict(model.named_parameters()))
    for name, value in models[0].items():
        torch.testing.assert_close(models[1][name], value.detach())
    run.destroy()


def test_a_gradient_that_is_set_to_none_leaves_its_parameter_alone_with_skip_unused():
    """Neither momentum nor decay move it in that step, as in torch."""
    models, x = [], torch.ones(2, 4)
    for is_plain in (True, False):
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
        run, step = model, optimizer.step
        if not is_plain:
            config = {"train_batch_size": 2, "gradient_clipping": 0.0, "skip_unused": True}
            run, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
            step = run.step
        for number in range(4):
            optimizer.zero_grad()
            loss = run(x).square().mean()
            loss.backward() if is_plain else run.backward(loss)
            if number in (1, 2):
                model.weight.grad = None
            step()
        models.append(scripts.weights(run) if not is_plain else dict(model.named_parameters()))
    for name, value in models[0].items():
        torch.testing.assert_close(models[1][name], value.detach())
    run.destroy()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_above_stage_0_a_gradient_that_is_set_is_an_error(stage):
    """The step would not use it, and autograd would add the next one to it."""
    model = nn.Linear(2, 2)
    engine, *_ = deepspeed.initialize(
        model=model, config={"train_batch_size": 1, "zero_optimization": {"stage": stage}}
    )
    engine.backward(engine(torch.ones(1, 2)).sum())
    model.weight.grad = None
    with pytest.raises(RuntimeError, match="safe_set_full_grad"):
        model.weight.grad = torch.ones(2, 2)
    engine.step()
    engine.destroy()


def dropped(process, *, stage: int, offload: str, accumulation: int) -> dict:
    """Every second batch is dropped by zero_grad, after its backward."""
    zero = {} if offload == "none" else {"offload_optimizer": {"device": offload}}
    config = scripts.config(stage=stage, accumulation=accumulation, zero=zero, gradient_clipping=0.0)
    engine, *_ = deepspeed.initialize(model=scripts.build(), config=config)
    for step in range(6):
        x, y = scripts.data(step)
        x, y = x.chunk(2)[process.rank], y.chunk(2)[process.rank]
        loss = F.cross_entropy(engine(x), y)
        engine.backward(loss)
        if step % 2 == 0:
            engine.zero_grad()
            if accumulation == 1:
                continue
        engine.step()
    weights = scripts.weights(engine)
    engine.destroy()
    return weights


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("offload", "accumulation"), [("none", 1), ("cpu", 1), ("none", 2)])
def test_zero_grad_drops_a_batch(ranks, stage, offload, accumulation):
    model = scripts.build()
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    for step in range(1, 6, 2):
        x, y = scripts.data(step)
        adamw.zero_grad()
        (F.cross_entropy(model(x), y) / accumulation).backward()
        adamw.step()
    for found in ranks(2).run(dropped, stage=stage, offload=offload, accumulation=accumulation):
        for name, value in model.named_parameters():
            # another order of sums in gradients, which Adam's first steps divide by their own size: at most lr per step where they vanish
            torch.testing.assert_close(found[name], value.detach(), rtol=0, atol=1e-4)


def adversaries(process, *, stage: int) -> list:
    """A GAN's two engines: the generator's loss runs backward through the discriminator, whose zero_grad drops that."""
    torch.manual_seed(0)
    made, drawn = nn.Linear(4, 6), nn.Linear(6, 1)
    config = scripts.config(stage=stage, gradient_clipping=0.0)
    generator, *_ = deepspeed.initialize(model=made, config=config)
    discriminator, *_ = deepspeed.initialize(model=drawn, config=config)
    for step in range(4):
        noise = torch.randn(8, 4, generator=torch.Generator().manual_seed(step)).chunk(2)[process.rank]
        discriminator.zero_grad()
        discriminator.backward(discriminator(generator(noise).detach()).square().mean())
        discriminator.step()
        generator.zero_grad()
        generator.backward((discriminator(generator(noise)) - 1).square().mean())
        generator.step()
    found = [scripts.weights(engine) for engine in (generator, discriminator)]
    generator.destroy()
    discriminator.destroy()
    return found


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_gans_engines_do_not_mix_their_gradients(ranks, stage):
    torch.manual_seed(0)
    made, drawn = nn.Linear(4, 6), nn.Linear(6, 1)
    adams = [torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0) for model in (made, drawn)]
    for step in range(4):
        noise = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        adams[1].zero_grad()
        drawn(made(noise).detach()).square().mean().backward()
        adams[1].step()
        adams[0].zero_grad()
        (drawn(made(noise)) - 1).square().mean().backward()
        adams[0].step()
    for found in ranks(2).run(adversaries, stage=stage):
        for model, weights in zip((made, drawn), found, strict=True):
            for name, value in model.named_parameters():
                torch.testing.assert_close(weights[name], value.detach(), rtol=0, atol=1e-4)  # as above


def _two_losses(model, x, y, backward, zero_grad) -> None:
    outputs = model(x)
    backward(F.cross_entropy(outputs, y), retain_graph=True)
    backward(0.1 * outputs.square().mean())


def _real_and_fake(model, x, y, backward, zero_grad) -> None:
    """As a GAN's discriminator learns: a backward each, one step."""
    F.cross_entropy(model(x), y).backward()
    F.cross_entropy(model(-x), y).backward()
    (0.1 * model.module.fc2(torch.ones(4, 32)).square().mean()).backward()  # a part of the model


def _dropped_between(model, x, y, backward, zero_grad) -> None:
    F.cross_entropy(model(-x), y).backward()
    zero_grad()
    F.cross_entropy(model(x), y).backward()
    F.cross_entropy(model(2 * x), y).backward()


def _clipped_between(model, x, y, backward, zero_grad) -> None:
    """At stage 0, where `p.grad` is there."""
    F.cross_entropy(model(x), y).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    F.cross_entropy(model(-x), y).backward()


SEVERAL = (_two_losses, _real_and_fake, _dropped_between, _clipped_between)


def several_backwards(process, *, stage: int, more: dict) -> list:
    found = []
    for backwards in SEVERAL[: 4 if stage == 0 else 3]:
        config = scripts.config(stage=stage, gradient_clipping=0.0, **more)
        config["optimizer"] = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}
        engine, *_ = deepspeed.initialize(model=scripts.build(), config=config)
        for step in range(3):
            x, y = (part.chunk(process.world_size)[process.rank] for part in scripts.data(step))
            backwards(engine, x, y, engine.backward, engine.zero_grad)
            engine.step()
        found.append((scripts.weights(engine), engine.global_steps, engine.get_global_grad_norm()))
        engine.destroy()
    return found


class _Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.module = scripts.build()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize(
    "more", [{}, {"prescale_gradients": True, "gradient_predivide_factor": 4.0}], ids=["", "prescaled"]
)
def test_a_step_may_have_several_backwards(ranks, stage, more):
    found = ranks(2).run(several_backwards, stage=stage, more=more)[0]
    for backwards, (weights, steps, norm) in zip(SEVERAL, found, strict=False):
        model = _Plain()
        sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(3):
            sgd.zero_grad()
            x, y = scripts.data(step)
            backwards(
                model, x, y, lambda loss, retain_graph=False: loss.backward(retain_graph=retain_graph), sgd.zero_grad
            )
            expected = nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
            sgd.step()
        assert steps == 3
        torch.testing.assert_close(norm, float(expected), rtol=1e-5, atol=0)
        for name, value in model.module.named_parameters():
            torch.testing.assert_close(weights[name], value.detach(), rtol=0, atol=1e-6)


def assigned(process, *, fp16: bool) -> tuple:
    config = scripts.config(stage=0, gradient_clipping=0.0, fp16={"enabled": fp16, "initial_scale_power": 4})
    config["optimizer"] = {"type": "SGD", "params": {"lr": 0.1}}
    engine, *_ = deepspeed.initialize(model=scripts.build(), config=config)
    for step in range(3):
        x, y = (part.chunk(process.world_size)[process.rank] for part in scripts.data(step))
        _assign_of_two_losses(engine, list(engine.module.parameters()), x, y)
        engine.step()
    found = scripts.weights(engine), engine.global_steps, engine.skipped_steps
    engine.module.fc1.weight.grad = torch.full_like(engine.module.fc1.weight, float("inf"))
    if fp16:
        engine.step()
        assert engine.skipped_steps == found[2] + 1
    engine.destroy()
    return found


def _assign_of_two_losses(model, parameters: list, x, y) -> None:
    outputs = model(x).float()
    losses = F.cross_entropy(outputs, y), 0.1 * outputs.square().mean()
    of_each = [torch.autograd.grad(loss, parameters, retain_graph=True) for loss in losses]
    for parameter, first, second in zip(parameters, *of_each, strict=True):
        parameter.grad = first - 0.5 * second


@pytest.mark.parametrize("fp16", [False, True])
def test_gradients_that_a_script_computes_itself_are_averaged_at_stage_0(ranks, fp16):
    model = scripts.build()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        _assign_of_two_losses(model, list(model.parameters()), *scripts.data(step))
        sgd.step()
    for weights, steps, skipped in ranks(2).run(assigned, fp16=fp16):
        assert (steps, skipped) == (3, 0)
        for name, value in model.named_parameters():
            # fp16: gradients below 1 are rounded to 2^-11, three steps of lr 0.1, through a forward that is rounded as well.
            torch.testing.assert_close(weights[name], value.detach(), rtol=0, atol=2e-3 if fp16 else 1e-6)
