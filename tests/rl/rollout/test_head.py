"""Losses of answers from the output layer's weight, in chunks: the numbers of the way over all logits, with the trainer's bits."""

import importlib

import pytest
import torch

from tests.experiments import test_alignment as alignment
from tests.rl.rollout.runs import config_of, play, rows_of
from ztk.core.runtime import Process
from ztk.experiments import policies, rollouts
from ztk.kernels import chosen_logprobs, linear_logprob, linear_token_loss
from ztk.nn import Decoder, DecoderConfig
from ztk.nn import loss as losses
from ztk.rl.rollout import answer_logits, has_large_logits, lay_out
from ztk.rl.rollout.head import AnswerHead

CHUNK = 256 * 4 * 8  # bytes: eight rows of a vocabulary of bytes


class Called:
    """An engine's module and its call."""

    def __init__(self, module: Decoder) -> None:
        self.module = module

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.module(tokens)


def chunked(process: Process, *, config, task: str = "rollout") -> object:
    """A run on this rank whose logits count as large."""
    module = importlib.import_module("ztk.kernels.ops.linear_logprob")
    before = losses.LARGE_LOGITS, module.CPU_CHUNK_BYTES
    losses.LARGE_LOGITS, module.CPU_CHUNK_BYTES = 0, CHUNK
    try:
        if task == "rollout":
            return play(process, config=config)
        rollouts.HELD_OUT_PROMPTS = 8
        return importlib.import_module(config.task.module).run(
            config, process=process.arrange(policies.topology(config))
        )
    finally:
        losses.LARGE_LOGITS, module.CPU_CHUNK_BYTES = before


@pytest.mark.parametrize(("task", "world_size", "stage"), [("grpo", 1, 0), ("ppo", 2, 3)])
def test_a_run_without_large_logits_has_the_same_numbers(ranks, tmp_path, task, world_size, stage):
    """Rollouts and their log-probabilities to the bit; losses, whose gradients add up by chunk, within float32."""
    folders = [tmp_path / name for name in ("all", "chunks")]
    configs = [config_of(task, folder=folder, ranks=world_size, zero__stage=stage) for folder in folders]
    plain = ranks(world_size).run(play, config=configs[0])[0]
    found = ranks(world_size).run(chunked, config=configs[1])[0]
    assert found["rollouts"][0]["tokens"] == plain["rollouts"][0]["tokens"]
    assert found["rollouts"][0]["logprobs"] == plain["rollouts"][0]["logprobs"]
    for first, second in zip(*(rows_of(folder) for folder in folders), strict=True):
        assert second["rollout_differing"] == 0
        for name in ("loss", "grad_norm", "entropy", "kl", "reward"):
            assert second[name] == pytest.approx(first[name], rel=1e-4, abs=1e-6), name


def test_dpo_without_large_logits_has_the_same_losses(ranks, tmp_path):
    folders = [tmp_path / name for name in ("all", "chunks")]
    first, second = (alignment.config_of("dpo", "warm_start.steps=0", folder=folder, ranks=1) for folder in folders)
    ranks(1).run(alignment.play, configs=[first])
    ranks(1).run(chunked, config=second, task="dpo")
    assert alignment.losses_of(folders[1]) == pytest.approx(alignment.losses_of(folders[0]), rel=1e-5)


@pytest.mark.parametrize("chunk_bytes", [97 * 8 * 7, 1 << 30])
def test_a_loss_of_tokens_is_that_of_their_log_probabilities(chunk_bytes):
    """In float64, gradients included, whatever the chunks; tokens of -100 add nothing."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 16, generator=generator, dtype=torch.float64, requires_grad=True) for n in (40, 97))
    target, factor = torch.randint(97, (40,), generator=generator), torch.randn(40, generator=generator).double()
    target[3] = -100

    def loss_of(logprobs: torch.Tensor, cut: slice, logits: torch.Tensor) -> torch.Tensor:
        assert torch.equal(chosen_logprobs(logits, target[cut]), logprobs)
        return (factor[cut] * logprobs.exp().clamp(max=0.02)).sum()

    options = {"temperature": 0.7, "chunk_bytes": chunk_bytes}
    direct = (torch.nn.functional.linear(x, weight) / 0.7).log_softmax(-1)
    direct = torch.where(target < 0, 0.0, direct.gather(1, target.clamp(min=0)[:, None])[:, 0])
    expected = (factor * direct.exp().clamp(max=0.02)).sum()
    gradients = torch.autograd.grad(2 * expected, (x, weight))
    logprobs = linear_logprob(x, weight, target, **options)
    again = (factor * logprobs.exp().clamp(max=0.02)).sum()
    once = linear_token_loss(x, weight, target, loss_of=loss_of, **options)
    for found in (again, once):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
        for one, other in zip(torch.autograd.grad(2 * found, (x, weight)), gradients, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_the_loss_of_a_decoder_does_not_change(monkeypatch):
    """Its z-loss and its mode; a derived class is not replaced."""
    monkeypatch.setattr(losses, "LARGE_LOGITS", 0)
    module = Decoder(
        DecoderConfig(vocab_size=8, dim=8, layers=1, heads=1, kv_heads=1, hidden_dim=8, max_seq_len=8)
    ).eval()
    engine = Called(module)
    module.loss = losses.LanguageLoss(z_loss=0.5).eval()
    assert has_large_logits(engine, tokens=8)
    tokens, mask = torch.arange(8).unsqueeze(0), torch.arange(8).unsqueeze(0) > 5
    layout = lay_out(tokens, lengths=torch.tensor([8]), packs=False, device=tokens.device)
    expected = module(tokens)[:, 5:7].flatten(0, 1)
    assert torch.allclose(answer_logits(engine, layout=layout, mask=mask, are_large=True), expected, atol=1e-6)
    assert type(module.loss) is AnswerHead
    assert module.loss.z_loss == 0.5 and not module.loss.training
    module.loss = type("Own", (losses.LanguageLoss,), {})()
    assert not has_large_logits(engine, tokens=8)
