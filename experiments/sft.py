"""Supervised fine-tuning on the answers of records, with prompts masked: the program of every rank of `task=sft`."""

from functools import partial

from torch import Tensor

from ztk.config import Config
from ztk.core.runtime import Process
from ztk.experiments.alignment import Measured, changes, open_stream, run_examples, start_from
from ztk.experiments.examples import ExampleStream, Step
from ztk.experiments.packing import packs_examples
from ztk.experiments.pretrain import build_engine
from ztk.experiments.ranks import started
from ztk.parallel.pipeline import MicroBatch
from ztk.train.engine import Engine


def main(config: Config) -> None:
    """Runs one rank from start to end. Raises ValueError for a configuration that does not fit the model, the data or the ranks."""
    with started(config) as process:
        run(config, process=process)


def run(config: Config, *, process: Process) -> dict[str, float]:
    """Builds, trains and evaluates. Returns the result of the last evaluation."""
    stream = open_stream(config, process=process)
    engine = build_engine(config, process=process)
    start_from(config, engine=engine)
    stream.packs = packs_examples(config, policy=engine)
    return run_examples(
        config,
        engine=engine,
        examples=stream,
        train_step=lambda step: Measured(loss=engine.train_batch(micro_batches(step, engine=engine))),
        evaluate=lambda: evaluate(engine, stream=stream),
        describe=partial(changes, unit=" (nats per answer token)"),
    )


def evaluate(engine: Engine, *, stream: ExampleStream) -> dict[str, float]:
    """Returns the masked loss over all held-out texts, the same number on every rank; empty if there are none."""
    step = stream.held_out()
    if step is None:
        return {}
    loss: Tensor = engine.eval_batch(micro_batches(step, engine=engine))
    return {"validation_loss": engine.comm.gather_scalars(loss.double().view(1), label="validation loss").mean().item()}


def micro_batches(step: Step, *, engine: Engine) -> list[MicroBatch]:
    """Returns tokens, targets and weights with which the mean over micro-batches and ranks is the mean over the step's answer tokens."""
    batches = []
    for batch in step.micro_batches:
        counted = 0 if batch.is_filler else int(batch.sequences.answer.sum())
        layout = step.layout(batch, module=engine.module, device=engine.process.device)
        documents = () if layout.documents is None else (layout.documents,)
        args = (layout.tokens, layout.targets(step.mask(batch)), *documents)
        weights = {"weight": counted * step.parts / step.num_answer_tokens, "token_weight": step.token_weight(batch)}
        batches.append(MicroBatch(args=args, **weights))
    return batches
