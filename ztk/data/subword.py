"""Tokenizers of the tokenizers library: read from a folder in transformers' format, or trained on the text of a run.

The library comes with the extra `data` and is imported on use.

[Note: Documents and texts]
A tokenizer reads two kinds of text. A document of `data.path` is training data: the spelling of a special token in it is read as
characters, so that no document can end another. A text is the prompt or answer of a record, a question, or a request: `read` returns the
same tokens as transformers, including special ones. Both start with the tokens that the tokenizer prepends to every text, such as <s>.
"""

import functools
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

from ztk.core.policies.text import SMALLEST_VOCABULARY
from ztk.data.tokenizer import Reading

END_TEXT = "<|endoftext|>"
_MAIN, _SETTINGS = "tokenizer.json", "tokenizer_config.json"
_COPIED = (_MAIN, _SETTINGS, "special_tokens_map.json", "chat_template.jinja")


@dataclass(frozen=True, kw_only=True)
class SubwordTokenizer:
    """A tokenizer with the interface of `ByteTokenizer`. See [Note: Documents and texts].

    vocab_size: largest token + 1. end: the token that ends a document. begin, after: tokens that the tokenizer adds before and after
    every text. digest: hash of the tokenizer's file, its end token and `begin`.
    """

    folder: Path
    vocab_size: int
    end: int
    digest: str
    inner: Any
    begin: tuple[int, ...] = ()
    after: tuple[int, ...] = ()

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
        begin, after = _around(inner)
        if begin:
            digest.update(f"\nbegin {begin}".encode())
        return SubwordTokenizer(
            folder=folder,
            vocab_size=max(inner.get_vocab(with_added_tokens=True).values()) + 1,
            end=end,
            digest=digest.hexdigest(),
            inner=inner,
            begin=begin,
            after=after,
        )

    @staticmethod
    def train(texts: Iterable[str], *, vocab_size: int, folder: str | Path) -> "SubwordTokenizer":
        """Trains a byte-level BPE with `vocab_size` tokens, including the end token and all bytes, and writes it into `folder`.

        The same texts give the same tokenizer. transformers can read the folder too.

        Raises:
            ValueError: `vocab_size` is below 257 or larger than the texts allow, or the library is not installed.
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
        """Returns the tokens of a document or a piece of one, int64 [num_tokens], without `begin`."""
        return torch.tensor(self.inner.encode(text, add_special_tokens=False).ids, dtype=torch.int64)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the tokens of each document, without `begin`. Uses all cores that the library may use."""
        return [found.ids for found in self.inner.encode_batch_fast(list(texts), add_special_tokens=False)]

    def read(self, text: str) -> Reading:
        """Returns the tokens of a text as in transformers, without `begin` and `after`, and their positions in the text."""
        found = self._reader.encode(text, add_special_tokens=False)
        return Reading(tokens=found.ids, spans=found.offsets)

    @functools.cached_property
    def end_text(self) -> str:
        """Returns the text of `end`."""
        return self.inner.id_to_token(self.end)

    def token_of(self, text: str) -> int:
        """Returns the token with the text `text`. Raises ValueError if there is none."""
        if (token := self._reader.token_to_id(text)) is None:
            raise ValueError(
                f"data.tokenizer={self.folder}: {text!r} is not in the vocabulary of {_MAIN}; save the tokenizer again"
            )
        return token

    @functools.cached_property
    def special(self) -> dict[int, str]:
        """Returns the special tokens, which `decode` omits, with their texts."""
        return {
            token: added.content for token, added in self._reader.get_added_tokens_decoder().items() if added.special
        }

    @functools.cached_property
    def _reader(self) -> Any:
        """Returns `inner` with the settings of transformers."""
        library = importlib.import_module("tokenizers")
        reader = library.Tokenizer.from_str(self.inner.to_str())
        reader.encode_special_tokens = bool(read_settings(self.folder).get("split_special_tokens"))
        reader.post_processor = None  # it strips spaces from the positions of tokens
        reader.add_special_tokens(_added_by_settings(self.folder, known=self.inner, library=library))
        return reader

    def decode(self, tokens: Tensor, *, shows_special: bool = False) -> str:
        """Returns the text of `tokens` [num_tokens]. Broken characters and tokens without a text become U+FFFD.

        shows_special: includes special tokens.
        """
        return self._reader.decode(tokens.flatten().tolist(), skip_special_tokens=not shows_special)

    def save(self, folder: str | Path) -> None:
        """Copies the tokenizer's files."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        for name in _COPIED:
            if (self.folder / name).is_file() and folder.resolve() != self.folder.resolve():
                shutil.copyfile(self.folder / name, folder / name)


def _around(inner: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the tokens that the tokenizer adds before and after every text."""
    found = inner.encode("a")
    is_text = [number for number, added in enumerate(found.special_tokens_mask) if not added]
    first, last = (is_text[0], is_text[-1] + 1) if is_text else (len(found.ids), len(found.ids))
    return tuple(found.ids[:first]), tuple(found.ids[last:])


def read_settings(folder: Path) -> dict[str, Any]:
    """Returns the contents of special_tokens_map.json, updated by tokenizer_config.json; empty without both.

    Raises ValueError if a file is not a JSON object.
    """
    found: dict[str, Any] = {}
    for name in ("special_tokens_map.json", _SETTINGS):
        path = folder / name
        if not path.is_file():
            continue
        try:
            found |= json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}: is no JSON object ({error}); save the tokenizer again") from None
    return found


def _end_text(folder: Path) -> str | None:
    """Returns the text of the end token."""
    return token_text(read_settings(folder).get("eos_token"))


def token_text(token: Any) -> str | None:
    """Returns the text of a token in tokenizer_config.json, a string or an object with `content`."""
    found = token.get("content") if isinstance(token, dict) else token
    return found if isinstance(found, str) else None


def _added_by_settings(folder: Path, *, known: Any, library: Any) -> list[Any]:
    """Returns tokens of the vocabulary that tokenizer_config.json makes special, as in transformers.

    Tokens outside the vocabulary are left out, because the model has no embedding for them.
    """
    settings = read_settings(folder)
    named = [value for name, value in settings.items() if name.endswith("_token")]
    for name in ("additional_special_tokens", "extra_special_tokens"):
        named += settings[name] if isinstance(settings.get(name), list) else []
    decoder = settings.get("added_tokens_decoder")
    if isinstance(decoder, dict):
        named += [entry for entry in decoder.values() if isinstance(entry, dict) and entry.get("special")]
    texts = dict.fromkeys(text for entry in named if (text := token_text(entry)))
    return [
        library.AddedToken(text, special=True, normalized=False)
        for text in texts
        if known.token_to_id(text) is not None
    ]


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
