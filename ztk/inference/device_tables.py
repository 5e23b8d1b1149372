"""Tables of blocks on a device. A step sends the entries that changed since the last one."""

import torch
from torch import Tensor

_PART = 4  # changes of more than a part of all entries are sent as the whole tensor: places take time, too


class DeviceTables:
    """Rows of block numbers, padded with zeros, in `tensor` int32 [rows, width].

    Most sequences continue in the next step of the same graph: their tables are equal, or longer by one block. Making a tensor of all
    entries takes the host longer than comparing the lists.
    """

    def __init__(self, *, rows: int, width: int, device: torch.device) -> None:
        self.tensor = torch.zeros(rows, width, dtype=torch.int32, device=device)
        self._known: list[list[int]] = [[] for _ in range(rows)]  # the rows of `tensor` without padding

    def update(self, tables: list[list[int]]) -> int:
        """Makes `tensor` equal to `tables`, at most `rows` lists of at most `width` entries, and the other rows zeros. Returns the number of
        entries that were sent."""
        rows, width = self.tensor.shape
        changed: list[tuple[int, int, int]] = []  # row, and its first and last changed entries
        for row, known in enumerate(self._known):
            own = tables[row] if row < len(tables) else []
            if own != known:
                start = len(known) if own[: len(known)] == known else 0
                changed.append((row, start, max(len(own), len(known))))
                self._known[row] = own.copy()
        count = sum(end - start for _, start, end in changed)
        if count * _PART > rows * width:
            every = [own + [0] * (width - len(own)) for own in self._known]
            self.tensor.copy_(self._sent(every, dtype=torch.int32), non_blocking=True)
            return rows * width
        if changed:
            places, values = [], []
            for row, start, end in changed:
                own = self._known[row]
                places += range(row * width + start, row * width + end)
                values += own[start:] + [0] * (end - len(own))
            sent = self._sent([places, values], dtype=torch.int64).to(self.tensor.device, non_blocking=True)
            self.tensor.view(-1).index_copy_(0, sent[0], sent[1].to(torch.int32))
        return count

    def _sent(self, numbers: list[list[int]], *, dtype: torch.dtype) -> Tensor:
        """In page-locked memory for a GPU, so that the host does not wait for the copy."""
        return torch.tensor(numbers, dtype=dtype, pin_memory=self.tensor.device.type == "cuda")
