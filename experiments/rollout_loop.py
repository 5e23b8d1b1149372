"""A run of `task=grpo` or `task=ppo`: rollout, update, report, checkpoint."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing, nullcontext
from functools import partial
from typing import Any

from torch import Tensor

from ztk import checkpoint
from ztk.config import Config, to_yaml
from ztk.core.runtime import Process
from ztk.experiments import policies
from ztk.experiments.completions import Texts, shown
from ztk.experiments.least_divergence import frontier_of
from ztk.experiments.models import warm_start
from ztk.experiments.policy_update import Update
from ztk.experiments.pretrain import build_reporter, is_saved, load_past
from ztk.experiments.prompts import Prompts, open_evaluation_prompts
from ztk.experiments.ranks import seed_dropout, started
from ztk.experiments.rollout_run import Run, open_run
from ztk.experiments.rollouts import (
    Evaluated,
    Scored,
    draw_ahead,
    drawing,
    evaluate,
    evaluate_prompts,
    measure,
    next_samples,
    score_samples,
    settle_drawer,
)
from ztk.report import Reporter, RunFolder
from ztk.rl.rollout import RolloutStopped
from ztk.train.engine import Engine
from ztk.train.loop import Loop

# The parts that differ between tasks: filling the buffer from scored samples, and one optimizer step of every trained model.
Fill = Callable[[Run, Scored], None]
UpdateModels = Callable[[Run], Update]


def run_rank(config: Config, *, fill: Fill, update: UpdateModels) -> None:
    """Runs one rank from start to end; see `run_task`."""
    with started(config) as process:
        run_task(config, process=process, fill=fill, update=update)


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
    with build_reporter(config, engine=run.actor, past=past) as reporter, run.ahead or nullcontext():
        reporter.say(run.prompts.describe())
        if config.rollout.weights is not None:
            reporter.say(f"rollout.weights={run.weights.weights}: {run.weights.reason}")
        if (settled := settle_drawer(run)) is not None:
            reporter.say(settled)
        if run.ahead is not None:
            rollout = config.rollout
            correction = (
                "" if rollout.correction is None else f", corrected by rollout.correction={rollout.correction.value}"
            )
            reporter.say(f"rollout.ahead=1: answers are drawn one rollout ahead{correction}")
        if run.reward_before is None:
            run.reward_before = evaluate(run).reward
        train(run, reporter=reporter, fill=fill, update=update)
        after = evaluate(run)
        divergence = divergence_of(run, reached=after)
        ends = {"reward_before": run.reward_before, "reward_after": after.reward}
        summary = reporter.finish(**run.metrics, **ends, **divergence)
        reporter.say(described(ends, divergence=divergence))
    run.close()  # not after an error: ranks that have lost a member could wait forever
    return summary


def divergence_of(run: Run, *, reached: Evaluated) -> dict[str, float]:
    """Returns `kl_after`, in nats per answer, and `kl_least`, the minimum for this reward, if right answers are known. A collective
    call.
    """
    if reached.kl is None or run.reference is None:
        return {}
    found, config = {"kl_after": reached.kl}, run.config
    is_cut = (
        config.rollout.top_k or config.rollout.top_p != 1 or config.rollout.min_p
    )  # the closed form needs full distributions
    if not is_cut and config.rollout.task is not None and not run.prompts.is_own_reward and config.reward.path is None:
        found["kl_least"] = frontier_of(run.reference, config=config).least(reached.reward)
    return found


def described(ends: dict[str, float], *, divergence: dict[str, float]) -> str:
    """Describes the final reward and its divergence, for the screen."""
    text = f"mean reward of sampled answers: {ends['reward_before']:.3f} before, {ends['reward_after']:.3f} after"
    if "kl_after" not in divergence:
        return text
    text += f"; divergence from the reference {divergence['kl_after']:.2f} nats per answer"
    least = divergence.get("kl_least", 0.0)
    return (
        f"{text}, {divergence['kl_after'] / least:.2f} times the least for this reward ({least:.2f})" if least else text
    )


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


def roll_out(run: Run, *, reporter: Reporter, texts: Texts, savers: "Savers", fill: Fill) -> None:
    """Samples, scores and shows texts, and fills the buffer. Raises RolloutStopped after a checkpoint if a guard ends the run."""
    config, step = run.config, run.actor.global_steps + 1
    with drawing(run):
        scored = score_samples(run, samples=next_samples(run))
    entropy = {"entropy": run.metrics["entropy"]} if "entropy" in run.metrics else {}  # of the last update
    run.metrics = entropy | measure(run, scored=scored)
    completions = texts.write_all(run, step=step, samples=scored.samples, kl=scored.kl)
    if _is_shown(step, updates=run.buffer.updates, every=config.rollout.show_every):
        records = texts.write(run, step=step, samples=scored.samples, kl=scored.kl)
        reporter.say(shown(records, step=step))
        reporter.texts(completions or records, step=step)
    fault = run.guards.fault(run.metrics, step=step, max_tokens=config.rollout.max_tokens)
    if fault is not None:
        savers.save(
            data_state=run.state_dict(), extra=reporter.past()
        )  # state from before this rollout; a resumed run repeats it
        raise RolloutStopped(f"{fault}. A checkpoint is in {savers.folder}")
    fill(run, scored)
    run.rollouts += 1
    draw_ahead(run)


def _is_shown(step: int, *, updates: int, every: int) -> bool:
    """Returns whether to show texts of a rollout for `updates` steps from `step` on: if one of them is a multiple of `every`, or 1."""
    return bool(every) and (step == 1 or (step + updates - 1) // every > (step - 1) // every)


class Savers:
    """Checkpoints of all models that a run needs to continue.

    The policy's is saved last, so that it exists only together with the others.
    """

    def __init__(self, run: Run) -> None:
        self._run, self._stack = run, ExitStack()
        self._policy: checkpoint.Saver | None = None
        self._others: list[checkpoint.Saver] = []
        self.folder = RunFolder(run.config.output_dir).checkpoints

    def __enter__(self) -> "Savers":
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def _open(self) -> checkpoint.Saver:
        if self._policy is None:
            run, config = self._run, self._run.config
            trained_only = policies.trained_only(config)
            keep, keep_every = config.checkpoint.keep or 2, config.checkpoint.keep_every or 0
            best = bool(config.checkpoint.keep_best)
            # The others keep one more: if a save stops before the policy's part, the policy's previous checkpoint stays complete.
            spare = checkpoint.Retention(keep=keep + 1, keep_every=keep_every, keep_best=best)
            self._others = [
                self._stack.enter_context(
                    checkpoint.Saver(
                        engine, folder=self.folder.parent / name, retention=spare, trained_only=trained_only
                    )
                )
                for name, engine in others_of(run).items()
            ]
            retention = checkpoint.Retention(keep=keep, keep_every=keep_every, keep_best=best)
            self._policy = self._stack.enter_context(
                checkpoint.Saver(
                    run.actor,
                    folder=self.folder,
                    retention=retention,
                    trained_only=trained_only,
                    record=to_yaml(config),
                )
            )
        return self._policy

    def save(self, *, data_state: Mapping[str, Any], extra: dict[str, Any], metric: float | None = None) -> None:
        """Saves all models after the same optimizer step. A collective call.

        data_state: of the run. metric: for `checkpoint.keep_best`; smaller is better.
        """
        policy = self._open()
        for engine in others_of(
            self._run
        ).values():  # a reference makes no steps, so its checkpoints would have the same name
            engine.global_steps = self._run.actor.global_steps
        for saver in self._others:
            saver.save(metric=metric)
        policy.save(data_state=data_state, extra=extra, metric=metric)


def others_of(run: Run) -> dict[str, Engine]:
    """Returns the models other than the policy that a checkpoint needs. With new adapters, the reference is `model.path`."""
    is_base = policies.trained_only(run.config) and run.config.warm_start.path is None
    others = {"critic": run.critic, "reference": None if is_base else run.reference}
    return {name: engine for name, engine in others.items() if isinstance(engine, Engine)}


def resume(run: Run) -> dict[str, Any]:
    """Restores all models and the run from `checkpoint.resume`. Returns the reporter's state."""
    loaded = load_past(run.config, engine=run.actor)
    if loaded is None:
        return {}
    for name, engine in others_of(run).items():
        checkpoint.load(engine, path=loaded.path.parent.parent / name / loaded.path.name)
    run.load_state_dict(loaded.data_state)
    if run.process.rank == 0:
        print(f"continues after step {loaded.step} from {loaded.path}, saved by {loaded.saved_world_size} ranks")
    return (loaded.extra or {}) | {"first_step": run.actor.global_steps}
