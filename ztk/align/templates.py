"""Chats by the template of a tokenizer: `chat_template` in tokenizer_config.json, or chat_template.jinja, rendered by transformers.

[Note: What an assistant wrote]
A template that marks answers by {% generation %} says itself which text is an assistant's. For the others, an answer is what the template
adds for its message to the conversation before it, as it is shown to a model that is to answer (add_generation_prompt): the content and what
ends it, such as <|im_end|>. That needs a template that writes a conversation as a beginning of every longer one. Templates that do not (some
drop earlier reasoning) are refused where it happens, because a policy would learn tokens that it never sees when it answers.
"""

import functools
import importlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# What an expression of a template may raise beside jinja2's own errors.
_OF_EXPRESSIONS = (TypeError, ValueError, AttributeError, LookupError, ArithmeticError)
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
Message = Mapping[str, Any]


class ChatTemplateError(ValueError):
    """There is no template that can be used; the text says what to do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendered:
    """tokens of a conversation; is_answer: an assistant wrote it, as long as `tokens`."""

    tokens: list[int]
    is_answer: list[bool]


@dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """The template of a folder. inner: transformers' tokenizer of the folder."""

    folder: Path
    inner: Any

    @staticmethod
    def has(folder: Path) -> bool:
        """Whether the folder has a template: records of texts alone can do without."""
        settings = folder / "tokenizer_config.json"
        named = settings.is_file() and "chat_template" in json.loads(settings.read_text(encoding="utf-8"))
        return named or (folder / "chat_template.jinja").is_file()

    @staticmethod
    @functools.lru_cache(maxsize=4)
    def open(folder: str | Path) -> "ChatTemplate":
        """Reads a folder as save_pretrained of a fast tokenizer writes it.

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
                "(that of the model's instruction-tuned sibling, for example), or use data.chat_template=roles, which writes <|role|> lines"
            )
        return ChatTemplate(folder=folder, inner=inner)

    @functools.cached_property
    def end(self) -> int | None:
        """The special token that ends an answer; None: the template writes none."""
        found = self.learnt([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], last_only=True)
        special = set(self.inner.all_special_ids)
        ends = [token for token, own in zip(found.tokens, found.is_answer, strict=True) if own and token in special]
        return ends[-1] if ends else None

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """The tokens of a conversation and of what begins the next answer. Raises ValueError for messages that the template refuses."""
        return self._tokens(self._text(messages, asks=True))

    def learnt(self, messages: Sequence[Message], *, last_only: bool = False) -> Rendered:
        """A conversation with its answers; last_only: the last message alone is one. See [Note: What an assistant wrote].

        Raises ValueError for messages that the template refuses, and for a template that does not write a conversation as the beginning of a
        longer one.
        """
        if not last_only and isinstance(self.inner.chat_template, str) and _GENERATION.search(self.inner.chat_template):
            return self._marked(messages)
        text = self._text(messages)
        numbers = [number for number, message in enumerate(messages) if message.get("role") == "assistant"]
        spans = [self._span(messages, number=number, text=text) for number in (numbers[-1:] if last_only else numbers)]
        found = self.inner(text, add_special_tokens=False, return_offsets_mapping=True)
        is_answer = [
            any(start < end and first <= start and end <= stop for first, stop in spans)
            for start, end in found["offset_mapping"]
        ]
        return Rendered(tokens=list(found["input_ids"]), is_answer=is_answer)

    def _marked(self, messages: Sequence[Message]) -> Rendered:
        found = self._applied(messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        return Rendered(tokens=list(found["input_ids"]), is_answer=[bool(flag) for flag in found["assistant_masks"]])

    def _span(self, messages: Sequence[Message], *, number: int, text: str) -> tuple[int, int]:
        """Where the answer of message `number` begins and ends in the text of the conversation."""
        before, after = self._text(messages[:number], asks=True), self._text(messages[: number + 1])
        if not (text.startswith(after) and after.startswith(before)):
            raise ValueError(
                f"message {number + 1}: the chat template of {self.folder} writes this answer in another way when more follows, or with "
                "another beginning than it shows a model that is to answer; mark answers in the template by {% generation %}, or leave such "
                "messages out"
            )
        return len(before), len(after)

    def _text(self, messages: Sequence[Message], *, asks: bool = False) -> str:
        return self._applied(messages, tokenize=False, add_generation_prompt=asks)

    def _applied(self, messages: Sequence[Message], **options: Any) -> Any:
        errors = (importlib.import_module("jinja2").TemplateError, *_OF_EXPRESSIONS)
        try:
            return self.inner.apply_chat_template(list(messages), **options)
        except errors as error:
            raise ValueError(f"the chat template of {self.folder} refuses the messages: {error}") from None

    def _tokens(self, text: str) -> list[int]:
        return list(self.inner(text, add_special_tokens=False)["input_ids"])
