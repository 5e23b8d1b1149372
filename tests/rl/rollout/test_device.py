"""Rollouts by kernels, as on a GPU: weights that are the trainer's own, memory that a rollout frees, one device for every operation."""

import gc
import math
import weakref
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch

from tests.device_tagged import DEVICE, gpu_tensors, move, products_of_torch
from tests.inference.test_blocks import Replayed
from tests.rl.rollout.runs import Batches, OneRank, config_of, play, rows_of
from ztk.core.runtime import Process
from ztk.experiments import grpo, policies
from ztk.experiments.best import Best
from ztk.experiments.models import build
from ztk.experiments.policy_run import Run
from ztk.experiments.prompts import Prompts
from ztk.experiments.rollouts import draw, drawing, score_samples
from ztk.inference import Generator, capacity, graphs
from ztk.nn import Decoder
from ztk.rl.rollout import (
    Buffer,
    CachedRollouts,
    GuardPolicy,
    Guards,
    Requests,
    RolloutPolicy,
    RolloutWeights,
    SettledWeights,
    generate,
)

OPTIONS = ("rollout.engine=generator", "rollout.identity=corrected", "kl.reference=none")
POLICY = {"length": 12, "micro_batch": 2, "max_tokens": 6, "stops": (10,), "pad": 0}


def requests_of(count: int) -> Requests:
    numbers = torch.arange(count)
    return Requests(
        prompts=[[5 + row, 6] for row in range(count)], numbers=numbers, prompt_numbers=numbers, copies=numbers * 0
    )


def held(process: Process, *, config) -> dict:
    """A rollout by kernels: tensors that stay alive, and weights that are the engine's memory."""
    engine = build(config, process=process.arrange(policies.topology(config)))
    found, close = {}, Generator.close

    def watched(self) -> None:
        own = {parameter.untyped_storage().data_ptr() for parameter in engine.module.parameters()}
        weights, layer = self._model.weights, self._model.weights.layers[0]
        parts = {"head": weights.head, "out": layer.out, "up": layer.mlp.up, "down": layer.mlp.down, "qkv": layer.qkv}
        found["own"] = {name: part.weight.untyped_storage().data_ptr() in own for name, part in parts.items()}
        found["positions"] = self._cache.positions
        found["alive"] = [weakref.ref(self._cache._store), weakref.ref(layer.qkv.weight)]
        close(self)

    Generator.close = watched
    gc.disable()  # memory of a device is freed by the rollout, not by a collection at some time
    try:
        cached = CachedRollouts(engine, kernels=True)
        generate(cached, policy=RolloutPolicy(**POLICY), requests=requests_of(4), step=0)
        found["alive"] = [one() is not None for one in found["alive"]]
        found["sharded"] = [parameter.numel() for parameter in engine.module.parameters()][:1]
    finally:
        gc.enable()
        Generator.close = close
    engine.close()
    return found


@pytest.mark.parametrize("stage", [0, 3])
def test_weights_are_the_trainers_and_a_rollout_frees_its_memory(ranks, tmp_path, stage):
    config = config_of(
        "grpo", "rollout.engine=generator", "rollout.identity=corrected", folder=tmp_path, zero__stage=stage
    )
    ((found),) = ranks(1).run(held, config=config)
    assert found["own"] == {"head": True, "out": True, "up": True, "down": True, "qkv": False}
    assert found["positions"] == 4 * 64  # a block for each of four texts of 12 tokens
    assert found["alive"] == [False, False]


def test_stages_and_tiers_change_no_number_of_a_run_over_blocks(ranks, tmp_path):
    """Also with a critic, whose states leave the device with the policy's."""
    found = []
    for name, changes in {
        "0": {},
        "3": {"zero__stage": 3},
        "host": {"zero__stage": 3, "offload__optimizer": "cpu"},
    }.items():
        folder = tmp_path / name
        config = config_of("ppo", *OPTIONS, "kl.coef=0", folder=folder, ranks=2, **changes)
        ranks(2).run(play, config=config, kernels=True)
        found.append(rows_of(folder))
    assert len(found[0]) == 4 and found[0] == found[1] == found[2]
    assert all(row["rollout_k3"] < 1e-9 for row in found[0])


class PlainEngine(Batches):
    """The part of a training engine that rollouts and updates call, over a module on a device that is not there."""

    def __init__(self, module: Decoder, *, process) -> None:
        self.module, self.process, self.comm, self.global_steps = module, process, process.comm, 0
        self.zero = self.offloader = self
        self._micro_batches, self.accumulation_steps = 0, 4

    def __call__(self, *args, **options):
        return self.module(*args, **options)

    @contextmanager
    def evaluating(self):
        with torch.no_grad():
            yield

    def gathered(self):
        return nullcontext()

    def full_parameters(self):
        yield from ((name, parameter.detach()) for name, parameter in self.module.named_parameters())

    def offload(self, kinds, **options) -> None:
        pass

    def reload(self, **options) -> None:
        pass

    def backward(self, loss) -> None:
        loss.backward()

    def step(self) -> None:
        self._micro_batches += 1
        if self._micro_batches % self.accumulation_steps:
            return
        self.global_steps += 1
        with torch.no_grad():
            for parameter in self.module.parameters():
                parameter -= 0.1 * parameter.grad
                parameter.grad = None


def run_of(config, *, device: str = "cpu", kernels: bool = True) -> Run:
    """A run whose policy has no engine of ztk's."""
    torch.manual_seed(0)
    module = Decoder(policies.decoder_config(config))
    if device != "cpu":
        move(module, device=device)
    process = SimpleNamespace(device=torch.device(device), rank=0, world_size=1, local_world_size=1)
    process.comm = process.mesh = OneRank()
    actor = PlainEngine(module, process=process)
    return Run(
        config=config,
        process=process,
        actor=actor,
        reference=None,
        critic=None,
        prompts=Prompts(config),
        best=Best(config),
        buffer=Buffer(updates=1),
        guards=Guards(GuardPolicy()),
        weights=SettledWeights(weights=RolloutWeights.whole, reason=""),
        packs=True,
        drawer=CachedRollouts(actor, kernels=kernels),
    )


def stepped(config, *, device: str) -> dict:
    """Two rollouts, each with an optimizer step of all its samples, of the run's own functions."""
    run, found = run_of(config, device=device), {"tokens": [], "logprobs": [], "losses": []}
    for _ in range(2):
        with drawing(run):
            scored = score_samples(run, samples=draw(run))
        grpo.fill(run, scored)
        updated = grpo.update_policy(run)
        run.rollouts += 1
        found["tokens"].append(scored.samples.tokens.tolist())
        found["logprobs"].append(scored.samples.logprobs.tolist())
        found["losses"].append(updated.loss.tolist())
    found["tagged"] = all(parameter.is_cuda for parameter in run.actor.module.parameters())
    return found


@pytest.mark.parametrize("cuts", [(), ("rollout.top_p=0.9", "rollout.top_k=200")])
def test_a_gpu_has_the_rollouts_and_losses_of_a_cpu(tmp_path, monkeypatch, cuts):
    """A rollout with its graphs, scores and the update on tensors that report a GPU: no operation mixes devices."""
    monkeypatch.setattr(graphs, "CudaCapture", lambda: Replayed.capture)
    monkeypatch.setattr(capacity, "free_device_memory", lambda device: 2**30)
    config = config_of(
        "grpo", *OPTIONS, *cuts, folder=tmp_path, train__global_batch_size=16, train__accumulation_steps=4
    )
    with products_of_torch():
        expected = stepped(config, device="cpu")
        with gpu_tensors():
            found = stepped(config, device=str(DEVICE))
    assert found.pop("tagged") and not expected.pop("tagged")
    assert found == expected
    assert expected["tokens"][0] != expected["tokens"][1]


def test_an_answer_of_another_policy_does_not_count(tmp_path):
    """The loss uses rollout.correction and its bound, and the row shows the mismatch."""
    options = (*OPTIONS, "rollout.correction=sequence_mask", "rollout.correction_max=3")
    run = run_of(config_of("grpo", *options, folder=tmp_path, train__global_batch_size=16))
    scored = score_samples(run, samples=draw(run))
    row, first = 2, int(scored.samples.prompt_lengths[2])
    scored.samples.logprobs[row, first] -= math.log(4)
    grpo.fill(run, scored)
    weights, mask = run.buffer.extra["correction"], scored.samples.answer_mask
    assert not weights[row][mask[row]].any()
    others = torch.arange(16) != row
    assert (weights[others] - 1).abs().max() < 1e-5
    assert run.metrics["rollout_outside"] == pytest.approx(1 / int(mask.sum()))
    assert run.metrics["rollout_k1"] == pytest.approx(-math.log(4) / int(mask.sum()), rel=1e-4)
