"""One interface for tokenizers of bytes, of runs and of transformers, and the bytes of single tokens."""

import functools
import json
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Protocol

import torch

from ztk.data import ByteTokenizer, SubwordTokenizer
from ztk.rl.align import ChatTemplate, Encoding
from ztk.serve.messages import PLAIN, ChatOptions
from ztk.serve.values import Parts

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # SentencePiece's byte tokens


class Tokenizer(Protocol):
    """Converts text to tokens and back."""

    @property
    def special(self) -> Mapping[int, str]:
        """The texts of special tokens, which `decode` omits."""
        ...

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of `text` with the tokens that the tokenizer prepends to a text.

        Appended ones are omitted, because the answer follows.
        """
        ...

    def encode_text(self, text: str) -> list[int]:
        """Returns the tokens of `text` alone."""
        ...

    def decode(self, tokens: list[int]) -> str:
        """Returns the text of `tokens`. Invalid UTF-8 becomes U+FFFD."""
        ...

    def token_bytes(self, token: int) -> bytes | None:
        """Returns the bytes of `token` in a text, also for special tokens, or None if it has none."""
        ...

    @property
    def longest(self) -> int:
        """Number of characters of the longest token."""
        ...

    @property
    def template(self) -> str | None:
        """The source of the chat template, or None."""
        ...

    def chat(self, messages: list[dict[str, Any]], *, options: ChatOptions = PLAIN) -> list[int]:
        """Returns the tokens of a conversation and of the beginning of the next answer.

        Raises:
            ValueError: the model has no chat template, or it rejects the messages.
        """
        ...


def _byte_of_letter() -> dict[str, int]:
    """Returns GPT-2's letters for bytes: printable latin-1 characters are themselves, others start at 256."""
    same = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in same]
    return {chr(byte): byte for byte in same} | {chr(256 + place): byte for place, byte in enumerate(others)}


_LETTERS = _byte_of_letter()


class Pieces:
    """The bytes of each token of `inner`, a tokenizer of the tokenizers library, by the rules of its decoder.

    Decoded text cannot give them: a token may be part of a character, a space that decoders drop, or a special token.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._added = {token: added.content for token, added in inner.get_added_tokens_decoder().items()}
        self.longest = max(map(len, inner.get_vocab(with_added_tokens=True)))
        self._rules = [] if inner.decoder is None else _rules(json.loads(inner.decoder.__getstate__()))

    def token_bytes(self, token: int) -> bytes | None:
        """Returns the bytes of `token` in a text, or None if it is not in the vocabulary."""
        if token in self._added:
            return self._added[token].encode()
        piece = self._inner.id_to_token(token)
        if piece is None:
            return None
        for rule in self._rules:
            kind = rule["type"]
            if kind == "ByteLevel" and all(letter in _LETTERS for letter in piece):
                return bytes(_LETTERS[letter] for letter in piece)
            if kind == "ByteFallback" and (found := _BYTE.fullmatch(piece)):
                return bytes([int(found[1], 16)])
            if kind == "Metaspace":
                piece = piece.replace(rule["replacement"], " ")
            elif kind == "Replace" and "String" in rule["pattern"]:
                piece = piece.replace(rule["pattern"]["String"], rule["content"])
            elif kind == "WordPiece":
                piece = piece.removeprefix(rule["prefix"]) if piece.startswith(rule["prefix"]) else f" {piece}"
            elif kind == "BPEDecoder":
                piece = piece.replace(rule["suffix"], " ")
        return piece.encode()


def _rules(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the decoders of a sequence, in order."""
    if decoder["type"] != "Sequence":
        return [decoder]
    return [rule for part in decoder["decoders"] for rule in _rules(part)]


def token_name(token: int, *, own: bytes | None) -> str:
    """Returns a token's name in a response: its text, or for a part of a character OpenAI's form, its bytes in hexadecimal.

    own: its bytes; without any, the name is token_id:5.
    """
    if own is None:
        return f"token_id:{token}"
    try:
        return own.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in own)


def begin_of(tokenizer: Any) -> tuple[int, ...]:
    """Returns the tokens that a transformers tokenizer prepends to a text."""
    plain, full = tokenizer.encode("a", add_special_tokens=False), tokenizer.encode("a")
    count = next(place for place in range(len(full) + 1) if full[place : place + len(plain)] == plain)
    return tuple(full[:count])


class Bytes:
    """UTF-8 bytes as tokens. Further tokens of a model are never sampled, and their text is U+FFFD."""

    special: Mapping[int, str] = MappingProxyType({})

    def __init__(self, *, chat_stop: int | None = None) -> None:
        """chat_stop: the byte that ends answers of chats, as `task=sft` learns them; None if the model has not learnt chats."""
        self._bytes, self._chat_stop = ByteTokenizer(), chat_stop

    def encode(self, text: str) -> list[int]:
        return self._bytes.encode(text).tolist()

    encode_text = encode

    def decode(self, tokens: list[int]) -> str:
        return b"".join(bytes([token]) if token < 256 else "\ufffd".encode() for token in tokens).decode(
            errors="replace"
        )

    def token_bytes(self, token: int) -> bytes | None:
        return bytes([token]) if token < 256 else None

    longest = 1
    template: str | None = None

    def chat(self, messages: list[dict[str, Any]], *, options: ChatOptions = PLAIN) -> list[int]:
        """Raises ValueError as `Tokenizer`."""
        if self._chat_stop is None:
            raise ValueError(
                "the model reads bytes and has no chat template: send the text to /v1/completions, or train it on chats with task=sft"
            )
        _check_plain(options)
        return Encoding(stop=self._chat_stop).prompt(messages).tokens


class Subword:
    """The tokenizer with which a ztk run was trained."""

    def __init__(self, tokenizer: SubwordTokenizer, *, has_chats: bool, by_template: bool) -> None:
        """has_chats: whether the model has learnt chats in the format of `task=sft`. by_template: uses the tokenizer's chat template."""
        self._tokenizer, self._has_chats = tokenizer, has_chats
        self.special = tokenizer.special
        self._pieces = Pieces(tokenizer.inner)
        self.token_bytes, self.longest = self._pieces.token_bytes, self._pieces.longest
        self._inner = (
            ChatTemplate.open(tokenizer.folder).inner
            if has_chats and by_template and ChatTemplate.has(tokenizer.folder)
            else None
        )
        self.template = None if self._inner is None else _source(self._inner)

    def encode(self, text: str) -> list[int]:
        return Encoding(tokenizer=self._tokenizer).prompt(text).tokens

    def encode_text(self, text: str) -> list[int]:
        return self._tokenizer.read(text).tokens

    def decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(torch.tensor(tokens, dtype=torch.int64))

    def chat(self, messages: list[dict[str, Any]], *, options: ChatOptions = PLAIN) -> list[int]:
        """Raises ValueError as `Tokenizer`."""
        if not self._has_chats:
            raise ValueError(
                "the model was trained on text and has no chat template: send the text to /v1/completions, or train it on chats with task=sft"
            )
        if self._inner is not None:
            return self._tokenizer.read(_templated(self._inner, messages=messages, options=options)).tokens
        _check_plain(options)
        return Encoding(tokenizer=self._tokenizer).prompt(messages).tokens


class Pretrained:
    """A transformers tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self._begin = tokenizer, begin_of(tokenizer)
        added = tokenizer.added_tokens_decoder.items()
        self.special = {token: entry.content for token, entry in added if entry.special}
        inner = getattr(tokenizer, "backend_tokenizer", None)
        self._pieces = None if inner is None else Pieces(inner)
        self.longest = max(map(len, tokenizer.get_vocab()))
        self.template = _source(tokenizer)

    def token_bytes(self, token: int) -> bytes | None:
        if self._pieces is not None:
            return self._pieces.token_bytes(token)
        text = self._tokenizer.decode([token])  # a slow tokenizer
        return None if "\ufffd" in text else text.encode()

    def encode(self, text: str) -> list[int]:
        return [*self._begin, *self.encode_text(text)]

    def encode_text(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True)

    def chat(self, messages: list[dict[str, Any]], *, options: ChatOptions = PLAIN) -> list[int]:
        """Raises ValueError as `Tokenizer`."""
        if self.template is None:
            raise ValueError(
                "the model has no chat template: put one into its tokenizer_config.json (key chat_template), or send the text to "
                "/v1/completions"
            )
        text = _templated(self._tokenizer, messages=messages, options=options)
        return list(self._tokenizer.encode(text, add_special_tokens=False))


def _templated(inner: Any, *, messages: list[dict[str, Any]], options: ChatOptions) -> str:
    """Formats messages with the chat template of a transformers tokenizer."""
    if _joins_parts(_source(inner) or ""):
        messages = [
            one | {"content": [{"type": "text", "text": text} for text in content.parts]}
            if isinstance(content := one["content"], Parts)
            else one
            for one in messages
        ]
    try:
        return inner.apply_chat_template(
            messages,
            tools=list(options.tools) or None,
            tokenize=False,
            add_generation_prompt=options.begins,
            continue_final_message=options.continues,
            **options.variables,
        )
    except Exception as error:  # noqa: BLE001  # a template is code of the model's folder
        raise ValueError(f"the model's chat template refuses the messages: {error}") from None


@functools.lru_cache(maxsize=4)
def _joins_parts(template: str) -> bool:
    """Whether a template has a loop over the parts of a content."""
    return (
        re.search(r"\bfor\s+\w+\s+in\s+(?:\w+(?:\.content|\[['\"]content['\"]\])|content)(?!\w)", template) is not None
    )


def _source(inner: Any) -> str | None:
    """Returns the source of the default template."""
    found = inner.chat_template or None
    return "\n".join(map(str, found.values())) if isinstance(found, dict) else found


def _check_plain(options: ChatOptions) -> None:
    if options.needs_template:
        raise ValueError(
            "the model has no chat template, which chat_template_kwargs, add_generation_prompt and continue_final_message need: leave them out"
        )
