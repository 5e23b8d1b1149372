"""Sums and joins among the tensor-parallel ranks that share a model, in the order of the ranks, so that all have the same bits."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ztk.core.runtime.comm import Comm, CommMismatch, PeerLost
from ztk.inference.cut import Cut
from ztk.inference.describe import Description

T = TypeVar("T")


class Ranks:
    """Sums and joins among the ranks that share a model. comm: communicates between them. hung_up: this rank has closed it, see `computing`."""

    def __init__(self, comm: Comm) -> None:
        self.comm, self.cut, self.hung_up = comm, Cut(rank=comm.rank, size=comm.size), False

    def sum(self, partial: Tensor) -> Tensor:
        """Of all ranks' partial [M, C], in their order and its dtype."""
        parts = self._gathered(partial)
        found = parts[0] + parts[1]
        for part in parts[2:]:
            found += part
        return found

    def join(self, part: Tensor) -> Tensor:
        """All ranks' columns: [M, N] of any dtype -> [M, size N]."""
        return torch.cat(list(self._gathered(part)), dim=1)

    def look_up(self, tokens: Tensor, *, table: Tensor) -> Tensor:
        """The rows of tokens, int64 [M], in a table whose rows the ranks divide, as many on each: this rank's [rows, C] -> [M, C]."""
        rows = table.shape[0]
        own = F.embedding((tokens - self.cut.rank * rows).clamp_(0, rows - 1), table)
        return self._gathered(own)[tokens // rows, torch.arange(len(tokens), device=tokens.device)]

    def join_keys(self, part: Tensor, *, description: Description) -> Tensor:
        """The columns of all key heads, each once: [M, own heads D] of any dtype -> [M, all heads D]."""
        copies = max(1, self.cut.size // description.kv_heads)
        return torch.cat(list(self._gathered(part)[::copies]), dim=1)

    def own_heads(self, queries: Tensor, *, keys: Tensor, description: Description) -> tuple[Tensor, Tensor]:
        """The columns of this rank's heads: queries [M, H D], keys [M, K D] of all heads, of any dtype. description: counts all ranks'
        heads."""
        own, size = self.cut.heads(description), description.head_dim
        return tuple(
            all_heads[:, part.start * size : part.stop * size]
            for all_heads, part in zip((queries, keys), own, strict=True)
        )

    def gather(self, one: T) -> list[T]:
        """Every rank's small object, in the order of the ranks."""
        with torch.inference_mode(False):
            return self.comm.gather_objects(one)

    def tell(self, message: T | None) -> T:
        """The first rank's message, on every rank."""
        with torch.inference_mode(False):
            return self.comm.broadcast_object(message, label="inference step")

    def _gathered(self, part: Tensor) -> Tensor:
        with torch.inference_mode(False):  # the thread that communicates writes into it
            full = torch.empty(self.cut.size, *part.shape, dtype=part.dtype, device=part.device)
        full[self.cut.rank] = part
        self.comm.all_gather(full.view(-1), label="inference").wait()
        return full


@contextmanager
def opening(ranks: Ranks | None) -> Iterator[None]:
    """Context of opening a model on all ranks. If one of them fails, all do: that one by its own error, the others by `PeerLost` with its
    text.

    Afterwards they can communicate as before, unless one of them was in the middle of an exchange.

    Raises:
        PeerLost: another rank has failed, or is gone.
    """
    if ranks is None:
        yield
        return
    own: Exception | None = None
    try:
        yield
    except PeerLost:
        raise
    except CommMismatch as error:
        raise PeerLost(f"another rank has stopped to open the model: {error}") from error
    except Exception as error:  # noqa: BLE001 - raised below, after the others are notified
        own = error
    try:
        # A separate label: a rank that waits in another exchange detects that this one has reached the end.
        failed = [bool(one) for (one,) in ranks.comm.gather_numbers([own is not None], label="end of opening")]
        texts = ranks.gather(None if own is None else f"{type(own).__name__}: {own}") if any(failed) else []
    except (PeerLost, CommMismatch) as error:
        raise own or PeerLost(f"another rank has stopped to open the model: {error}") from None
    if own is not None:
        raise own
    if any(failed):
        first = failed.index(True)
        raise PeerLost(f"rank {first} could not open the model: {texts[first]}")


@contextmanager
def computing(ranks: Ranks | None) -> Iterator[None]:
    """Context of a step of all ranks. A rank that fails in it closes its connections, so that the others raise `PeerLost` at once."""
    try:
        yield
    except BaseException:
        if ranks is not None:
            ranks.hung_up = True
            ranks.comm.close()
        raise
