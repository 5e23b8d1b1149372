r"""Formats chats with a tokenizer's template: `chat_template` in tokenizer_config.json, or chat_template.jinja, rendered by transformers.

[Note: What an assistant wrote] A template that marks answers with {% generation %} defines the text of the assistant. For other
templates, an answer is the text that the template adds for its message to the preceding conversation with add_generation_prompt: the
content and the token that ends it, such as <|im_end|>. This requires that the template's output for a conversation is a prefix of its
output for a longer one. Templates that violate this (some drop earlier reasoning) are rejected at such a conversation, because a policy
would learn tokens that never occur when it answers.

[Note: The end of an answer] A policy that never learns to end is truncated at every answer. The end is the first token after the content
that was added to the vocabulary, whether or not the tokenizer marks it as special: <|end|> in "text<|end|>\n<|endoftext|>". If {%
generation %} closes before it, it is learnt too. A template without such a token is rejected.
"""

import contextlib
import functools
import importlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ztk.data.subword import read_settings

# Errors of a template's expressions, in addition to jinja2's own.
_OF_EXPRESSIONS = (TypeError, ValueError, AttributeError, LookupError, ArithmeticError)
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_PROBE = "5f3a9c71"  # a content that no template contains
Message = Mapping[str, Any]


class ChatTemplateError(ValueError):
    """There is no usable template. The message contains the fix."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendered:
    """A conversation as text. answers: positions of the assistant's texts, as characters (first, last + 1)."""

    text: str
    answers: list[tuple[int, int]]


@dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """The template of a folder. inner: transformers' tokenizer of the folder, used only for rendering."""

    folder: Path
    inner: Any

    @staticmethod
    def has(folder: Path) -> bool:
        """Returns whether the folder has a template, which records of plain texts do not need."""
        return "chat_template" in read_settings(folder) or (folder / "chat_template.jinja").is_file()

    @staticmethod
    @functools.lru_cache(maxsize=4)
    def open(folder: str | Path) -> "ChatTemplate":
        """Reads a folder in the format of a fast tokenizer's save_pretrained.

        Raises:
            ChatTemplateError: it has no template, or transformers or jinja2 is not installed.
        """
        folder = Path(folder).expanduser()
        try:
            importlib.import_module("jinja2")
            library: Any = importlib.import_module("transformers")
        except ImportError as error:
            raise ChatTemplateError(
                f'data.tokenizer={folder}: its chat template needs transformers and jinja2 ({error}): pip install "ztk[hf]" jinja2, or use '
                "data.chat_template=roles"
            ) from None
        try:
            inner = library.AutoTokenizer.from_pretrained(
                str(folder), local_files_only=True, use_fast=True, trust_remote_code=False
            )
        except (OSError, ValueError, KeyError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ChatTemplateError(
                f"data.tokenizer={folder}: transformers cannot read it ({reason}): save the tokenizer again, or use data.chat_template=roles"
            ) from None
        if not inner.chat_template:
            raise ChatTemplateError(
                f'data.tokenizer={folder}: has no chat template to write messages by: put "chat_template" into its tokenizer_config.json '
                "(for example from the model's instruction-tuned sibling), or use data.chat_template=roles, which writes <|role|> lines"
            )
        return ChatTemplate(folder=folder, inner=inner)

    @functools.cached_property
    def end(self) -> str | None:
        """The text of the token that ends an answer, or None if the template writes none. See [Note: The end of an answer]."""
        try:
            return self._end_after([{"role": "user", "content": "a"}])
        except (ValueError, ImportError):  # the template needs another conversation, or jinja2 is not installed
            return None

    def required_end(self) -> str:
        """Same as `end`. Raises ChatTemplateError if the template writes none."""
        if self.end is None:
            raise ChatTemplateError(
                f"data.tokenizer={self.folder}: its chat template writes no token behind an assistant's message, so answers would never end: "
                "put eos_token there, as in {{ message['content'] }}{{ eos_token }}, or use data.chat_template=roles"
            )
        return self.end

    def prompt(self, messages: Sequence[Message], *, tools: Sequence[Any] | None = None) -> str:
        """Returns a conversation and the beginning of the next answer. tools: offered to the model.

        Raises ValueError for messages that the template rejects.
        """
        return self._text(messages, asks=True, tools=tools)

    def between(
        self, messages: Sequence[Message], *, observed: Sequence[Message], tools: Sequence[Any] | None = None
    ) -> str:
        """The text between the end of an answer to `messages` and the beginning of the next answer, which follows `observed`.

        Raises ValueError for messages that are refused, and for a template that leaves out the end of an answer that others follow.
        """
        asked = [*messages, {"role": "assistant", "content": _PROBE}, *observed]
        rest = self._text(asked, asks=True, tools=tools).rpartition(_PROBE)[2]
        end = self.required_end()
        before, found, after = rest.partition(end)
        if not found or before.strip():
            raise ValueError(
                f"the chat template of {self.folder} writes no {end!r} behind an answer that other messages follow, so turns cannot be joined: "
                "write it there"
            )
        return after

    def learnt(
        self, messages: Sequence[Message], *, last_only: bool = False, tools: Sequence[Any] | None = None
    ) -> Rendered:
        """Returns a conversation with the positions of its answers. See [Note: What an assistant wrote].

        last_only: only the last message is an answer. tools: offered by the template.

        Raises:
            ValueError: messages that the template rejects, or a conversation whose text is not a prefix of a longer one's.
            ChatTemplateError: the template writes no token that ends an answer.
        """
        numbers = [number for number, message in enumerate(messages) if message.get("role") == "assistant"]
        if not numbers:
            return Rendered(text=self._text(messages, tools=tools), answers=[])
        end = self.end or self._end_after(messages[: numbers[-1]]) or self.required_end()
        if not last_only and isinstance(self.inner.chat_template, str) and _GENERATION.search(self.inner.chat_template):
            return self._marked(messages, end=end, tools=tools)
        text, counted = self._text(messages, tools=tools), numbers[-1:] if last_only else numbers
        spans = [self._span(messages, number=number, text=text, tools=tools) for number in counted]
        return Rendered(text=text, answers=spans)

    def _end_after(self, messages: Sequence[Message]) -> str | None:
        """Returns the token after the content of an answer to `messages`."""
        text = self._text([*messages, {"role": "assistant", "content": _PROBE}])
        rest = text[text.rfind(_PROBE) + len(_PROBE) :] if _PROBE in text else ""
        # Tokens of white space, which some tokenizers add, are text.
        tokens = (token for token in {*self.inner.get_added_vocab(), *self.inner.all_special_tokens} if token.strip())
        found = [(place, -len(token), token) for token in tokens if (place := rest.find(token)) >= 0]
        return min(found)[2] if found else None

    def _marked(self, messages: Sequence[Message], *, end: str, tools: Sequence[Any] | None) -> Rendered:
        render: Any = importlib.import_module("transformers.utils.chat_template_utils").render_jinja_template
        with self._refusing():
            [text], [marks] = render(
                conversations=[list(messages)],
                chat_template=self.inner.chat_template,
                tools=tools,
                return_assistant_tokens_mask=True,
                **self.inner.special_tokens_map,
            )
        borders = [first for first, _ in marks[1:]] + [len(text)]
        answers = [
            (first, _with_end(text, first=first, last=last, border=border, end=end))
            for (first, last), border in zip(marks, borders, strict=True)
        ]
        if not any(end in text[first:last] for first, last in answers):
            raise ValueError(
                f"the chat template of {self.folder} leaves {end!r} out of {{% generation %}}, so the end of an answer would not be learnt: "
                "move {% endgeneration %} behind it"
            )
        return Rendered(text=text, answers=answers)

    def _span(
        self, messages: Sequence[Message], *, number: int, text: str, tools: Sequence[Any] | None
    ) -> tuple[int, int]:
        """Returns the positions of the answer of message `number` in the text of the conversation."""
        before = self._text(messages[:number], asks=True, tools=tools)
        after = self._text(messages[: number + 1], tools=tools)
        if not (text.startswith(after) and after.startswith(before)):
            raise ValueError(
                f"message {number + 1}: the chat template of {self.folder} writes this answer in another way when more follows, or with "
                "another beginning than it shows a model that is to answer; mark answers in the template by {% generation %}, or leave such "
                "messages out"
            )
        return len(before), len(after)

    def _text(self, messages: Sequence[Message], *, asks: bool = False, tools: Sequence[Any] | None = None) -> str:
        with self._refusing():
            return self.inner.apply_chat_template(
                list(messages), tools=tools, tokenize=False, add_generation_prompt=asks
            )

    @contextlib.contextmanager
    def _refusing(self) -> Iterator[None]:
        errors = (importlib.import_module("jinja2").TemplateError, *_OF_EXPRESSIONS)
        try:
            yield
        except errors as error:
            raise ValueError(f"the chat template of {self.folder} refuses the messages: {error}") from None


def _with_end(text: str, *, first: int, last: int, border: int, end: str) -> int:
    """Returns the end of a marked answer, after the end token if only white space lies between. border: beginning of the next answer."""
    if end in text[first:last]:
        return last
    between, found, _ = text[last:border].partition(end)
    return last + len(between) + len(end) if found and not between.strip() else last
