"""Records of chats and preferences: JSON lines, checked before training.

A preference is {"prompt": ..., "chosen": ..., "rejected": ...}, optionally with "margin" for reward models. A chat is {"messages":
[{"role": ..., "content": ...}, ...]}, or {"prompt": ..., "answer": ...}. A prompt is a text, or messages. `formats` converts other known
formats to these. Text is tokenised as UTF-8 bytes, with a stop byte at the end of an answer, or by a tokenizer, with its end token or the
end of its chat template. A policy thus learns to end its answers.

[Note: One text] The parts of a record are joined and tokenised once, as in transformers and TRL. The tokens that the tokenizer prepends
to a text, such as <s>, are added, unless a chat template wrote the text, which writes them itself. Learnt tokens are determined by
characters: a token belongs to an answer if one of its characters does. A token across the border of prompt and answer is thus learnt: in
"hello wor" and "ld you", the learnt tokens are "world" and "you". A text's first token is never learnt, because nothing predicts it. A
prompt to be answered is tokenised in the same way, without the tokens that the tokenizer appends to a text, because the answer follows.
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

ANSWER_END = ord("\n")  # ends an answer, unless data.stop is set
ROLES = ("system", "user", "assistant", "tool")


class RecordFormat(StrEnum):
    """The kind of record in the lines of a file."""

    chat = "chat"
    preferences = "preferences"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Part:
    """A text. ends: the end of an answer follows, which is learnt if the text is."""

    text: str
    is_answer: bool = False
    ends: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class _Encoding:
    """end: the text that ends an answer. reserved: a byte that answers must not contain, if any. template: of messages; `_rendered` by
    default.
    """

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
    """tokens: uint8 [n], or int32 [n] of a tokenizer. answer: whether to learn the token, bool [n]."""

    tokens: Tensor
    answer: Tensor

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def last_answer(self) -> slice:
        """The positions of the last answer, including its end, of a text with an answer."""
        return last_answer(self.answer)

    @staticmethod
    def of(parts: Sequence[tuple[str, bool]], *, stop: int) -> "Text":
        """Makes a text from (text, whether it is an answer), in order, as bytes. `stop` ends every answer."""
        named = [_Part(text=text, is_answer=is_answer, ends=is_answer) for text, is_answer in parts]
        return _text(named, encoding=_Encoding.of(stop=stop, tokenizer=None, by_template=False))


def last_answer(counts: Tensor) -> slice:
    """Returns the last run of tokens that count, of bool [n] with at least one."""
    end = int(counts.nonzero()[-1]) + 1
    before = (~counts[:end]).nonzero()
    return slice(int(before[-1]) + 1 if len(before) else 0, end)


def _text(parts: Sequence[_Part], *, encoding: _Encoding) -> Text:
    """Joins the parts and tokenises them once; see [Note: One text]."""
    after = encoding.tokenizer.after
    ends_itself = after[:1] == (encoding.tokenizer.end,)  # the tokenizer appends the end of an answer to every text
    text, answers = "", []
    for number, part in enumerate(parts, start=1):
        first = len(text)
        text += part.text
        if part.ends and encoding.reserved is None:
            text = text.removesuffix(encoding.end)  # an answer that includes its end keeps it, as in TRL
        if part.ends and not (ends_itself and number == len(parts)):
            text += encoding.end
        if part.is_answer:
            answers.append((first, len(text)))
    return _tokenised(text, answers=answers, encoding=encoding)


def _tokenised(
    text: str, *, answers: Sequence[tuple[int, int]], encoding: _Encoding, is_rendered: bool = False
) -> Text:
    """Tokenises a text. answers: positions in `text`. is_rendered: a chat template wrote the text with all special tokens."""
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
    """Returns whether a token has a character of an answer. A token without characters belongs to the following ones."""
    first, last = span[0], max(span[1], span[0] + 1)
    return any(first < stop and start < last for start, stop in answers)


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """texts: a chat, or the chosen and the rejected text of a pair. margin: of the pair; NaN if it has none. label: whether the text of a
    KTO record is desirable. See `without_rejected`.
    """

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
    """Returns the rows of all files.

    paths: files, globs, or folders. seq_len: longest text in tokens, or None for no limit. stop: the byte that ends answers of bytes.
    tokenizer: of the texts, or None for bytes. by_template: formats messages with the chat template of the tokenizer's folder, which is
    read if there are any. fields: ztk's names -> the data's. labelled: allows preferences with one answer and a label.

    Raises:
        ValueError: invalid or too long lines, each with file, line and fix; or no records.
        ChatTemplateError: there are messages and no usable template.
    """
    encoding = _Encoding.of(stop=stop, tokenizer=tokenizer, by_template=by_template)
    options = {"record_format": record_format, "seq_len": seq_len, "encoding": encoding, "labelled": labelled}
    return read_records(paths, make=partial(_example, **options), fields=fields)


def without_rejected(examples: Sequence[Example]) -> list[Example]:
    """Drops KTO records with a rejected answer, for a training that would learn all answers."""
    return [example for example in examples if example.label is not False]


def _example(
    record: Mapping[str, Any],
    *,
    record_format: RecordFormat,
    seq_len: int | None,
    encoding: _Encoding,
    labelled: bool,
) -> Example:
    """Converts a record. Raises ValueError without the place."""
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
    key = "answer" if "answer" in record else "chosen"  # the better answer of a pair is learnt
    answer = _answer(record, key=key, encoding=encoding)
    label = record.get("label") if key == "answer" else None
    if not isinstance(label, bool) and label in (0, 1):
        raise ValueError(
            f'"label": {label} may belong to a record of KTO, whose rejected answers are not learnt: write true or false, or leave the '
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
    """Makes a text of a record's prompt, and an answer to learn."""
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
    """Checks messages for a template, which may support other roles and contents than texts. Raises ValueError for invalid ones."""
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
    """A text for a model to answer, including its special tokens."""

    tokens: list[int]
    text: str


def text_prompt(text: str, *, tokenizer: ByteTokenizer | SubwordTokenizer) -> Prompt:
    """Makes a prompt of one text. See [Note: One text]."""
    return Prompt(tokens=[*tokenizer.begin, *tokenizer.read(text).tokens], text=text)


def chat_prompt(
    messages: Sequence[Mapping[str, str]],
    *,
    stop: int | None = None,
    tokenizer: SubwordTokenizer | None = None,
    by_template: bool = False,
    tools: Sequence[Any] | None = None,
) -> Prompt:
    """Returns a conversation up to the beginning of the next answer, in the format of `task=sft`.

    Options are as in `read_examples`. tools: offered by a chat template. Raises ValueError for invalid messages, and ChatTemplateError.
    """
    encoding = _Encoding.of(stop=stop, tokenizer=tokenizer, by_template=by_template)
    if encoding.template is not None:
        text = encoding.template().prompt(_checked(list(messages)), tools=tools)
        return Prompt(tokens=encoding.tokenizer.read(text).tokens, text=text)
    parts = _prompt({"prompt": list(messages), "tools": tools}, encoding=encoding)
    text = "".join(part.text + encoding.end * part.ends for part in parts)
    return text_prompt(text, tokenizer=encoding.tokenizer)


def _rendered(messages: Any, *, encoding: _Encoding, tools: Any = None) -> list[_Part]:
    """Formats messages as `<|role|>`, a line end, the content, and a line end.

    After an assistant's content, the end of an answer replaces it.
    """
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
