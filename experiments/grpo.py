"""Trains a policy by comparing answers to the same prompt (GRPO and variants): the program of every rank of `task=grpo`.

A rollout draws answers and scores them. Their advantages enter a buffer, and each of the next optimizer steps learns from its part of
the rollout. `rollouts` draws and scores, `policy_losses` has the loss and its weights, `policy_run` the models and their checkpoints.
PPO (`ppo`) runs this program with other advantages and a second model to update.
"""

import time
from collections.abc import Callable, Mapping
from contextlib import closing, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ztk.config import Config
from ztk.core.runtime import Process
from ztk.experiments import policies
from ztk.experiments.completions import Texts
from ztk.experiments.models import warm_start
from ztk.experiments.policy_losses import compared, corrected, counted, loss_of, losses_of, rescored, weights_of
from ztk.experiments.policy_run import Run, Savers, open_run, resume
from ztk.experiments.pretrain import build_reporter, is_saved
from ztk.experiments.prompts import Prompts, open_evaluation_prompts
from ztk.experiments.ranks import seed_dropout, started
from ztk.experiments.rollouts import (
    Scored,
    described,
    divergence_of,
    draw_ahead,
    drawing,
    evaluate,
    evaluate_prompts,
    layout_of,
    measure,
    micro_batches,
    next_samples,
    score_samples,
    settle_drawer,
    staleness_of,
)
from ztk.parallel.pipeline import MicroBatch
from ztk.report import Reporter, RunFolder
from ztk.rl.align import group_advantages
from ztk.rl.rollout import RolloutStopped, ServedRollouts
from ztk.train.loop import Loop


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """loss: this rank's mean over its micro-batches; the mean over ranks is the step's loss. entropy: nats per token, over all ranks.

    tokens: number in prompts and answers, over all ranks. metrics: further values of the step's row, such as `clipped`, the fraction of tokens
    outside the clipping range.
    """

    loss: Tensor
    entropy: float
    tokens: int
    metrics: Mapping[str, float]


# The parts that differ between tasks: filling the buffer from scored samples, and one optimizer step of every trained model.
Fill = Callable[[Run, Scored], None]
UpdateModels = Callable[[Run], Update]


def main(config: Config) -> None:
    """Runs one rank from start to end. Raises as `run_task`."""
    with started(config) as process:
        run_task(config, process=process, fill=fill, update=update_policy)


def run_task(config: Config, *, process: Process, fill: Fill, update: UpdateModels) -> dict[str, Any]:
    """Runs the task from the first model to the last row. Returns the summary.

    Raises ValueError for a configuration that does not fit the prompts, RewardError for a failing reward function, RolloutStopped when a
    guard ends the run, and RolloutMismatch if rollout.identity=exact is violated.
    """
    prompts = Prompts(config)  # first, so that errors in the user's files are reported immediately
    if process.rank == 0:
        prompts.save_tokenizer(RunFolder(config.output_dir).tokenizer)
    continues = config.checkpoint.resume not in (None, "auto")
    first_values = None if continues else warm_start(config, process=process)
    lr_table = policies.learning_rates(config)
    run = open_run(config, process=process, prompts=prompts, first_values=first_values, lr_table=lr_table)
    past = resume(run)
    ahead = nullcontext() if run.ahead is None else run.ahead
    with build_reporter(config, engine=run.actor, past=past) as reporter, ahead:
        for text in (*run.described(), settle_drawer(run)):
            if text is not None:
                reporter.say(text)
        if run.reward_before is None:
            run.reward_before = evaluate(run).reward
        began = time.perf_counter()
        train(run, reporter=reporter, fill=fill, update=update)
        waited = f"waited {run.waited:.1f} s of {time.perf_counter() - began:.1f} s for answers"
        after = evaluate(run)
        divergence = divergence_of(run, reached=after)
        ends = {"reward_before": run.reward_before, "reward_after": after.reward}
        summary = reporter.finish(**run.metrics, **ends, **divergence)
        reporter.say(described(ends, divergence=divergence))
        if isinstance(run.drawer, ServedRollouts):
            reporter.say(f"{waited}\n{run.drawer.fleet.describe()}")
    run.close()  # not after an error: ranks that have lost a member could wait forever
    return summary


def train(run: Run, *, reporter: Reporter, fill: Fill, update: UpdateModels) -> None:
    """Runs optimizer steps up to `train.steps`, or until `train.patience` ends the run, with a rollout whenever the buffer is used up.

    Raises Interrupted as `Loop.run`.
    """
    config, engine = run.config, run.actor
    texts = Texts(run, first_step=engine.global_steps)
    prompts = open_evaluation_prompts(config, prompts=run.prompts)

    def run_step(step: int) -> Tensor:
        if run.buffer.is_used_up:
            roll_out(run, reporter=reporter, texts=texts, savers=savers, fill=fill)
        seed_dropout(config, process=run.process, step=step)
        updated = update(run)
        if run.ahead is not None:
            run.ahead.check()
        run.buffer.position += 1
        run.metrics |= {"entropy": updated.entropy}
        loop.tokens = updated.tokens
        loop.measured |= {**run.metrics, **updated.metrics}
        return updated.loss

    with Savers(run) as savers, closing(texts):
        loop = Loop(
            engine,
            train_step=run_step,
            steps=config.train.steps,
            evaluate=None if prompts is None else partial(evaluate_prompts, run, prompts=prompts),
            eval_every=config.rollout.eval_every or 0,
            evaluates_last=True,
            reporter=reporter,
            saver=savers if config.checkpoint.saves else None,
            saves=partial(is_saved, config),
            metric=run.best.metric if config.checkpoint.keep_best else None,
            state=run.state_dict,
            callbacks=[run.best],
            grace_seconds=config.checkpoint.grace_seconds,
        )
        if (ended_by := loop.run()) is not None:
            reporter.say(f"ends after step {loop.step}: {ended_by}")


def roll_out(run: Run, *, reporter: Reporter, texts: Texts, savers: Savers, fill: Fill) -> None:
    """Draws and scores answers, and fills the buffer. Raises RolloutStopped after a checkpoint if a guard ends the run."""
    step = run.actor.global_steps + 1
    with drawing(run):
        scored = score_samples(run, samples=next_samples(run))
    entropy = {"entropy": run.metrics["entropy"]} if "entropy" in run.metrics else {}  # of the last update
    run.metrics = entropy | measure(run, scored=scored) | staleness_of(run, samples=scored.samples)
    texts.report(run, step=step, samples=scored.samples, kl=scored.kl, reporter=reporter)
    fault = run.guards.fault(run.metrics, step=step, max_tokens=run.config.rollout.max_tokens)
    if fault is not None:
        # The state is from before this rollout, so a resumed run repeats it.
        savers.save(data_state=run.state_dict(), extra=reporter.past())
        raise RolloutStopped(f"{fault}. A checkpoint is in {savers.folder}")
    fill(run, scored)
    run.rollouts += 1
    draw_ahead(run)


def fill(run: Run, scored: Scored) -> None:
    """Computes the advantage of an answer, the same for all its tokens, by comparing its reward with the other answers to the same
    prompt.
    """
    config, samples = run.config, scored.samples
    advantages = group_advantages(
        scored.table["reward"] - scored.table["penalty"],
        groups=scored.groups,
        included=scored.included,
        baseline=config.advantage.baseline,
        scale=config.advantage.scale,
    )
    fill_buffer(
        run,
        scored=scored,
        counts=counted(run, scored=scored),
        advantages=advantages[samples.numbers].float().unsqueeze(1) * samples.answer_mask,
    )


def fill_buffer(run: Run, *, scored: Scored, counts: Tensor, advantages: Tensor, **extra: Tensor) -> None:
    """Starts the updates with a rollout. counts: whether a sample counts, bool [S]. advantages: per token, float32 [S, T]. extra: [S, T]
    each.
    """
    config, samples = run.config, scored.samples
    values = {
        "old": samples.logprobs,
        "advantages": advantages,
        "weights": weights_of(run, samples=samples, counts=counts),
    }
    if config.rollout.identity == "corrected":
        values["old"] = trainer = rescored(run, samples=samples)
        values["correction"] = corrected(run, samples=samples, trainer=trainer)
    if config.kl.coef and config.kl.place == "loss" and scored.reference is not None:
        values["reference"] = scored.reference
    run.buffer.fill(samples, **values, **extra)


def update_rows(run: Run) -> slice:
    """Returns the rows of this rank's samples for the next optimizer step."""
    share = run.config.train.global_batch_size // run.process.mesh.replicas
    return slice(run.buffer.position * share, (run.buffer.position + 1) * share)


def update_policy(run: Run) -> Update:
    """Runs one optimizer step of the policy. Raises RolloutMismatch if rollout.identity=exact is violated."""
    config, engine, device = run.config, run.actor, run.process.device
    assert run.buffer.samples is not None
    rows = update_rows(run)
    samples, extra = run.buffer.samples[rows], {name: value[rows] for name, value in run.buffer.extra.items()}
    policy = loss_of(config)
    scale = run.process.mesh.replicas * config.train.accumulation_steps  # compensates for the engine's division
    sums = torch.zeros(4, dtype=torch.float64)
    batches = [samples[part] for part in micro_batches(run, samples=samples)]
    logprobs: list[Tensor] = []  # of each micro-batch, on ranks that compute losses

    def forward_of(number: int, part: slice) -> MicroBatch:
        batch, own = batches[number], {name: value[part].to(device) for name, value in extra.items()}
        given = {name: own.get(name) for name in ("old", "advantages", "weights", "correction", "reference")}
        layout = layout_of(run, samples=batch)
        options = {"layout": layout, "temperature": config.rollout.temperature}

        def scaled_loss(model: Any) -> Tensor:
            if run.routers is not None:
                run.routers.begin(batch, layout=layout)
            found = losses_of(model, batch=batch, policy=policy, **options, **given)
            logprobs.append(found.logprobs)
            counts = torch.stack([found.entropy, found.clipped.double()]).cpu()
            answered, computed = int(batch.answer_mask.sum()), int(batch.lengths.sum())
            sums.add_(torch.tensor([counts[0], answered, counts[1], computed], dtype=torch.float64))
            return found.loss * scale

        return layout.micro_batch(scaled_loss)

    def check() -> None:
        if run.buffer.position == 0:  # on policy: the weights have not changed since the rollout
            run.metrics["rollout_differing"] = compared(run, batches=batches, logprobs=logprobs)

    parts = enumerate(micro_batches(run, samples=samples))
    loss = engine.train_batch((forward_of(number, part) for number, part in parts), before_step=check)
    if run.routers is not None:
        run.routers.begin(None)
    totals = run.process.mesh.gather_scalars(sums.to(device), label="update").sum(0).tolist()
    entropy, tokens, clipped, computed = totals
    return Update(
        loss=loss,
        entropy=entropy / max(1.0, tokens),
        tokens=int(computed),
        metrics={"clipped": clipped / max(1.0, tokens)},
    )
