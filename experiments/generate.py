"""Answers the prompts of a file: the program of `python run.py task=generate`.

`completions.jsonl` in the run folder has one line per prompt, in the file's order. `answering` opens the inference engine of this task,
`task=serve` and `task=eval`.
"""

import json
import os
import shutil
import signal
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ztk import checkpoint, kernels
from ztk.config import Config
from ztk.core.policies.inference import SamplingConfig
from ztk.core.policies.key import policy_of
from ztk.core.policies.runs import streams_layers
from ztk.core.policies.tier import Tier
from ztk.core.runtime.comm import Comm
from ztk.data.lines import parse_line
from ztk.experiments.ranks import started
from ztk.inference import Completion, Generator, InferencePolicy, Packed, SamplingParams, perplexity
from ztk.inference.packed import MANIFEST
from ztk.nn.low_rank import Adapter
from ztk.report import RunFolder
from ztk.report.folder import PACKED
from ztk.serve.models import Opened, checkpoint_of
from ztk.serve.packing import calibration_tokens, open_streamed, opened_unread
from ztk.serve.text import TextStream
from ztk.serve.weights import Expected
from ztk.zero.offload import OffloadPolicy

_HELD_OUT_TOKENS = 2048
_USUAL_WINDOW = 2048  # most tokens per sequence in task=eval if eval.seq_len is not set
_PROMPT = {"prompt": "\n"}  # without a file
# Keys of a line that affect sampling. `stop` has stop texts.
_KEYS = {field.name for field in fields(SamplingConfig)} | {"logit_bias", "stop_token_ids"}
_ADAPTER = "adapter"  # the key of a line that names one of inference.adapters
_TEXTS = ("prompt", "messages", "tokens")
# Keys of other programs, which have no effect here.
_OTHERS = (
    *(
        "max_completion_tokens",
        "max_new_tokens",
        "max_gen_toks",
        "do_sample",
        "num_beams",
        "length_penalty",
        "ignore_eos",
    ),
    *("stop_sequences", "until", "top_logprobs", "best_of", "echo", "suffix", "stream"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """A prompt of the file. line: its number. given: its object. stops: texts that end its answers. adapter: its name, or None for the
    base model.
    """

    line: int
    given: dict[str, Any]
    tokens: list[int]
    sampling: SamplingParams
    stops: tuple[str, ...] = ()
    adapter: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class BadLine:
    """An invalid line, which gets no answer. given: its object, or its text as `line` if it is not an object."""

    line: int
    given: dict[str, Any]
    error: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """Perplexity of held-out text with the weights as stored, and in the chosen format."""

    stored: float
    chosen: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Answering:
    """An opened model. stored: perplexity of `inference.held_out` with the weights as stored, if layers stream: it must then be measured
    before the model is opened.
    """

    opened: Opened
    generator: Generator
    stored: float | None = None


def main(config: Config) -> None:
    """Answers all prompts. All ranks take part, and the first one writes the answers with the totals.

    Raises:
        ValueError: a model that cannot be run, or a file in which no line has an answer.
    """
    with answering(config) as leading:
        if leading is not None:
            answer(config, answering=leading)


def answer(config: Config, *, answering: Answering) -> None:
    """Answers all prompts and writes them with the totals. Raises as `main`."""
    opened, generator = answering.opened, answering.generator
    cost = cost_of_weights(config, answering=answering)
    release_module(opened)
    lines = read_prompts(config.inference.prompts, opened=opened, config=config, generator=generator)
    prompts = [line for line in lines if isinstance(line, Prompt)]
    started = time.perf_counter()
    answers = generator.generate(
        [prompt.tokens for prompt in prompts],
        sampling=[prompt.sampling for prompt in prompts],
        adapters=[prompt.adapter for prompt in prompts],
    )
    seconds = time.perf_counter() - started
    folder, found, step = RunFolder(config.output_dir), iter(answers), checkpoint_of(config.inference.model)
    records = [
        record(line, answers=next(found), opened=opened)
        if isinstance(line, Prompt)
        else line.given | {"error": line.error}
        for line in lines
    ]
    text = "".join(json.dumps(written, ensure_ascii=False) + "\n" for written in records)
    (folder.path / "completions.jsonl").write_text(text, encoding="utf-8")
    failed = [
        f"line {line.line}: {written['error']}"
        for line, written in zip(lines, records, strict=True)
        if "answers" not in written
    ]
    drawn = sum(len(answer.tokens) for found in answers for answer in found)
    folder.write_summary(
        {
            "status": "done",
            "error": None,
            "steps": 0,
            "checkpoint": None if step is None else str(step),
            "prompts": len(lines),
            "failed_prompts": len(failed),
            "prompt_tokens": sum(len(prompt.tokens) for prompt in prompts),
            "reused_tokens": generator.reused_tokens,
            "generated_tokens": drawn,
            "seconds": seconds,
            "tokens_per_second": drawn / seconds,
            "weight_bytes": generator.weight_bytes,
            **_plan_of(generator),
            **({} if cost is None else {"perplexity_stored": cost.stored, "perplexity": cost.chosen}),
        }
    )
    if len(failed) == len(records):
        raise ValueError(f"inference.prompts={config.inference.prompts}: no prompt has an answer; {failed[0]}")
    if failed:
        print(f"{len(failed)} of {len(lines)} prompts have an error instead of answers, the first: {failed[0]}")
    if config.inference.prompts is None:
        print(f"{records[0]['answers'][0]['text']}\n(inference.prompts=FILE.jsonl answers the prompts of a file)")
    if step is not None:
        print(f"weights of {step}")
    print(
        f"{len(prompts)} prompts, {drawn} tokens in {seconds:.1f} s, {drawn / seconds:.1f} tokens/s: {folder.path / 'completions.jsonl'}"
    )


def _plan_of(generator: Generator) -> dict[str, float]:
    """Returns the plan of streamed layers, and the bytes that were read."""
    plan = generator.plan
    if plan is None:
        return {}
    return {
        "resident_layers": plan.resident,
        "planned_sequences": plan.sequences,
        "planned_tokens_per_second": plan.tokens_per_second,
        "pass_bytes": plan.pass_bytes,
        "streamed_bytes": generator.streamed_bytes,
    }


def read_prompts(path: str | None, *, opened: Opened, config: Config, generator: Generator) -> list[Prompt | BadLine]:
    """Reads the file's non-empty lines; one prompt without a file. Tokens without a text are never sampled.

    Raises:
        ValueError: a file without a line, or one that cannot be read.
    """
    try:
        lines = [json.dumps(_PROMPT).encode()] if path is None else Path(path).read_bytes().split(b"\n")
    except OSError as error:
        raise ValueError(f"inference.prompts={path}: cannot be read ({error}); name another file") from None
    mask, size = None, generator.description.vocab_size
    if opened.vocabulary < size:
        allowed = torch.arange(size) < opened.vocabulary
        mask = lambda answer: allowed  # noqa: E731
    usual = replace(usual_sampling(config), token_mask=mask)
    found = [
        _read(line, number=number, usual=usual, config=config, opened=opened, generator=generator)
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not found:
        raise ValueError(f'inference.prompts={path}: has no prompt; a line is {{"prompt": "text"}}')
    return found


def _read(
    line: bytes, *, number: int, usual: SamplingParams, config: Config, opened: Opened, generator: Generator
) -> Prompt | BadLine:
    given: dict[str, Any] = {"line": line.decode(errors="replace").strip()}
    try:
        given = _object(line)
        tokens, stops = _tokens(given, opened=opened), _stops(given.get("stop") or config.sampling.stop or ())
        # A stop text that is a special token ends the answer when it is sampled.
        ends = (*opened.ends, *(token for token, text in opened.tokenizer.special.items() if text in stops))
        own = _own(given, ends=ends)
        if "max_tokens" not in own:
            own["max_tokens"] = _rest_of_context(tokens, most=config.sampling.max_tokens, generator=generator)
        sampling = replace(usual, draw_key=(number,), **own)
        generator.check(tokens, sampling=sampling)
        adapter = given.get(_ADAPTER)
        if adapter is not None and adapter not in generator.adapters:
            has = ", ".join(generator.adapters) or "none"
            raise ValueError(f"adapter={adapter!r}: inference.adapters has {has}; name one of them, or leave it out")
    except (ValueError, TypeError) as error:
        return BadLine(line=number, given=given, error=str(error))
    return Prompt(line=number, given=given, tokens=tokens, sampling=sampling, stops=stops, adapter=adapter)


def _object(line: bytes) -> dict[str, Any]:
    given = parse_line(line)
    if not isinstance(given, dict):
        raise ValueError('must be a JSON object, such as {"prompt": "text"}')
    for name in given.keys() - _KEYS:
        if name in _OTHERS:
            raise ValueError(f"{name} has no effect here: leave it out, or use {', '.join(sorted(_KEYS))}")
        if name in (*_TEXTS, _ADAPTER):
            continue
        if near := get_close_matches(name, [*_KEYS, *_TEXTS, _ADAPTER], n=1, cutoff=0.82):
            raise ValueError(f"{name} is no key of a prompt: write {near[0]}, or give a field of your own another name")
    return given


def _tokens(given: dict[str, Any], *, opened: Opened) -> list[int]:
    if isinstance(tokens := given.get("tokens"), list):
        return tokens
    if (messages := given.get("messages")) is not None and "prompt" not in given:
        if not isinstance(messages, list) or not messages or not all(isinstance(entry, dict) for entry in messages):
            raise ValueError(f'"messages": {messages!r} must be a list of messages, {{"role": ..., "content": ...}}')
        return opened.tokenizer.chat(messages)
    if not isinstance(prompt := given.get("prompt"), str):
        raise ValueError('has neither a text "prompt" nor a list "messages" or "tokens"; a line is {"prompt": "text"}')
    return opened.tokenizer.encode(prompt)


def _stops(given: Any) -> tuple[str, ...]:
    found = [given] if isinstance(given, str) else list(given)
    if not all(isinstance(stop, str) and stop for stop in found):
        raise ValueError(f"stop={given!r}: must be a text or a list of texts")
    return tuple(found)


def _own(given: dict[str, Any], *, ends: tuple[int, ...]) -> dict[str, Any]:
    """Returns the line's own sampling. ends: tokens that end every answer."""
    own = {name: value for name, value in given.items() if name in _KEYS - {"stop"} and value is not None}
    if "logit_bias" in own:  # JSON keys are strings
        if not isinstance(own["logit_bias"], dict):
            raise ValueError('logit_bias must map token ids to numbers, as in {"50256": -100}')
        own["logit_bias"] = {int(token): float(value) for token, value in own["logit_bias"].items()}
    return own | {"stop_token_ids": (*ends, *own.get("stop_token_ids", ()))}


def _rest_of_context(tokens: list[int], *, most: int | None, generator: Generator) -> int:
    """Returns the longest answer for which context and memory have room, at most `most` tokens. Raises ValueError if there is none."""

    def check(limit: int) -> None:
        generator.check(tokens, sampling=SamplingParams(max_tokens=limit))

    check(1)
    rest = max(1, generator.max_len - len(tokens))
    least, most = 1, rest if most is None else min(rest, most)
    while least < most:
        middle = (least + most + 1) // 2
        try:
            check(middle)
        except ValueError:
            most = middle - 1
        else:
            least = middle
    return least


def record(prompt: Prompt, *, answers: list[Completion], opened: Opened) -> dict[str, Any]:
    """Returns the original line with its answers, or with its error."""
    if errors := [answer.error for answer in answers if answer.error is not None]:
        return prompt.given | {"error": errors[0]}
    written = []
    for answer in answers:
        stream = TextStream(opened.tokenizer, stops=prompt.stops, prompt=prompt.tokens)
        kept = answer.tokens[:-1] if answer.finish_reason == "stop" else answer.tokens
        text = "".join(stream.push(token) for token in kept) + stream.finish()
        reason = "stop" if stream.stopped else answer.finish_reason
        line: dict[str, Any] = {
            "text": text,
            "tokens": answer.tokens,
            "finish_reason": reason,
            "logprobs": answer.logprobs.tolist(),
        }
        if answer.top_logprobs is not None:
            line["top_logprobs"] = answer.top_logprobs
        written.append(line)
    return prompt.given | {"answers": written}


@contextmanager
def answering(config: Config) -> Iterator[Answering | None]:
    """Yields `open_answering` on the rank that answers.

    On other ranks that share the model, yields None after the answering rank has finished.

    After an error no rank waits for the others, because the launcher stops all ranks.

    Raises:
        ValueError: as `open_answering`.
    """
    if config.topology.tensor == 1:
        kernels.set_backend(config.kernels.backend)
        stored = _streamed_perplexity(config)
        opened, generator = open_answering(config)
        yield Answering(opened=opened, generator=generator, stored=stored)
        return
    path, ema = config.inference.model, bool(config.inference.ema)
    with started(config) as process, opened_unread(path, ema=ema) as opened:
        comm = process.mesh.comm("tp")
        stored = _shared_perplexity(config, opened=opened, comm=comm)
        expected = expected_of(config, opened=opened)
        options = {"adapters": _adapters(config), "open_weights": expected and expected.opened}
        generator = Generator(opened.module, policy=_calibrated(config, opened=opened), comm=comm, **options)
        if streams_layers(config) and config.offload.nvme_path is None:
            with suppress(OSError):  # another rank's part still exists
                os.rmdir(_packed_folder(config))
        if generator.leads and generator.plan is not None:
            print(generator.plan, flush=True)
        if generator.follows:
            release_module(opened)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the answering rank determines the end
            generator.follow()
            yield None
            return
        yield Answering(opened=opened, generator=generator, stored=stored)
        generator.close()


def expected_of(config: Config, *, opened: Opened) -> Expected | None:
    """Returns the parameters of new weights with serve.weights_path, before the module is released. Raises ValueError as `Expected.of`."""
    return None if config.serve.weights_path is None else Expected.of(opened)


def open_answering(config: Config) -> tuple[Opened, Generator]:
    """Opens the model of `inference.model` and its engine, on one rank.

    With offload=nvme it opens packed weights, which it writes first if necessary, and prints the plan. Unless the user names a folder,
    the files are unlinked and freed with the process.

    Raises:
        ValueError: as `open_model`, `pack_model` and `Generator`.
    """
    path, ema = config.inference.model, bool(config.inference.ema)
    if not streams_layers(config):
        adapters = _adapters(config)
        with opened_unread(path, ema=ema) as opened:
            policy = _calibrated(config, opened=opened)
            expected = expected_of(config, opened=opened)
            open_weights = expected and expected.opened
            generator = Generator(opened.module, policy=policy, adapters=adapters, open_weights=open_weights)
            if generator.plan is not None:
                print(generator.plan, flush=True)
            return opened, generator
    to = _packed_folder(config)
    try:
        options = {"calibration": config.inference.calibration, "on_packed": _say_packed}
        opened = open_streamed(path, weights=_format(config), to=to, ema=ema, **options)
        policy = _policy(config) if isinstance(opened.module, Packed) else _calibrated(config, opened=opened)
        generator = Generator(opened.module, policy=policy)
    finally:
        if config.offload.nvme_path is None:
            shutil.rmtree(to, ignore_errors=True)
    print(generator.plan, flush=True)
    return opened, generator


def _adapters(config: Config) -> dict[str, Adapter]:
    """Reads the adapters of `inference.adapters`. Raises ValueError for a folder without one, with its name."""
    found = {}
    for name, path in (config.inference.adapters or {}).items():
        try:
            found[name] = checkpoint.read_adapter(path)
        except ValueError as error:
            raise ValueError(f"inference.adapters.{name}={path}: {error}") from error
    return found


def _say_packed(packed: Packed) -> None:
    layers = packed.description.layers
    gib = layers * packed.layer_bytes / 2**30
    print(f"packed with weights={packed.weights} into {packed.path}: {layers} layers, {gib:.2f} GiB", flush=True)


def _packed_folder(config: Config) -> str:
    return config.offload.nvme_path or os.path.join(config.output_dir, PACKED)


def _streamed_perplexity(config: Config) -> float | None:
    """Returns the perplexity of `inference.held_out` with streamed layers as stored, or None if it is not needed.

    Its memory is freed before the model is opened in its own format.
    """
    path = config.inference.model
    if config.inference.held_out is None or not streams_layers(config):
        return None
    if Path(path, MANIFEST).is_file():
        raise _only_packed(config, path=path)
    to = os.path.join(_packed_folder(config), f"stored-{uuid.uuid4().hex}")
    try:
        opened = open_streamed(path, weights="stored", to=to, ema=bool(config.inference.ema))
        generator = Generator(opened.module, policy=_as_stored(config, to=to))
    finally:
        shutil.rmtree(to, ignore_errors=True)
    try:
        return perplexity(generator, tokens=_held_out(config, opened=opened))
    finally:
        generator.close()


def _shared_perplexity(config: Config, *, opened: Opened, comm: Comm) -> float | None:
    """Like `_streamed_perplexity`, for a model that ranks share. A collective call."""
    if config.inference.held_out is None or not streams_layers(config):
        return None
    generator = Generator(opened.module, policy=_as_stored(config, to=_packed_folder(config)), comm=comm)
    try:
        if generator.follows:
            generator.follow()
            return None
        return perplexity(generator, tokens=_held_out(config, opened=opened))
    finally:
        generator.close()


def _as_stored(config: Config, *, to: str) -> InferencePolicy:
    policy = _policy(config)
    assert policy.offload is not None, "layers stream"
    return replace(policy, weights="stored", offload=replace(policy.offload, nvme_path=to))


def _held_out(config: Config, *, opened: Opened) -> list[int]:
    """Returns the tokens of the text. Raises ValueError for fewer than two."""
    name = config.inference.held_out
    text = Path(name).read_text(encoding="utf-8", errors="replace")
    tokens = opened.tokenizer.encode(text)[:_HELD_OUT_TOKENS]
    if len(tokens) < 2:
        raise ValueError(f"inference.held_out={name}: has {len(tokens)} tokens; name a longer text")
    return tokens


def _only_packed(config: Config, *, path: object) -> ValueError:
    return ValueError(
        f"inference.held_out={config.inference.held_out}: {path} has the packed weights only; leave it out, or name the model itself"
    )


def cost_of_weights(config: Config, *, answering: Answering) -> Cost | None:
    """Returns and prints the effect of `inference.weights` on `inference.held_out`. None without such a text.

    Raises:
        ValueError: the text has fewer than two tokens, or the model is packed.
    """
    chosen, opened, stored = config.inference, answering.opened, answering.stored
    if chosen.held_out is None:
        return None
    tokens = _held_out(config, opened=opened)
    if stored is None:
        if isinstance(opened.module, Packed):
            raise _only_packed(config, path=opened.module.path)
        stored = perplexity(Generator(opened.module), tokens=tokens)
    cost = Cost(stored=stored, chosen=perplexity(answering.generator, tokens=tokens))
    print(
        f"perplexity of {len(tokens)} tokens of {chosen.held_out}: {cost.stored:.4f} as stored, {cost.chosen:.4f} with "
        f"weights={_format(config)} ({100 * (cost.chosen / cost.stored - 1):+.2f} %)",
        flush=True,
    )
    return cost


def release_module(opened: Opened) -> None:
    """Frees the module's own weights. The engine has copies of the layers, and keeps embeddings and norms."""
    if isinstance(opened.module, nn.Module):
        opened.module.to("meta")


def _format(config: Config) -> str:
    return str(config.inference.weights)


def _calibrated(config: Config, *, opened: Opened) -> InferencePolicy:
    """Returns the policy with the tokens of `inference.calibration`."""
    path = config.inference.calibration
    if path is None:
        return _policy(config)
    return replace(_policy(config), calibration=calibration_tokens(path, tokenizer=opened.tokenizer))


def _policy(config: Config) -> InferencePolicy:
    others: dict[str, Any] = {"offload": _offload(config), "device": config.launch.device.value}
    if config.task.name == "eval":
        others["max_model_len"] = config.eval.seq_len or _USUAL_WINDOW
    return policy_of(InferencePolicy, given=config.inference, others=others)


def _offload(config: Config) -> OffloadPolicy | None:
    chosen = config.offload
    if chosen.optimizer is Tier.none:
        return None
    return OffloadPolicy(
        parameters=chosen.optimizer,
        nvme_path=_packed_folder(config) if streams_layers(config) else config.offload.nvme_path or config.output_dir,
        block_bytes=chosen.block_bytes,
        threads=chosen.threads,
        pin_memory=chosen.pin_memory is not False,
        direct_io=chosen.direct_io,
    )


def usual_sampling(config: Config) -> SamplingParams:
    """Returns the sampling of `sampling.*`, without stop texts, which are handled outside the engine."""
    given = {name: value for name, value in vars(config.sampling).items() if name != "stop" and value is not None}
    return SamplingParams(**given)
