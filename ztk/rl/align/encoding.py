"""Tokens of texts, chats and prompts: UTF-8 bytes with a stop byte at the end of an answer, or a tokenizer's with its end token or the end
of its chat template. A policy thus learns to end its answers.

[Note: One text] The parts of a record are joined and tokenised once, as in transformers and TRL. The tokens that the tokenizer prepends
to a text, such as <s>, are added, unless a chat template wrote the text, which writes them itself. Learnt tokens are determined by
characters: a token belongs to an answer if one of its characters does. A token across the border of prompt and answer is thus learnt: in
"hello wor" and "ld you", the learnt tokens are "world" and "you". A text's first token is never learnt, because nothing predicts it. A
prompt to be answered is tokenised in the same way, without the tokens that the tokenizer appends to a text, because the answer follows.

[Note: Joined turns] The tokens of a conversation are the prompt, the first answer as sampled, the environment's observation, the next
answer, and so on. An observation is formatted as the chat template formats it between the end of an answer and the beginning of the next,
and tokenised after the end token. The tokens are thus equal to the template's for the whole conversation, if its beginning does not
change when messages follow. Some templates change it (they drop reasoning of earlier turns, or strip white space). The sampled tokens are
then kept, because the policy's results are based on them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ztk.data import ByteTokenizer, SubwordTokenizer
from ztk.rl.align.formats import shown
from ztk.rl.align.templates import ChatTemplate, Message

ANSWER_END = ord("\n")  # ends an answer, unless data.stop is set
ROLES = ("system", "user", "assistant", "tool")

# A text, or messages.
Said = str | Sequence[Message]


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """tokens: the prompt of the policy. text: the same as text, including special tokens. record: further columns, for the reward. is_chat:
    whether the record has messages. tools: that its chat template offers. answer: the right one, if it is known.
    """

    tokens: list[int]
    text: str
    record: Mapping[str, Any] = field(default_factory=dict)
    is_chat: bool = False
    tools: Sequence[Any] | None = None
    answer: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A text. ends: the end of an answer follows, which is learnt if the text is."""

    text: str
    is_answer: bool = False
    ends: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Text:
    """tokens: uint8 [n], or int32 [n] of a tokenizer. answer: whether to learn the token, bool [n]."""

    tokens: Tensor
    answer: Tensor

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def first_answer(self) -> int:
        """The position of the first token that counts, of a text with an answer."""
        return int(self.answer.int().argmax())

    @property
    def last_answer(self) -> slice:
        """The positions of the last answer, including its end, of a text with an answer."""
        return last_answer(self.answer)


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoding:
    """tokenizer: encodes all texts. by_template: formats messages with the chat template of the tokenizer's folder, which is read if there are
    any, instead of as lines <|role|>. stop: the byte that ends an answer of bytes, and that answers must not contain.
    """

    tokenizer: ByteTokenizer | SubwordTokenizer = field(default_factory=ByteTokenizer)
    by_template: bool = False
    stop: int = ANSWER_END

    @property
    def is_bytes(self) -> bool:
        """Whether tokens are bytes."""
        return isinstance(self.tokenizer, ByteTokenizer)

    @property
    def end(self) -> str:
        """The text that ends an answer outside of templates."""
        return chr(self.stop) if isinstance(self.tokenizer, ByteTokenizer) else self.tokenizer.end_text

    @property
    def template(self) -> ChatTemplate | None:
        """The template of messages; None for lines <|role|>. Raises ChatTemplateError."""
        if isinstance(self.tokenizer, ByteTokenizer) or not self.by_template:
            return None
        return ChatTemplate.open(self.tokenizer.folder)

    def prompt(self, asked: Said, *, tools: Sequence[Any] | None = None) -> Prompt:
        """Returns a text, or a conversation up to the beginning of the next answer, in the format of `task=sft`.

        tools: offered by a chat template. Raises ValueError for invalid messages, and ChatTemplateError.
        """
        is_chat = not isinstance(asked, str)
        if is_chat and (template := self.template) is not None:
            text = template.prompt(checked(list(asked)), tools=tools)
            return Prompt(tokens=self.tokenizer.read(text).tokens, text=text, is_chat=True)
        text = asked if isinstance(asked, str) else ""
        if is_chat:
            text = "".join(part.text + self.end * part.ends for part in self.asking(list(asked), tools=tools))
        return Prompt(tokens=[*self.tokenizer.begin, *self.tokenizer.read(text).tokens], text=text, is_chat=is_chat)

    def between(self, said: Said, *, observed: Said, tools: Sequence[Any] | None = None) -> list[int]:
        """Returns the tokens between an answer to `said` and the next answer, which follows `observed`. See [Note: Joined turns].

        Both are texts or both are messages.

        Raises ValueError for messages that the template rejects.
        """
        if isinstance(said, str):
            assert isinstance(observed, str), "the observation was checked"
            text, end = observed, self.end
        elif (template := self.template) is not None:
            assert not isinstance(observed, str), "the observation was checked"
            text, end = template.between(said, observed=observed, tools=tools), template.required_end()
        else:
            text, end = self.prompt(observed).text, self.end
        read = self.tokenizer.read
        return read(end + text).tokens[len(read(end).tokens) :]

    def text(self, parts: Sequence[Part]) -> Text:
        """Joins the parts and tokenises them once; see [Note: One text]."""
        after = self.tokenizer.after
        ends_itself = after[:1] == (self.tokenizer.end,)  # the tokenizer appends the end of an answer to every text
        text, answers = "", []
        for number, part in enumerate(parts, start=1):
            first = len(text)
            text += part.text
            if part.ends and not self.is_bytes:
                text = text.removesuffix(self.end)  # an answer that includes its end keeps it, as in TRL
            if part.ends and not (ends_itself and number == len(parts)):
                text += self.end
            if part.is_answer:
                answers.append((first, len(text)))
        return self.tokenised(text, answers=answers)

    def tokenised(self, text: str, *, answers: Sequence[tuple[int, int]], is_rendered: bool = False) -> Text:
        """Tokenises a text. answers: positions in `text`. is_rendered: a chat template wrote the text with all special tokens."""
        found = self.tokenizer.read(text)
        tokens, learnt = list(found.tokens), [_overlaps(span, answers) for span in found.spans]
        if not is_rendered:
            begin, after = self.tokenizer.begin, self.tokenizer.after
            tokens = [*begin, *tokens, *after]
            ends = bool(answers) and answers[-1][1] == len(text)
            learnt = [*[False] * len(begin), *learnt, *[ends] * len(after)]
        if learnt:
            learnt[0] = False
        dtype = torch.uint8 if self.is_bytes else torch.int32
        return Text(tokens=torch.tensor(tokens, dtype=dtype), answer=torch.tensor(learnt, dtype=torch.bool))

    def asking(self, messages: Sequence[Any], *, tools: Any = None) -> list[Part]:
        """Returns messages and the beginning of the next answer as lines <|role|>, none of which is learnt."""
        lines = [replace(part, is_answer=False) for part in self.lines(messages, tools=tools)]
        return [*lines, Part(text=_header("assistant"))]

    def lines(self, messages: Any, *, tools: Any = None) -> list[Part]:
        """Formats messages as `<|role|>`, a line end, the content, and a line end.

        After an assistant's content, the end of an answer replaces it. Raises ValueError for invalid messages, and for tools.
        """
        if tools or (isinstance(messages, list) and any(isinstance(m, dict) and m.get("tool_calls") for m in messages)):
            raise ValueError(
                "has tools or calls of tools, which lines <|role|> cannot write: use data.tokenizer=FOLDER with a chat template that writes "
                "them"
            )
        if not isinstance(messages, list) or not messages:
            raise ValueError(f"{shown(messages)} must be a list of messages")
        parts = []
        for number, message in enumerate(messages, start=1):
            if (
                not isinstance(message, dict)
                or message.get("role") not in ROLES
                or not isinstance(message.get("content"), str)
            ):
                raise ValueError(
                    f'message {number}: {shown(message)} must be {{"role": ..., "content": ...}} with a role of {", ".join(ROLES)} and a text'
                )
            is_answer = message["role"] == "assistant"
            text = message["content"]
            parts.append(Part(text=_header(message["role"])))
            if is_answer:
                parts.append(Part(text=self.without_stop(text, key="content"), is_answer=True, ends=True))
            else:
                parts.append(Part(text=f"{text}\n"))
        return parts

    def without_stop(self, text: str, *, key: str) -> str:
        """Returns an answer. Raises ValueError if it contains the byte that ends answers."""
        if self.is_bytes and self.stop in text.encode():
            raise ValueError(
                f'"{key}" contains the byte {self.stop}, which ends an answer: use data.stop=3, or another byte that no answer contains'
            )
        return text


def last_answer(counts: Tensor) -> slice:
    """Returns the last run of tokens that count, of bool [n] with at least one."""
    end = int(counts.nonzero()[-1]) + 1
    before = (~counts[:end]).nonzero()
    return slice(int(before[-1]) + 1 if len(before) else 0, end)


def checked(messages: Any) -> list[dict]:
    """Checks messages for a template, which may support other roles and contents than texts. Raises ValueError for invalid ones."""
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"{shown(messages)} must be a list of messages")
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f'message {number}: {shown(message)} must be {{"role": ..., "content": ...}}')
    return messages


def _overlaps(span: tuple[int, int], answers: Sequence[tuple[int, int]]) -> bool:
    """Returns whether a token has a character of an answer. A token without characters belongs to the following ones."""
    first, last = span[0], max(span[1], span[0] + 1)
    return any(first < stop and start < last for start, stop in answers)


def _header(role: str) -> str:
    return f"<|{role}|>\n"
