"""Trains a decoder on text, as bytes or a tokenizer's tokens: the program of every rank of `python run.py`.

This program does not depend on where parameters, gradients and optimizer states are stored. `parallelize` handles `zero=` and `offload=`.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ztk import checkpoint
from ztk.config import Config, check_resumed, is_own, to_yaml
from ztk.core.policies.model import LoraPolicy
from ztk.core.policies.runs import AUTO
from ztk.core.policies.train import Evaluated
from ztk.core.policies.utilization import Work
from ztk.core.runtime import Process
from ztk.core.runtime.part import InitialValues
from ztk.core.runtime.seed import generator, kept_generators
from ztk.data import Batch, ByteTokenizer, Stream, TokenCorpus
from ztk.experiments import policies
from ztk.experiments.limits import Limits
from ztk.experiments.ranks import seed_dropout, started
from ztk.experiments.streams import Corpus, held_out_sequences, model_call, open_corpus, open_data
from ztk.experiments.user_objects import add_loss, own_callbacks, own_logits, own_model
from ztk.experiments.work import step_work
from ztk.hf.causal import open_causal
from ztk.nn import Decoder, initial_values
from ztk.nn.lora import adapter_values, add_adapters
from ztk.parallel.apply import parallelize
from ztk.parallel.pipeline import MicroBatch, PipelineModule
from ztk.report import Gauges, Reporter, RunFolder
from ztk.train.engine import Engine
from ztk.train.loop import Loop

SAMPLE_BYTES = 160
PROMPT_BYTES = 48
SAMPLE_TOKENS = 48
PROMPT_TOKENS = 16
SAMPLE_TEMPERATURE = 0.8


def main(config: Config) -> None:
    """Runs one rank from start to end. Raises ValueError for a configuration that does not fit the model, the data or the ranks."""
    with started(config) as process:
        run(config, process=process)


def run(config: Config, *, process: Process) -> None:
    """Builds, trains and evaluates."""
    corpus = open_corpus(config, process=process)
    stream, held_out = open_data(config, corpus=corpus, process=process)
    engine = build_engine(config, process=process)
    past = resume(config, engine=engine, stream=stream)
    limits = Limits(config.train, engine=engine)
    first_loss = None
    if past and held_out and config.train.until_loss is not None:
        with evaluated_weights(config, engine=engine):
            first_loss = evaluate(engine, batches=held_out)
    is_done = limits.is_reached(first_loss)  # already reached by the continued run
    steps = engine.global_steps if is_done else config.train.steps
    work = step_work(config, process=process, build=lambda config: build_model(config)[0])
    with build_reporter(config, engine=engine, past=past, total_steps=steps, work=work) as reporter:
        if isinstance(corpus, TokenCorpus):
            reporter.say("\n".join(corpus.describe()))
        with open_saver(config, engine=engine) as saver:

            def run_step(step: int) -> Tensor:
                if saver is not None and config.checkpoint.every:
                    loop.row_values = lambda: {"checkpoint.stall_seconds": saver.stall_seconds}
                return train_step(config, step, engine=engine, stream=stream)

            loop = Loop(
                engine,
                train_step=run_step,
                steps=steps,
                tokens=config.train.global_batch_size * (config.data.seq_len or 1),
                evaluate=partial(evaluate_weights, config, engine=engine, batches=held_out, reporter=reporter)
                if held_out
                else None,
                eval_every=config.train.eval_every or 0,
                reporter=reporter,
                saver=saver,
                saves=partial(is_saved, config),
                metric=finite_loss if config.checkpoint.keep_best else None,
                state=stream.state_dict,
                callbacks=[limits, *own_callbacks(config)],
                grace_seconds=config.checkpoint.grace_seconds,
            )
            ended_by = loop.run() or limits.reason(over=False, reached=is_done)
            if saver is not None and saver.is_saving:
                reporter.say(f"writes the checkpoint of step {engine.global_steps}")
        loss = loop.evaluate() if held_out else None
        with evaluated_weights(config, engine=engine):
            finish(config, engine=engine, corpus=corpus, loss=loss, reporter=reporter, ended_by=ended_by)
    engine.close()


def build_engine(config: Config, *, process: Process) -> Engine:
    """Builds the model on the meta device and the engine. Every rank fills only its own part."""
    model, first_values = build_model(config)
    common = {
        "process": process,
        **policies.optimizer_of(config, model=model),
        "lr_table": policies.learning_rates(config),
        "precision": policies.precision_policy(config),
        "recompute": policies.recompute_policy(config),
        "accumulation_steps": config.train.accumulation_steps,
        "initial_values": first_values,
    }
    if config.zero.engine != "ztk":
        from ztk.train.engine.peers import parallelize_peer  # imported late: FSDP2's imports take a second

        return parallelize_peer(model, kind=config.zero.engine, **common)
    return parallelize(
        model,
        zero=policies.zero_policy(config),
        offload=policies.offload_policy(config),
        tensor=policies.tensor_policy(config),
        pipeline=policies.pipeline_policy(config),
        ema=policies.ema_policy(config),
        **common,
    )


def build_model(config: Config, *, has_adapters: bool = True) -> tuple[nn.Module, InitialValues | None]:
    """Returns ztk's decoder or a transformers model without memory, with its initial values by name and range.

    A model of the user's has its values already, so None is returned for them. has_adapters: with False, omits the adapters of `lora`.
    """
    if is_own(config, section="model"):
        model, values = own_model(config), None
        model.takes_batches = not isinstance(model, PipelineModule)  # which takes inputs and labels
    else:
        model, values = _named_model(config, has_adapters=has_adapters)
    add_loss(config, model=model)
    return model, values


def _named_model(config: Config, *, has_adapters: bool) -> tuple[nn.Module, InitialValues]:
    given = config.model
    lora = policies.lora_policy(config) if has_adapters else None
    if given.path is not None and given.init is not None:
        options = {"lora": lora, "kernels": bool(given.kernels), "z_loss": config.train.z_loss or 0.0}
        return open_causal(given.path, init=given.init.value, seed=config.train.seed, **options)
    with torch.device("meta"):
        model = Decoder(policies.decoder_config(config))
    model.loss.z_loss = config.train.z_loss or 0.0
    return adapted(
        model, lora=lora, values=partial(initial_values, model, seed=config.train.seed), seed=config.train.seed
    )


def adapted(
    model: nn.Module, *, lora: LoraPolicy | None, values: InitialValues, seed: int
) -> tuple[nn.Module, InitialValues]:
    """Returns `model`, frozen and with new adapters if `lora` is set, and its initial values."""
    if lora is None:
        return model, values
    add_adapters(model, policy=lora, base="")
    return model, adapter_values(values, model=model, seed=seed)


def resume(config: Config, *, engine: Engine, stream: Stream) -> dict[str, Any]:
    """Restores engine and stream from `checkpoint.resume`. Returns the reporter's state."""
    loaded = load_past(config, engine=engine)
    if loaded is None:
        return {}
    if engine.process.rank == 0:
        print(f"continues after step {loaded.step} from {loaded.path}, saved by {loaded.saved_world_size} ranks")
        print("".join(f"{note}\n" for note in loaded.notes), end="")
    if loaded.data_state is not None:  # an imported checkpoint has no position in this text: start at the beginning
        with kept_generators():  # a stream may draw from those that were just restored
            stream.load_state_dict(loaded.data_state)
    return (loaded.extra or {}) | {"first_step": engine.global_steps}


def load_past(config: Config, *, engine: Engine) -> checkpoint.LoadReport | None:
    """Loads the checkpoint from which the run continues. Returns None if it starts from the beginning.

    A run that began from another run's checkpoint, or with an elastic launch, continues from its own newest one as soon as there is one.
    """
    given, own = config.checkpoint.resume, RunFolder(config.output_dir)
    given = None if given == AUTO else given
    goes_back = given is not None and Path(given).is_relative_to(own.path)
    if not goes_back and (config.checkpoint.resume is not None or config.launch.elastic):
        loaded = checkpoint.load_newest(
            engine,
            folder=own.checkpoints,
            check_older=lambda step: check_resumed(config, given=str(step)),
            local=bool(config.checkpoint.local),
        )
        if loaded is not None:
            return loaded
    return None if given is None else checkpoint.load(engine, path=given, local=bool(config.checkpoint.local))


def train_step(config: Config, step: int, *, engine: Engine, stream: Stream) -> Tensor:
    """Runs optimizer step `step`. Returns this replica's mean loss over its micro-batches, on the device."""
    seed_dropout(config, process=engine.process, step=step)
    batches = (stream.next_batch() for _ in range(engine.accumulation_steps))
    return engine.train_batch(micro_batch(batch, engine=engine) for batch in batches)


def evaluate(engine: Engine, *, batches: Iterable[Batch]) -> float:
    """Returns the mean loss over all replicas' batches, the same number on every rank."""
    loss = engine.eval_batch(micro_batch(batch, engine=engine) for batch in batches)
    return engine.comm.gather_scalars(loss.double().view(1), label="validation loss").mean().item()


def finite_loss(values: Mapping[str, Any]) -> float | None:
    """Returns the validation loss of a row, or None if it is not finite."""
    loss = values["validation_loss"]
    return loss if math.isfinite(loss) else None


def evaluate_weights(config: Config, *, engine: Engine, batches: Sequence[Batch], reporter: Reporter) -> float:
    """Runs `evaluate` with the weights of `train.evaluate`. The reporter shows its progress."""
    with evaluated_weights(config, engine=engine):
        return evaluate(engine, batches=reporter.follow(batches, work="held-out loss: {} batches"))


def evaluated_weights(config: Config, *, engine: Engine) -> AbstractContextManager[None]:
    """Switches to the weights of `train.evaluate` inside the context. A collective call."""
    return engine.averaged() if config.train.evaluate is Evaluated.ema else nullcontext()


def micro_batch(batch: Any, *, engine: Engine) -> MicroBatch:
    """Returns the arguments of the engine's model for a batch of the stream."""
    return model_call(batch, takes_batches=getattr(engine.module, "takes_batches", False), device=engine.process.device)


def finish(
    config: Config,
    *,
    engine: Engine,
    corpus: Corpus | None,
    loss: float | None,
    reporter: Reporter,
    ended_by: str,
) -> None:
    """Writes the summary with the last validation loss, and prints a text sample.

    Synthetic tokens have neither a text nor anything to learn, and `train.quick` skips both.
    """
    if config.train.quick or (corpus is None and loss is None):
        reporter.finish(ended_by=ended_by)
        return
    if corpus is None:
        reporter.finish(validation_loss=loss, ended_by=ended_by)
        reporter.say(f"held-out loss {loss:.4f}")
        return
    if isinstance(corpus, TokenCorpus):
        finish_tokens(config, engine=engine, corpus=corpus, loss=loss, reporter=reporter, ended_by=ended_by)
        return
    entropy = corpus.bigram_entropy()
    measured = {} if loss is None else {"validation_loss": loss}
    text = draw_text(
        config,
        engine=engine,
        prompt=corpus.validation[:PROMPT_BYTES],
        num_tokens=SAMPLE_BYTES,
        tokenizer=ByteTokenizer(),
        reporter=reporter,
    )
    reporter.finish(**measured, bigram_entropy=entropy, sample=text, ended_by=ended_by)
    if text is not None:
        reporter.say(f"a sample, from {PROMPT_BYTES} held-out bytes on:\n{text}\n")
    if loss is not None:
        comparison = "below" if measured["validation_loss"] < entropy else "not below"
        reporter.say(
            f"held-out loss {measured['validation_loss']:.4f} nats per byte, {comparison} the text's own byte-bigram "
            f"entropy {entropy:.4f}"
        )


def finish_tokens(
    config: Config,
    *,
    engine: Engine,
    corpus: TokenCorpus,
    loss: float | None,
    reporter: Reporter,
    ended_by: str,
) -> None:
    """Like `finish`, for documents: bits per byte instead of the bytes' entropy, because the loss is per token."""
    measured: dict[str, float] = {"skipped_records": corpus.skipped}
    if loss is not None:
        size = corpus.bytes_per_token(seq_len=config.data.seq_len, num_sequences=held_out_sequences(config))
        measured |= {"validation_loss": loss, "validation_bits_per_byte": loss / math.log(2) / size}
    part = corpus.parts[0]
    prompt = (part.held_out if len(part.held_out) else part.train)[:PROMPT_TOKENS]
    text = draw_text(
        config,
        engine=engine,
        prompt=prompt,
        num_tokens=SAMPLE_TOKENS,
        tokenizer=corpus.tokenizer,
        reporter=reporter,
    )
    reporter.finish(**measured, sample=text, ended_by=ended_by)
    if text is not None:
        reporter.say(f"a sample, from {PROMPT_TOKENS} tokens on:\n{text}\n")
    if loss is not None:
        reporter.say(
            f"held-out loss {measured['validation_loss']:.4f} nats per token, {measured['validation_bits_per_byte']:.4f} bits per byte"
        )


def draw_text(
    config: Config, *, engine: Engine, prompt: Tensor, num_tokens: int, tokenizer: Any, reporter: Reporter
) -> str | None:
    """Returns a text that the model continues, or None if a user's model has no logits. prompt: tokens [T]. A collective call."""
    logits_of = engine if not is_own(config, section="model") else own_logits(engine, vocab_size=tokenizer.vocab_size)
    if logits_of is None:
        return None
    with engine.evaluating():
        draws = torch.rand(num_tokens, generator=generator(config.train.seed, "sample"), dtype=torch.float64)
        tokens = continued(
            lambda tokens: logits_of(tokens.to(engine.process.device))[..., : tokenizer.vocab_size],
            prompt=prompt.long(),
            draws=reporter.follow(draws.tolist(), work="a sample of text: {} tokens"),
            max_seq_len=config.data.seq_len,
        )
    return printable(tokenizer.decode(tokens))


@torch.no_grad()
def continued(
    logits_of: Callable[[Tensor], Tensor], *, prompt: Tensor, draws: Iterable[float], max_seq_len: int
) -> Tensor:
    """Returns `prompt`, int64 [T], and a token per draw. A forward per token, so that models that ranks share and own models have a sample.

    logits_of: tokens [1, T] of the last `max_seq_len` to logits [1, T, V]. draws: numbers in [0, 1), equal on all ranks.
    """
    tokens = prompt
    for draw in draws:
        logits = logits_of(tokens[-max_seq_len:].unsqueeze(0))[0, -1].double().cpu()
        cumulative = torch.softmax(logits / SAMPLE_TEMPERATURE, dim=-1).cumsum(dim=-1)
        token = torch.searchsorted(cumulative, draw * cumulative[-1:], right=True).clamp(max=len(logits) - 1)
        tokens = torch.cat([tokens, token])
    return tokens


def printable(text: str) -> str:
    """Removes control characters, which would move a terminal's cursor."""
    return "".join(letter if letter.isprintable() or letter in "\n\t" else "\ufffd" for letter in text)


def is_saved(config: Config, step: int, ends: bool = False) -> bool:
    """Returns whether to save `step`. ends: the run ends after it for another reason than `train.steps`."""
    every, last = config.checkpoint.every, config.checkpoint.last
    return bool((every and (ends or step % every == 0)) or (last and (ends or step == config.train.steps)))


def open_saver(config: Config, *, engine: Engine) -> AbstractContextManager[checkpoint.Saver | None]:
    """Returns a saver for the steps of `is_saved`, below the run folder. Leaving it waits for a background save."""
    if not config.checkpoint.saves:
        return nullcontext()
    return checkpoint.Saver(
        engine,
        folder=RunFolder(config.output_dir).checkpoints,
        retention=checkpoint.Retention(
            keep=config.checkpoint.keep or 2,
            keep_every=config.checkpoint.keep_every or 0,
            keep_best=bool(config.checkpoint.keep_best),
        ),
        asynchronous=bool(config.checkpoint.asynchronous),
        trained_only=policies.trained_only(config),
        local=bool(config.checkpoint.local),
        timeout_seconds=config.launch.save_seconds or config.launch.timeout_seconds,
        record=to_yaml(config),
    )


def parameter_count(model: Any) -> int | None:
    """Returns the number of parameters of the full model, or None if it has no `full_parameter_count`."""
    if isinstance(model, Decoder):
        return model.config.parameter_count()
    counted = getattr(model, "full_parameter_count", None)
    return None if counted is None else int(counted() if callable(counted) else counted)


def build_reporter(
    config: Config,
    *,
    engine: Engine,
    past: dict[str, Any],
    parameters: int | None = None,
    total_steps: int | None = None,
    work: Work | None = None,
) -> Reporter:
    """Builds the reporter. parameters: number of the full model's, by default of the engine's module. total_steps: defaults to
    `train.steps`. work: see `Reporter`.
    """
    process, given = engine.process, getattr(engine, "script_optimizer", None)  # the peers' engines have none
    return Reporter(
        policies.report_policy(config, total_steps=total_steps),
        comm=engine.comm,
        gauges=Gauges(
            memory=engine.memory,
            comm=engine.process.mesh.counters,
            clock=engine.clock,
            io=engine.io,
            device=process.device,
        ),
        parameters=parameters or parameter_count(engine.module) or engine.num_parameters,
        module=engine.module,
        work=work,
        acted={f"optimizer.{key}": value for key, value in given.describe().items()} if given else None,
        **past,
    )
