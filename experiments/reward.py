"""Trains a reward model, a decoder with one number per token, on pairs of answers: the program of every rank of `task=reward`."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from ztk.config import Config
from ztk.core.policies.key import policy_of
from ztk.core.runtime import Process
from ztk.experiments import policies
from ztk.experiments.alignment import evaluate_pairs, open_stream, run_examples, start_from, train_pairs
from ztk.experiments.examples import Step
from ztk.experiments.models import build
from ztk.experiments.packing import packs_examples
from ztk.experiments.ranks import started
from ztk.rl.align import PairwisePolicy, pairwise_losses
from ztk.rl.rollout import Layout
from ztk.train.engine import Engine


def main(config: Config) -> None:
    """Runs one rank from start to end. Raises ValueError for a configuration that does not fit the model, the data or the ranks."""
    with started(config) as process:
        run(config, process=process)


def run(config: Config, *, process: Process) -> dict[str, float]:
    """Builds, trains and evaluates. Returns the result of the last evaluation."""
    stream = open_stream(config, process=process)
    engine = build(config, process=process, lr_table=policies.learning_rates(config), is_critic=True)
    start_from(config, engine=engine, body_only=True)
    stream.packs = packs_examples(config, policy=engine)
    forward = partial(forward_of, engine, policy=policy_of(PairwisePolicy, given=config.reward))
    return run_examples(
        config,
        engine=engine,
        examples=stream,
        train_step=lambda step: train_pairs(engine, step=step, forward=forward),
        evaluate=lambda: evaluate_pairs(engine, stream=stream, forward=forward),
        describe=described,
        parameters=engine.num_parameters,
    )


def described(before: Mapping[str, float], after: Mapping[str, float]) -> list[str]:
    """Describes the accuracy, for the screen."""
    if not after:
        return []
    was, now = before["validation_accuracy"], after["validation_accuracy"]
    return [f"the chosen answer of held-out pairs has the larger value: {was:.1%} before, {now:.1%} after"]


def forward_of(
    engine: Engine, step: Step, index: int, *, policy: PairwisePolicy
) -> tuple[Layout, Callable[[Any], tuple[Tensor, dict[str, Tensor]]]]:
    """Returns a micro-batch's layout, and the function to its part of the step's loss and sums over its pairs."""
    batch, device = step.micro_batches[index], engine.process.device
    layout = step.layout(batch, module=engine.module, device=device, shares=True)

    def losses_of(model: Any) -> tuple[Tensor, dict[str, Tensor]]:
        places = layout.places(batch.sequences.is_token(length=step.length))
        values, sequences = layout.forward(model).flatten().index_select(0, places), batch.sequences.to(device)
        found = pairwise_losses(values, sequences=sequences, policy=policy, margins=batch.margins.to(device))
        sums = {
            "accuracy": (found.chosen > found.rejected).sum(),
            "margin": (found.chosen - found.rejected).sum(),
            "value": (found.chosen + found.rejected).sum() / 2,
        }
        return found.losses.sum() / step.num_examples, sums

    return layout, losses_of
