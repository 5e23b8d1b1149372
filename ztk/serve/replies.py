"""From a request to jobs of the engine, and from the engine's outputs to the response: everything that runs in threads."""

import json
from dataclasses import replace

from ztk.inference import Generator, Output
from ztk.serve.answers import Answer, Shape
from ztk.serve.bodies import Asked, BadRequest, Limits
from ztk.serve.loop import Item, Job, Outbox
from ztk.serve.models import Opened, Tokenizer

_MOST_VALUES = 1 << 21  # log-probabilities of one response, about 200 MB of objects
_LARGE = 256  # log-probabilities of a prompt that are not written among the pieces of other streams


class Failed(Exception):
    """The engine has ended an answer by an error."""


class Reader:
    """Makes jobs of requests for one model. max_tokens: of requests that have none."""

    def __init__(
        self, generator: Generator, *, opened: Opened, max_waiting: int, max_tokens: int | None, limits: Limits
    ) -> None:
        self._opened, self._max_waiting, self._max_tokens, self._limits = opened, max_waiting, max_tokens, limits
        self._vocabulary_size = generator.description.vocab_size
        self._max_len, self._longest = generator.max_len, generator.longest
        self._check = generator.check

    def jobs(self, asked: Asked, *, chat: bool, outbox: Outbox) -> list[Job]:
        """One per prompt.

        Raises:
            BadRequest: another model, no chat template, more prompts than may wait, or a prompt that does not fit the model.
        """
        if asked.model not in (None, self._opened.name):
            raise self.unknown(asked.model)
        if len(asked.prompts) > self._max_waiting:
            raise BadRequest(
                f"{len(asked.prompts)} prompts in one request, and {self._max_waiting} may wait at most: send fewer at a time",
                param="prompt",
            )
        prompts = [self._opened.tokenizer.chat(list(asked.messages))] if chat else map(self._tokens, asked.prompts)
        return [self._job(prompt, asked=asked, number=number, outbox=outbox) for number, prompt in enumerate(prompts)]

    def unknown(self, name: str) -> BadRequest:
        """The refusal of another model."""
        text = (
            f"The model '{name}' does not exist: this server has '{self._opened.name}'; leave model out, or name that"
        )
        return BadRequest(text, param="model", status=404, code="model_not_found")

    def _tokens(self, prompt: str | list[int]) -> list[int]:
        if not isinstance(prompt, str):
            return prompt
        most = self._max_len * self._opened.tokenizer.longest
        if len(prompt) > most:
            raise BadRequest(
                f"the prompt has {len(prompt)} characters, and the {self._max_len} tokens of this model have {most} at most: shorten it",
                param="prompt",
            )
        return self._opened.tokenizer.encode(prompt)

    def _job(self, prompt: list[int], *, asked: Asked, number: int, outbox: Outbox) -> Job:
        if not prompt:
            raise BadRequest("the prompt is empty", param="prompt")
        for param, tokens in (("prompt", prompt), ("logit_bias", asked.sampling.logit_bias)):
            odd = next((token for token in tokens if not 0 <= token < self._vocabulary_size), None)
            if odd is not None:
                raise BadRequest(f"token {odd} is outside the vocabulary of {self._vocabulary_size}", param=param)
        limit = self._limit(len(prompt), asked=asked)
        sampling = replace(asked.sampling, max_tokens=limit)
        self._check(prompt, sampling=sampling)
        positions = limit + len(prompt) * sampling.prompt_logprobs
        values = max(1, len(asked.prompts)) * sampling.n * positions * (1 + sampling.logprobs) * asked.with_logprobs
        if values > _MOST_VALUES:
            raise BadRequest(
                f"{values} log-probabilities (answers times tokens times likely ones), and one response has {_MOST_VALUES} at most: ask for "
                "fewer of them, fewer answers or a smaller max_tokens",
                param="logprobs",
            )
        ends = (*(() if asked.ignores_ends else self._opened.ends), *asked.stop_token_ids)
        vocabulary = self._opened.vocabulary if self._opened.vocabulary < self._vocabulary_size else None
        sampling = replace(sampling, draw_key=(number,), stop_token_ids=ends, vocabulary=vocabulary)
        return Job(prompt=prompt, sampling=sampling, outbox=outbox, number=number)

    def _limit(self, length: int, *, asked: Asked) -> int:
        """Tokens of an answer to a prompt of so many tokens."""
        if asked.max_tokens is None and length < self._longest:
            rest = self._longest - length
            return rest if self._max_tokens is None else min(rest, self._max_tokens)
        limit = 1 if asked.max_tokens is None else max(1, asked.max_tokens)
        if length + limit > self._max_len:
            shown = "" if asked.max_tokens is None else f" and max_tokens is {limit}"
            advice = "" if asked.max_tokens is None else ", or lower max_tokens"
            raise BadRequest(
                f"This model's maximum context length is {self._max_len} tokens. The prompt has {length} tokens{shown}: shorten the prompt"
                f"{advice}",
                param="prompt" if asked.max_tokens is None else "max_tokens",
            )
        return limit


class Reply:
    """The answers to one request while they are drawn. `keep` and properties are for the event loop, the others for one thread at a time."""

    def __init__(self, jobs: list[Job], *, asked: Asked, shape: Shape, tokenizer: Tokenizer) -> None:
        self.jobs, self.asked, self._shape = jobs, asked, shape
        self._answers = [
            Answer(
                shape=shape,
                index=prompt * asked.sampling.n + sample,
                prompt=job.prompt,
                asked=asked,
                tokenizer=tokenizer,
            )
            for prompt, job in enumerate(jobs)
            for sample in range(asked.sampling.n)
        ]
        self._kept: list[Item] = []
        self._open = set(range(len(self._answers)))
        self._ended: list[Job] = []

    def keep(self, items: list[Item]) -> None:
        """Outputs that `take_kept` or `body` reads. Raises Failed for one that is an error."""
        for number, item in items:
            if isinstance(item, Exception):
                raise Failed(str(item))
            if item.error is not None:
                raise Failed(item.error)
            if item.finished:
                self._open.discard(self._place(number, output=item))
        self._kept += items

    @property
    def is_complete(self) -> bool:
        """No answer goes on."""
        return not self._open

    @property
    def is_large(self) -> bool:
        """The kept outputs have the log-probabilities of long prompts."""
        return any(isinstance(item, Output) and len(item.prompt_logprobs or ()) > _LARGE for _, item in self._kept)

    def take_ended(self) -> list[Job]:
        """Jobs whose answers have all ended since the last call: a stop text ends them here, the engine would go on."""
        ended, self._ended = self._ended, []
        return ended

    def opening(self) -> bytes:
        """Events before the first token."""
        return _events([chunk for answer in self._answers for chunk in answer.opening()])

    def take_kept(self) -> bytes:
        """The kept outputs as events."""
        chunks, each, items = [], self.asked.sampling.n, self._kept
        self._kept = []
        for number, item in items:
            assert isinstance(item, Output), "`keep` has raised the others"
            place = self._place(number, output=item)
            answer = self._answers[place]
            was_ended = answer.ended
            chunks += answer.push(item)
            if answer.ended and not was_ended:
                self._open.discard(place)
                if all(one.ended for one in self._answers[number * each : (number + 1) * each]):
                    self._ended.append(self.jobs[number])
        return _events(chunks) if self.asked.stream else b""

    def closing(self) -> bytes:
        """The last events."""
        usage = [self._shape.usage_chunk(self._answers, prompt_tokens=self._prompt_tokens)]
        return _events(usage if self.asked.with_usage else []) + b"data: [DONE]\n\n"

    def body(self) -> bytes:
        """The complete response."""
        self.take_kept()
        return json.dumps(self._shape.complete(self._answers, prompt_tokens=self._prompt_tokens)).encode()

    @property
    def _prompt_tokens(self) -> int:
        return sum(len(job.prompt) for job in self.jobs)

    def _place(self, number: int, *, output: Output) -> int:
        return number * self.asked.sampling.n + output.sample


def _events(chunks: list[dict]) -> bytes:
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks).encode()
