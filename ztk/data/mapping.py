"""Memory-mapped token files whose pages can be released: tensors of uint8, uint16 or int32 [size].

Pages of a mapped file that were read once count as the process's memory until the system reclaims them. A stream that reads a corpus in
random order would thus grow to the size of the corpus. It releases its pages regularly: they stay in the system's page cache, and
reading them again costs a page fault but no disk access.
"""

import mmap
import weakref
from pathlib import Path

import torch
from torch import Tensor

READ_AROUND = 1 << 16  # bytes that the system maps around a byte on a page fault
_mappings: "weakref.WeakValueDictionary[int, mmap.mmap]" = (
    weakref.WeakValueDictionary()
)  # keyed by the address of the first byte


def mapped(path: Path, *, size: int, dtype: torch.dtype) -> Tensor:
    """Maps the first `size` elements of a file, [size] of `dtype`. Writes to the tensor do not change the file. Raises OSError as
    `open`.
    """
    if not size:
        return torch.empty(0, dtype=dtype)
    with open(path, "rb") as file:
        pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    data = torch.frombuffer(pages, dtype=dtype, count=size)
    _mappings[data.data_ptr()] = pages
    return data


def drop_pages(data: Tensor) -> None:
    """Releases this process's pages of the mapped file behind `data`, a tensor of any shape. Does nothing for other tensors."""
    pages = _mappings.get(data.untyped_storage().data_ptr())
    if pages is not None:
        pages.madvise(mmap.MADV_DONTNEED)
