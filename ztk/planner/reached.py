"""Seconds of an operation on a device, at the rates that operations reach.

A product is cut into tiles, and each wave of tiles occupies all multiprocessors: a product whose tiles do not fill the last wave takes as
long as one that does. A short inner size wastes the time in which multiprocessors fill and empty. Attention is causal, so half of the
counted operations are computed; it reaches a lower rate with short sequences and small heads.
"""

from ztk.core.policies.hardware import FLOAT8, Hardware
from ztk.core.policies.peers import Peer
from ztk.planner.kinds import ATTENTION, GROUPED_PRODUCT, PRODUCT, TORCH_ATTENTION

_TILES = (
    (128, 256, 1.0),
    (256, 128, 1.0),
    (128, 128, 0.9),
    (64, 64, 0.6),
)  # rows, columns, share of the largest ones' rate
_VOCABULARY = 30_000
_INNER = 128  # inner steps lost to filling and emptying
_HEADS = {
    128: 1.0,
    64: 0.9,
    256: 0.9,
}  # FlashAttention-2, forward on H100 at 8,192: 333, 297 (of 256) and 322 without mask of 64


def device_seconds(
    kind: str, *, flops: int, nbytes: int, dtype: str, shape: tuple[int, ...], hardware: Hardware, peer: Peer
) -> float:
    """Seconds of one operation in the memory of the device."""
    moved = nbytes / (hardware.memory_bandwidth * hardware.memory_share)
    computed = 0.0
    if kind in (ATTENTION, TORCH_ATTENTION) and shape:
        length, head = shape
        share = hardware.attention_share * _HEADS.get(head, 1.0) * length / (length + hardware.attention_length)
        causal = 0.5 if hardware.attention_share < 1 else 1.0
        computed = flops * causal / (hardware.rate(dtype) * share * peer.attention_gain)
    elif flops:
        rate, share, casts = hardware.rate(dtype), hardware.product_share * peer.product_gain, 0.0
        if dtype == FLOAT8:  # casts to it are operations of their own
            share = hardware.fp8_share * peer.product_gain
        elif peer.fp8 and hardware.fp8_rate is not None and kind == PRODUCT and _is_linear(shape):
            rate, share = hardware.fp8_rate, hardware.fp8_share * peer.product_gain
            casts = moved * peer.casts  # operands are read, scaled and written in fp8
        computed = flops / (rate * share * _tiling(kind, shape=shape, hardware=hardware)) + casts
        computed *= 1 + peer.again / 3  # a backward has two products to one of its forward
    return max(computed, moved, hardware.operation_latency)


def _is_linear(shape: tuple[int, ...]) -> bool:
    """Whether it is a layer's product. The head, whose vocabulary is larger than any layer, stays in 16 bits."""
    return len(shape) == 3 and sorted(shape)[1] < _VOCABULARY


def _tiling(kind: str, *, shape: tuple[int, ...], hardware: Hardware) -> float:
    """The share of large products' rate that a product of this shape reaches."""
    if not hardware.multiprocessors or kind == GROUPED_PRODUCT or len(shape) != 3:
        return 1.0
    rows, columns, inner = shape
    best = 0.0
    for height, width, share in _TILES:
        tiles = -(-rows // height) * -(-columns // width)
        waves = -(-tiles // hardware.multiprocessors)
        best = max(best, share * rows * columns / (waves * hardware.multiprocessors * height * width))
    return best * inner / (inner + _INNER)
