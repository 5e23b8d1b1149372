"""Tokenises documents once, into files that every later run maps.

[Note: The cache] The tokens of a source are stored in a folder with `train.bin`, `held_out.bin` and `meta.json`. Its name is a hash of
the content of the files, the tokenizer and the options. One process builds it under a file lock in a temporary folder and renames that
when it is complete; other processes wait and map the same pages. Every few mebibytes the builder records its progress. After a kill, the
next builder truncates the files to the recorded progress and continues. Content hashes of files are cached by path, size and modification
time, so that large files are read once.

[Note: Held-out documents]
A document is held out if the hash of its text (of its first piece) is below `share` of all hashes. Equal documents are thus on the same
side, whatever files they are in. If no document has such a hash, the one with the smallest hash is held out.
"""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy
import torch
from torch import Tensor

from ztk.core.policies.records import replace_file
from ztk.core.policies.text import COLUMNS, COMPRESSED
from ztk.data.cache import built_once, cache_folder, writing
from ztk.data.documents import Document, Fault, read_documents
from ztk.data.mapping import mapped
from ztk.data.sources import SourceFile

_FORMAT = 1  # part of the name: increase it when the layout or the tokens change
BATCH_CHARACTERS = 1 << 20  # given to the tokenizer at a time
JOURNAL_CHARACTERS = 1 << 25  # between two records of the builder's progress
_CONTENT_BYTES = 16  # length of a file's hash
_NUMPY = {torch.uint8: "u1", torch.uint16: "u2", torch.int32: "i4"}
_SHOWN_FAULTS = 10
_HASHES = 1 << 64


class DocumentTokenizer(Protocol):
    """The tokenizer's interface that a build uses."""

    @property
    def vocab_size(self) -> int:
        """All tokens are smaller."""
        ...

    @property
    def end(self) -> int:
        """The token that ends a document."""
        ...

    @property
    def begin(self) -> tuple[int, ...]:
        """The tokens at the start of a document."""
        ...

    @property
    def digest(self) -> str:
        """Identifies the tokenizer."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> Sequence[Sequence[int]]:
        """Returns the tokens of each text."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadPolicy:
    """How files are read. field: text field of jsonl and parquet. skips: skip and count broken input. share: fraction of documents to
    hold out.
    """

    field: str = "text"
    skips: bool = False
    share: float = 0.05


@dataclass(kw_only=True, slots=True)
class Counts:
    """Statistics of a build. *_bytes: UTF-8 bytes of the texts. faults: the first faults that were skipped."""

    train_tokens: int = 0
    train_bytes: int = 0
    train_documents: int = 0
    held_out_tokens: int = 0
    held_out_bytes: int = 0
    held_out_documents: int = 0
    skipped: int = 0
    faults: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenPart:
    """The tokens of one source: read-only mappings of uint8, uint16 or int32 [num_tokens]. digest: identifies content, tokenizer and
    options.
    """

    train: Tensor
    held_out: Tensor
    counts: Counts
    digest: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """The progress of a build. nbytes: bytes of UTF-8 text that were read. share: fraction of the files' bytes that was read; compressed
    files, parquet and arrow count when they are complete.
    """

    documents: int
    nbytes: int
    share: float


OnProgress = Callable[[Progress], None]


def content_of(files: Sequence[SourceFile], *, cache_dir: str | None) -> str:
    """Returns a hash of the bytes of all files in order, without their names.

    Raises:
        ValueError: a file cannot be read, or the cache cannot be written.
    """
    folder = cache_folder(cache_dir) / "contents"
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        digest.update(_content(file, folder=folder) + b"\n")
    return digest.hexdigest()


def held_out_limit(files: Sequence[SourceFile], *, policy: ReadPolicy) -> int:
    """Returns the largest hash of held-out documents, or -1 to hold out none. See [Note: Held-out documents].

    Raises:
        ValueError: bad input, or fewer than two documents.
    """
    if not policy.share:
        return -1
    limit, smallest, count = int(_HASHES * policy.share), _HASHES, 0
    for item in _documents(files, policy=policy):
        if item.is_first:
            value, count = hash_of(item.text), count + 1
            smallest = min(smallest, value)
            if smallest <= limit and count > 1:
                return limit
    if count < 2:
        raise ValueError(
            f"data.path={files[0].path if files else ''}: {count} documents, and held-out text is chosen by document; name more files, or use "
            "data.validation_fraction=0 train.eval_every=0"
        )
    return smallest


def training_texts(files: Sequence[SourceFile], *, policy: ReadPolicy) -> Iterator[str]:
    """Yields the texts that are not held out, to train a tokenizer. Raises ValueError for bad input."""
    limit = held_out_limit(files, policy=policy)
    is_held = False
    for item in _documents(files, policy=policy):
        is_held = hash_of(item.text) <= limit if item.is_first else is_held
        if not is_held:
            yield item.text


def hash_of(text: str) -> int:
    """Returns a 64-bit hash of a text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def open_part(
    files: Sequence[SourceFile],
    *,
    tokenizer: DocumentTokenizer,
    policy: ReadPolicy,
    cache_dir: str | None = None,
    progress: OnProgress | None = None,
) -> TokenPart:
    """Opens the tokens of `files`, and builds them if no process has done so yet. See [Note: The cache].

    Raises:
        ValueError: bad input, with file and place; no document to train on; a cache folder that cannot be written.
    """
    options = f"{_FORMAT} {policy.field} {policy.skips} {policy.share}"
    named = f"{options}\n{content_of(files, cache_dir=cache_dir)}\n{tokenizer.digest}"
    digest = hashlib.blake2b(named.encode(), digest_size=16).hexdigest()
    folder = built_once(
        cache_folder(cache_dir) / f"tokens-{digest}",
        build=lambda unfinished: _Builder(
            files, tokenizer=tokenizer, policy=policy, folder=unfinished, progress=progress
        ).build(),
    )
    counts = Counts(**json.loads((folder / "meta.json").read_text(encoding="utf-8")))
    kind = _dtype(tokenizer.vocab_size)
    return TokenPart(
        train=mapped(folder / "train.bin", size=counts.train_tokens, dtype=kind),
        held_out=mapped(folder / "held_out.bin", size=counts.held_out_tokens, dtype=kind),
        counts=counts,
        digest=digest,
    )


class _Builder:
    """Writes the files of one source into `folder`. Continues where a killed builder stopped."""

    def __init__(
        self,
        files: Sequence[SourceFile],
        *,
        tokenizer: DocumentTokenizer,
        policy: ReadPolicy,
        folder: Path,
        progress: OnProgress | None,
    ) -> None:
        self.folder = folder
        self._files, self._tokenizer, self._policy, self._progress = files, tokenizer, policy, progress
        self._kind = numpy.dtype(_NUMPY[_dtype(tokenizer.vocab_size)])
        self._counts, self._items, self._limit = Counts(), 0, -1
        self._side: str | None = None  # side of the document whose end token is not written yet
        self._texts: list[tuple[str, Document]] = []  # side and piece of texts to be tokenised
        self._characters = self._unnoted = 0
        self._outs: dict[str, BinaryIO] = {}
        self._file = self._file_bytes = 0  # index of the current file, and characters of its texts so far

    def build(self) -> None:
        """Builds the files. Raises ValueError for bad input, and if there is nothing to train on."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self._continue():
            self._limit = held_out_limit(self._files, policy=self._policy)
        with open(self.folder / "train.bin", "ab") as train, open(self.folder / "held_out.bin", "ab") as held_out:
            self._outs = {"train": train, "held_out": held_out}
            for side, out in self._outs.items():
                out.truncate(getattr(self._counts, f"{side}_tokens") * self._kind.itemsize)
            self._read()
            self._flush()
            if self._side is not None:
                self._write(self._side, tokens=[self._tokenizer.end])
            self._sync()
        self._finish()

    def _continue(self) -> bool:
        """Restores the progress of an earlier builder. Returns whether there was one."""
        try:
            past = json.loads((self.folder / "journal.json").read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return False
        counts = Counts(**past["counts"])
        for side in ("train", "held_out"):
            if os.path.getsize(self.folder / f"{side}.bin") < getattr(counts, f"{side}_tokens") * self._kind.itemsize:
                return False
        self._counts, self._items = counts, past["items"]
        self._limit, self._side = past["limit"], past["side"]
        return True

    def _read(self) -> None:
        done, number = self._items, 0
        for place, file in enumerate(self._files):
            self._file, self._file_bytes = place, 0
            for item in read_documents(file.path, field=self._policy.field):
                number += 1
                if isinstance(item, Document):
                    self._file_bytes += len(item.text)
                if number > done:
                    self._items = number
                    self._read_item(item)

    def _read_item(self, item: Document | Fault) -> None:
        if isinstance(item, Fault):
            self._skip(item)
            return
        self._take(item)
        if self._characters >= BATCH_CHARACTERS:
            self._flush()
            if self._progress is not None:
                self._progress(self._how_far())
            if self._unnoted >= JOURNAL_CHARACTERS:
                self._note()

    def _how_far(self) -> Progress:
        counts, current = self._counts, self._files[self._file]
        before, total = (sum(file.size for file in files) for files in (self._files[: self._file], self._files))
        is_plain = current.path.suffix.lower() not in (*COMPRESSED, *COLUMNS)
        read = before + (min(self._file_bytes, current.size) if is_plain else 0)
        return Progress(
            documents=counts.train_documents + counts.held_out_documents,
            nbytes=counts.train_bytes + counts.held_out_bytes,
            share=read / total,
        )

    def _skip(self, fault: Fault) -> None:
        if not self._policy.skips:
            raise ValueError(fault.text)
        self._counts.skipped += 1
        if len(self._counts.faults) < _SHOWN_FAULTS:
            self._counts.faults.append(fault.text)

    def _take(self, piece: Document) -> None:
        counts = self._counts
        if piece.is_first:
            is_held = hash_of(piece.text) <= self._limit
            counts.held_out_documents += is_held
            counts.train_documents += not is_held
            side = "held_out" if is_held else "train"
        else:  # ends the previous document
            side = self._texts[-1][0] if self._texts else self._side
            assert side is not None
        self._texts.append((side, piece))
        self._characters += len(piece.text)
        nbytes = len(piece.text.encode())
        if side == "train":
            counts.train_bytes += nbytes
        else:
            counts.held_out_bytes += nbytes

    def _flush(self) -> None:
        """Tokenises and writes the collected texts."""
        encoded = self._tokenizer.encode_batch([piece.text for _, piece in self._texts])
        for (side, piece), tokens in zip(self._texts, encoded, strict=True):
            if piece.is_first and self._side is not None:
                self._write(self._side, tokens=[self._tokenizer.end])
            if piece.is_first:
                self._write(side, tokens=self._tokenizer.begin)
            self._write(side, tokens=tokens)
            self._side = side
        self._unnoted += self._characters
        self._texts, self._characters = [], 0

    def _write(self, side: str, *, tokens: Sequence[int]) -> None:
        if isinstance(tokens, bytes):
            self._outs[side].write(tokens)
        else:
            self._outs[side].write(numpy.asarray(tokens, dtype=self._kind).tobytes())
        if side == "train":
            self._counts.train_tokens += len(tokens)
        else:
            self._counts.held_out_tokens += len(tokens)

    def _note(self) -> None:
        """Records the progress of the build. All collected texts must have been written."""
        self._sync()
        noted = {"items": self._items, "limit": self._limit, "side": self._side, "counts": asdict(self._counts)}
        replace_file(self.folder / "journal.json", text=json.dumps(noted))
        self._unnoted = 0

    def _sync(self) -> None:
        for out in self._outs.values():
            out.flush()
            os.fsync(out.fileno())

    def _finish(self) -> None:
        counts = self._counts
        if any(file.has_changed() for file in self._files):
            shutil.rmtree(self.folder)
            raise ValueError("data.path: a file changed while it was read; start again when nothing writes to it")
        if not counts.train_documents:
            shutil.rmtree(self.folder)
            raise ValueError(
                f"data.path={self._files[0].path}: no document is left to train on ({counts.held_out_documents} held out, "
                f"{counts.skipped} skipped); name more text, or use a smaller data.validation_fraction"
            )
        (self.folder / "journal.json").unlink(missing_ok=True)
        replace_file(self.folder / "meta.json", text=json.dumps(asdict(counts)))


def _documents(files: Sequence[SourceFile], *, policy: ReadPolicy) -> Iterator[Document]:
    for file in files:
        for item in read_documents(file.path, field=policy.field):
            if isinstance(item, Document):
                yield item
            elif not policy.skips:
                raise ValueError(item.text)


def _content(file: SourceFile, *, folder: Path) -> bytes:
    """Returns a hash of the bytes of a file, cached in `folder` until its size or time change."""
    named = f"{file.path.absolute()}\t{file.size}\t{file.modified}"
    kept = folder / hashlib.blake2b(named.encode(), digest_size=16).hexdigest()
    with contextlib.suppress(OSError):
        if len(found := kept.read_bytes()) == _CONTENT_BYTES:
            return found
    with file.opened() as source:
        digest = hashlib.file_digest(source, lambda: hashlib.blake2b(digest_size=_CONTENT_BYTES)).digest()
    with writing(folder):
        own = kept.with_suffix(f".{os.getpid()}")
        own.write_bytes(digest)
        os.replace(own, kept)
    return digest


def _dtype(vocab_size: int) -> torch.dtype:
    if vocab_size <= 1 << 8:
        return torch.uint8
    return torch.uint16 if vocab_size <= 1 << 16 else torch.int32
