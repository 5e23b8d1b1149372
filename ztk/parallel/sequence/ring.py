"""Ring attention (Liu et al. 2023, https://arxiv.org/abs/2310.01889), balanced for causal attention by zigzag, as Megatron's context
parallelism is: a contiguous cut leaves the first ranks idle (Brandon et al. 2023, https://arxiv.org/abs/2311.09431).

[Note: Zigzag]
A sequence of T tokens is cut into 2 N chunks; rank r of N has chunks r and 2 N - 1 - r. At every hop but the first a rank computes two
pairs of chunks (two of four are in the future), at the first one three, so all ranks compute the same amount.

[Note: The ring]
Keys and values go from rank to rank. At hop h a rank has the block of rank r - h; before it computes, it posts the exchange for the next
block. A block's result is merged by log-sum-exp: with L = log(e^l + e^m), out = out e^(l - L) + part e^(m - L), in fp32.
In the backward keys and values go around again; P is recomputed from the log-sum-exp over all blocks. dK and dV of a block follow it in
fp32 through the ranks that add to them, and return from the last one to the owner, which adds its own part. All sums have the
order of the ring, so results depend only on N.

[Note: Volume]
With n = B (T / N) K D elements of a rank's keys, every rank sends 2 n (N - 1) elements in the forward and 4 n (N - 1) in the backward, per
layer: half of the latter are gradients in fp32. Ulysses sends about 4 B (T / N) H D per direction, for any N.
Results have the dtype of the query.
"""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from ztk.core.runtime import Comm
from ztk.core.runtime.dispatch_modes import without_dispatch_modes
from ztk.kernels import PackedPair, Pair, Part, attention_block, attention_block_backward
from ztk.kernels.launch.functions import OnceFunction
from ztk.nn import Documents


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunks:
    """Chunks of `length` tokens of each of a batch's sequences. window: tokens of a sliding window, or 0. starts: per sequence, the
    positions where its documents begin, 0 first. If omitted, attention crosses documents."""

    length: int
    window: int = 0
    starts: tuple[tuple[int, ...], ...] | None = None

    def pair(self, *, query: int, key: int, device: torch.device) -> Pair | PackedPair | None:
        """The pair of queries of chunk `query` and keys of chunk `key`, counted along the sequence, or None if all is masked. device: of
        the result."""
        if key > query:
            return None
        if self.starts is None:
            return self._plain(query=query, key=key)
        if key == query:
            return self._own(query, device=device)
        parts = tuple(self._rectangles(query=query, key=key))
        if all(part.pair.length == part.pair.keys == self.length for part in parts) and len(parts) == len(self.starts):
            return self._plain(query=query, key=key)
        return PackedPair(parts=parts) if parts else None

    def _plain(self, *, query: int, key: int) -> Pair | None:
        pair = Pair(length=self.length, keys=self.length, distance=(query - key) * self.length, window=self.window)
        return None if pair.is_empty else pair

    def _own(self, chunk: int, *, device: torch.device) -> PackedPair:
        """The documents of a chunk, or their parts in it."""
        first, ends = chunk * self.length, []
        for number, starts in enumerate(self.starts or ()):
            inside = [start - first for start in starts if first < start < first + self.length]
            ends += [number * self.length + place for place in (*inside, self.length)]
        borders = [0, *ends]
        parts = tuple(
            Part(query=start, key=start, pair=Pair(length=stop - start, keys=stop - start, distance=0))
            for start, stop in zip(borders, ends, strict=False)
        )
        longest = max(part.pair.length for part in parts)
        return PackedPair(
            parts=parts, cu_seqlens=torch.tensor(borders, dtype=torch.int32, device=device), longest=longest
        )

    def _rectangles(self, *, query: int, key: int) -> Iterator[Part]:
        first = query * self.length
        for number, starts in enumerate(self.starts or ()):
            place = bisect_right(starts, first)
            start = starts[place - 1]
            stop = min([*starts[place : place + 1], first + self.length])
            keys = (key + 1) * self.length - max(start, key * self.length)
            if start < first and keys > 0:
                yield Part(
                    query=number * self.length,
                    key=(number + 1) * self.length - keys,
                    pair=Pair(length=min(stop - first, self.length), keys=keys, distance=keys),
                )


CHUNKS = 2  # of a rank, see [Note: Zigzag]


class RingAttention(nn.Module):
    """Wraps `core(query, key=, value=)` on [B, T, H, D]; its inputs and output are a rank's chunks [B, T / N, H, D], see [Note: Zigzag].

    If `active` is False, only the core runs, for sequences that are not cut.
    """

    def __init__(self, core: nn.Module, *, comm: Comm, name: str) -> None:
        super().__init__()
        self.core, self.active = core, False
        self._comm, self._name = comm, name

    def forward(
        self, query: Tensor, *, key: Tensor, value: Tensor, documents: Documents | None = None, **options: Any
    ) -> Tensor:
        """documents: the full sequences'. options: window and scale, for a core that takes them."""
        if not self.active:
            return self.core(query, key=key, value=value, documents=documents, **options)
        given = {"comm": self._comm, "label": self._name, "documents": documents}
        return ring_attention(query, key=key, value=value, **given, **options)


def ring_attention(
    query: Tensor,
    *,
    key: Tensor,
    value: Tensor,
    comm: Comm,
    label: str,
    window: int = 0,
    scale: float | None = None,
    documents: Documents | None = None,
) -> Tensor:
    """Causal attention over sequences of which every rank has two chunks, with gradients.

    query [B, T / N, H, D], key and value [B, T / N, K, D], of the same dtype; returns [B, T / N, H, D]. window: if w > 0, a token attends
    to itself and the previous w - 1 tokens. scale: factor of the scores. Defaults to D ** -0.5. documents: the full sequences'; a token attends
    to its own document only, and padding tokens at the end attend to each other. A collective call in the forward and in the backward.

    Raises:
        ValueError: T / N is odd, but a rank needs two chunks of one length. Pad the end of the sequence, which no earlier token attends to.
            Or a window is used with documents.
    """
    if query.shape[1] % CHUNKS:
        raise ValueError(
            f"ring attention: {query.shape[1]} tokens on a rank are not two chunks of one length: pad the sequence"
        )
    if window and documents is not None:
        raise ValueError(f"ring attention: window={window} has no implementation for packed documents: use one of them")
    chunks = Chunks(
        length=query.shape[1] // CHUNKS, window=window, starts=_starts(documents, tokens=query.shape[1] * comm.size)
    )
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    dtype = query.dtype
    if query.device.type == "cpu" and dtype != torch.float32:  # as in `ztk.nn.self_attention`
        query, key, value = query.float(), key.float(), value.float()
    return _Ring.apply(query, key, value, comm, label, chunks, scale).to(dtype)


class _Ring(OnceFunction):
    """Inside, tensors are [2, B c, heads, D]: a rank's two chunks of c tokens, each of all B sequences, dense."""

    INSTEAD = "Use topology.context=1"

    @staticmethod
    @without_dispatch_modes  # selective recomputation would keep the result of every block, N times a layer's output
    def forward(ctx, query, key, value, comm, label, chunks, scale):  # noqa: PLR0917 - as torch calls it
        B = query.shape[0]
        q, own = _chunks(query), torch.stack([_chunks(key), _chunks(value)])
        out, lse = [None, None], [None, None]
        for hop, block in _blocks(own, comm=comm, label=label):
            for mine, theirs, pair in _pairs(comm, hop=hop, chunks=chunks, device=q.device):
                part = attention_block(q[mine], block[0, theirs], block[1, theirs], pair=pair, scale=scale)
                out[mine], lse[mine] = _merged(out[mine], lse[mine], part=part)
        joined, sums = torch.stack(out).to(query.dtype), torch.stack(lse)
        ctx.save_for_backward(q, own, joined, sums)
        ctx.options = comm, label, chunks, scale, B
        return _joined(joined, batch=B)

    @staticmethod
    def backward(ctx, d_out):
        q, own, out, lse = ctx.saved_tensors
        comm, label, chunks, scale, B = ctx.options
        d_o, d_q = _chunks(d_out), torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        d_own = torch.zeros(own.shape, dtype=torch.float32, device=q.device)
        arriving = None  # the previous ranks' sum for the block of this hop
        for hop, block in _blocks(own, comm=comm, label=f"{label} again"):
            d_block = torch.zeros_like(d_own) if hop else d_own
            for mine, theirs, pair in _pairs(comm, hop=hop, chunks=chunks, device=q.device):
                parts = attention_block_backward(
                    d_o[mine],
                    q[mine],
                    block[0, theirs],
                    block[1, theirs],
                    out=out[mine],
                    lse=lse[mine],
                    pair=pair,
                    scale=scale,
                )
                for total, part in zip((d_q[mine], d_block[0, theirs], d_block[1, theirs]), parts, strict=True):
                    total.add_(part)
            if hop:
                arriving = _passed_on(d_block, arriving=arriving, comm=comm, label=f"gradient of {label}")
        if arriving is not None:
            d_own = arriving.wait().add_(d_own)
        d_k, d_v = (_joined(x, batch=B).to(own.dtype) for x in d_own)
        return _joined(d_q, batch=B).to(q.dtype), d_k, d_v, None, None, None, None


def _blocks(own: Tensor, *, comm: Comm, label: str) -> Iterator[tuple[int, Tensor]]:
    """(hop, the block of rank r - hop), this rank's own first. The next exchange is posted before a block is handed out."""
    block = own
    for hop in range(comm.size):
        following = _Passed(block, comm=comm, label=label) if hop + 1 < comm.size else None
        yield hop, block
        if following is not None:
            block = following.wait()


class _Passed:
    """A tensor being sent to the next rank, and one of the same shape from the previous rank."""

    def __init__(self, tensor: Tensor, *, comm: Comm, label: str) -> None:
        self._sent, self._out = tensor, torch.empty_like(tensor)
        self._work = comm.pass_on(tensor.view(-1), out=self._out.view(-1), label=label)

    def wait(self) -> Tensor:
        """Waits for the previous rank's tensor."""
        self._work.wait()
        return self._out


def _passed_on(d_block: Tensor, *, arriving: _Passed | None, comm: Comm, label: str) -> _Passed:
    """Adds this rank's part to the arriving sum, and posts the result to the next rank."""
    total = d_block if arriving is None else arriving.wait().add_(d_block)
    return _Passed(total, comm=comm, label=label)


def _pairs(
    comm: Comm, *, hop: int, chunks: Chunks, device: torch.device
) -> Iterator[tuple[int, int, Pair | PackedPair]]:
    """(own chunk, the block's chunk, their mask) of all pairs that are not fully masked; a query's own chunk first."""
    source = (comm.rank - hop) % comm.size
    queries = (comm.rank, 2 * comm.size - 1 - comm.rank)
    keys = (source, 2 * comm.size - 1 - source)
    for mine, query in enumerate(queries):
        for theirs, key in sorted(enumerate(keys), key=lambda item: item[1] != query):
            if (pair := chunks.pair(query=query, key=key, device=device)) is not None:
                yield mine, theirs, pair


def _starts(documents: Documents | None, *, tokens: int) -> tuple[tuple[int, ...], ...] | None:
    """Starts of documents in sequences of `tokens` tokens. Padding at the end counts as a document."""
    if documents is None:
        return None
    length = documents.positions.shape[1]
    return tuple((*starts, length) if tokens > length else starts for starts in documents.starts)


def _merged(out: Tensor | None, lse: Tensor | None, *, part: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Two blocks' results as one, see [Note: The ring]: out fp32 [tokens, H, D], lse fp32 [H, tokens]."""
    part_out, part_lse = part
    if out is None or lse is None:
        return part_out.to(torch.float32, copy=True), part_lse
    total = torch.logaddexp(lse, part_lse)
    out.mul_(_by_row(lse - total)).add_(part_out * _by_row(part_lse - total))
    return out, total


def _by_row(exponent: Tensor) -> Tensor:
    """[H, tokens] -> [tokens, H, 1]."""
    return exponent.exp().transpose(0, 1)[..., None]


def _chunks(x: Tensor) -> Tensor:
    """[B, 2 c, heads, D] -> [2, B c, heads, D]."""
    return rearrange(x, "b (two c) h d -> two (b c) h d", two=CHUNKS).contiguous()


def _joined(x: Tensor, *, batch: int) -> Tensor:
    """[2, B c, heads, D] -> [B, 2 c, heads, D]."""
    return rearrange(x, "two (b c) h d -> b (two c) h d", b=batch)
