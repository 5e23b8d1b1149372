"""Files of tokens in memory, of which a process keeps what it reads now: tensors of uint8, uint16 or int32 [size].

Pages of a mapped file that were read once count as the process's memory until the system needs them elsewhere. A stream that reads a corpus
in random order would so grow to its size. It gives them back from time to time: they stay in the system's cache, where reading them again costs
a fault and no disk.
"""

import mmap
import weakref
from pathlib import Path

import torch
from torch import Tensor

READ_AROUND = 1 << 16  # bytes that the system maps around a byte that is read
_mappings: "weakref.WeakValueDictionary[int, mmap.mmap]" = (
    weakref.WeakValueDictionary()
)  # by the address of the first byte


def mapped(path: Path, *, size: int, dtype: torch.dtype) -> Tensor:
    """The first `size` elements of a file, [size] of `dtype`; what is written into the tensor stays in it. OSError as of `open`."""
    if not size:
        return torch.empty(0, dtype=dtype)
    with open(path, "rb") as file:
        pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    data = torch.frombuffer(pages, dtype=dtype, count=size)
    _mappings[data.data_ptr()] = pages
    return data


def drop_pages(data: Tensor) -> None:
    """Takes the pages of the mapped file that `data`, of any shape, is a part of out of this process's memory; nothing for another tensor."""
    pages = _mappings.get(data.untyped_storage().data_ptr())
    if pages is not None:
        pages.madvise(mmap.MADV_DONTNEED)
