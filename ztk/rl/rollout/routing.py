"""The experts that the inference engine and the trainer choose for the tokens of a rollout."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ztk.inference import Generator
from ztk.nn.moe import SparseMLP
from ztk.parallel.moe.stacked import CALLS, is_stacked_experts
from ztk.rl.rollout.buffer import Samples
from ztk.rl.rollout.layout import Layout


def with_experts(samples: Samples, *, generator: Generator) -> Samples:
    """Returns the samples with the experts of their texts, if this process has the generator's model and it has experts."""
    model = generator.own_model
    if model is None or not model.description.experts:
        return samples
    rows = [
        model.chosen_experts(tokens[:length].tolist())
        for tokens, length in zip(samples.tokens, samples.lengths.tolist(), strict=True)
    ]
    experts = torch.zeros(*samples.tokens.shape, *rows[0].shape[1:], dtype=torch.int16)
    for row, own in zip(experts, rows, strict=True):
        row[: len(own)] = own
    return replace(samples, experts=experts)


@contextmanager
def recorded_experts(module: nn.Module) -> Iterator[list[Tensor]]:
    """Yields a list that gets the experts of every forward inside, layer by layer: integers [tokens, choices] each."""
    found: list[Tensor] = []

    def of_router(router: Any, _: Any, logits: Tensor) -> None:
        found.append(logits.topk(choices[router]).indices)

    def of_experts(_: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        found.append(args[1] if len(args) > 1 else next(named[call[0]] for call in CALLS if call[0] in named))

    parts = list(module.modules())
    choices = {part.router: part.top_k for part in parts if isinstance(part, SparseMLP)}
    hooks = [router.register_forward_hook(of_router) for router in choices]
    stacked = [part for part in parts if is_stacked_experts(part)]
    hooks += [part.register_forward_pre_hook(of_experts, with_kwargs=True) for part in stacked]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def same_experts(samples: Samples, *, layout: Layout, found: Sequence[Tensor]) -> int:
    """Returns how many answer tokens were predicted with the same experts in every layer. found: of the trainer's forward over `layout`."""
    assert samples.experts is not None, "they were kept"
    text, position = samples.answer_mask.nonzero().unbind(1)
    trainers = torch.stack(list(found), dim=1)[layout.before(samples.answer_mask)].cpu()
    drawn = samples.experts[text, position - 1]
    return int((trainers.sort(-1).values == drawn.sort(-1).values).flatten(1).all(1).sum())
