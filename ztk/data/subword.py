"""Tokenizers of the tokenizers library: read from a folder as transformers writes it, or trained on the text of a run.

The library is the extra `data`, imported here and not with ztk.
"""

import hashlib
import importlib
import json
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ztk.policies.text import SMALLEST_VOCABULARY

END_TEXT = "<|endoftext|>"
_MAIN, _SETTINGS = "tokenizer.json", "tokenizer_config.json"
_COPIED = (_MAIN, _SETTINGS, "special_tokens_map.json", "chat_template.jinja")


@dataclass(frozen=True, kw_only=True)
class SubwordTokenizer:
    """A tokenizer with the interface of `ByteTokenizer`. Special tokens in a text are read as its letters, not as the tokens.

    vocab_size: the largest token and 1. end: the token that ends a document. digest: of the tokenizer's file and its end token.
    """

    folder: Path
    vocab_size: int
    end: int
    digest: str
    inner: Any

    @staticmethod
    def open(folder: str | Path) -> "SubwordTokenizer":
        """Reads `tokenizer.json`, and the end token from `tokenizer_config.json` or `special_tokens_map.json`.

        Raises:
            ValueError: a file is missing or broken, there is no end token, or the library is not installed.
        """
        folder = Path(folder).expanduser()
        path = folder / _MAIN
        library = _library(f"data.tokenizer={folder}")
        if not path.is_file():
            raise ValueError(
                f"data.tokenizer={folder}: there is no {_MAIN} (from {Path.cwd()}); name a folder as save_pretrained of a fast tokenizer "
                "writes it, or use data.tokenizer=train or data.tokenizer=bytes"
            )
        try:
            inner = library.Tokenizer.from_file(str(path))
        except Exception as error:  # noqa: BLE001  # the library raises plain Exception
            raise ValueError(
                f"data.tokenizer={folder}: {_MAIN} cannot be read ({error}); save the tokenizer again"
            ) from None
        inner.no_truncation()
        inner.no_padding()
        inner.encode_special_tokens = True
        text = _end_text(folder)
        end = None if text is None else inner.token_to_id(text)
        if end is None:
            said = "no eos_token is named" if text is None else f"eos_token {text!r} is not in the vocabulary"
            raise ValueError(
                f"data.tokenizer={folder}: has no end token ({said}), and every document ends with it; put "
                f'"eos_token": "..." with a token of the vocabulary into {folder / _SETTINGS}'
            )
        digest = hashlib.blake2b(path.read_bytes(), digest_size=16)
        digest.update(f"\nend {end}".encode())
        size = max(inner.get_vocab(with_added_tokens=True).values()) + 1
        return SubwordTokenizer(folder=folder, vocab_size=size, end=end, digest=digest.hexdigest(), inner=inner)

    @staticmethod
    def train(texts: Iterable[str], *, vocab_size: int, folder: str | Path) -> "SubwordTokenizer":
        """Makes a byte-level BPE of `vocab_size` tokens, the end token and all bytes included, and writes it into `folder`.

        The same texts give the same tokenizer. transformers reads the folder, too.

        Raises:
            ValueError: `vocab_size` is below 257 or more than the texts give, or the library is not installed.
        """
        if vocab_size < SMALLEST_VOCABULARY:
            raise ValueError(
                f"data.vocab_size={vocab_size}: the bytes and the end token are {SMALLEST_VOCABULARY}; use data.vocab_size=4096"
            )
        library = _library("data.tokenizer=train")
        inner = library.Tokenizer(library.models.BPE())
        inner.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.decoder = library.decoders.ByteLevel()
        trainer = library.trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END_TEXT],
            initial_alphabet=sorted(library.pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        inner.train_from_iterator(iter(texts), trainer)
        if (size := inner.get_vocab_size()) < vocab_size:
            raise ValueError(
                f"data.vocab_size={vocab_size}: the training text gives {size} tokens; use data.vocab_size={size}, or name more text"
            )
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        inner.save(str(folder / _MAIN))
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": END_TEXT,
            "clean_up_tokenization_spaces": False,
        }
        (folder / _SETTINGS).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        return SubwordTokenizer.open(folder)

    def encode(self, text: str) -> Tensor:
        """The tokens of `text` without special ones, int64 [num_tokens]."""
        return torch.tensor(self.inner.encode(text, add_special_tokens=False).ids, dtype=torch.int64)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokens of each text, by all cores that the library may use."""
        return [found.ids for found in self.inner.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, tokens: Tensor) -> str:
        """The text of `tokens` [num_tokens] without special ones; broken characters and tokens that have no text become U+FFFD."""
        return self.inner.decode(tokens.flatten().tolist(), skip_special_tokens=True)

    def save(self, folder: str | Path) -> None:
        """Copies the tokenizer's files."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        for name in _COPIED:
            if (self.folder / name).is_file() and folder.resolve() != self.folder.resolve():
                shutil.copyfile(self.folder / name, folder / name)


def _end_text(folder: Path) -> str | None:
    """The end token as it is written."""
    for name in (_SETTINGS, "special_tokens_map.json"):
        path = folder / name
        if not path.is_file():
            continue
        try:
            named = json.loads(path.read_text(encoding="utf-8")).get("eos_token")
        except (ValueError, AttributeError) as error:
            raise ValueError(f"data.tokenizer={folder}: {name} is no JSON object ({error}); save it again") from None
        if isinstance(named, dict):
            named = named.get("content")
        if isinstance(named, str):
            return named
    return None


def _library(needed_by: str) -> Any:
    try:
        library = importlib.import_module("tokenizers")
    except ImportError:
        raise ValueError(
            f'{needed_by}: needs the library tokenizers: pip install "ztk[data]", or use data.tokenizer=bytes'
        ) from None
    for part in ("models", "pre_tokenizers", "decoders", "trainers"):
        importlib.import_module(f"tokenizers.{part}")
    return library
