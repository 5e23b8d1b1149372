"""The bytes of single tokens.

Decoded text cannot give them: a token may be part of a character, a space that decoders drop, or a special token.
"""

import json
import re
from typing import Any

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # SentencePiece's byte tokens


def _byte_of_letter() -> dict[str, int]:
    """Returns GPT-2's letters for bytes: printable latin-1 characters are themselves, others start at 256."""
    same = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in same]
    return {chr(byte): byte for byte in same} | {chr(256 + place): byte for place, byte in enumerate(others)}


_LETTERS = _byte_of_letter()


class Pieces:
    """The bytes of each token of `inner`, a tokenizer of the tokenizers library, by the rules of its decoder."""

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
