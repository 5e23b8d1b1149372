"""bf16 parameters that are their own master weights, with states in fp32 or bf16: `bf16_master_weights_and_grads`, `bf16_optimizer_states`."""

import pytest
import torch

from tests.deepspeed import scripts
from tests.zero.models import Layout, batches, build, make_engine, train
from ztk import kernels
from ztk.checkpoint import load, save
from ztk.core.precision import PrecisionPolicy
from ztk.core.runtime import Process
from ztk.kernels import Control
from ztk.nn.linear import WIDENED, speed_up_linear_layers
from ztk.optim import OptimizerPolicy
from ztk.optim.flat import flat_optimizer

ADAMW = OptimizerPolicy(lr=1e-2, weight_decay=0.1, decay_all=True)
STEPS = 4
LAYOUTS = [
    Layout(stage=0, offload="cpu"),
    Layout(stage=1),
    Layout(stage=2, offload="nvme"),
    Layout(stage=3),
    Layout(stage=3, offload="cpu"),
    Layout(stage=3, offload="nvme"),
]


def precision(*, states: bool) -> PrecisionPolicy:
    return PrecisionPolicy(dtype=torch.bfloat16, bf16_master=True, bf16_states=states)


def plain(*, states: bool) -> dict:
    """Each update computed in fp32 from the bf16 weights, by the same kernel over a full parameter, and rounded."""
    model = build().to(torch.bfloat16)
    if torch.bfloat16 in WIDENED:  # as an engine does
        speed_up_linear_layers(model)
    padded = {p: -(-p.numel() // 16) * 16 for p in model.parameters()}  # the kernel's padding
    kept = {p: [torch.zeros(size), torch.zeros(size)] for p, size in padded.items()}
    for step, tokens in enumerate(batches(STEPS, rank=0, world=1), start=1):
        model.zero_grad()
        model(tokens).backward()
        for p, moments in kept.items():
            control = torch.zeros(kernels.CONTROL_COLUMNS)
            control[Control.grad_coefficient], control[Control.lr], control[Control.weight_decay] = 1.0, 1e-2, 0.1
            control[Control.beta1], control[Control.beta2], control[Control.eps] = 0.9, 0.95, 1e-8
            beta1, beta2 = float(control[Control.beta1]), float(control[Control.beta2])
            control[Control.bias_correction1], control[Control.bias_correction2_sqrt] = (
                1 - beta1**step,
                (1 - beta2**step) ** 0.5,
            )
            master, gradient = torch.zeros(2, padded[p])
            master[: p.numel()], gradient[: p.numel()] = p.detach().view(-1), p.grad.view(-1)
            kernels.adamw(
                master,
                grad=gradient,
                exp_avg=moments[0],
                exp_avg_sq=moments[1],
                control=control,
                out=None,
                decoupled=True,
            )
            p.data.copy_(master[: p.numel()].view(p.shape))
            if states:
                kept[p] = [moment.bfloat16().float() for moment in moments]
    return {name: p.detach() for name, p in model.named_parameters()}


def weights(process: Process, *, layout: Layout, states: bool, steps: range, folder: str = "") -> dict:
    engine = make_engine(process, layout=layout, optimizer=ADAMW, precision=precision(states=states))
    for piece in (piece for bucket in engine.zero.buckets for piece in bucket.pieces):
        row = -(-piece.numel * (2 if states else 4) // 64) * 64  # bytes of a moment, padded
        copy = -(-piece.numel * 2 // 64) * 64 if piece.has_master else 0  # of a parameter that stays on the device
        assert tuple(piece.states.shape) == (2 * row + copy,)
    if steps.start:
        load(engine, path=folder)
    for tokens in list(batches(STEPS, rank=0, world=1))[steps.start : steps.stop]:
        engine.backward(engine(tokens))
        engine.step()
    if folder and not steps.start:
        save(engine, folder=folder)
    found = {name: value.clone() for name, value in engine.zero.full_parameters()}
    engine.close()
    return found


@pytest.mark.parametrize("states", [False, True])
def test_every_stage_and_tier_has_the_bits_of_the_plain_update(ranks, tmp_path, states):
    """Every rank has the same micro-batch; a resume on one rank and another stage, too."""
    expected = plain(states=states)
    runs = {layout.id: ranks(2).run(weights, layout=layout, states=states, steps=range(STEPS))[0] for layout in LAYOUTS}
    ranks(2).run(weights, layout=Layout(stage=3), states=states, steps=range(2), folder=str(tmp_path))
    runs["resumed"] = ranks(1).run(
        weights, layout=Layout(), states=states, steps=range(2, STEPS), folder=str(tmp_path)
    )[0]
    for run, found in runs.items():
        for name, value in expected.items():
            assert torch.equal(found[name], value), (run, name)


def test_other_optimizers_and_the_keys_of_deepspeed(ranks):
    lion = OptimizerPolicy(name="lion", lr=1e-2, decay_all=True)
    options = {"steps": 3, "optimizer": lion, "precision": precision(states=True)}
    first = ranks(2).run(train, layout=Layout(), **options)[0]
    assert ranks(2).run(train, layout=Layout(stage=3, offload="cpu"), **options)[0].digest == first.digest
    keys = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    runs = [ranks(2).run(scripts.train, ds_config=scripts.config(stage=stage, bf16=keys))[0] for stage in (0, 3)]
    assert runs[0]["losses"] == runs[1]["losses"]
    for name, value in runs[0]["weights"].items():
        assert torch.equal(value, value.bfloat16().to(value.dtype)) and torch.equal(value, runs[1]["weights"][name])


@pytest.mark.parametrize("name", ["lamb", "muon"])
def test_updates_over_more_than_an_element_are_refused(name):
    with pytest.raises(ValueError, match="works only with adamw, adam, lion or sgd"):
        flat_optimizer(OptimizerPolicy(name=name)).rounded(states=torch.float32)


def test_without_bf16_it_is_refused():
    with pytest.raises(ValueError, match="use precision=bf16"):
        PrecisionPolicy(bf16_master=True)
    with pytest.raises(ValueError, match="bf16_master=true: set it"):
        PrecisionPolicy(dtype=torch.bfloat16, bf16_states=True)
