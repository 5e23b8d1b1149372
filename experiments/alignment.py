"""The program of `task=sft`, `task=reward`, `task=dpo` and `task=distill`: steps, evaluation, checkpoints."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ztk import checkpoint
from ztk.config import Config
from ztk.core.runtime import Process
from ztk.experiments.best import Best
from ztk.experiments.examples import Examples, ExampleStream, Step, lengths_of
from ztk.experiments.pretrain import build_reporter, is_saved, load_past, open_saver
from ztk.experiments.ranks import seed_dropout
from ztk.experiments.streams import share_of
from ztk.nn.lora import is_adapter
from ztk.parallel.pipeline import MicroBatch
from ztk.report import Reporter
from ztk.rl.rollout import Layout
from ztk.train.engine import Engine
from ztk.train.loop import Loop

BODY = ("embedding.*", "blocks.*", "norm.*")  # all parameters of ztk's decoder except the output layer


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """The results of a step's forwards on this rank.

    loss: mean over its micro-batches; the mean over ranks is the step's loss. sums: scalars summed over its examples, shown as means over
    all examples.
    """

    loss: Tensor
    sums: Mapping[str, Tensor] = field(default_factory=dict)


class Steps(Protocol):
    """This rank's steps of a run, in order."""

    def next_step(self) -> Step: ...

    def state_dict(self) -> dict[str, object]:
        """Returns the position, the same on all ranks."""


def open_stream(config: Config, *, process: Process) -> ExampleStream:
    """Opens the example stream. Raises ValueError for an invalid record."""
    share = share_of(config, process=process)
    return ExampleStream(Examples(config, process=process), config=config, share=share)


def start_from(config: Config, *, engine: Engine, body_only: bool = False) -> None:
    """Loads the parameters of `warm_start.path`, if set. A collective call. body_only: keeps the output layer.

    Raises CheckpointError.
    """
    if config.warm_start.path is not None:
        only = _body_of(engine.module) if body_only else None
        load_weights(config, engine=engine, path=config.warm_start.path, only=only)


def load_weights(config: Config, *, engine: Engine, path: str, only: Sequence[str] | None = None) -> None:
    """Loads parameters from the run in `path`, which may lack adapters that are new in this run. A collective call.

    only: shell patterns of the parameters' names.

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
    """Returns patterns for all parameters except the output layer's, which has the same name in all transformers models."""
    prefix = getattr(module, "base_model_prefix", None)
    return BODY if prefix is None else (f"{prefix}.*",)


def resume(
    config: Config, *, engine: Engine, stream: ExampleStream
) -> tuple[dict[str, Any], checkpoint.LoadReport | None]:
    """Restores engine and stream from `checkpoint.resume`. Returns the reporter's state and the load report."""
    loaded = load_past(config, engine=engine)
    if loaded is None:
        return {}, None
    if engine.process.rank == 0:
        print(f"continues after step {loaded.step} from {loaded.path}, saved by {loaded.saved_world_size} ranks")
    stream.load_state_dict(loaded.data_state)
    return (loaded.extra or {}) | {"first_step": engine.global_steps}, loaded


def run_examples(
    config: Config,
    *,
    engine: Engine,
    examples: ExampleStream,
    train_step: Callable[[Step], Measured],
    evaluate: Callable[[], dict[str, float]],
    stream: Steps | None = None,
    begin: Callable[[checkpoint.LoadReport | None], None] = lambda loaded: None,
    state: Callable[[], Mapping[str, Any]] = dict,
    describe: Callable[[Mapping[str, float], Mapping[str, float]], list[str]] | None = None,
    parameters: int | None = None,
) -> dict[str, float]:
    """Continues from `checkpoint.resume`, trains, evaluates before and after, and closes the engine. Returns the last evaluation.

    stream: defaults to `examples`. begin: called with the report of a loaded checkpoint, or None. state: the same as in `train`. describe:
    returns lines about both evaluations, `changes` by default. parameters: the same as in `build_reporter`.
    """
    past, loaded = resume(config, engine=engine, stream=examples)
    begin(loaded)
    with build_reporter(config, engine=engine, past=past, parameters=parameters) as reporter:
        reporter.say(lengths_of(examples.examples, step=config.train.global_batch_size))
        before = evaluate()
        train(
            config,
            engine=engine,
            stream=stream or examples,
            reporter=reporter,
            train_step=train_step,
            evaluate=evaluate,
            best=Best.of(config, loaded=loaded),
            state=state,
        )
        after = evaluate()
        reporter.finish(**after)
        for line in (describe or changes)(before, after):
            reporter.say(line)
    engine.close()
    return after


def changes(before: Mapping[str, float], after: Mapping[str, float], *, unit: str = "") -> list[str]:
    """Describes every value of the evaluations."""
    return [
        f"{name.replace('_', ' ')}: {before[name]:.4f} before, {value:.4f} after{unit}" for name, value in after.items()
    ]


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
    """Runs optimizer steps up to `train.steps`, with evaluations and checkpoints, or until `train.patience` ends the run.

    state: returns the content of a checkpoint in addition to the position of the stream. Raises Interrupted as `Loop.run`.
    """

    def run_step(number: int) -> Tensor:
        step = stream.next_step()
        seed_dropout(config, process=engine.process, step=number)
        found = train_step(step)
        loop.tokens, loop.row_values = step.num_tokens, partial(means, found.sums, step=step, engine=engine)
        return found.loss

    with open_saver(config, engine=engine) as saver:
        loop = Loop(
            engine,
            train_step=run_step,
            steps=config.train.steps,
            evaluate=evaluate,
            eval_every=config.train.eval_every or 0,
            reporter=reporter,
            saver=saver,
            saves=partial(is_saved, config),
            metric=best.metric if config.checkpoint.keep_best else None,
            state=lambda: {**stream.state_dict(), **state(), "best": best.state_dict()},
            callbacks=[best],
            grace_seconds=config.checkpoint.grace_seconds,
        )
        if (ended_by := loop.run()) is not None:
            reporter.say(f"ends after step {loop.step}: {ended_by}")


def means(sums: Mapping[str, Tensor], *, step: Step, engine: Engine) -> dict[str, float]:
    """Returns the means over all ranks' examples. A collective call."""
    if not sums:
        return {}
    own = torch.stack([value.detach().double() for value in sums.values()])
    totals = engine.process.mesh.gather_scalars(own, label="examples").sum(0) / step.num_examples
    return dict(zip(sums, totals.tolist(), strict=True))


class PairForward(Protocol):
    """Prepares the forward of a micro-batch: its layout, and a function from the model to its part of the step's loss and to sums over its
    pairs.
    """

    def __call__(self, step: Step, index: int) -> tuple[Layout, Callable[[Any], tuple[Tensor, dict[str, Tensor]]]]: ...


def train_pairs(engine: Engine, *, step: Step, forward: PairForward) -> Measured:
    """Runs one optimizer step."""
    sums: list[dict[str, Tensor]] = []
    loss = engine.train_batch(_pair_batches(step, forward=forward, sums=sums, counts_loss=False))
    return Measured(loss=loss, sums=_added(sums, engine=engine))


def evaluate_pairs(engine: Engine, *, stream: ExampleStream, forward: PairForward) -> dict[str, float]:
    """Returns the loss over held-out pairs as `validation_loss`, and the means of the sums of `forward`; empty if there are none.

    A collective call.
    """
    step = stream.held_out()
    if step is None:
        return {}
    sums: list[dict[str, Tensor]] = []
    with engine.evaluating():
        engine.compute(_pair_batches(step, forward=forward, sums=sums, counts_loss=True))
    found = means(_added(sums, engine=engine), step=step, engine=engine)
    return {f"validation_{name}": value for name, value in found.items()}


def _pair_batches(
    step: Step, *, forward: PairForward, sums: list[dict[str, Tensor]], counts_loss: bool
) -> Iterator[MicroBatch]:
    """Yields the forwards of a step, which add to `sums` on ranks that compute losses. counts_loss: the loss is one of the sums."""
    for index, batch in enumerate(step.micro_batches):
        layout, losses = forward(step, index)

        def loss_of(model: Any, losses=losses, batch=batch) -> Tensor:
            loss, found = losses(model)
            found = {"loss": loss * step.num_examples} | found if counts_loss else found
            sums.append(_counted(found, is_filler=batch.is_filler))
            return loss * (0 if batch.is_filler else step.parts)  # compensates for the engine's division

        yield layout.micro_batch(loss_of, token_weight=step.token_weight(batch))


def _counted(sums: Mapping[str, Tensor], *, is_filler: bool) -> dict[str, Tensor]:
    return {name: torch.zeros_like(value) if is_filler else value.detach() for name, value in sums.items()}


def _added(parts: list[dict[str, Tensor]], *, engine: Engine) -> dict[str, Tensor]:
    """Adds up the micro-batches' sums. In a pipeline, ranks without losses get zeros of the same names. A collective call there."""
    own = {name: torch.stack([part[name] for part in parts]).sum() for name in (parts[0] if parts else ())}
    stages = engine.process.mesh.comm("pp")
    if stages.size == 1:
        return own
    nothing = torch.zeros((), device=engine.process.device)
    return {name: own.get(name, nothing) for name in stages.gather_objects(list(own))[-1]}
