"""Opens the documents of a run as tokens: training streams, held-out batches and bytes per token."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from ztk.data.cache import built_once, cache_folder
from ztk.data.mixture import MixedStream, held_out_batches, held_out_picks
from ztk.data.sources import SourceFile, named_files, standard_library
from ztk.data.stream import Batch, Share, Stream, TokenStream
from ztk.data.subword import SubwordTokenizer
from ztk.data.tokencache import OnProgress, ReadPolicy, TokenPart, content_of, open_part, training_texts
from ztk.data.tokenizer import ByteTokenizer

BYTES, TRAIN = "bytes", "train"
_TRAINED_FORMAT = 1  # part of a trained tokenizer's name: increase it when training changes


@dataclass(frozen=True, kw_only=True, slots=True)
class TextPolicy:
    """How to read text.

    paths: default to the source code of the standard library. tokenizer: bytes, train or a folder.
    weights: one for each entry of `paths`. If omitted, all entries form one order.
    keeps_apart: keeps documents in a sequence apart; see [Note: Documents in a sequence].
    """

    paths: tuple[str, ...] | None = None
    tokenizer: str = BYTES
    vocab_size: int | None = None
    weights: tuple[float, ...] | None = None
    read: ReadPolicy = field(default_factory=ReadPolicy)
    cache_dir: str | None = None
    keeps_apart: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenCorpus:
    """Tokens of one or more sources with their weights. keeps_apart: the same as in `TextPolicy`."""

    parts: tuple[TokenPart, ...]
    weights: tuple[float, ...]
    tokenizer: SubwordTokenizer | ByteTokenizer
    keeps_apart: bool = False

    @property
    def _end(self) -> int | None:
        return self.tokenizer.end if self.keeps_apart else None

    @property
    def digest(self) -> str:
        """Identifies text, tokenizer and options. Ranks and resumed runs compare it."""
        return " ".join(part.digest for part in self.parts)

    @property
    def skipped(self) -> int:
        """Number of broken records and files that were skipped."""
        return sum(part.counts.skipped for part in self.parts)

    def stream(self, *, seq_len: int, share: Share, seed: int) -> Stream:
        """Returns the training sequences. Raises ValueError if a source is shorter than one sequence."""
        streams = [
            TokenStream(part.train, digest=part.digest, seq_len=seq_len, share=share, seed=seed, end=self._end)
            for part in self.parts
        ]
        if len(streams) == 1:
            return streams[0]
        return MixedStream(streams, weights=self.weights, share=share, seed=seed)

    def held_out_batches(self, *, seq_len: int, share: Share, num_sequences: int) -> Iterator[Batch]:
        """Yields this rank's part of the sequences for evaluation. Raises ValueError if a held-out part is shorter than one sequence."""
        return held_out_batches(
            self._held_out,
            weights=self.weights,
            seq_len=seq_len,
            share=share,
            num_sequences=num_sequences,
            end=self._end,
        )

    def bytes_per_token(self, *, seq_len: int, num_sequences: int) -> float:
        """Returns the UTF-8 bytes per token of `held_out_batches`: the held-out texts' ratios, weighted as the sources are in the
        batches.

        Nats per token, divided by ln 2 and by this value, are bits per byte, which are comparable across tokenizers. If documents are
        kept apart, a document's first token is not predicted and counts as the mean of the others.
        """
        picks = held_out_picks(self._held_out, weights=self.weights, seq_len=seq_len, num_sequences=num_sequences)
        ratios = [part.counts.held_out_bytes / part.counts.held_out_tokens for part in self.parts]
        return sum(ratios[source] for source, _ in picks) / len(picks)

    @property
    def _held_out(self) -> list[Tensor]:
        return [part.held_out for part in self.parts]

    def describe(self) -> list[str]:
        """Returns one line per source, and per kind of skipped input."""
        lines = []
        for number, part in enumerate(self.parts, start=1):
            counts = part.counts
            of = f" of source {number}" if len(self.parts) > 1 else ""
            lines.append(
                f"tokens{of}: {counts.train_tokens:,} of {counts.train_documents:,} documents to train on, {counts.held_out_tokens:,} of "
                f"{counts.held_out_documents:,} held out, {counts.train_bytes / max(1, counts.train_tokens):.2f} bytes per token"
            )
            if counts.skipped:
                lines += [f"skipped{of}: {counts.skipped:,}, the first:", *counts.faults]
        return lines


def open_tokens(policy: TextPolicy, *, progress: OnProgress | None = None) -> TokenCorpus:
    """Trains the tokenizer and tokenises the text, unless an earlier run has done so, and maps the tokens.

    Raises:
        ValueError: bad input, with file and place; a tokenizer that cannot be used; a cache folder that cannot be written.
    """
    sources = _sources(policy)
    tokenizer = _tokenizer(policy, sources=sources)
    parts = tuple(
        open_part(files, tokenizer=tokenizer, policy=policy.read, cache_dir=policy.cache_dir, progress=progress)
        for files in sources
    )
    return TokenCorpus(
        parts=parts, weights=policy.weights or (1.0,), tokenizer=tokenizer, keeps_apart=policy.keeps_apart
    )


def _sources(policy: TextPolicy) -> list[list[SourceFile]]:
    if policy.paths is None:
        return [[file for file in standard_library() if file.size]]  # an empty __init__.py is no mistake in the library
    if policy.weights is None:
        return [named_files(policy.paths)]
    return [named_files([path]) for path in policy.paths]


def _tokenizer(policy: TextPolicy, *, sources: Sequence[Sequence[SourceFile]]) -> SubwordTokenizer | ByteTokenizer:
    if policy.tokenizer == BYTES:
        return ByteTokenizer()
    if policy.tokenizer != TRAIN:
        return SubwordTokenizer.open(policy.tokenizer)
    assert policy.vocab_size is not None, "the configuration is checked"
    read, digest = policy.read, hashlib.blake2b(digest_size=16)
    digest.update(f"{_TRAINED_FORMAT} {policy.vocab_size} {read.field} {read.skips} {read.share}".encode())
    for files in sources:
        digest.update(content_of(files, cache_dir=policy.cache_dir).encode())
    folder = cache_folder(policy.cache_dir) / f"tokenizer-{digest.hexdigest()}"
    texts = (text for files in sources for text in training_texts(files, policy=read))
    return SubwordTokenizer.open(
        built_once(
            folder,
            build=lambda unfinished: SubwordTokenizer.train(texts, vocab_size=policy.vocab_size, folder=unfinished),
        )
    )
