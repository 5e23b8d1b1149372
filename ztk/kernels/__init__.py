"""The kernels: one op per file, each with its Triton kernels, CPU implementation, torch reference and `SPEC`.

`ALL_OPS` is what the generic tests, the AOT report (`python -m ztk.kernels.aot`) and the benchmark run from.
"""

from ztk.kernels import quantize as _quantize
from ztk.kernels import swiglu as _swiglu
from ztk.kernels._library import Backend, get_backend, set_backend
from ztk.kernels._spec import AotCase, OpSpec
from ztk.kernels.quantize import dequantize, dequantize_reduce, quantize, quantized_bytes
from ztk.kernels.swiglu import swiglu

ALL_OPS: tuple[OpSpec, ...] = (
    _swiglu.SPEC,
    _quantize.SPEC,
    _quantize.DEQUANTIZE_SPEC,
    _quantize.DEQUANTIZE_REDUCE_SPEC,
)

__all__ = [
    "ALL_OPS",
    "AotCase",
    "Backend",
    "OpSpec",
    "dequantize",
    "dequantize_reduce",
    "get_backend",
    "quantize",
    "quantized_bytes",
    "set_backend",
    "swiglu",
]
