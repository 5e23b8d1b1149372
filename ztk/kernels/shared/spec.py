"""`OpSpec` describes an op for tests, the ahead-of-time report and benchmarks."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, kw_only=True, slots=True)
class OpSpec:
    """Description of an op for tests, benchmarks and documentation.

    `make_inputs(shape, dtype=, device=, **variant)` returns the keyword arguments of `op`, `reference` and `eager`, as
    one dict: `op(**inputs)`. Tests compare with the reference: the returned tensors (one, a tuple, or None), the
    inputs named in `mutated` after the call, and the gradients of the inputs named in `differentiable`. `reference`
    computes in float32, or in float64 when its inputs are float64, which is how the tests find the true values. `eager`
    is the plain torch formulation in the input's own dtype; the op's error may be at most `error_ratio` times its error.
    """

    name: str
    op: Callable[..., Tensor | tuple[Tensor, ...] | None]
    reference: Callable[..., Tensor | tuple[Tensor, ...] | None]
    make_inputs: Callable[..., dict[str, Any]]
    eager: Callable[..., Tensor | tuple[Tensor, ...] | None] | None = None
    differentiable: tuple[str, ...] = ()
    mutated: tuple[str, ...] = ()
    small_shapes: tuple[tuple[int, ...], ...]  # interpreter: few programs, odd edges
    bench_shapes: tuple[tuple[int, ...], ...]
    variants: tuple[Mapping[str, object], ...] = field(default_factory=lambda: ({},))  # keywords for make_inputs
    num_bytes: Callable[..., int]  # (shape, itemsize) -> bytes a perfect forward moves
    num_bytes_backward: Callable[..., int] | None = None
    num_flops: Callable[..., int]  # (shape,) -> floating point operations of the forward
    dtypes: tuple[torch.dtype, ...] = FLOAT_DTYPES
    interpreted_dtypes: tuple[torch.dtype, ...] = FLOAT_DTYPES  # without bfloat16 when the kernel uses tl.dot
    # Root mean square error in eps of the output dtype; the error of the worst element may be 32 times as large.
    tolerance_ulps: float = 2.0
    error_ratio: float = 1.5


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype a reference computes in for x of any shape: float64 for float64 inputs, otherwise float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def tokens_as_numbers(function: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
    """Wraps `function`, whose first result is tokens, int64 [...], and returns them as float64, so that tests can compare with a tolerance."""

    @functools.wraps(function)
    def compared(**inputs: Any) -> tuple[Tensor, ...]:
        tokens, *rest = function(**inputs)
        return tokens.double(), *rest

    return compared
