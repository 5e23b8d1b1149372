"""Answer the prompts of a file: the program of `python run.py task=generate`.

`completions.jsonl` in the run folder has a line per prompt, in the file's order.
"""

import json
import time
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from experiments.answering import Answering, answering, cost_of_weights, release_module, usual_sampling
from ztk.config import Config
from ztk.inference import Completion, Generator, SamplingParams
from ztk.report import RunFolder
from ztk.serve.models import Opened
from ztk.serve.text import TextStream

_OWN = {field.name for field in fields(SamplingParams)} - {
    "draw_key",
    "token_mask",
    "prompt_logprobs",
    "stop_token_ids",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """A line of the file. given: the line, as it was."""

    tokens: list[int]
    sampling: SamplingParams
    given: dict[str, Any]


def main(config: Config) -> None:
    """Every rank answers all prompts, and the first one writes them with the totals.

    Raises:
        ValueError: a model that cannot be computed, or a line that is not a prompt, by its number.
        FloatingPointError: logits that are not finite.
    """
    with answering(config) as leading:
        if leading is not None:
            answer(config, answering=leading)


def answer(config: Config, *, answering: Answering) -> None:
    """Answers all prompts and writes them with the totals. Raises as `main`."""
    opened, generator = answering.opened, answering.generator
    cost = cost_of_weights(config, answering=answering)
    release_module(opened)
    usual = replace(usual_sampling(config), stop_token_ids=opened.ends)
    prompts = read_prompts(
        config.inference.prompts, opened=opened, usual=usual, vocabulary=generator.description.vocab_size
    )
    started = time.perf_counter()
    answers = generator.generate(
        [prompt.tokens for prompt in prompts], sampling=[prompt.sampling for prompt in prompts]
    )
    seconds = time.perf_counter() - started
    folder = RunFolder(config.output_dir)
    stops = tuple(config.sampling.stop or ())
    lines = [
        record(prompt, answers=found, opened=opened, stops=stops)
        for prompt, found in zip(prompts, answers, strict=True)
    ]
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    (folder.path / "completions.jsonl").write_text(text, encoding="utf-8")
    drawn = sum(len(answer.tokens) for found in answers for answer in found)
    folder.write_summary(
        {
            "prompts": len(prompts),
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
    print(
        f"{len(prompts)} prompts, {drawn} tokens in {seconds:.1f} s, {drawn / seconds:.1f} tokens/s: {folder.path / 'completions.jsonl'}"
    )


def _plan_of(generator: Generator) -> dict[str, float]:
    """What the plan of streamed layers said, and what was read."""
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


def read_prompts(path: str, *, opened: Opened, usual: SamplingParams, vocabulary: int) -> list[Prompt]:
    """The file's prompts. Tokens without a text are never drawn.

    Raises:
        ValueError: a line that is no prompt, with its number; or a file without one.
    """
    mask = None
    if opened.vocabulary < vocabulary:
        allowed = torch.arange(vocabulary) < opened.vocabulary
        mask = lambda answer: allowed  # noqa: E731
    found = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            given = json.loads(line)
            own = {name: value for name, value in given.items() if name in _OWN}
            tokens = given["tokens"] if "tokens" in given else opened.tokenizer.encode(given["prompt"])
            sampling = replace(usual, **own, draw_key=(number,), token_mask=mask)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            reason = 'has neither "prompt" nor "tokens"' if isinstance(error, KeyError) else str(error)
            raise ValueError(
                f'inference.prompts={path}, line {number}: {reason}; a line is {{"prompt": "text"}}'
            ) from error
        found.append(Prompt(tokens=tokens, sampling=sampling, given=given))
    if not found:
        raise ValueError(f'inference.prompts={path}: has no prompt; a line is {{"prompt": "text"}}')
    return found


def record(prompt: Prompt, *, answers: list[Completion], opened: Opened, stops: tuple[str, ...]) -> dict[str, Any]:
    """The line as it was, with its answers.

    Raises:
        FloatingPointError: logits that are not finite.
    """
    written = []
    for answer in answers:
        if answer.error is not None:
            raise FloatingPointError(f"{answer.error}; the prompt was {prompt.given}")
        stream = TextStream(opened.tokenizer, stops=stops, prompt=prompt.tokens)
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
