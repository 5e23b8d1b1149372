"""Records of chats, preferences and prompts: rows of files, all checked before training, with faults reported together.

A preference is {"prompt": ..., "chosen": ..., "rejected": ...}, optionally with "margin" for reward models. A chat is {"messages":
[{"role": ..., "content": ...}, ...]}, or {"prompt": ..., "answer": ...}. A prompt is a text, or messages. `formats` converts other known
formats to these.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import Any, TypeVar

from ztk.data import ByteTokenizer
from ztk.data.rows import files_of, read_rows
from ztk.rl.align.encoding import ANSWER_END, Encoding, Part, Prompt, Text, checked
from ztk.rl.align.formats import PROMPTS, shown, unified
from ztk.rl.align.templates import ChatTemplate, ChatTemplateError

_MAX_FAULTS = 10
R = TypeVar("R")


class RecordFormat(StrEnum):
    """The kind of record in the lines of a file."""

    chat = "chat"
    preferences = "preferences"


class Truncation(StrEnum):
    """The part of a too long prompt to drop."""

    left = "left"  # its beginning
    right = "right"  # its end


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """texts: a chat, or the chosen and the rejected text of a pair. margin: the pair's, or NaN if it has none. label: whether the text of a
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
    encoding: Encoding,
    fields: Mapping[str, str] | None = None,
    labelled: bool = False,
) -> list[Example]:
    """Returns the rows of all files.

    paths: files, globs, or folders. seq_len: longest text in tokens, or None for no limit. fields: ztk's names -> the data's. labelled:
    allows preferences with one answer and a label.

    Raises:
        ValueError: invalid or too long lines, each with file, line and fix; or no records.
        ChatTemplateError: there are messages and no usable template.
    """
    options = {"record_format": record_format, "seq_len": seq_len, "encoding": encoding, "labelled": labelled}
    return read_records(paths, make=partial(_example, **options), fields=fields)


def without_rejected(examples: Sequence[Example]) -> list[Example]:
    """Drops KTO records with a rejected answer, for a training that would learn all answers."""
    return [example for example in examples if example.label is not False]


def read_prompts(paths: Sequence[str], *, encoding: Encoding, fields: Mapping[str, str] | None = None) -> list[Prompt]:
    """Returns the rows of all files: {"prompt": text}, {"prompt": messages} or {"messages": messages} without the answer, or another
    format of `formats`.

    paths: files, globs, or folders. fields: ztk's names -> the data's.

    Raises:
        ValueError: invalid prompts, each with file, line and fix; or no prompts.
        ChatTemplateError: there are messages and no usable template.
    """
    return read_records(paths, make=partial(_prompt_record, encoding=encoding), fields=fields)


def answer_end(prompts: Sequence[Prompt], *, encoding: Encoding) -> int:
    """Returns the token at which an answer ends. For chats it is the token that the template writes after an answer, if any.

    Raises ValueError for texts mixed with chats, and ChatTemplateError.
    """
    tokenizer = encoding.tokenizer
    if isinstance(tokenizer, ByteTokenizer):
        return ANSWER_END
    chats = [prompt for prompt in prompts if prompt.is_chat] if encoding.by_template else []
    if not chats:
        return tokenizer.end
    if len(chats) < len(prompts):
        raise ValueError(
            "data.path: some prompts are texts and some are messages, whose answers end in different ways by the chat template: write all of "
            "them as messages, or use data.chat_template=roles"
        )
    return tokenizer.token_of(ChatTemplate.open(tokenizer.folder).required_end())


def fitted(prompts: Sequence[Prompt], *, most: int, seq_len: int, cut: Truncation | None) -> list[Prompt]:
    """Returns the prompts, each with at most `most` tokens, which leaves room for an answer in `seq_len`.

    cut: the part of a longer prompt to drop. If omitted, longer prompts raise.

    Raises ValueError for a prompt without a token, for one that is too long, and if there is no room for any.
    """
    answer = seq_len - most
    if most < 1:
        raise ValueError(
            f"rollout.max_tokens={answer} leaves no token for a prompt in data.seq_len={seq_len}: use data.seq_len={2 * answer}"
        )
    shortest, longest = (bound(prompts, key=lambda prompt: len(prompt.tokens)) for bound in (min, max))
    if not shortest.tokens:
        raise ValueError(f"the prompt {shortest.text!r} has no token in data.tokenizer: give it a text")
    length = len(longest.tokens)
    if length > most and cut is None:
        raise ValueError(
            f"the prompt {longest.text[:40]!r}... of {length} tokens and rollout.max_tokens={answer} do not fit into "
            f"data.seq_len={seq_len}: use data.seq_len={length + answer}, shorter prompts, or data.truncate_prompts=left, which drops "
            "their beginnings"
        )
    part = slice(-most, None) if cut is Truncation.left else slice(most)
    return [replace(prompt, tokens=prompt.tokens[part]) for prompt in prompts]


def read_records(
    paths: Sequence[str], *, make: Callable[[Mapping[str, Any]], R], fields: Mapping[str, str] | None = None
) -> list[R]:
    """Returns the records of all files.

    paths: the same as for `ztk.data.rows.files_of`. make: converts a row's object, and raises ValueError for an invalid one. fields: ztk's
    names -> the data's.

    Raises:
        ValueError: invalid rows, each with file and place, at most ten, an error that repeats once in full; or files without a record.
        ChatTemplateError: raised by `make`; reported once instead of per row.
    """
    found: list[R] = []
    faults: list[str] = []
    places: dict[str, str] = {}  # error -> the first place that has it
    for file in files_of(paths):
        for row in read_rows(file):
            try:
                found.append(make(_renamed(_object(row.value), fields=fields or {})))
            except ChatTemplateError:
                raise
            except ValueError as error:
                earlier = places.setdefault(str(error), f"data.path={file}, {row.place}")
                place = f"data.path={file}, {row.place}"
                faults.append(f"{place}: " + (str(error) if earlier == place else f"the same as {earlier}"))
            if len(faults) == _MAX_FAULTS:
                raise ValueError("\n".join([*faults, "later lines were not read"]))
    if faults:
        raise ValueError("\n".join(faults))
    if not found:
        raise ValueError(f"data.path={', '.join(paths)}: there are no records; every line must be a JSON object")
    return found


def _renamed(record: Mapping[str, Any], *, fields: Mapping[str, str]) -> Mapping[str, Any]:
    """Adds further names for fields of the record. Its own names are kept, because reward functions may use them."""
    for name, own in fields.items():
        if own not in record:
            raise ValueError(
                f"has no field {own!r} of data.fields={{{name}: {own}}}; its fields are {', '.join(record) or 'none'}"
            )
    return record if not fields else {**record, **{name: record[own] for name, own in fields.items()}}


def _object(value: Any) -> Mapping[str, Any]:
    if isinstance(value, ValueError):
        raise value
    if not isinstance(value, dict):
        raise ValueError("must be a JSON object, such as {...}")
    return value


def _prompt_record(record: Mapping[str, Any], *, encoding: Encoding) -> Prompt:
    """Converts a record. Raises ValueError without the place."""
    found = unified(record, purpose=PROMPTS)
    prompt = found["prompt"]
    if not (isinstance(prompt, str) and prompt) and not isinstance(prompt, list):
        raise ValueError('must be an object with a text "prompt", or with "messages"')
    if isinstance(prompt, list) and prompt and isinstance(prompt[-1], dict) and prompt[-1].get("role") == "assistant":
        raise ValueError("the last message is an assistant's, and the policy is to write that one: leave it out")
    tools = found.get("tools")
    written = encoding.prompt(prompt, tools=tools)
    return replace(written, record={**record, "prompt": prompt} if written.is_chat else record, tools=tools)


def _example(
    record: Mapping[str, Any],
    *,
    record_format: RecordFormat,
    seq_len: int | None,
    encoding: Encoding,
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


def _chat(record: Mapping[str, Any], *, encoding: Encoding) -> Example:
    if "messages" in record:
        messages = record["messages"]
        if encoding.template is not None:
            text = _by_template(checked(messages), encoding=encoding, last_only=False, tools=record.get("tools"))
        else:
            text = encoding.text(encoding.lines(messages, tools=record.get("tools")))
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


def _labelled(record: Mapping[str, Any], *, encoding: Encoding) -> Example:
    label = record["label"]
    if not isinstance(label, bool | int) or label not in (0, 1):
        raise ValueError(f'"label": {label!r} must be true or false')
    answer = _answer(record, key="answer", encoding=encoding)
    return Example(texts=(_answered(record, answer=answer, encoding=encoding),), label=bool(label))


def _preference(record: Mapping[str, Any], *, encoding: Encoding) -> Example:
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


def _answered(record: Mapping[str, Any], *, answer: str, encoding: Encoding) -> Text:
    """Makes a text of a record's prompt, and an answer to learn."""
    messages = record.get("prompt")
    if isinstance(messages, list) and encoding.template is not None:
        chat = [*checked(messages), {"role": "assistant", "content": answer}]
        return _by_template(chat, encoding=encoding, last_only=True, tools=record.get("tools"))
    prompt = _prompt(record, encoding=encoding)
    return encoding.text([*prompt, Part(text=answer, is_answer=True, ends=True)])


def _by_template(messages: list[dict], *, encoding: Encoding, last_only: bool, tools: Any = None) -> Text:
    assert encoding.template is not None, "asked before"
    found = encoding.template.learnt(messages, last_only=last_only, tools=tools)
    return encoding.tokenised(found.text, answers=found.answers, is_rendered=True)


def _prompt(record: Mapping[str, Any], *, encoding: Encoding) -> list[Part]:
    prompt = record.get("prompt")
    if isinstance(prompt, str) and prompt:
        return [Part(text=prompt)]
    if isinstance(prompt, list):
        return encoding.asking(prompt, tools=record.get("tools"))
    raise ValueError(f'"prompt": {shown(prompt)} must be a text of a character or more, or a list of messages')


def _answer(record: Mapping[str, Any], *, key: str, encoding: Encoding) -> str:
    text = record.get(key)
    if isinstance(text, list) and len(text) == 1 and isinstance(text[0], dict) and text[0].get("role") == "assistant":
        text = text[0].get("content")
    if not isinstance(text, str):
        raise ValueError(f'"{key}": {shown(text)} must be a text, or a list of one message of the role "assistant"')
    return encoding.without_stop(text, key=key)
