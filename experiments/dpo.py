"""Direct preference optimisation: trains a policy on pairs of answers. The program of every rank of `task=dpo`."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from ztk.config import Config
from ztk.core.policies.key import policy_of
from ztk.core.runtime import Process
from ztk.experiments import policies
from ztk.experiments.alignment import (
    PairForward,
    evaluate_pairs,
    open_stream,
    run_examples,
    start_from,
    train_pairs,
)
from ztk.experiments.examples import ExampleStream, Step
from ztk.experiments.kto import KtoForward
from ztk.experiments.models import Values, build, warm_start
from ztk.experiments.packing import packs_examples
from ztk.experiments.ranks import started
from ztk.experiments.reference import (
    FrozenReference,
    LoraOffReference,
    PrecomputedReference,
    Reference,
    pair_forward,
)
from ztk.experiments.rollouts import HeldOutAnswers
from ztk.rl.align import WITHOUT_REFERENCE, DpoPolicy, dpo_loss, dpo_losses
from ztk.rl.rollout import Layout
from ztk.train.engine import Engine


def main(config: Config) -> None:
    """Runs one rank from start to end. Raises ValueError for a configuration that does not fit the model, the data or the ranks."""
    with started(config) as process:
        run(config, process=process)


def run(config: Config, *, process: Process) -> dict[str, float]:
    """Builds, trains and evaluates. Returns the result of the last evaluation."""
    stream = open_stream(config, process=process)
    continues = config.checkpoint.resume not in (None, "auto")
    first_values = None if continues else warm_start(config, process=process)
    engine = build(config, process=process, values=first_values, lr_table=policies.learning_rates(config))
    start_from(config, engine=engine)
    reference = open_reference(config, engine=engine, stream=stream, first_values=first_values)
    stream.packs = packs_examples(config, policy=engine, reference=reference.engine)
    forward = forward_of(config, engine=engine, reference=reference)
    answers = HeldOutAnswers(config, engine=engine, reference=reference.engine, packs=stream.packs)
    after = run_examples(
        config,
        engine=engine,
        examples=stream,
        train_step=lambda step: train_pairs(engine, step=step, forward=forward),
        evaluate=lambda: evaluate_pairs(engine, stream=stream, forward=forward) | answers.measure(),
        begin=lambda loaded: reference.begin() if loaded is None else reference.resume(loaded),
        state=reference.state_dict,
    )
    reference.close()
    return after


def open_reference(config: Config, *, engine: Engine, stream: ExampleStream, first_values: Values | None) -> Reference:
    """Opens the reference of `dpo.reference`. engine: the policy, before its first step."""
    if config.dpo.reference == "frozen":
        return FrozenReference(config, process=engine.process, first_values=first_values)
    if config.dpo.reference == "lora_off":
        return LoraOffReference(engine)
    if config.dpo.reference == "precomputed":
        return PrecomputedReference(config, policy=engine, stream=stream)
    return Reference()


def forward_of(config: Config, *, engine: Engine, reference: Reference) -> PairForward:
    """Returns the forward of a micro-batch with the loss of `dpo.loss`."""
    if config.dpo.loss == "kto":
        assert reference.engine is not None, "the configuration is checked"
        return KtoForward(config, engine=engine, reference=reference.engine)
    return partial(pairs_of, engine, policy=policy_of(DpoPolicy, given=config.dpo), reference=reference)


def pairs_of(
    engine: Engine, step: Step, index: int, *, policy: DpoPolicy, reference: Reference
) -> tuple[Layout, Callable[[Any], tuple[Tensor, dict[str, Tensor]]]]:
    """Returns a micro-batch's layout, and the function to its part of the step's loss and sums over its pairs."""
    frozen = None if policy.loss in WITHOUT_REFERENCE else reference.of(step, index=index)
    learns_texts = policy.loss == "orpo" and policy.sft_weight > 0
    layout, logprobs_of = pair_forward(engine, step=step, index=index, whole_texts=learns_texts)
    num_tokens = step.num_text_tokens if learns_texts else step.num_answer_tokens

    def losses_of(model: Any) -> tuple[Tensor, dict[str, Tensor]]:
        pairs = logprobs_of(model)
        found = dpo_losses(pairs, policy=policy, reference=frozen)
        loss = dpo_loss(found, pairs=pairs, policy=policy, num_pairs=step.num_examples, num_tokens=num_tokens)
        sums = {
            "accuracy": (found.chosen > found.rejected).sum(),
            "margin": (found.chosen - found.rejected).sum(),
            "chosen": found.chosen.sum(),
            "rejected": found.rejected.sum(),
        }
        return loss, sums

    return layout, losses_of
