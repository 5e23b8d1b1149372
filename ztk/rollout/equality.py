"""The log-probability of a token, by one function for rollout and trainer, and the comparison of the two bit by bit.

[Note: The trainer's bits]
A rollout runs the trainer's own forward, over rows of the trainer's length and in micro-batches of the trainer's size, so every product and
every attention has the operands' shapes of the training step. A causal model's result at a position does not depend on what follows it,
and the same kernel on the same shapes rounds in the same way. What is compared below is whether that held.
Experts are the exception: how many rows an expert multiplies depends on later tokens, too.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ztk.inference.sample import fp32_logprobs
from ztk.rollout.buffer import Samples


class RolloutMismatch(RuntimeError):
    """The trainer's log-probabilities of a rollout are not those that were stored; the text names the first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """count: tokens whose log-probabilities differ in any bit. first: what to say of the first one; "" if there is none."""

    count: int
    first: str = ""


def token_logprobs(logits: Tensor, *, tokens: Tensor, temperature: float) -> Tensor:
    """logits [S, T, V] of tokens [S, T] -> log-probability of each token given those before it, float32 [S, T]; 0 for the first."""
    logprobs = fp32_logprobs(logits[:, :-1], temperature=temperature)
    chosen = logprobs.gather(-1, tokens[:, 1:].unsqueeze(-1)).squeeze(-1)
    return torch.cat([torch.zeros_like(chosen[:, :1]), chosen], dim=1)


def compare(samples: Samples, *, logprobs: Tensor) -> Difference:
    """Stored log-probabilities against the trainer's `logprobs` [S, T], over the tokens of the answers."""
    mask = samples.answer_mask
    trainer = logprobs.detach().cpu()
    differs = (samples.logprobs.view(torch.int32) != trainer.view(torch.int32)) & mask
    count = int(differs.sum())
    if not count:
        return Difference(count=0)
    row, position = differs.nonzero()[0].tolist()
    stored, found = samples.logprobs[row, position].item(), trainer[row, position].item()
    return Difference(
        count=count,
        first=(
            f"sample {int(samples.numbers[row])}, position {position} (token {int(samples.tokens[row, position])}): the rollout stored "
            f"{stored!r}, the trainer computes {found!r}"
        ),
    )
