"""The parts of `task=sft`, `task=reward`, `task=dpo` and `task=distill` that are the same: steps, evaluation, checkpoints."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from experiments.best import Best
from experiments.examples import Examples, ExampleStream, Step
from experiments.pretrain import is_saved, load_past, open_interrupts, open_saver
from experiments.ranks import seed_dropout
from experiments.streams import share_of
from ztk import checkpoint
from ztk.config import Config
from ztk.core.runtime import Process
from ztk.nn.lora import is_adapter
from ztk.report import Reporter
from ztk.train.engine import Engine

BODY = ("embedding.*", "blocks.*", "norm.*")  # of ztk's decoder: all but the output layer


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What a step's forwards found on this rank. loss: the mean over its micro-batches, of which the mean over ranks is the step's loss.

    sums: over its examples, scalars, of what is shown as the mean over all examples.
    """

    loss: Tensor
    sums: Mapping[str, Tensor] = field(default_factory=dict)


class Steps(Protocol):
    """This rank's steps of a run, one after another."""

    def next_step(self) -> Step: ...

    def state_dict(self) -> dict[str, object]:
        """The position, the same on all ranks."""


def open_stream(config: Config, *, process: Process) -> ExampleStream:
    """Raises ValueError for a record that is none."""
    share = share_of(config, process=process)
    return ExampleStream(Examples(config, process=process), config=config, share=share)


def start_from(config: Config, *, engine: Engine, body_only: bool = False) -> None:
    """Sets the parameters from `warm_start.path`, if there is one. body_only: the output layer stays. A collective call.

    Raises CheckpointError.
    """
    if config.warm_start.path is not None:
        only = _body_of(engine.module) if body_only else None
        load_weights(config, engine=engine, path=config.warm_start.path, only=only)


def load_weights(config: Config, *, engine: Engine, path: str, only: Sequence[str] | None = None) -> None:
    """Sets the parameters from the run in `path`, which may be without adapters where this one has new ones. only: shell patterns of their
    names. A collective call.

    Raises CheckpointError.
    """
    is_base = config.lora.rank > 0 and not checkpoint.has_adapters(path)
    loaded = checkpoint.load(engine, path=path, weights_only=True, only=only, strict=not is_base)
    asked = [
        name for name in (*loaded.kept, *loaded.unused) if only is None or any(fnmatchcase(name, one) for one in only)
    ]
    if wrong := [name for name in asked if is_base and not is_adapter(name)]:
        raise checkpoint.CheckpointError(
            f"{loaded.path} is of another model: {wrong[0]} and {len(wrong) - 1} more are not in both; use the sizes of the run that saved it"
        )


def _body_of(module: nn.Module) -> tuple[str, ...]:
    """Patterns of the names of all parameters but the output layer's, which models of transformers have under one name."""
    prefix = getattr(module, "base_model_prefix", None)
    return BODY if prefix is None else (f"{prefix}.*",)


def resume(
    config: Config, *, engine: Engine, stream: ExampleStream
) -> tuple[dict[str, Any], checkpoint.LoadReport | None]:
    """Restores engine and stream from `checkpoint.resume`; returns what the reporter needs to continue its record, and what was loaded."""
    loaded = load_past(config, engine=engine)
    if loaded is None:
        return {}, None
    if engine.process.rank == 0:
        print(f"continues after step {loaded.step} from {loaded.path}, saved by {loaded.saved_world_size} ranks")
    stream.load_state_dict(loaded.data_state)
    return (loaded.extra or {}) | {"first_step": engine.global_steps}, loaded


def train(
    config: Config,
    *,
    engine: Engine,
    stream: Steps,
    reporter: Reporter,
    train_step: Callable[[Step], Measured],
    evaluate: Callable[[], Mapping[str, float]],
    best: Best,
    state: Callable[[], Mapping[str, Any]] = dict,
) -> None:
    """Optimizer steps up to `train.steps`, with evaluations and checkpoints between them, or until `train.patience` ends the run.

    state: what a checkpoint holds beside the position of the stream. Raises Interrupted after the step in which a signal arrived; that step
    is saved, unless the run saves nothing.
    """
    settings = config.train
    with open_interrupts(config, process=engine.process) as interrupts, open_saver(config, engine=engine) as saver:
        for number in range(engine.global_steps + 1, settings.steps + 1):
            step = stream.next_step()
            seed_dropout(config, process=engine.process, step=number)
            found = train_step(step)
            interrupted = interrupts.are_pending()
            saves = saver is not None and (interrupted or is_saved(config, number))
            is_regular = bool(settings.eval_every) and number % settings.eval_every == 0 and number < settings.steps
            is_due = is_regular or (saves and bool(config.checkpoint.keep_best))
            has_row = saves or is_due or number % settings.log_every == 0 or number in (1, settings.steps)
            measured = means(found.sums, step=step, engine=engine) if has_row else {}
            is_evaluated = is_due and not interrupted
            if is_evaluated:
                with reporter.aside():
                    measured |= evaluate()
                interrupted = interrupts.are_pending()
                saves = saves or (saver is not None and interrupted)
            judged = measured if is_evaluated else {}
            ended_by = best.reason_to_end(judged) if is_regular and not interrupted else None
            saves = saves or (saver is not None and ended_by is not None)
            reporter.step(loss=found.loss, tokens=step.num_tokens, metrics=engine.read_metrics, row=saves, **measured)
            if saves:
                with reporter.aside():
                    assert saver is not None
                    states = stream.state_dict() | dict(state()) | {"best": best.state_dict()}
                    metric = best.metric(judged) if judged and config.checkpoint.keep_best else None
                    saver.save(data_state=states, extra=reporter.past(), metric=metric)
            if interrupted:
                interrupts.stop()
            if ended_by is not None:
                reporter.say(f"ends after step {number}: {ended_by}")
                break


def means(sums: Mapping[str, Tensor], *, step: Step, engine: Engine) -> dict[str, float]:
    """The means over all ranks' examples. A collective call."""
    if not sums:
        return {}
    own = torch.stack([value.detach().double() for value in sums.values()])
    totals = engine.process.comm.gather_scalars(own, label="examples").sum(0) / step.num_examples
    return dict(zip(sums, totals.tolist(), strict=True))


def train_pairs(
    engine: Engine, *, step: Step, forward: Callable[[Step, int], tuple[Tensor, dict[str, Tensor]]]
) -> Measured:
    """One optimizer step. forward(step, micro-batch) -> this micro-batch's part of the step's loss, and sums over its pairs."""
    losses, sums = [], []
    for index, batch in enumerate(step.micro_batches):
        loss, found = forward(step, index)
        loss = loss * (0 if batch.is_filler else step.parts)  # the engine divides by as much
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
        sums.append(_counted(found, is_filler=batch.is_filler))
    return Measured(loss=torch.stack(losses).mean(), sums=_added(sums))


def evaluate_pairs(
    engine: Engine, *, step: Step, forward: Callable[[Step, int], tuple[Tensor, dict[str, Tensor]]]
) -> dict[str, float]:
    """The loss over pairs that are not trained on, as `validation_loss`, and the means of what `forward` sums. A collective call."""
    sums = []
    with engine.evaluating():
        for index, batch in enumerate(step.micro_batches):
            loss, found = forward(step, index)
            sums.append(_counted({"loss": loss * step.num_examples} | found, is_filler=batch.is_filler))
    found = means(_added(sums), step=step, engine=engine)
    return {f"validation_{name}": value for name, value in found.items()}


def _counted(sums: Mapping[str, Tensor], *, is_filler: bool) -> dict[str, Tensor]:
    return {name: torch.zeros_like(value) if is_filler else value.detach() for name, value in sums.items()}


def _added(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([part[name] for part in parts]).sum() for name in parts[0]}
