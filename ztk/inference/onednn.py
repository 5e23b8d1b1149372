"""Weights in oneDNN's own layout, and memory that they are read into.

torch makes such a weight from a plain one and owns its memory. A layer that is streamed is read into memory of ours, so its weights are
tensors over that memory; torch makes them for the programs that its ahead-of-time compiler writes, by the C functions used here.
"""

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_INT64 = ctypes.c_int64


def memory_of(weight: Tensor) -> Tensor:
    """The bytes of a weight in oneDNN's layout, which depends on its shape and the processor: uint8 [bytes]."""
    memory = (ctypes.c_char * torch.ops.mkldnn._nbytes(weight)).from_address(torch.ops.mkldnn.data_ptr(weight))
    memory.owner = weight  # lives as long as who reads its memory
    return torch.frombuffer(memory, dtype=torch.uint8)


def over(memory: Tensor, *, like: Tensor) -> Tensor:
    """A weight in the layout of `like`, fp32 or int8 [out, in], that uses `memory`, uint8 [bytes], as its bytes.

    Raises:
        RuntimeError: torch cannot make it.
    """
    library, meaning = _library(), torch.ops.mkldnn._get_mkldnn_serialized_md(like)
    made, (out, columns) = ctypes.c_void_p(), like.shape
    failed = library.aoti_torch_create_tensor_from_blob_v2(
        ctypes.c_void_p(memory.data_ptr()),
        _INT64(2),
        (_INT64 * 2)(out, columns),
        (_INT64 * 2)(columns, 1),
        _INT64(0),
        library.aoti_torch_dtype_int8() if like.dtype == torch.int8 else library.aoti_torch_dtype_float32(),
        library.aoti_torch_device_type_cpu(),
        0,
        ctypes.byref(made),
        library.aoti_torch_layout__mkldnn(),
        ctypes.c_void_p(meaning.data_ptr()),
        _INT64(meaning.numel()),
    )
    if failed:
        raise RuntimeError(f"torch {torch.__version__} makes no weight over memory that is given to it")
    found = torch._C._aoti.alloc_tensor_by_stealing_from_void_ptr(_capsule(made, None, None))
    # pyrefly: ignore[missing-attribute]  # a tensor takes any
    found.memory = memory  # which lives as long as the weight
    return found


@cache
def _library() -> Any:
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))


_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.restype, _capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
