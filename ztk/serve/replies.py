"""Converts a request to jobs of the engine, and the engine's outputs to the response. This code runs in threads."""

import base64
import json
import struct
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from ztk.inference import Generator, Output, SamplingParams
from ztk.serve.answers import Answer, Shape
from ztk.serve.bodies import Asked, Limits, read_prompts
from ztk.serve.loop import Item, Job, Outbox, Restarted
from ztk.serve.messages import ChatOptions, read_messages, read_options
from ztk.serve.models import Opened
from ztk.serve.structured import Grammars
from ztk.serve.text import TextStream
from ztk.serve.tokenizers import Tokenizer, token_name
from ztk.serve.tools import Format, call_structure, format_of, read_tools, told
from ztk.serve.values import BadRequest, choice, flag, number, parsed, token_list

_MOST_VALUES = 1 << 21  # log-probabilities of one response, about 200 MB of objects
_TOKENS = 1 << 20  # of a text to detokenise
_PAIRS = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))  # vLLM's names
_LARGE = 256  # log-probabilities of a prompt; more are not written together with pieces of other streams


def check_tokens(tokens: Iterable[int], *, size: int, param: str | None = None) -> None:
    """Raises BadRequest for a token outside a vocabulary of `size`. param: the field."""
    odd = next((token for token in tokens if not 0 <= token < size), None)
    if odd is not None:
        raise BadRequest(f"token {odd} is outside the vocabulary of {size}", param=param)


class Reader:
    """Creates the jobs of requests for one model, and answers the bodies of routes that generate nothing. Used in threads.

    max_tokens: default for requests. format: format of tool calls, by default derived from the chat template.

    Raises:
        ValueError: an adapter has the model's name.
    """

    def __init__(
        self,
        generator: Generator,
        *,
        opened: Opened,
        max_waiting: int,
        max_tokens: int | None,
        limits: Limits,
        format: Format | None = None,
    ) -> None:
        self._generator, self._opened, self._limits = generator, opened, limits
        self._max_waiting, self._max_tokens = max_waiting, max_tokens
        self.format = format or format_of(opened.tokenizer.template)
        self._grammars = Grammars(opened.tokenizer, vocabulary=opened.vocabulary, ends=opened.ends)
        self._vocabulary_size = generator.description.vocab_size
        self._max_len, self._longest = generator.max_len, generator.longest
        self._adapters = frozenset(generator.adapters)
        if opened.name in self._adapters:
            raise ValueError(
                f"inference.adapters.{opened.name}: the model has this name; give the adapter another one, or use serve.model_name"
            )

    def jobs(self, asked: Asked, *, chat: bool, outbox: Outbox) -> list[Job]:
        """Returns one job per prompt.

        Raises:
            BadRequest: an unknown model, no chat template, more prompts than may wait, or a prompt that does not fit the model.
        """
        adapter = self.adapter(asked.model)
        if len(asked.prompts) > self._max_waiting:
            raise BadRequest(
                f"{len(asked.prompts)} prompts in one request, and {self._max_waiting} may wait at most: send fewer at a time",
                param="prompt",
            )
        asked = replace(asked, sampling=self._constrained(asked))
        prompts = (
            [self.chat_tokens(asked.messages, options=asked.chat)]
            if chat
            else [
                self.tokens(
                    prompt, has_beginning=asked.add_special_tokens, is_cut=asked.truncate_prompt_tokens is not None
                )
                for prompt in asked.prompts
            ]
        )
        return [
            self._job(self._cut(prompt, asked=asked), asked=asked, adapter=adapter, number=number, outbox=outbox)
            for number, prompt in enumerate(prompts)
        ]

    def close(self) -> None:
        """Ends the threads of grammars."""
        self._grammars.close()

    def chat_tokens(self, messages: Sequence[dict[str, Any]], *, options: ChatOptions) -> list[int]:
        """Returns the tokens of messages.

        Tools are added as text if the template does not support them, and the role developer becomes system.
        """
        tokenizer, messages = self._opened.tokenizer, list(messages)
        template = tokenizer.template or ""
        if "developer" not in template:
            messages = [one | ({"role": "system"} if one["role"] == "developer" else {}) for one in messages]
        if "tools" not in template:
            messages = told(messages, tools=options.tools)
            options = replace(options, tools=())
        return tokenizer.chat(messages, options=options)

    def _constrained(self, asked: Asked) -> SamplingParams:
        """Returns sampling with the grammar and the bad words of the request."""
        structure, tools = asked.structure, asked.tools
        if tools is not None and (tools.required or tools.named is not None):
            structure = call_structure(tools, format=self.format, special=self._opened.tokenizer.special)
        return replace(
            asked.sampling,
            grammar=None if structure is None else self._grammars.compiled(structure),
            bad_words=self._bad_words(asked.bad_words),
        )

    def _bad_words(self, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """Returns the tokens of each word, and of the word after a space if only its first token differs, as in vLLM."""
        encode, found = self._opened.tokenizer.encode_text, []
        for word in words:
            plain, spaced = encode(word.lstrip()), encode(" " + word.lstrip())
            found.append(tuple(plain))
            if len(spaced) == len(plain) and spaced[:1] != plain[:1]:
                found.append(tuple(spaced))
        return tuple(word for word in found if word)

    def adapter(self, model: str | None) -> str | None:
        """Returns the adapter that a request names as its model, or None for the base. Raises BadRequest for another model."""
        if model in (None, self._opened.name):
            return None
        if model in self._adapters:
            return model
        has = ", ".join(f"'{name}'" for name in (self._opened.name, *sorted(self._adapters)))
        text = f"The model '{model}' does not exist: this server has {has}; leave model out, or name one of them"
        raise BadRequest(text, param="model", status=404, code="model_not_found")

    def tokens(self, prompt: str | list[int], *, has_beginning: bool, is_cut: bool = False) -> list[int]:
        """Returns the tokens of a prompt. Raises BadRequest for a text that is too long.

        has_beginning: with the tokens that the tokenizer prepends to a text. is_cut: whether the prompt will be truncated.
        """
        if not isinstance(prompt, str):
            return prompt
        most = self._max_len * self._opened.tokenizer.longest
        if len(prompt) > most and not is_cut:
            raise BadRequest(
                f"the prompt has {len(prompt)} characters, and the {self._max_len} tokens of this model have {most} at most: shorten it",
                param="prompt",
            )
        tokenizer = self._opened.tokenizer
        return tokenizer.encode(prompt) if has_beginning else tokenizer.encode_text(prompt)

    def _cut(self, prompt: list[int], *, asked: Asked) -> list[int]:
        """Truncates a prompt as the request asks."""
        if asked.truncate_prompt_tokens is None:
            return prompt
        most = asked.truncate_prompt_tokens
        if most == -1:
            most = max(1, self._max_len - (asked.max_tokens or 1))
        return prompt[:most] if asked.truncation_side == "right" else prompt[-most:]

    def _job(self, prompt: list[int], *, asked: Asked, adapter: str | None, number: int, outbox: Outbox) -> Job:
        if not prompt:
            raise BadRequest("the prompt is empty", param="prompt")
        check_tokens(prompt, size=self._vocabulary_size, param="prompt")
        check_tokens(asked.sampling.logit_bias, size=self._vocabulary_size, param="logit_bias")
        check_tokens(asked.sampling.allowed_token_ids, size=self._opened.vocabulary, param="allowed_token_ids")
        limit = self._limit(len(prompt), asked=asked)
        if asked.sampling.min_tokens > limit:
            raise BadRequest(
                f"min_tokens={asked.sampling.min_tokens} is more than the {limit} tokens that the answer may have",
                param="min_tokens",
            )
        sampling = replace(asked.sampling, max_tokens=limit)
        self._generator.check(prompt, sampling=sampling)
        positions = limit + len(prompt) * sampling.prompt_logprobs
        is_written = asked.with_logprobs or sampling.prompt_logprobs
        values = max(1, len(asked.prompts)) * sampling.n * positions * (1 + sampling.logprobs) * is_written
        if values > _MOST_VALUES:
            raise BadRequest(
                f"{values} log-probabilities (answers times tokens times likely ones), and one response has {_MOST_VALUES} at most: ask for "
                "fewer of them, fewer answers or a smaller max_tokens",
                param="logprobs",
            )
        ends = (*(() if asked.ignore_eos else self._opened.ends), *asked.stop_token_ids)
        vocabulary = self._opened.vocabulary if self._opened.vocabulary < self._vocabulary_size else None
        if sampling.fp32_logprobs:  # as a trainer, which has probabilities of all tokens
            vocabulary = None
        key = asked.draw_keys[number] if asked.draw_keys else (number,)
        sampling = replace(sampling, draw_key=key, stop_token_ids=ends, vocabulary=vocabulary)
        return Job(prompt=prompt, sampling=sampling, outbox=outbox, number=number, adapter=adapter)

    def _limit(self, length: int, *, asked: Asked) -> int:
        """Returns the limit of an answer's tokens for a prompt of `length` tokens."""
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

    def tokenize(self, raw: bytes) -> bytes:
        """Returns the tokens of vLLM's `prompt`, or of `messages`. Raises BadRequest for a body without them."""
        body = parsed(raw)
        if "messages" in body:
            tools = read_tools(body)
            options = read_options(body, tools=() if tools is None else tools.given)
            tokens = self.chat_tokens(read_messages(body), options=options)
        else:
            prompt = body.get("prompt")
            if not isinstance(prompt, str):
                raise BadRequest("prompt must be a text", param="prompt")
            tokens = self.tokens(prompt, has_beginning=flag(body, name="add_special_tokens", usual=True))
        found: dict[str, Any] = {"count": len(tokens), "max_model_len": self._max_len, "tokens": tokens}
        if flag(body, name="return_token_strs"):
            own = self._opened.tokenizer.token_bytes
            found["token_strs"] = [token_name(token, own=own(token)) for token in tokens]
        return json.dumps(found).encode()

    def detokenize(self, raw: bytes) -> bytes:
        """Returns the text of `tokens`, including special ones. Raises BadRequest for others."""
        tokens = token_list(parsed(raw), name="tokens", most=_TOKENS)
        check_tokens(tokens, size=self._vocabulary_size)
        stream = TextStream(self._opened.tokenizer, shows_special=True)
        text = "".join([*map(stream.push, tokens), stream.finish()])
        return json.dumps({"prompt": text}).encode()

    def embeddings(self, raw: bytes) -> bytes:
        """Returns a vector for each `input`, in OpenAI's format. Raises BadRequest for invalid or too long inputs."""
        body = parsed(raw)
        name = body.get("model")
        adapter = self.adapter(None if name is None else str(name))
        kind = choice(body, name="encoding_format", of=("float", "base64"))
        if "dimensions" in body:
            raise BadRequest("dimensions is not supported: leave it out", param="dimensions")
        found, used = self._embedded(read_prompts(body, name="input"), adapter=adapter, param="input")
        vectors: list[Any] = [one.tolist() for one in found]
        if kind == "base64":
            vectors = [base64.b64encode(struct.pack(f"<{len(one)}f", *one)).decode() for one in vectors]
        return json.dumps(
            {
                "object": "list",
                "model": adapter or self._opened.name,
                "data": [
                    {"object": "embedding", "index": index, "embedding": vector} for index, vector in enumerate(vectors)
                ],
                "usage": {"prompt_tokens": used, "total_tokens": used},
            }
        ).encode()

    def score(self, raw: bytes) -> bytes:
        """Returns the similarity of each pair of texts, in vLLM's format. Raises BadRequest for invalid or too long inputs."""
        body = parsed(raw)
        names = next((pair for pair in _PAIRS if pair[1] in body), _PAIRS[0])
        firsts, seconds = (_texts(body, name=name) for name in names)
        if len(firsts) not in (1, len(seconds)):
            raise BadRequest(
                f"{names[0]} has {len(firsts)} texts and {names[1]} has {len(seconds)}: send one, or as many",
                param=names[0],
            )
        values, used, model = self._similarities(body, firsts=firsts, seconds=seconds, param=names[1])
        data = [{"index": index, "object": "score", "score": value} for index, value in enumerate(values)]
        named = {"id": f"score-{uuid.uuid4().hex}", "object": "list", "created": int(time.time()), "model": model}
        return json.dumps(named | {"data": data, "usage": {"prompt_tokens": used, "total_tokens": used}}).encode()

    def rerank(self, raw: bytes) -> bytes:
        """Returns documents by falling similarity to a query, in Jina's and Cohere's format, as vLLM. Raises BadRequest as `score`."""
        body = parsed(raw)
        query, documents, most = (
            body.get("query"),
            _texts(body, name="documents"),
            number(body, name="top_n", kind=int, usual=0),
        )
        if not isinstance(query, str):
            raise BadRequest("query must be a text", param="query")
        if most < 0:
            raise BadRequest(f"top_n={most}: must be 1 or more, or 0 for all", param="top_n")
        values, used, model = self._similarities(body, firsts=(query,), seconds=documents, param="documents")
        ranked = sorted(enumerate(values), key=lambda pair: -pair[1])[: most or None]
        results = [
            {"index": index, "document": {"text": documents[index]}, "relevance_score": value}
            for index, value in ranked
        ]
        named = {"id": f"score-{uuid.uuid4().hex}", "model": model, "results": results}
        return json.dumps(named | {"usage": {"prompt_tokens": used, "total_tokens": used}}).encode()

    def _similarities(
        self, body: dict[str, Any], *, firsts: Sequence[str], seconds: Sequence[str], param: str
    ) -> tuple[list[float], int, str]:
        """Returns the cosine of the embeddings of each pair, the tokens of all pairs, and the model's name."""
        name = body.get("model")
        adapter = self.adapter(None if name is None else str(name))
        own, used = self._embedded(firsts, adapter=adapter, param=param)
        others, more = self._embedded(seconds, adapter=adapter, param=param)
        repeats = len(others) // len(own)
        values = [float(one @ other) for one, other in zip(own * repeats, others, strict=True)]
        return values, used * repeats + more, adapter or self._opened.name

    def _embedded(
        self, inputs: Sequence[str | list[int]], *, adapter: str | None, param: str
    ) -> tuple[list[Tensor], int]:
        """Returns a vector of length 1 for each input, fp32 [C], and the number of their tokens."""
        if len(inputs) > self._limits.answers:
            raise BadRequest(
                f"{len(inputs)} inputs, and this server takes {self._limits.answers} at a time", param=param
            )
        prompts = [self.tokens(one, has_beginning=True) for one in inputs]
        for prompt in prompts:
            check_tokens(prompt, size=self._vocabulary_size)
        return [self._generator.embed(prompt, adapter=adapter) for prompt in prompts], sum(map(len, prompts))


def _texts(body: dict[str, Any], *, name: str) -> list[str]:
    """Returns one text or a list of texts. Raises BadRequest for something else."""
    found = read_prompts(body, name=name) if name in body else ()
    texts = [one for one in found if isinstance(one, str)]
    if not texts or len(texts) < len(found):
        raise BadRequest(f"{name} must be a text or a list of texts", param=name)
    return texts


class Reply:
    """The answers to one request during generation. `keep` and properties are for the event loop; other methods for one thread at a
    time.
    """

    def __init__(self, jobs: list[Job], *, asked: Asked, shape: Shape, tokenizer: Tokenizer, format: Format) -> None:
        """format: format of tool calls."""
        self.jobs, self.asked, self.shape = jobs, asked, shape
        self._tokenizer, self._format = tokenizer, format
        for job in jobs:
            job.can_restart = not asked.stream
        self._answers = [answer for prompt in range(len(jobs)) for answer in self._begun(prompt)]
        self._kept: list[Item] = []
        self._open = set(range(len(self._answers)))
        self._ended: list[Job] = []

    def _begun(self, prompt: int) -> list[Answer]:
        """New answers to a prompt."""
        job, each = self.jobs[prompt], self.asked.sampling.n
        return [
            Answer(
                shape=self.shape,
                index=prompt * each + sample,
                prompt=job.prompt,
                asked=self.asked,
                tokenizer=self._tokenizer,
                ends=frozenset(job.sampling.stop_token_ids),
                format=self._format,
            )
            for sample in range(each)
        ]

    def keep(self, items: list[Item]) -> None:
        """Stores outputs for `take_kept` or `body`. Raises BadRequest for an error of the engine."""
        for prompt, item in items:
            if isinstance(item, Restarted):
                if not self._has_ended(prompt):
                    self._open.update(self._places(prompt))
                continue
            if isinstance(item, Exception):
                raise BadRequest(str(item), status=500)
            if item.error is not None:
                raise BadRequest(item.error, status=400 if item.is_by_request else 500)
            if item.finished:
                self._open.discard(self._place(prompt, output=item))
        self._kept += items

    @property
    def is_complete(self) -> bool:
        """Whether all answers have ended."""
        return not self._open

    @property
    def is_large(self) -> bool:
        """Whether the stored outputs have log-probabilities of long prompts."""
        return any(isinstance(item, Output) and len(item.prompt_logprobs or ()) > _LARGE for _, item in self._kept)

    def take_ended(self) -> list[Job]:
        """Returns jobs whose answers have all ended since the last call. A stop text ends answers here, while the engine would
        continue.
        """
        ended, self._ended = self._ended, []
        return ended

    def opening(self) -> bytes:
        """Returns the events before the first token."""
        return self.written([chunk for answer in self._answers for chunk in answer.opening()])

    def take_kept(self) -> bytes:
        """Returns the stored outputs as events."""
        chunks, items = [], self._kept
        self._kept = []
        for prompt, item in items:
            if isinstance(item, Restarted):
                if not self._has_ended(prompt):  # by a stop text, while the engine went on
                    places = self._places(prompt)
                    self._answers[places.start : places.stop] = self._begun(prompt)
                    self._open.update(places)
                continue
            assert isinstance(item, Output), "`keep` has raised the others"
            place = self._place(prompt, output=item)
            answer = self._answers[place]
            was_ended = answer.ended
            chunks += answer.push(item)
            if answer.ended and not was_ended:
                self._open.discard(place)
                if self._has_ended(prompt):
                    self._ended.append(self.jobs[prompt])
        return self.written(chunks) if self.asked.stream else b""

    def written(self, chunks: list[dict]) -> bytes:
        """Returns chunks as events."""
        return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks).encode()

    def closing(self) -> bytes:
        """Returns the last events."""
        usage = self.shape.chunk() | {"usage": self.shape.usage(self._answers, prompt_tokens=self._prompt_tokens)}
        return self.written([usage] if self.asked.with_usage else []) + b"data: [DONE]\n\n"

    def failing(self, error: BadRequest) -> bytes:
        """Returns the last event of failed answers."""
        return f"data: {json.dumps(error.body())}\n\n".encode()

    def body(self) -> bytes:
        """Returns the complete response."""
        self.take_kept()
        return json.dumps(self.complete()).encode()

    def complete(self) -> dict:
        """Returns all answers in one object."""
        return self.shape.complete(self._answers, kept=self._best(), prompt_tokens=self._prompt_tokens)

    def _best(self) -> list[Answer]:
        """Returns the answers to send: the likeliest of each prompt, if more were generated."""
        each, keeps = self.asked.sampling.n, self.asked.keeps
        if keeps == each:
            return self._answers
        groups = [self._answers[start : start + each] for start in range(0, len(self._answers), each)]
        return [
            one for group in groups for one in sorted(group, key=lambda answer: answer.likelihood, reverse=True)[:keeps]
        ]

    @property
    def _prompt_tokens(self) -> int:
        return sum(len(job.prompt) for job in self.jobs)

    def _places(self, prompt: int) -> range:
        each = self.asked.sampling.n
        return range(prompt * each, (prompt + 1) * each)

    def _has_ended(self, prompt: int) -> bool:
        return all(self._answers[place].ended for place in self._places(prompt))

    def _place(self, number: int, *, output: Output) -> int:
        return number * self.asked.sampling.n + output.sample
