"""Computes the log-probability of a token with one function for rollout and trainer, and compares both bitwise.

[Note: The trainer's bits] `rollout.engine=trainer` runs the trainer's own forward. In packed texts, no result of a text depends on the
others; see [Note: The bits of packed texts] in `layout`. Otherwise rows have the trainer's length and micro-batches the trainer's size,
so every product and every attention has the operands' shapes of the training step: a causal model's result at a position does not depend
on later positions, and the same kernel on the same shapes rounds in the same way. The comparison below verifies this. Experts are an
exception: the number of rows of an expert also depends on later tokens.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ztk.inference.sample import fp32_logprobs
from ztk.rl.rollout.buffer import Samples
from ztk.rl.rollout.layout import Layout, lay_out
from ztk.rl.rollout.weights import RolloutWeights, rollout_weights
from ztk.train.engine import Engine


class RolloutMismatch(RuntimeError):
    """The trainer's log-probabilities of a rollout differ from the stored ones. The message names the first difference."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """count: number of tokens whose log-probabilities differ in any bit. first: description of the first one, or "". row, position: its
    place in the samples' rows.
    """

    count: int
    first: str = ""
    row: int = 0
    position: int = 1


def token_logprobs(logits: Tensor, *, tokens: Tensor, temperature: float) -> Tensor:
    """Returns logits [S, T, V] of tokens [S, T] -> log-probability of each token given the previous ones, float32 [S, T]; 0 for the
    first.
    """
    logprobs = fp32_logprobs(logits[:, :-1], temperature=temperature)
    chosen = logprobs.gather(-1, tokens[:, 1:].unsqueeze(-1)).squeeze(-1)
    return torch.cat([torch.zeros_like(chosen[:, :1]), chosen], dim=1)


def compare(samples: Samples, *, logprobs: Tensor) -> Difference:
    """Compares stored log-probabilities with the trainer's `logprobs` [S, T], over the tokens of the answers."""
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
        row=row,
        position=position,
        first=(
            f"sample {int(samples.numbers[row])}, position {position} (token {int(samples.tokens[row, position])}): the rollout stored "
            f"{stored!r}, the trainer computes {found!r}"
        ),
    )


def first_layer(engine: Engine, *, samples: Samples, packs: bool, row: int, position: int) -> str:
    """Returns a sentence about the first layer whose value before a token differs between the trainer's and a rollout's forward.

    samples: the micro-batch's. packs: their texts are packed; in the rollout this one was packed with others, here it is computed alone.
    Both forwards run again. A collective call, which leaves the engine in the middle of a step.
    """
    device, module = engine.process.device, engine.module if packs else None
    options = {"lengths": samples.lengths, "prompt_lengths": samples.prompt_lengths, "packs": packs}
    trainers = lay_out(samples.tokens, device=device, module=module, **options)
    rollouts, own = trainers, row
    if packs:
        cut = {"lengths": torch.tensor([position]), "packs": True, "device": device, "module": module}
        rollouts, own = lay_out(samples.tokens[row : row + 1], **cut), 0
    with (
        rollout_weights(engine, weights=RolloutWeights.streamed),
        _recorded(engine.module, layout=rollouts, row=own, count=position) as drawn,
    ):
        rollouts.forward(engine)
    with _recorded(engine.module, layout=trainers, row=row, count=position) as trained:
        trainers.forward(engine)
    for (name, kind, first), (other, _, second) in zip(drawn, trained, strict=False):
        if name != other:
            break
        if first.shape != second.shape or not torch.equal(first, second):
            where = int((first != second).flatten(1).any(1).nonzero()[0]) if first.shape == second.shape else 0
            return f"the first layer that differs between a rollout's forward and the trainer's is {name} ({kind}), from position {where} on"
    return "a rollout's forward has the trainer's bits in every layer, so the sampler computes otherwise, or the weights have changed since"


@contextmanager
def _recorded(module: nn.Module, *, layout: Layout, row: int, count: int) -> Iterator[list[tuple[str, str, Tensor]]]:
    """Records name, class and result [count, ...] of every module that computes all tokens, in the order in which their forwards end.

    row, count: the first tokens of a text, which are recorded.
    """
    places, shape = layout.text(row, count=count), layout.tokens.shape
    found: list[tuple[str, str, Tensor]] = []

    def hook(name: str) -> Any:
        def record(part: nn.Module, args: tuple, out: Any) -> None:
            result = out[0] if isinstance(out, tuple) else out
            if isinstance(result, Tensor) and result.dim() > 2 and result.shape[:2] == shape:
                own = result.detach().flatten(0, 1).index_select(0, places.to(result.device))
                found.append((name, type(part).__name__, own))

        return record

    handles = [part.register_forward_hook(hook(name)) for name, part in module.named_modules() if name]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
