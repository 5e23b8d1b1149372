"""Forwards of `task=dpo dpo.loss=kto`: single answers with labels, compared with the divergence of answers to other prompts of the
step.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ztk.config import Config
from ztk.core.policies.key import policy_of
from ztk.experiments.examples import Step
from ztk.experiments.reference import BaseModel, text_forward
from ztk.rl.align import DpoPolicy, kto_losses, segment_sums
from ztk.rl.rollout import Layout
from ztk.train.engine import Engine


class KtoForward:
    """Called as forward(step, micro-batch). A step's divergence is measured once over all its micro-batches, before the first of them."""

    def __init__(self, config: Config, *, engine: Engine, reference: Engine | BaseModel) -> None:
        self._engine, self._reference = engine, reference
        self._policy = policy_of(DpoPolicy, given=config.dpo)
        self._kl = torch.zeros(())

    def __call__(self, step: Step, index: int) -> tuple[Layout, Callable[[Any], tuple[Tensor, dict[str, Tensor]]]]:
        """Returns a micro-batch's layout, and the function to its part of the step's loss and sums over its answers."""
        if index == 0:
            assert step.mismatched is not None, "the examples have labels"
            self._kl = self._divergence(step.mismatched)
        batch, kl = step.micro_batches[index], self._kl
        frozen = self._sums(self._reference, step=step, index=index)
        layout, sums_of = self._forward(self._engine, step=step, index=index)

        def losses_of(model: Any) -> tuple[Tensor, dict[str, Tensor]]:
            ratios = sums_of(model) - frozen
            labels = batch.labels.to(ratios.device)
            losses = kto_losses(ratios, labels=labels, kl=kl, policy=self._policy)
            rewards = self._policy.beta * ratios.detach()
            signed = torch.where(labels, rewards, -rewards)
            threshold = self._policy.beta * kl.clamp(min=0)
            sums = {
                "accuracy": ((rewards > threshold) == labels).sum(),
                "margin": signed.sum(),
                "desirable": labels.sum(),
                "kl": kl * len(labels),
            }
            return losses.sum() / step.num_examples, sums

        return layout, losses_of

    def _divergence(self, step: Step) -> Tensor:
        """Returns the mean log ratio over all ranks' mismatched answers. A collective call."""
        total = torch.zeros((), dtype=torch.float64)
        for index, batch in enumerate(step.micro_batches):
            found = self._sums(self._engine, step=step, index=index) - self._sums(
                self._reference, step=step, index=index
            )
            total += 0 if batch.is_filler else found.double().sum().cpu()
        device = self._engine.process.device
        totals = self._engine.process.mesh.gather_scalars(total.reshape(1).to(device), label="divergence")
        return (totals.sum() / step.num_examples).float().to(device)

    def _sums(self, engine: Engine | BaseModel, *, step: Step, index: int) -> Tensor:
        """Returns the log-probabilities of the answers of a micro-batch, [P], without gradients. A collective call."""
        layout, sums_of = self._forward(engine, step=step, index=index)
        with engine.evaluating():
            (found,) = engine.compute([layout.micro_batch(sums_of)])
        return found

    def _forward(self, engine: Engine | BaseModel, *, step: Step, index: int) -> tuple[Layout, Callable[[Any], Tensor]]:
        layout, logprobs_of = text_forward(engine, step=step, index=index)
        lengths = step.micro_batches[index].sequences.lengths.to(engine.process.device)
        return layout, lambda model: segment_sums(logprobs_of(model), lengths=lengths)
