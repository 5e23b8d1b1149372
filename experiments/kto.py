"""Forwards of `task=dpo dpo.loss=kto`: single answers with labels, compared with the divergence of answers to other prompts of the
step.
"""

import torch
from torch import Tensor

from experiments.examples import Step
from experiments.reference import BaseModel, text_logprobs
from ztk.config import Config
from ztk.rl.align import KtoPolicy, kto_losses, segment_sums
from ztk.train.engine import Engine


class KtoForward:
    """Called as forward(step, micro-batch). A step's divergence is measured once over all its micro-batches, before the first of them."""

    def __init__(self, config: Config, *, engine: Engine, reference: Engine | BaseModel) -> None:
        dpo = config.dpo
        self._engine, self._reference = engine, reference
        self._policy = KtoPolicy(
            beta=dpo.beta, desirable_weight=dpo.desirable_weight, undesirable_weight=dpo.undesirable_weight
        )
        self._kl = torch.zeros(())

    def __call__(self, step: Step, index: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns a micro-batch's part of the step's loss, and sums over its answers."""
        if index == 0:
            assert step.mismatched is not None, "the examples have labels"
            self._kl = self._divergence(step.mismatched)
        batch = step.micro_batches[index]
        ratios = self._sums(self._engine, step=step, index=index) - self._frozen(step, index=index)
        labels = batch.labels.to(ratios.device)
        losses = kto_losses(ratios, labels=labels, kl=self._kl, policy=self._policy)
        rewards = self._policy.beta * ratios.detach()
        signed = torch.where(labels, rewards, -rewards)
        threshold = self._policy.beta * self._kl.clamp(min=0)
        sums = {
            "accuracy": ((rewards > threshold) == labels).sum(),
            "margin": signed.sum(),
            "desirable": labels.sum(),
            "kl": self._kl * len(labels),
        }
        return losses.sum() / step.num_examples, sums

    def _divergence(self, step: Step) -> Tensor:
        """Returns the mean log ratio over all ranks' mismatched answers. A collective call."""
        total = torch.zeros((), dtype=torch.float64)
        for index, batch in enumerate(step.micro_batches):
            with self._engine.evaluating():
                found = self._sums(self._engine, step=step, index=index) - self._frozen(step, index=index)
            total += 0 if batch.is_filler else found.double().sum().cpu()
        device = self._engine.process.device
        totals = self._engine.process.comm.gather_scalars(total.reshape(1).to(device), label="divergence")
        return (totals.sum() / step.num_examples).float().to(device)

    def _frozen(self, step: Step, *, index: int) -> Tensor:
        with self._reference.evaluating():
            return self._sums(self._reference, step=step, index=index)

    def _sums(self, engine: Engine | BaseModel, *, step: Step, index: int) -> Tensor:
        """Returns the log-probabilities of the answers of a micro-batch, [P]."""
        lengths = step.micro_batches[index].sequences.lengths.to(engine.process.device)
        return segment_sums(text_logprobs(engine, step=step, index=index), lengths=lengths)
