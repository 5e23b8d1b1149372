"""Tables of blocks on a device. A step sends the entries that changed since the last one."""

from collections.abc import Iterable

import torch
from torch import Tensor


class DeviceTables:
    """Copies in `tensor`, int32 [slots, width], of the tables of all slots, lists that their owner changes.

    Most sequences continue in the next step: their tables are equal, or longer by one block. Making a tensor of all entries takes the host
    longer than comparing the lists. Entries after a table's end are undefined: numbers of blocks that it had before, or 0.
    """

    def __init__(self, tables: list[list[int]], *, width: int, device: torch.device) -> None:
        self.tensor = torch.zeros(len(tables), width, dtype=torch.int32, device=device)
        self._tables = tables
        self._known: list[list[int]] = [[] for _ in tables]  # the tables in `tensor`

    def update(self, slots: Iterable[int]) -> int:
        """Makes the rows of these slots equal to their tables. Returns the number of entries that were sent."""
        places, values, width = [], [], self.tensor.shape[1]
        for slot in slots:
            own, known = self._tables[slot], self._known[slot]
            if own != known:
                start = len(known) if own[: len(known)] == known else 0
                places += range(slot * width + start, slot * width + len(own))
                values += own[start:]
                self._known[slot] = own.copy()
        if places:
            at, blocks = sent([places, values], dtype=torch.int64, device=self.tensor.device)
            self.tensor.view(-1).index_copy_(0, at, blocks.to(torch.int32))
        return len(places)


def sent(numbers: list, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of numbers on the device. For a GPU it is made in page-locked memory, so that the host does not wait for the copy."""
    return torch.tensor(numbers, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)
