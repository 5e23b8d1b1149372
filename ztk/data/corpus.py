"""A text as one memory-mapped byte array, with a part held out for validation."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ztk.data.mapping import mapped
from ztk.data.packing import DIGEST_BYTES, num_held_out, packed_file
from ztk.data.sources import named_files, standard_library


@dataclass(frozen=True, kw_only=True, slots=True)
class ByteCorpus:
    """Training and held-out bytes of a corpus.

    train, validation: uint8 [num_bytes] views of one read-only mapping, which uses address space but no memory.
    digest: hash of all bytes in order. Ranks and resumed runs compare it to verify that they read the same text.
    """

    train: Tensor
    validation: Tensor
    digest: str
    num_files: int

    @staticmethod
    def open(
        path: str | Sequence[str] | None = None, *, cache_dir: str | None = None, validation_fraction: float = 0.05
    ) -> "ByteCorpus":
        """Opens the text at `path`: one or more files, folders or globs. Defaults to the source code of the Python standard library.

        validation_fraction: fraction of the bytes held out for validation. It is taken from the end of every mebibyte (of the full text
        if it is smaller), so that both parts sample all regions of the text.
        cache_dir: folder of the packed copy. Defaults to the folder ztk below $XDG_CACHE_HOME or ~/.cache.

        Raises ValueError for a path that is missing, empty or unreadable, and for a cache folder that cannot be written.
        """
        if not 0.0 < validation_fraction < 1.0:
            raise ValueError(
                f"data.validation_fraction={validation_fraction}: must lie between 0 and 1, "
                "0.05 keeps a twentieth for validation"
            )
        entries = [path] if isinstance(path, str) else list(path or ())
        files = named_files(entries) if entries else standard_library()
        total = sum(file.size for file in files)
        num_validation = num_held_out(total, share=validation_fraction)
        if num_validation < 2:
            raise ValueError(
                f"data.path={', '.join(entries)}: {total} bytes in {len(files)} files, of which {num_validation} would "
                f"be held out; name more text, or raise data.validation_fraction={validation_fraction}"
            )
        packed = packed_file(files, cache_dir=cache_dir, share=validation_fraction)
        data = mapped(packed, size=total + DIGEST_BYTES, dtype=torch.uint8)
        train, validation, digest = data.split([total - num_validation, num_validation, DIGEST_BYTES])
        return ByteCorpus(train=train, validation=validation, digest=bytes(digest.tolist()).hex(), num_files=len(files))

    def bigram_entropy(self) -> float:
        """Returns the empirical conditional entropy H(next byte | byte) of the held-out bytes, in nats per byte.

        H = -sum over pairs (a, b) of p(a, b) ln p(b | a), counted on the held-out bytes themselves. It is a lower bound for the loss of
        any byte bigram model on this text, even one fitted to it. A model with a lower loss has learned more than pairs.
        """
        counts = _pair_counts(self.validation).double()
        totals = counts.sum(dim=1, keepdim=True)
        return -(torch.xlogy(counts, counts / totals.clamp(min=1)).sum() / counts.sum()).item()


def _pair_counts(data: Tensor) -> Tensor:
    """Returns how often byte b follows byte a, int64 [256, 256]."""
    counts = torch.zeros(256 * 256, dtype=torch.int64)
    block = 1 << 22  # bounds the int64 temporaries to 64 MiB
    for start in range(0, len(data) - 1, block):
        values = data[start : start + block + 1].long()
        counts += torch.bincount(values[:-1] * 256 + values[1:], minlength=256 * 256)
    return counts.view(256, 256)
