"""Answers in OpenAI's format: complete, and as chunks of a stream."""

import base64
import functools
import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ztk.inference import Output, PromptLogprob
from ztk.serve.bodies import Asked
from ztk.serve.text import TextStream
from ztk.serve.tokenizers import Tokenizer, token_name
from ztk.serve.tools import MARKS, Call, CallStream, Format, with_pieces


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """The common fields of all parts of a response."""

    id: str
    model: str
    chat: bool
    created: int

    def complete(self, answers: list["Answer"], *, kept: list["Answer"], prompt_tokens: int) -> dict:
        """Returns the body of a response without streaming. kept: the answers to return."""
        kind = "chat.completion" if self.chat else "text_completion"
        body = self._head(kind) | {
            "choices": [answer.choice() | {"index": index} for index, answer in enumerate(kept)],
            "usage": self.usage(answers, prompt_tokens=prompt_tokens),
        }
        return body | (kept[0].of_prompt() if self.chat else {})

    def chunk(self, *choices: dict) -> dict:
        """Returns one event of a stream."""
        return self._head("chat.completion.chunk" if self.chat else "text_completion") | {"choices": [*choices]}

    def _head(self, kind: str) -> dict:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def usage(self, answers: list["Answer"], *, prompt_tokens: int) -> dict:
        """Counts of tokens."""
        drawn = sum(len(answer.tokens) for answer in answers)
        return {"prompt_tokens": prompt_tokens, "completion_tokens": drawn, "total_tokens": prompt_tokens + drawn}


class Answer:
    """One choice of a response, fed with the engine's outputs. Used by one thread at a time."""

    def __init__(
        self,
        *,
        shape: Shape,
        index: int,
        prompt: list[int],
        asked: Asked,
        tokenizer: Tokenizer,
        ends: Collection[int] = (),
        format: Format = Format.hermes,
    ) -> None:
        """ends: tokens that end the answer. format: format of tool calls."""
        self._shape, self._index, self._prompt, self._asked, self._tokenizer = shape, index, prompt, asked, tokenizer
        self._ends = ends
        self._text = TextStream(
            tokenizer,
            stops=asked.stops,
            prompt=prompt,
            shows_special=not asked.skip_special_tokens,
            shown=() if asked.tools is None else (MARKS[format],),
            shows_stop=asked.include_stop_str_in_output,
            first_stop=asked.sampling.min_tokens,
        )
        tools, in_pieces = asked.tools, asked.stream
        self._found = None if tools is None else CallStream(format, tools=tools, in_pieces=in_pieces)
        self._calls: list[Call] = []
        self._pieces: list[str] = []
        self._drawn: list[tuple[Output, int]] = []  # with the offset of the token in the text
        self._prompt_logprobs: list[PromptLogprob] = []
        self.tokens: list[int] = []
        self.finish_reason: str | None = None

    @property
    def ended(self) -> bool:
        """Whether the answer is complete."""
        return self.finish_reason is not None

    def opening(self) -> list[dict]:
        """Returns the chunks before the first token: the role of a chat, or the echoed prompt."""
        if self._shape.chat:
            delta = {"role": "assistant", "content": ""}
            choice = {"index": self._index, "delta": delta, "finish_reason": None, "logprobs": None}
            first = self._chunk(choice) | self.of_prompt()
            return [first, self._piece(self._echoed, drawn=[])] if self._echoed else [first]
        if self._asked.echo and not self._asked.with_logprobs:
            return [self._piece(self._echoed, drawn=[])]
        return []  # a prompt with log-probabilities comes with the first token

    def push(self, output: Output) -> list[dict]:
        """Adds one token. Returns chunks of a stream."""
        if self.ended:
            return []
        before = []
        if output.prompt_logprobs is not None:
            self._prompt_logprobs = output.prompt_logprobs
            before = [self._piece(self._echoed, drawn=[], with_prompt=True)]
        assert output.token is not None, "an output without a token is an error, which the server has handled"
        if self._asked.max_tokens == 0:  # only the prompt's log-probabilities were requested
            self.finish_reason = "length"
            return [*before, self._piece("", drawn=[])]
        is_end = (
            output.finish_reason == "stop" and output.token in self._ends and not self._asked.include_stop_str_in_output
        )
        place = len(self._echoed) + self._text.length
        self.tokens.append(output.token)
        piece = "" if is_end else self._text.push(output.token)
        if output.finish_reason is not None and not self._text.stopped:
            piece += self._text.finish()
        self.finish_reason = "stop" if self._text.stopped else output.finish_reason
        piece, calls = self._split(piece)
        first = len(self._calls)
        self._pieces.append(piece)
        self._calls = with_pieces(self._calls, pieces=calls)
        if self.finish_reason == "stop" and self._calls and not self._is_named:
            self.finish_reason = "tool_calls"
        self._drawn.append((output, place))
        needs_tokens = self._asked.with_logprobs or self._asked.return_token_ids
        if not piece and not calls and not self.ended and not needs_tokens:
            return before
        return [*before, self._piece(piece, drawn=self._drawn[-1:], calls=calls, first=first)]

    def _split(self, piece: str) -> tuple[str, list[Call]]:
        """Splits another piece of text into text and pieces of calls."""
        if self._found is None:
            return piece, []
        text, calls = self._found.push(piece)
        if self.ended:
            rest, last = self._found.finish()
            return text + rest, [*calls, *last]
        return text, calls

    @property
    def _is_named(self) -> bool:
        return self._asked.tools is not None and self._asked.tools.named is not None

    @property
    def likelihood(self) -> float:
        """The mean log-probability of its tokens."""
        return sum(output.logprob for output, _ in self._drawn) / max(1, len(self._drawn))

    @property
    def text(self) -> str:
        """The text so far, without calls."""
        return "".join(self._pieces)

    @property
    def calls(self) -> list[Call]:
        """The tool calls so far."""
        return self._calls

    def choice(self) -> dict:
        """Returns the complete choice."""
        logprobs = self._written(self._drawn, with_prompt=self._asked.echo) if self._asked.with_logprobs else None
        choice = {"index": self._index, "finish_reason": self.finish_reason, "logprobs": logprobs}
        choice |= {"token_ids": self.tokens} if self._asked.return_token_ids else {}
        choice |= _versions([output for output, _ in self._drawn])
        if not self._shape.chat:
            return choice | {"text": self._echoed + self.text} | self.of_prompt()
        text = self._echoed + self.text
        message: dict = {"role": "assistant", "content": text}
        if self._calls:
            message |= {"content": text or None, "tool_calls": [call.written() for call in self._calls]}
        return choice | {"message": message}

    def of_prompt(self) -> dict:
        """Returns vLLM's fields of the prompt, if requested."""
        found: dict = {"prompt_token_ids": self._prompt} if self._asked.return_token_ids else {}
        if self._asked.prompt_tops is not None:
            pairs = zip(self._prompt[1:], self._prompt_logprobs, strict=False)
            found["prompt_logprobs"] = [None, *(self._of_prompt_token(token, own=own) for token, own in pairs)]
        return found

    def _of_prompt_token(self, token: int, *, own: PromptLogprob) -> dict[str, dict]:
        """Returns values by token, for the prompt's own token and for the likely ones."""
        assert self._asked.prompt_tops is not None, "as the caller has checked"
        ranked = list(own.top.items())[: self._asked.prompt_tops]
        found = {token: (own.value, own.rank)}
        found |= {likely: (value, rank) for rank, (likely, value) in enumerate(ranked, start=1) if likely != token}
        return {
            str(number): {
                "logprob": value,
                "rank": rank,
                "decoded_token": token_name(number, own=self._tokenizer.token_bytes(number)),
            }
            for number, (value, rank) in found.items()
        }

    @functools.cached_property
    def _echoed(self) -> str:
        """Returns the text before the answer's own: the prompt, or a chat's last message if the answer continues it."""
        if not self._asked.echo:
            return ""
        if not self._shape.chat:
            return self._tokenizer.decode(self._prompt)
        last = self._asked.messages[-1]
        return last["content"] if last["role"] == "assistant" else ""

    def _piece(
        self,
        text: str,
        *,
        drawn: list[tuple[Output, int]],
        with_prompt: bool = False,
        calls: Sequence[Call] = (),
        first: int = 0,
    ) -> dict:
        """A chunk of a stream. first: number of the next call that begins."""
        is_written = self._asked.with_logprobs and (drawn or with_prompt)
        written = self._written(drawn, with_prompt=with_prompt) if is_written else None
        choice: dict = {"index": self._index, "finish_reason": self.finish_reason, "logprobs": written}
        choice |= {"token_ids": [output.token for output, _ in drawn]} if self._asked.return_token_ids else {}
        choice |= _versions([output for output, _ in drawn])
        if not self._shape.chat:
            return self._chunk(choice | {"text": text} | (self.of_prompt() if len(self._drawn) == 1 else {}))
        delta: dict = {"content": text}
        if calls:
            begins = itertools.accumulate((call.id is not None for call in calls), initial=first - 1)
            delta["tool_calls"] = [
                {"index": at} | call.written() for call, at in zip(calls, [*begins][1:], strict=True)
            ]
        return self._chunk(choice | {"delta": delta})

    def _chunk(self, choice: dict) -> dict:
        """Returns one event of a stream, with the token counts so far if requested."""
        chunk = self._shape.chunk(choice)
        if not self._asked.with_running_usage:
            return chunk
        return chunk | {"usage": self._shape.usage([self], prompt_tokens=len(self._prompt))}

    def _written(self, drawn: list[tuple[Output, int]], *, with_prompt: bool) -> dict:
        """Returns log-probabilities: a list of objects per token for chats, lists for completions, in which an echoed prompt starts with
        a null.

        OpenAI's fields have the model's own log-probabilities. `processed` values belong to the sampled distribution, after temperature,
        penalties and truncation, and are null for a prompt's tokens. text_offset: start of each token in the choice's text; several tokens of
        one character have the offset of the character. kept_token_ids, kept_counts: the tokens that each one was drawn from, with
        `fp32_logprobs` and top_k, top_p or min_p: int32 in base64, little-endian, for one token after another.
        """
        if self._shape.chat:
            return {"content": [self._chat_token(output) for output, _ in drawn]}
        tokens, values, processed, tops, offsets = [], [], [], [], []
        if with_prompt:
            tokens = list(self._prompt)
            values = [None] + [own.value for own in self._prompt_logprobs]
            processed = [None] * len(tokens)
            tops = [None] + [self._named(own.top) for own in self._prompt_logprobs]
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
        } | _kept([output for output, _ in drawn])

    def _prompt_offsets(self) -> list[int]:
        stream, offsets = TextStream(self._tokenizer), []
        for token in self._prompt:
            offsets.append(stream.length)
            stream.push(token)
        return offsets

    def _named(self, top: dict[int, float]) -> dict[str, float]:
        """Returns log-probabilities by text. If tokens share a text, only the likeliest has it; the others are named like token_id:5."""
        named: dict[str, float] = {}
        for token, value in list(top.items())[: self._asked.tops]:
            name = self._name(token)
            named[token_name(token, own=None) if name in named else name] = value
        return named

    def _name(self, token: int) -> str:
        return token_name(
            token, own=None if self._asked.return_tokens_as_token_ids else self._tokenizer.token_bytes(token)
        )

    def _chat_token(self, output: Output) -> dict:
        assert output.token is not None, "an error is no token"
        tops = [self._token(*item) for item in list((output.top_logprobs or {}).items())[: self._asked.tops]]
        own = {"processed_logprob": output.processed_logprob, "top_logprobs": tops}
        return self._token(output.token, output.logprob) | own

    def _token(self, token: int, value: float) -> dict:
        own = self._tokenizer.token_bytes(token)
        return {"token": self._name(token), "logprob": value, "bytes": None if own is None else list(own)}


def _kept(drawn: Sequence[Output]) -> dict:
    """Returns the tokens that a trainer's draws were made from, or nothing if a draw was made from all."""
    kept = [output.kept for output in drawn if output.kept is not None]
    if not kept or len(kept) < len(drawn):
        return {}
    data = b"".join(one.numpy().astype("<i4", copy=False).tobytes() for one in kept)
    return {"kept_token_ids": base64.b64encode(data).decode(), "kept_counts": [len(one) for one in kept]}


def _versions(drawn: Sequence[Output]) -> dict:
    """Returns the field `versions`: the versions of the weights that drew the tokens, in order, each with its number of tokens.

    Returns nothing before the first update.
    """
    runs = [(version, sum(1 for _ in own)) for version, own in itertools.groupby(output.version for output in drawn)]
    if all(version is None for version, _ in runs):
        return {}
    return {"versions": [{"version": version, "tokens": count} for version, count in runs]}
