"""Bytes as tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """The tokens of a text. spans: position of each token in the text, as characters (first, last + 1)."""

    tokens: list[int]
    spans: list[tuple[int, int]]


class ByteTokenizer:
    """Converts UTF-8 text to byte values and back. The vocabulary is the 256 bytes; there are no special tokens.

    end: ends a document of jsonl or parquet; this byte occurs in no text. Text files are read unchanged, without it.
    """

    vocab_size = 256
    end = 0
    digest = "bytes"
    begin = after = ()

    def encode(self, text: str) -> Tensor:
        """Returns the bytes of `text`, int64 [num_bytes]."""
        return torch.tensor(list(text.encode()), dtype=torch.int64)

    def read(self, text: str) -> Reading:
        """Returns the bytes of `text` and the character of each byte."""
        sizes = [len(character.encode()) for character in text]
        spans = [(place, place + 1) for place, size in enumerate(sizes) for _ in range(size)]
        return Reading(tokens=list(text.encode()), spans=spans)

    def encode_batch(self, texts: Sequence[str]) -> list[bytes]:
        """Returns the bytes of each text."""
        return [text.encode() for text in texts]

    def decode(self, tokens: Tensor) -> str:
        """Returns the text of `tokens` [num_bytes]. Bytes that are not UTF-8 become U+FFFD.

        Raises ValueError for tokens above 255.
        """
        values = tokens.flatten().tolist()
        if values and not 0 <= min(values) <= max(values) < self.vocab_size:
            raise ValueError(
                f"token {max(values)} is not a byte; decode only the output of a model with vocab_size=256"
            )
        return bytes(values).decode(errors="replace")
