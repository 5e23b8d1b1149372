"""rollout.engine=generator: the trainer's log-probabilities but for rounding, weights that follow the policy, texts by counters alone."""

import pytest
import torch

from tests.hf.policies import ADAPTERS, save_policy
from tests.hf.policies import config_of as config_of_hf
from tests.rl.rollout.runs import config_of, play, rows_of
from ztk.config import ConfigError, Machine, compose
from ztk.core.runtime import Process
from ztk.experiments import policies
from ztk.experiments.models import build
from ztk.nn.self_attention import CausalAttention
from ztk.rl.rollout import (
    CachedRollouts,
    EngineAttention,
    Requests,
    RolloutPolicy,
    Samples,
    generate,
    token_logprobs,
    use_engine_attention,
)

GENERATOR = ("rollout.engine=generator", "rollout.identity=corrected")
EXACT = ("rollout.engine=generator", "rollout.identity=exact")
NEAR = 2e-5  # two layers in fp32: both sum up to 64 products per value in another order, about 40 roundings of 6e-8 of logits below 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_policy(tmp_path_factory.mktemp("model"))


def drawn_twice(process: Process, *, config, kernels: bool | None = None) -> list[dict]:
    """Samples before and after optimizer steps that change every weight, with the trainer's log-probabilities of them."""
    engine = build(config, process=process.arrange(policies.topology(config)))
    cached = CachedRollouts(engine, kernels=kernels)
    numbers = torch.arange(6)
    requests = Requests(
        prompts=[[5 + row, 6, 7][: 1 + row % 3] for row in range(6)],
        numbers=numbers,
        prompt_numbers=numbers // 2,
        copies=numbers % 2,
    )
    options = {"length": 12, "micro_batch": 2, "max_tokens": 6, "stops": (10,), "pad": 0, "temperature": 0.8}
    found = []
    for step in range(3):
        samples = generate(cached, policy=RolloutPolicy(**options), requests=requests, step=0)
        with engine.evaluating():
            trainer = token_logprobs(engine(samples.tokens), tokens=samples.tokens, temperature=0.8)
        mask = samples.answer_mask
        found.append(
            {"off": float(((trainer - samples.logprobs) * mask).abs().max()), "tokens": samples.tokens.tolist()}
        )
        if step < 2:
            targets = torch.where(mask, samples.tokens, -100)
            engine.backward(engine(samples.tokens, targets) * 100)
            engine.step()
    engine.close()
    return found


@pytest.mark.parametrize(
    ("kind", "kernels"),
    [
        ("native", None),
        ("native adapters", None),
        ("transformers", None),
        ("adapters", None),
        ("native", True),
        ("adapters", True),
    ],
)
def test_log_probabilities_are_the_trainers_after_every_step(ranks, folder, tmp_path, kind, kernels):
    """Adapters are merged, also after updates. The ranks have the same texts here, because they request the same samples."""
    options = (*GENERATOR, "zero=stage3", "optimizer.lr=0.03")
    options = (*options, *(ADAPTERS if "adapters" in kind else ()))
    if "native" in kind:
        config = config_of("grpo", *options, folder=tmp_path, ranks=2)
    else:
        config = config_of_hf("grpo", *options, folder=folder, to=tmp_path)
    first, second = ranks(2).run(drawn_twice, config=config, kernels=kernels)
    assert first == second
    assert all(found["off"] < NEAR for found in first)
    assert first[0]["tokens"] != first[-1]["tokens"]


def test_a_run_corrects_for_the_difference(ranks, tmp_path):
    """The first texts do not depend on the number of ranks, nor on whether they share a copy of the weights; the ratio to the trainer's
    probabilities is in the loss.

    There is no warm start: its 30 steps on two ranks sum gradients in another order than on one, and the weights after it differ by enough
    to change a drawn token on some processors. So most answers are cut."""
    options, found = (*GENERATOR, "rollout.stop_truncated_above=null"), {}
    for count, tensor in ((1, 1), (2, 1), (2, 2)):
        path = tmp_path / f"{count}{tensor}"
        config = config_of("grpo", *options, folder=path, ranks=count, rollout__tensor=tensor, warm_start__steps=0)
        result = ranks(count).run(play, config=config)
        joined = Samples.joined([Samples.from_json(rank["rollouts"][0]) for rank in result])
        found[count, tensor] = joined[joined.numbers.argsort()].tokens.tolist()
        rows = rows_of(path)
        assert len(rows) == 4 and rows[-1]["grad_norm"] > 0
        for row in rows:  # ratios are 1 but for rounding, in every row
            assert abs(row["rollout_k1"]) < NEAR and abs(row["rollout_k3"]) < NEAR**2
            assert abs(row["rollout_perplexity"] - 1) < NEAR and row["rollout_outside"] == 0
    assert found[1, 1] == found[2, 1] == found[2, 2]


@pytest.mark.parametrize(("task", "world_size", "stage"), [("grpo", 2, 3), ("ppo", 1, 0)])
def test_a_run_has_the_trainers_bits(ranks, tmp_path, task, world_size, stage):
    config = config_of(task, "rollout.engine=generator", folder=tmp_path, ranks=world_size, zero__stage=stage)
    ranks(world_size).run(play, config=config)
    rows = rows_of(tmp_path)
    assert len(rows) == 4 and all(row["rollout_differing"] == 0 for row in rows)
    assert rows[0]["kl"] == 0 != rows[-1]["kl"]


def long_answers(process: Process, *, config) -> list[list[int]]:
    """Of answers over more than two blocks of keys: tokens that differ from the trainer's, with torch's attention and with the engine's."""
    engine, found = build(config, process=process.arrange(policies.topology(config))), []
    requests = Requests(
        prompts=[[5 + row] * (1 + 9 * row) for row in range(4)],
        numbers=torch.arange(4),
        prompt_numbers=torch.arange(4),
        copies=torch.zeros(4, dtype=torch.int64),
    )
    policy = RolloutPolicy(length=170, micro_batch=4, max_tokens=140, stops=(300,), pad=0, temperature=0.8)
    samples = generate(CachedRollouts(engine), policy=policy, requests=requests, step=0)
    for own in (False, True):
        if own:
            use_engine_attention(engine.module)
        with engine.evaluating():
            trainer = token_logprobs(engine(samples.tokens), tokens=samples.tokens, temperature=0.8)
        found.append(((trainer != samples.logprobs) & samples.answer_mask).sum(1).tolist())
    engine.close()
    return found


def test_long_answers_have_the_trainers_bits(ranks, tmp_path):
    options = ("rollout.engine=generator", "model.max_seq_len=256", "data.seq_len=170")
    config = config_of("grpo", *options, folder=tmp_path)
    ((by_torch, own),) = ranks(1).run(long_answers, config=config)
    assert min(by_torch) > 20 and own == [0, 0, 0, 0]


def test_the_engines_attention_has_the_gradient_of_torchs():
    draw = torch.Generator().manual_seed(2)
    shapes = ((2, 70, 4, 8), (2, 70, 2, 8), (2, 70, 2, 8))
    query, key, value = (torch.randn(shape, generator=draw, requires_grad=True) for shape in shapes)
    d_out, found = torch.randn(shapes[0], generator=draw), []
    for attention in (EngineAttention(), CausalAttention()):
        out = attention(query, key=key, value=value)
        found.append((out, torch.autograd.grad(out, (query, key, value), d_out)))
    (own, gradients), (by_torch, expected) = found
    assert torch.allclose(own, by_torch, atol=1e-6)  # 70 products per value, below 1 each
    for one, other in zip(gradients, expected, strict=True):  # sums of up to 140 rounded products, in another order
        assert (one - other).norm() <= 8 * torch.finfo(torch.float32).eps * other.norm()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            (*EXACT, "precision=bf16"),
            "rounds the trainer's products, so rollout.identity=exact cannot be promised; use rollout.identity=corrected or off",
        ),
        ((*EXACT, "lora=adapter", "warm_start.steps=0"), "it merges adapters into the weights"),
        ((*EXACT, "rollout.tensor=2"), "use rollout.identity=corrected or off, or rollout.tensor=1"),
        (("topology=tp2", *GENERATOR), "which are a part of the model; use rollout.engine=trainer, or topology=dp"),
        ((*GENERATOR, "rollout.tensor=3"), "2 ranks cannot be divided by it; use rollout.tensor=2"),
        (
            ("rollout.tensor=2", "rollout.engine=trainer"),
            "rollout.tensor=2 has no effect here, only with task=grpo or task=ppo, and task=distill with",
        ),
        ((*GENERATOR, "zero=stage3", "rollout.weights=streamed"), "rollout.weights=streamed has no effect here"),
    ],
)
def test_what_it_cannot_promise_is_refused(overrides, message):
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        compose("task=grpo", *overrides, output_dir="/run", machine=Machine(gpus=0, cores=2))


@pytest.mark.parametrize(
    ("gpus", "overrides", "engine", "identity", "reason"),
    [
        (1, (), "generator", "corrected", "keeps keys and values"),
        (1, ("zero=stage3", "precision=bf16", "lora=adapter"), "generator", "corrected", "keeps keys and values"),
        (1, ("rollout.identity=off",), "generator", "off", "keeps keys and values"),
        (1, ("rollout.identity=exact",), "trainer", "exact", "needs the trainer's forward"),
        (1, ("zero=stage3", "rollout.weights=whole"), "trainer", "exact", "rollout.weights=whole is for its forward"),
        (1, ("rollout.engine=trainer",), "trainer", "exact", None),
        (0, (), "generator", "exact", "keeps keys and values"),
        (0, ("zero=stage3",), "generator", "exact", "keeps keys and values"),
        (0, ("lora=adapter",), "generator", "corrected", "keeps keys and values"),
        (0, ("lora=adapter", "rollout.identity=exact"), "trainer", "exact", "needs the trainer's"),
        (0, ("precision=bf16",), "generator", "corrected", "keeps keys and values"),
        (0, ("model=tiny_moe",), "generator", "corrected", "keeps keys and values"),
        (0, ("topology=tp2",), "trainer", "exact", "every rank has a part of the weights"),
    ],
)
def test_the_inference_engine_draws_where_it_can(gpus, overrides, engine, identity, reason):
    config = compose("task=grpo", *overrides, output_dir="/run", machine=Machine(gpus=gpus, cores=2))
    assert (config.rollout.engine, config.rollout.identity) == (engine, identity)
    assert (reason or "") in config.reasons.get("rollout.engine", "") and ("rollout.engine" in config.reasons) == bool(
        reason
    )
    assert (config.rollout.correction_max is not None) == (identity == "corrected")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("rollout.engine=generator", "rollout.identity=exact"),
            "adds in another order than the trainer's, so rollout.identity=exact cannot",
        ),
        (("rollout.tensor=2", "launch.ranks=2"), "this run is on GPUs; use rollout.tensor=1"),
    ],
)
def test_what_a_gpu_cannot_do_is_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        compose("task=grpo", *overrides, output_dir="/run", machine=Machine(gpus=2, cores=2))
