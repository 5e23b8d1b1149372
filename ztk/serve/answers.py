"""Answers in OpenAI's shapes: complete, and as chunks of a stream."""

import functools
from dataclasses import dataclass

from ztk.inference import Output, PromptLogprob
from ztk.serve.bodies import Asked
from ztk.serve.models import Tokenizer
from ztk.serve.pieces import token_name
from ztk.serve.text import TextStream


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """What all parts of one response share."""

    id: str
    model: str
    chat: bool
    created: int

    def complete(self, answers: list["Answer"], *, prompt_tokens: int) -> dict:
        """The body of a response that is no stream."""
        kind = "chat.completion" if self.chat else "text_completion"
        return self._head(kind) | {
            "choices": [answer.choice() for answer in answers],
            "usage": self._usage(answers, prompt_tokens=prompt_tokens),
        }

    def chunk(self, choice: dict) -> dict:
        """One event of a stream."""
        return self._head("chat.completion.chunk" if self.chat else "text_completion") | {"choices": [choice]}

    def usage_chunk(self, answers: list["Answer"], *, prompt_tokens: int) -> dict:
        """The last event, if `stream_options.include_usage` asks for it."""
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        return self._head(kind) | {"choices": [], "usage": self._usage(answers, prompt_tokens=prompt_tokens)}

    def _head(self, kind: str) -> dict:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _usage(self, answers: list["Answer"], *, prompt_tokens: int) -> dict:
        drawn = sum(len(answer.tokens) for answer in answers)
        return {"prompt_tokens": prompt_tokens, "completion_tokens": drawn, "total_tokens": prompt_tokens + drawn}


class Answer:
    """One choice of a response, fed with the engine's outputs. Used by one thread at a time."""

    def __init__(self, *, shape: Shape, index: int, prompt: list[int], asked: Asked, tokenizer: Tokenizer) -> None:
        self._shape, self._index, self._prompt, self._asked, self._tokenizer = shape, index, prompt, asked, tokenizer
        self._text = TextStream(tokenizer, stops=asked.stops, prompt=prompt, shows_special=asked.shows_special)
        self._pieces: list[str] = []
        self._drawn: list[tuple[Output, int]] = []  # with the place in the text where the token begins
        self._prompt_logprobs: list[PromptLogprob] = []
        self.tokens: list[int] = []
        self.finish_reason: str | None = None

    @property
    def ended(self) -> bool:
        """Nothing more comes."""
        return self.finish_reason is not None

    def opening(self) -> list[dict]:
        """Chunks before the first token: the role of a chat, or the prompt that is repeated."""
        if self._shape.chat:
            delta = {"role": "assistant", "content": ""}
            return [self._shape.chunk({"index": self._index, "delta": delta, "finish_reason": None, "logprobs": None})]
        if self._asked.echo and not self._asked.with_logprobs:
            return [self._piece(self._echoed, drawn=[])]
        return []  # a prompt whose log-probabilities are asked for comes with the first token

    def push(self, output: Output) -> list[dict]:
        """Takes one token; returns chunks of a stream."""
        if self.ended:
            return []
        before = []
        if output.prompt_logprobs is not None:
            self._prompt_logprobs = output.prompt_logprobs
            before = [self._piece(self._echoed, drawn=[], with_prompt=True)]
        assert output.token is not None, "an output without a token is an error, which the server has handled"
        if self._asked.max_tokens == 0:  # the prompt's log-probabilities alone
            self.finish_reason = "length"
            return [*before, self._piece("", drawn=[])]
        is_end, place = output.finish_reason == "stop", len(self._echoed) + self._text.length
        self.tokens.append(output.token)
        piece = "" if is_end else self._text.push(output.token)
        if output.finish_reason is not None and not self._text.stopped:
            piece += self._text.finish()
        self.finish_reason = "stop" if self._text.stopped else output.finish_reason
        self._pieces.append(piece)
        self._drawn.append((output, place))
        if not piece and not self.ended and not self._asked.with_logprobs:
            return before
        return [*before, self._piece(piece, drawn=self._drawn[-1:])]

    def choice(self) -> dict:
        """The complete choice."""
        text = "".join(self._pieces)
        logprobs = self._written(self._drawn, with_prompt=self._asked.echo) if self._asked.with_logprobs else None
        if self._shape.chat:
            message = {"role": "assistant", "content": text}
            return {"index": self._index, "message": message, "finish_reason": self.finish_reason, "logprobs": logprobs}
        return {
            "index": self._index,
            "text": self._echoed + text,
            "finish_reason": self.finish_reason,
            "logprobs": logprobs,
        }

    @functools.cached_property
    def _echoed(self) -> str:
        """The text before the answer's."""
        return self._tokenizer.decode(self._prompt) if self._asked.echo else ""

    def _piece(self, text: str, *, drawn: list[tuple[Output, int]], with_prompt: bool = False) -> dict:
        is_written = self._asked.with_logprobs and (drawn or with_prompt)
        written = self._written(drawn, with_prompt=with_prompt) if is_written else None
        choice: dict = {"index": self._index, "finish_reason": self.finish_reason, "logprobs": written}
        return self._shape.chunk(choice | ({"delta": {"content": text}} if self._shape.chat else {"text": text}))

    def _written(self, drawn: list[tuple[Output, int]], *, with_prompt: bool) -> dict:
        """Chat: a list of objects per token. Completions: lists; those of an echoed prompt begin with a null.

        OpenAI's names have the model's own log-probabilities; `processed` ones are of the distribution that a token was drawn from, after
        temperature, penalties and cuts, and null for a prompt's tokens. text_offset: where each token begins in the choice's text; tokens of
        one character have the place of the character.
        """
        if self._shape.chat:
            return {"content": [self._chat_token(output) for output, _ in drawn]}
        tokens, values, processed, tops, offsets = [], [], [], [], []
        if with_prompt:
            tokens = list(self._prompt)
            values = [None] + [value for value, _ in self._prompt_logprobs]
            processed = [None] * len(tokens)
            tops = [None] + [self._named(top) for _, top in self._prompt_logprobs]
            offsets = self._prompt_offsets()
        tokens += [output.token for output, _ in drawn]
        values += [output.logprob for output, _ in drawn]
        processed += [output.processed_logprob for output, _ in drawn]
        tops += [self._named(output.top_logprobs or {}) for output, _ in drawn]
        offsets += [place for _, place in drawn]
        return {
            "tokens": [self._name(token) for token in tokens],
            "token_logprobs": values,
            "processed_token_logprobs": processed,
            "top_logprobs": tops,
            "text_offset": offsets,
        }

    def _prompt_offsets(self) -> list[int]:
        stream, offsets = TextStream(self._tokenizer), []
        for token in self._prompt:
            offsets.append(stream.length)
            stream.push(token)
        return offsets

    def _named(self, top: dict[int, float]) -> dict[str, float]:
        """By text; of tokens with one text, all but the likeliest are token_id:5."""
        named: dict[str, float] = {}
        for token, value in top.items():
            name = self._name(token)
            named[token_name(token, own=None) if name in named else name] = value
        return named

    def _name(self, token: int) -> str:
        return token_name(token, own=self._tokenizer.token_bytes(token))

    def _chat_token(self, output: Output) -> dict:
        assert output.token is not None, "an error is no token"
        tops = [self._token(*item) for item in (output.top_logprobs or {}).items()]
        own = {"processed_logprob": output.processed_logprob, "top_logprobs": tops}
        return self._token(output.token, output.logprob) | own

    def _token(self, token: int, value: float) -> dict:
        own = self._tokenizer.token_bytes(token)
        return {"token": token_name(token, own=own), "logprob": value, "bytes": None if own is None else list(own)}
