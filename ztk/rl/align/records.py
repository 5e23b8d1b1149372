"""Records of chats and preferences: lines of JSON, checked before anything trains on them.

A preference is {"prompt": ..., "chosen": ..., "rejected": ...}, with "margin" if a reward model is to use one. A chat is {"messages":
[{"role": ..., "content": ...}, ...]}, or {"prompt": ..., "answer": ...}. A prompt is a text, or messages. `formats` brings the forms of known
data sets into these. Text is UTF-8 bytes, and an answer ends with the stop byte; or the tokens of a tokenizer, and an answer ends with its end
token, or as the tokenizer's chat template ends it. So a policy learns to end.

[Note: One text]
The parts of a record are joined and tokenised once, as transformers and TRL do it: with the tokens that the tokenizer puts before a text, such
as <s>, unless a chat template wrote the text, which writes them itself. Which tokens are learnt follows from characters: a token is part of an
answer if one of its characters is. So a token across the border of prompt and answer is learnt: of "hello wor" and "ld you" these are the
tokens "world" and "you". A text's first token is never learnt, because nothing predicts it. A prompt that is to be answered is tokenised in
the same way, without the tokens that the tokenizer puts after a text: the answer comes there.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ztk.data import ByteTokenizer, SubwordTokenizer
from ztk.rl.align.formats import unified
from ztk.rl.align.lines import read_records
from ztk.rl.align.templates import ChatTemplate

ANSWER_END = ord("\n")  # ends an answer, unless data.stop says otherwise
ROLES = ("system", "user", "assistant", "tool")


class RecordFormat(StrEnum):
    """What the lines of a file are."""

    chat = "chat"
    preferences = "preferences"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Part:
    """A text. ends: the end of an answer follows, which is to be learnt if the text is."""

    text: str
    is_answer: bool = False
    ends: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class _Encoding:
    """end: the text that ends an answer. reserved: a byte that no answer may contain; None: all may be there. template: of messages; None:
    `_rendered`."""

    tokenizer: ByteTokenizer | SubwordTokenizer
    end: str
    reserved: int | None
    dtype: torch.dtype
    template: Callable[[], ChatTemplate] | None = None

    @staticmethod
    def of(*, stop: int | None, tokenizer: SubwordTokenizer | None, by_template: bool) -> "_Encoding":
        if tokenizer is None:
            assert stop is not None, "answers have an end"
            return _Encoding(tokenizer=ByteTokenizer(), end=chr(stop), reserved=stop, dtype=torch.uint8)
        assert stop is None, "answers have one end"
        template = partial(ChatTemplate.open, tokenizer.folder) if by_template else None
        return _Encoding(
            tokenizer=tokenizer, end=tokenizer.end_text, reserved=None, dtype=torch.int32, template=template
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Text:
    """tokens: uint8 [n], or int32 [n] of a tokenizer. answer: the token is to be learnt, bool [n]."""

    tokens: Tensor
    answer: Tensor

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def last_answer(self) -> slice:
        """Where the last answer is, its end included. For texts with one."""
        return last_answer(self.answer)

    @staticmethod
    def of(parts: Sequence[tuple[str, bool]], *, stop: int) -> "Text":
        """From (text, whether it is an answer), in order, as bytes; `stop` ends every answer."""
        named = [_Part(text=text, is_answer=is_answer, ends=is_answer) for text, is_answer in parts]
        return _text(named, encoding=_Encoding.of(stop=stop, tokenizer=None, by_template=False))


def last_answer(counts: Tensor) -> slice:
    """Where the last run of tokens that count is, of bool [n] with one."""
    end = int(counts.nonzero()[-1]) + 1
    before = (~counts[:end]).nonzero()
    return slice(int(before[-1]) + 1 if len(before) else 0, end)


def _text(parts: Sequence[_Part], *, encoding: _Encoding) -> Text:
    """The parts as one text, tokenised once: see [Note: One text]."""
    after = encoding.tokenizer.after
    ends_itself = after[:1] == (encoding.tokenizer.end,)  # the tokenizer ends every text as an answer ends
    text, answers = "", []
    for number, part in enumerate(parts, start=1):
        first = len(text)
        text += part.text
        if part.ends and encoding.reserved is None:
            text = text.removesuffix(encoding.end)  # an answer that has its end keeps it, as in TRL
        if part.ends and not (ends_itself and number == len(parts)):
            text += encoding.end
        if part.is_answer:
            answers.append((first, len(text)))
    return _tokenised(text, answers=answers, encoding=encoding)


def _tokenised(
    text: str, *, answers: Sequence[tuple[int, int]], encoding: _Encoding, is_rendered: bool = False
) -> Text:
    """answers: places in `text`. is_rendered: a chat template wrote the text with all special tokens."""
    found = encoding.tokenizer.read(text)
    tokens, learnt = list(found.tokens), [_overlaps(span, answers) for span in found.spans]
    if not is_rendered:
        begin, after = encoding.tokenizer.begin, encoding.tokenizer.after
        tokens = [*begin, *tokens, *after]
        ends = bool(answers) and answers[-1][1] == len(text)
        learnt = [*[False] * len(begin), *learnt, *[ends] * len(after)]
    if learnt:
        learnt[0] = False
    return Text(tokens=torch.tensor(tokens, dtype=encoding.dtype), answer=torch.tensor(learnt, dtype=torch.bool))


def _overlaps(span: tuple[int, int], answers: Sequence[tuple[int, int]]) -> bool:
    """Whether a token has a character of an answer. One without characters belongs to those behind it."""
    first, last = span[0], max(span[1], span[0] + 1)
    return any(first < stop and start < last for start, stop in answers)


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """texts: a chat, or the chosen and the rejected text of a pair. margin: of the pair; NaN: it has none of its own. label: whether the one
    text of a record of KTO is desirable. See `without_rejected`."""

    texts: tuple[Text, ...]
    margin: float = math.nan
    label: bool | None = None


def read_examples(
    paths: Sequence[str],
    *,
    record_format: RecordFormat,
    seq_len: int | None,
    stop: int | None = None,
    tokenizer: SubwordTokenizer | None = None,
    by_template: bool = False,
    fields: Mapping[str, str] | None = None,
    labelled: bool = False,
) -> list[Example]:
    """The rows of all files. paths: files, globs, or folders. seq_len: the longest text in tokens, or None for no limit. stop: the byte
    that ends answers of bytes. tokenizer: of the texts, or None for bytes. by_template: messages are written by the chat template of the
    tokenizer's folder, which is read if there are any. fields: ztk's names -> the data's. labelled: preferences may have one answer with a
    label.

    Raises:
        ValueError: lines that are no such record or do not fit, each with file, line and fix; no records.
        ChatTemplateError: messages, and no template that can be used.
    """
    encoding = _Encoding.of(stop=stop, tokenizer=tokenizer, by_template=by_template)
    options = {"record_format": record_format, "seq_len": seq_len, "encoding": encoding, "labelled": labelled}
    return read_records(paths, make=partial(_example, **options), fields=fields)


def without_rejected(examples: Sequence[Example]) -> list[Example]:
    """Leaves out records of KTO whose answer is rejected, where all answers would be learnt."""
    return [example for example in examples if example.label is not False]


def _example(
    record: Mapping[str, Any],
    *,
    record_format: RecordFormat,
    seq_len: int | None,
    encoding: _Encoding,
    labelled: bool,
) -> Example:
    """Raises ValueError without the place."""
    record = unified(record, purpose=record_format.value)
    if record_format is RecordFormat.chat:
        example = _chat(record, encoding=encoding)
    elif "chosen" in record:
        example = _preference(record, encoding=encoding)
    elif labelled:
        example = _labelled(record, encoding=encoding)
    else:
        raise ValueError(
            "is a record of KTO, with one answer and its label, and two answers are compared: use task=dpo dpo.loss=kto"
        )
    if seq_len is not None and (longest := max(len(text) for text in example.texts)) > seq_len:
        raise ValueError(
            f"{longest} tokens, and data.seq_len={seq_len}: shorten it, or use data.seq_len={longest} and a model.max_seq_len of as many"
        )
    return example


def _chat(record: Mapping[str, Any], *, encoding: _Encoding) -> Example:
    if "messages" in record:
        messages = record["messages"]
        if encoding.template is not None:
            text = _by_template(_checked(messages), encoding=encoding, last_only=False, tools=record.get("tools"))
        else:
            text = _text(_rendered(messages, encoding=encoding, tools=record.get("tools")), encoding=encoding)
        if not bool(text.answer.any()):
            raise ValueError('"messages" has no message of the role "assistant", so there is nothing to learn')
        return Example(texts=(text,))
    key = "answer" if "answer" in record else "chosen"  # of a pair the better one is learnt
    answer = _answer(record, key=key, encoding=encoding)
    label = record.get("label") if key == "answer" else None
    if not isinstance(label, bool) and label in (0, 1):
        raise ValueError(
            f'"label": {label} may be that of a record of KTO, whose rejected answers are not to be learnt: write true or false, or leave the '
            "field out"
        )
    label = label if isinstance(label, bool) else None
    return Example(texts=(_answered(record, answer=answer, encoding=encoding),), label=label)


def _labelled(record: Mapping[str, Any], *, encoding: _Encoding) -> Example:
    label = record["label"]
    if not isinstance(label, bool | int) or label not in (0, 1):
        raise ValueError(f'"label": {label!r} must be true or false')
    answer = _answer(record, key="answer", encoding=encoding)
    return Example(texts=(_answered(record, answer=answer, encoding=encoding),), label=bool(label))


def _preference(record: Mapping[str, Any], *, encoding: _Encoding) -> Example:
    answers = [_answer(record, key=key, encoding=encoding) for key in ("chosen", "rejected")]
    prompts = [record["prompt"], record.get("rejected_prompt", record["prompt"])]
    if answers[0] == answers[1] and prompts[0] == prompts[1]:
        raise ValueError('"chosen" and "rejected" are equal, so there is nothing to learn: leave the line out')
    margin = record.get("margin", math.nan)
    if isinstance(margin, bool) or not isinstance(margin, int | float) or math.isinf(margin):
        raise ValueError(f'"margin": {margin!r} must be a finite number')
    sides = zip(prompts, answers, strict=True)
    texts = tuple(_answered({**record, "prompt": prompt}, answer=answer, encoding=encoding) for prompt, answer in sides)
    return Example(texts=texts, margin=float(margin))


def _answered(record: Mapping[str, Any], *, answer: str, encoding: _Encoding) -> Text:
    """A record's prompt, and an answer to it that is to be learnt."""
    messages = record.get("prompt")
    if isinstance(messages, list) and encoding.template is not None:
        chat = [*_checked(messages), {"role": "assistant", "content": answer}]
        return _by_template(chat, encoding=encoding, last_only=True, tools=record.get("tools"))
    prompt = _prompt(record, encoding=encoding)
    return _text([*prompt, _Part(text=answer, is_answer=True, ends=True)], encoding=encoding)


def _by_template(messages: list[dict], *, encoding: _Encoding, last_only: bool, tools: Any = None) -> Text:
    assert encoding.template is not None
    found = encoding.template().learnt(messages, last_only=last_only, tools=tools)
    return _tokenised(found.text, answers=found.answers, encoding=encoding, is_rendered=True)


def _checked(messages: Any) -> list[dict]:
    """Messages for a template, which may know other roles and contents than texts. Raises ValueError for what are none."""
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"{_shown(messages)} must be a list of messages")
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f'message {number}: {_shown(message)} must be {{"role": ..., "content": ...}}')
    return messages


def _prompt(record: Mapping[str, Any], *, encoding: _Encoding) -> list[_Part]:
    prompt = record.get("prompt")
    if isinstance(prompt, str) and prompt:
        return [_Part(text=prompt)]
    if isinstance(prompt, list):
        rendered = _rendered(prompt, encoding=encoding, tools=record.get("tools"))
        parts = [replace(part, is_answer=False) for part in rendered]
        return [*parts, _Part(text=_header("assistant"))]
    raise ValueError(f'"prompt": {_shown(prompt)} must be a text of a character or more, or a list of messages')


def _answer(record: Mapping[str, Any], *, key: str, encoding: _Encoding) -> str:
    text = record.get(key)
    if isinstance(text, list) and len(text) == 1 and isinstance(text[0], dict) and text[0].get("role") == "assistant":
        text = text[0].get("content")
    if not isinstance(text, str):
        raise ValueError(f'"{key}": {_shown(text)} must be a text, or a list of one message of the role "assistant"')
    return _without_stop(text, key=key, encoding=encoding)


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """A text that a model is to answer, as it sees it: with its special tokens."""

    tokens: list[int]
    text: str


def text_prompt(text: str, *, tokenizer: ByteTokenizer | SubwordTokenizer) -> Prompt:
    """A prompt of one text. See [Note: One text]."""
    return Prompt(tokens=[*tokenizer.begin, *tokenizer.read(text).tokens], text=text)


def chat_prompt(
    messages: Sequence[Mapping[str, str]],
    *,
    stop: int | None = None,
    tokenizer: SubwordTokenizer | None = None,
    by_template: bool = False,
    tools: Sequence[Any] | None = None,
) -> Prompt:
    """A conversation up to where the next answer begins, as `task=sft` learns it. The options are those of `read_examples`. tools: what a chat
    template may offer.

    Raises ValueError for messages that are none, and ChatTemplateError.
    """
    encoding = _Encoding.of(stop=stop, tokenizer=tokenizer, by_template=by_template)
    if encoding.template is not None:
        text = encoding.template().prompt(_checked(list(messages)), tools=tools)
        return Prompt(tokens=encoding.tokenizer.read(text).tokens, text=text)
    parts = _prompt({"prompt": list(messages), "tools": tools}, encoding=encoding)
    text = "".join(part.text + encoding.end * part.ends for part in parts)
    return text_prompt(text, tokenizer=encoding.tokenizer)


def _rendered(messages: Any, *, encoding: _Encoding, tools: Any = None) -> list[_Part]:
    """Messages as `<|role|>`, a line end, the content, and a line end, which behind an assistant's content is the end of an answer."""
    if tools or (isinstance(messages, list) and any(isinstance(m, dict) and m.get("tool_calls") for m in messages)):
        raise ValueError(
            "has tools or calls of tools, which lines <|role|> cannot write: use data.tokenizer=FOLDER with a chat template that writes them"
        )
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"{_shown(messages)} must be a list of messages")
    parts = []
    for number, message in enumerate(messages, start=1):
        if (
            not isinstance(message, dict)
            or message.get("role") not in ROLES
            or not isinstance(message.get("content"), str)
        ):
            raise ValueError(
                f'message {number}: {_shown(message)} must be {{"role": ..., "content": ...}} with a role of {", ".join(ROLES)} and a text'
            )
        is_answer = message["role"] == "assistant"
        text = message["content"]
        parts.append(_Part(text=_header(message["role"])))
        if is_answer:
            parts.append(_Part(text=_without_stop(text, key="content", encoding=encoding), is_answer=True, ends=True))
        else:
            parts.append(_Part(text=f"{text}\n"))
    return parts


def _header(role: str) -> str:
    return f"<|{role}|>\n"


def _without_stop(text: str, *, key: str, encoding: _Encoding) -> str:
    if encoding.reserved is not None and encoding.reserved in text.encode():
        raise ValueError(
            f'"{key}" contains the byte {encoding.reserved}, which ends an answer: use data.stop=3, or another byte that no answer contains'
        )
    return text


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
