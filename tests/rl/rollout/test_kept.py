"""Rollouts with top-k, top-p and min-p, whose log-probabilities are over the tokens that were kept; texts that end answers."""

import math

import pytest
import torch

from tests.rl.rollout.runs import config_of, play, rows_of
from tests.rl.rollout.test_device import OPTIONS, run_of
from ztk.experiments import grpo
from ztk.experiments.policy_losses import loss_of, losses_of
from ztk.experiments.rollouts import draw, layout_of, logprobs_of, score_samples
from ztk.inference import SamplingParams
from ztk.inference.sample import Cut, Draw, draw_rows
from ztk.nn import loss as losses
from ztk.rl.rollout import Samples

P = torch.tensor([[0.4, 0.05, 0.3, 0.2, 0.05]])


@pytest.mark.parametrize(
    ("cut", "expected"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"top_k": 2}, [0, 2]),
        ({"top_k": 4}, [0, 1, 2, 3, 4]),  # as likely as the fourth
        ({"top_p": 0.69}, [0, 2]),
        ({"top_p": 0.71}, [0, 2, 3]),
        ({"top_p": 0.001}, [0]),
        ({"min_p": 0.49}, [0, 2, 3]),
        ({"top_k": 3, "top_p": 0.7}, [0, 2]),  # of 0.9: 0.44 and 0.78
        ({"top_k": 3, "top_p": 0.8, "min_p": 0.6}, [0, 2]),
    ],
)
def test_which_tokens_stay(cut, expected):
    assert Cut(**cut).kept(P.double())[0].nonzero().flatten().tolist() == expected


def test_draws_do_not_depend_on_the_batch():
    """Nor on how many are sorted at once."""
    logits = torch.randn(150, 40, generator=torch.Generator().manual_seed(0))
    each = [
        SamplingParams(temperature=(0.7, 1.3)[row % 2], top_p=0.8, min_p=0.02 * (row % 3), seed=row, fp32_logprobs=True)
        for row in range(150)
    ]
    draws = [Draw(sampling=sampling, tokens=[0] * 5, prompt_length=5) for sampling in each]
    for row, drawn in enumerate(draw_rows(logits, draws=draws)):
        [alone] = draw_rows(logits[row : row + 1], draws=draws[row : row + 1])
        assert (drawn.token, drawn.kept.tolist()) == (alone.token, alone.kept.tolist()) and drawn.token in drawn.kept
        over = logits[row][drawn.kept.long()] / each[row].temperature
        expected = float(logits[row, drawn.token] / each[row].temperature - over.logsumexp(0))
        assert drawn.processed_logprob == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("kernels", [False, True], ids=["products", "kernels"])
def test_ratios_are_one_where_the_weights_have_not_changed(tmp_path, kernels):
    """Over all tokens their mean would be the kept mass."""
    options = (*OPTIONS, "rollout.top_p=0.9", "rollout.top_k=200", "rollout.temperature=0.7")
    run = run_of(config_of("grpo", *options, folder=tmp_path), kernels=kernels)
    samples = draw(run)
    mask = samples.answer_mask
    assert samples.kept is not None and torch.equal(samples.kept.counts > 0, mask)
    for tokens, drawn in zip(
        samples.kept.tokens.split(samples.kept.counts[mask].tolist()), samples.tokens[mask], strict=True
    ):
        assert drawn in tokens and len(tokens) < 200

    ratio = (logprobs_of(run.actor, run=run, samples=samples) - samples.logprobs).exp()[mask]
    assert (ratio - 1).abs().max() < 1e-5
    samples.kept = None
    ratio = (logprobs_of(run.actor, run=run, samples=samples) - samples.logprobs).exp()[mask]
    assert ratio.max() < 0.95 and ratio.mean() > 0.8


@pytest.mark.parametrize("options", [(), ("rollout.engine=generator",), ("zero=stage3",)])
def test_a_run_has_the_trainers_bits(ranks, tmp_path, options):
    config = config_of("grpo", *options, "rollout.top_p=0.9", "rollout.min_p=0.01", folder=tmp_path)
    ((found),) = ranks(1).run(play, config=config)
    rows = rows_of(tmp_path)
    assert len(rows) == 4 and all(row["rollout_differing"] == 0 for row in rows)
    assert rows[0]["kl"] == 0 != rows[-1]["kl"]  # the reference is over the same tokens
    assert "kl_least" not in found["summary"] and Samples.from_json(found["rollouts"][0]).kept is not None


@pytest.mark.parametrize("large", [False, True])
def test_the_gradient_is_that_of_the_kept_tokens(tmp_path, monkeypatch, large):
    """Also for logits in chunks. The reference is a softmax over the kept logits only."""
    run = run_of(config_of("grpo", *OPTIONS, "rollout.top_p=0.6", folder=tmp_path), kernels=False)
    samples = draw(run)[:4]
    mask = samples.answer_mask
    given = {name: torch.ones(mask.shape) for name in ("advantages", "weights")}
    options = {"batch": samples, "layout": layout_of(run, samples=samples), "policy": loss_of(run.config)}
    module = run.actor.module
    logits = module(samples.tokens)
    text, position = mask.nonzero().unbind(1)
    sets = samples.kept.tokens.split(samples.kept.counts[mask].tolist())
    chosen = torch.stack(
        [
            logits[row, at - 1, samples.tokens[row, at]] - logits[row, at - 1, own.long()].logsumexp(0)
            for row, at, own in zip(text, position, sets, strict=True)
        ]
    )
    (-(chosen - chosen.detach()).exp().sum()).backward()
    expected = [parameter.grad.clone() for parameter in module.parameters()]
    module.zero_grad()
    if large:
        monkeypatch.setattr(losses, "LARGE_LOGITS", 0)
    own = losses_of(
        run.actor, temperature=1.0, old=samples.logprobs, correction=None, reference=None, **given, **options
    )
    own.loss.backward()
    for parameter, gradient in zip(module.parameters(), expected, strict=True):
        assert (parameter.grad - gradient).norm() < 1e-4 * gradient.norm()
    assert (own.logprobs[mask] - chosen).abs().max() < 1e-5
    every = logits.detach()[text, position - 1].log_softmax(-1)
    assert own.entropy == pytest.approx(float(-(every.exp() * every).sum()), rel=1e-5)  # of the policy, over all tokens


def test_rows_of_samples_keep_their_tokens(tmp_path):
    run = run_of(config_of("grpo", *OPTIONS, "rollout.top_k=3", folder=tmp_path), kernels=False)
    scored = score_samples(run, samples=draw(run))
    samples, order = scored.samples, torch.tensor([5, 0, 7])
    again = Samples.from_json(Samples.joined([samples[:4], samples[4:]]).to_json())
    assert torch.equal(again.kept.tokens, samples.kept.tokens) and torch.equal(again.kept.counts, samples.kept.counts)
    first = samples.kept.counts[:5].sum()
    assert torch.equal(samples[order].kept.tokens[:3], samples.kept.tokens[first : first + 3])
    grpo.fill(run, scored)
    assert run.metrics["rollout_outside"] == 0 and math.isclose(run.metrics["rollout_perplexity"], 1, abs_tol=1e-5)


def test_texts_of_one_token_end_an_answer(tmp_path):
    config = config_of("grpo", *OPTIONS, "rollout.stop=[a,b]", folder=tmp_path)
    run = run_of(config, kernels=False)
    run.actor.module.head.weight.data[ord("b")] *= 50  # likely, or very unlikely
    samples = draw(run)
    answers = [run.prompts.answer_of(samples, row=row) for row in range(len(samples))]
    assert samples.finished.any() and not any("a" in answer or "b" in answer for answer in answers)
    last = samples.tokens[torch.arange(len(samples)), samples.lengths - 1]
    assert set(last[samples.finished].tolist()) <= {ord("a"), ord("b"), ord("\n")} and ord("b") in last
    config.rollout.stop = ["END"]
    with pytest.raises(ValueError, match="'END' has 3 tokens, and an answer ends with one"):
        run_of(config)
