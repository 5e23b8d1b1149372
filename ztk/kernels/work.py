"""The minimum bytes and operations of one call of an op, from its tensors.

Bytes: every tensor that is read or written counts once, and one that is changed in place twice. For the shapes of a `SPEC` this equals its
`num_bytes` and `num_bytes_backward`, except for rows of statistics (tests/kernels/test_times.py). A call may have tensors that the shape
does not cover, such as a residual, or fewer heads of keys than of queries. Operations: matrix products, as in `num_flops`. The time of all
other ops is bounded by their bytes on every device.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ztk.kernels.launch.library import operator

# Written and not read, by name: their schema only marks them as changed.
_WRITTEN = {"step_control": ("control",)}
_OUT = "out"  # everywhere
_NOT_READ = {
    "step_control": ("lr_table",),  # one number of it
    "linear_cross_entropy": ("logits",),  # memory for a chunk
}


class Work(NamedTuple):
    """num_bytes: minimum traffic. flops: () -> operations of matrix products; it may read offsets from the device, so it is called
    after the step, like `share`. dtype: the products' dtype. share: () -> the fraction of the bytes that the call moved, if it depends on
    values.
    None if all were moved. A tuple, because one is made per timed call."""

    num_bytes: int
    flops: Callable[[], int] | None
    dtype: torch.dtype
    share: Callable[[], float] | None = None


def work_of(name: str, *, args: tuple, result: object) -> Work:
    """Of a call `ztk::name(*args) -> result`. args: in the order of the schema; trailing ones may be left to their defaults."""
    flops = _PRODUCTS.get(name)
    moved = sum(map(_moved, args, _passes(name))) + _nbytes(result)
    share = _share_of_rows(args) if name == "scale_rows" else None
    return Work(num_bytes=moved, flops=flops(args, result) if flops else None, dtype=_first(args).dtype, share=share)


def _share_of_rows(args: tuple) -> Callable[[], float]:
    """Fraction of `scale_rows(x, scale)`: rows with scale 1 are not accessed, as for the loss at the start of a backward."""
    return lambda: float((args[1] != 1).float().mean())


def _moved(arg: object, passes: int) -> int:
    return passes * _nbytes(arg) if passes else 0


def _nbytes(value: object) -> int:
    """Bytes of a tensor (of a view only its elements), or of all tensors in a list or tuple; 0 for other values."""
    if isinstance(value, Tensor):
        return value.nbytes
    return sum(map(_nbytes, value)) if isinstance(value, (list, tuple)) else 0


def _first(args: tuple) -> Tensor:
    first = args[0]
    return first if isinstance(first, Tensor) else first[0]


@functools.cache
def _passes(name: str) -> tuple[int, ...]:
    """How often each argument passes through memory."""
    found = []
    schema = operator(name)._schema  # pyrefly: ignore[missing-attribute]  # an OpOverload
    for argument in schema.arguments:
        changes = argument.alias_info is not None and argument.alias_info.is_write
        written = argument.name == _OUT or argument.name in _WRITTEN.get(name, ())
        skipped = argument.name in _NOT_READ.get(name, ())
        found.append(0 if skipped else 2 if changes and not written else 1)
    return tuple(found)


def _attention_flops(q: Tensor, *, rest: tuple, per_pair: int) -> Callable[[], int]:
    """q: [tokens, heads, D]; rest: cu_seqlens, T, causal, window. per_pair: per visible pair, head and element of D."""
    (tokens, heads, dim), (offsets, T, causal, window) = q.shape, rest[:4]

    def flops() -> int:
        if offsets is None:
            pairs = tokens // max(T, 1) * visible_pairs(T, causal=causal, window=window)
        else:
            borders = offsets.tolist()
            lengths = (stop - start for start, stop in zip(borders, borders[1:], strict=False))
            pairs = sum(visible_pairs(length, causal=causal, window=window) for length in lengths)
        return per_pair * pairs * heads * dim

    return flops


def visible_pairs(length: int, *, causal: bool, window: int) -> int:
    """Visible pairs of queries and keys of one sequence: key j <= i if causal, and j > i - window if there is a window."""
    hidden = max(0, length - window) if window > 0 else 0  # queries with masked keys before them
    return (length * (length + 1) // 2 if causal else length * length) - hidden * (hidden + 1) // 2


def _grouped_flops(offsets: Tensor, *, per_slot: int) -> Callable[[], int]:
    """Operations of grouped products. Slots after the last offset are padding."""
    return lambda: per_slot * int(offsets[-1])


def _linear_loss_flops(args: tuple, result: object) -> Callable[[], int]:
    x, weight, with_gradients = args[0], args[1], args[8]
    flops = 2 * math.prod(x.shape) * weight.shape[0] * (3 if with_gradients else 1)
    return lambda: flops


_PRODUCTS: dict[str, Callable[[tuple, object], Callable[[], int]]] = {
    "attention": lambda args, result: _attention_flops(args[0], rest=args[3:], per_pair=4),
    "attention_backward": lambda args, result: _attention_flops(args[1], rest=args[6:], per_pair=10),
    "grouped_matmul": lambda args, result: _grouped_flops(
        args[4], per_slot=2 * sum(math.prod(weight.shape[1:]) for weight in (args[1], args[3]) if weight is not None)
    ),
    "grouped_matmul_weight": lambda args, result: _grouped_flops(
        args[2], per_slot=2 * args[0].shape[1] * args[1].shape[1]
    ),
    "linear_cross_entropy": _linear_loss_flops,
}
