"""The experts that the inference engine chose for the tokens of a rollout, for the trainer's forward."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ztk.inference import Generator
from ztk.nn.moe import SparseMLP
from ztk.parallel.moe.stacked import is_stacked_experts
from ztk.rl.rollout.buffer import Samples
from ztk.rl.rollout.layout import Layout

_OWN = -1  # of a token without an expert to replay


def experts_of(samples: Samples, *, generator: Generator) -> Tensor | None:
    """Returns `Samples.experts`, if this process has the generator's model and it has experts."""
    model = generator.own_model
    if model is None or not model.description.experts:
        return None
    rows = [
        model.chosen_experts(tokens[:length].tolist())
        for tokens, length in zip(samples.tokens, samples.lengths.tolist(), strict=True)
    ]
    experts = torch.zeros(*samples.tokens.shape, *rows[0].shape[1:], dtype=torch.int16)
    for row, own in zip(experts, rows, strict=True):
        row[: len(own)] = own
    return experts


class Routers:
    """The routers of a module, in the order of its layers. They choose the experts that drew a text, and record their own choices.

    [Note: Replayed experts] Engine and trainer round differently, which moves a choice between experts of nearly equal scores. The
    token's probability then jumps, which no importance weight corrects. With `rollout.experts=replay` the trainer therefore takes the
    engine's experts, in scoring and in every update of the rollout, with weights from its own scores of them, so that routers learn. A
    block that is recomputed in the backward takes the experts of its forward.
    """

    def __init__(self, module: nn.Module, *, replays: bool = True) -> None:
        """replays: whether it replays; with False it only records."""
        self._replays, self._count = replays, 0
        self._given: Tensor | None = None
        self._found: list[Tensor] | None = None
        for block in module.modules():
            if isinstance(block, SparseMLP):
                block.choose = partial(self._choose, self._count)
                self._count += 1
            elif any(is_stacked_experts(child) for child in block.children()):
                for router in (child for child in block.children() if type(child).__name__.endswith("Router")):
                    router.register_forward_hook(partial(self._reroute, self._count))
                    self._count += 1

    def begin(self, samples: Samples | None, *, layout: Layout | None = None) -> None:
        """Starts a forward, and its backward, with the experts of `samples` over `layout`. Without samples routers choose by themselves.

        Raises ValueError if the engine's experts are of another number of layers.
        """
        self._given = None
        if samples is None or layout is None or samples.experts is None or not self._replays:
            return
        if (layers := samples.experts.shape[2]) != self._count:
            raise ValueError(
                f"rollout.experts=replay: {layers} layers chose experts, and {self._count} routers of the model are known; use "
                "rollout.experts=own"
            )
        is_token = torch.arange(samples.tokens.shape[1]) < samples.lengths.unsqueeze(1)
        given = samples.experts.new_full((layout.tokens.numel(), *samples.experts.shape[2:]), _OWN)
        given[layout.places(is_token).cpu()] = samples.experts[is_token]
        self._given = given.to(layout.tokens.device)

    @contextmanager
    def recorded(self) -> Iterator[list[Tensor]]:
        """Yields a list that gets the routers' own choices in every forward inside, layer by layer: integers [tokens, choices] each."""
        self._found = found = []
        try:
            yield found
        finally:
            self._found = None

    def _choose(self, number: int, own: Tensor) -> Tensor:
        """number: the layer's among those with experts. own: the router's choice, integers [tokens, choices]."""
        if self._found is not None:
            self._found.append(own)
        if self._given is None:
            return own
        given = self._given[:, number].to(own.dtype)
        return torch.where(given == _OWN, own, given)

    def _reroute(self, number: int, router: Any, _: Any, out: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
        """A forward hook of a router of transformers, which returns logits [tokens, experts], weights and experts [tokens, choices]."""
        logits, weights, own = out
        experts = self._choose(number, own)
        if experts is own:
            return out
        replayed = logits.float().softmax(-1).gather(-1, experts)
        if getattr(router, "norm_topk_prob", True):
            replayed = replayed / replayed.sum(-1, keepdim=True)
        return logits, replayed.to(weights.dtype), experts


def same_experts(samples: Samples, *, layout: Layout, found: Sequence[Tensor]) -> int:
    """Returns how many answer tokens were predicted with the same experts in every layer. found: the choices of the trainer's forward over
    `layout`."""
    assert samples.experts is not None, "they were kept"
    text, position = samples.answer_mask.nonzero().unbind(1)
    trainers = torch.stack(list(found), dim=1)[layout.before(samples.answer_mask)].cpu()
    drawn = samples.experts[text, position - 1]
    return int((trainers.sort(-1).values == drawn.sort(-1).values).flatten(1).all(1).sum())
