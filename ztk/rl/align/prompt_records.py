"""Prompts for a policy: JSON lines, read and tokenised before the first rollout."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import Any

from ztk.data import ByteTokenizer, SubwordTokenizer
from ztk.rl.align.formats import PROMPTS, unified
from ztk.rl.align.lines import read_records
from ztk.rl.align.records import ANSWER_END, chat_prompt, text_prompt
from ztk.rl.align.templates import ChatTemplate

Tokenizer = ByteTokenizer | SubwordTokenizer


class Truncation(StrEnum):
    """The part of a too long prompt to drop."""

    left = "left"  # its beginning
    right = "right"  # its end


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptRecord:
    """tokens: the prompt of the policy. text: the same as text, including special tokens. record: the line, for the reward. is_chat: it
    has messages.
    """

    tokens: list[int]
    text: str
    record: Mapping[str, Any]
    is_chat: bool = False


def read_prompts(
    paths: Sequence[str],
    *,
    tokenizer: Tokenizer,
    by_template: bool = False,
    fields: Mapping[str, str] | None = None,
) -> list[PromptRecord]:
    """Returns the rows of all files: {"prompt": text}, {"prompt": messages} or {"messages": messages} without the answer, or another
    format of `formats`.

    paths: files, globs, or folders. by_template: formats messages with the chat template of the tokenizer's folder, as in `task=sft`,
    instead of as lines <|role|>. fields: ztk's names -> the data's.

    Raises:
        ValueError: invalid prompts, each with file, line and fix; or no prompts.
        ChatTemplateError: there are messages and no usable template.
    """
    return read_records(paths, make=partial(_record, tokenizer=tokenizer, by_template=by_template), fields=fields)


def answer_end(records: Sequence[PromptRecord], *, tokenizer: Tokenizer, by_template: bool = False) -> int:
    """Returns the token at which an answer ends. For chats it is the token that the template writes after an answer, if any.

    Raises ValueError for texts mixed with chats, and ChatTemplateError.
    """
    if isinstance(tokenizer, ByteTokenizer):
        return ANSWER_END
    chats = [record for record in records if record.is_chat] if by_template else []
    if not chats:
        return tokenizer.end
    if len(chats) < len(records):
        raise ValueError(
            "data.path: some prompts are texts and some are messages, whose answers end in different ways by the chat template: write all of "
            "them as messages, or use data.chat_template=roles"
        )
    return tokenizer.token_of(ChatTemplate.open(tokenizer.folder).required_end())


def fitted(records: Sequence[PromptRecord], *, most: int, seq_len: int, cut: Truncation | None) -> list[PromptRecord]:
    """Returns the prompts, each with at most `most` tokens, which leaves room for an answer in `seq_len`.

    cut: the part of a longer prompt to drop. If omitted, longer prompts raise.

    Raises ValueError for a prompt without a token, for one that is too long, and if there is no room for any.
    """
    answer = seq_len - most
    if most < 1:
        raise ValueError(
            f"rollout.max_tokens={answer} leaves no token for a prompt in data.seq_len={seq_len}: use data.seq_len={2 * answer}"
        )
    shortest, longest = (bound(records, key=lambda record: len(record.tokens)) for bound in (min, max))
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
    return [replace(record, tokens=record.tokens[part]) for record in records]


def _record(record: Mapping[str, Any], *, tokenizer: Tokenizer, by_template: bool) -> PromptRecord:
    """Converts a record. Raises ValueError without the place."""
    found = unified(record, purpose=PROMPTS)
    prompt, tools = found["prompt"], found.get("tools")
    if isinstance(prompt, str) and prompt:
        written = text_prompt(prompt, tokenizer=tokenizer)
        return PromptRecord(tokens=written.tokens, text=written.text, record=record)
    if not isinstance(prompt, list):
        raise ValueError('must be an object with a text "prompt", or with "messages"')
    if prompt and isinstance(prompt[-1], dict) and prompt[-1].get("role") == "assistant":
        raise ValueError("the last message is an assistant's, and the policy is to write that one: leave it out")
    if isinstance(tokenizer, ByteTokenizer):
        written = chat_prompt(prompt, stop=ANSWER_END, tools=tools)
    else:
        written = chat_prompt(prompt, tokenizer=tokenizer, by_template=by_template, tools=tools)
    return PromptRecord(tokens=written.tokens, text=written.text, record={**record, "prompt": prompt}, is_chat=True)
