"""Products with a model's weights on the CPU, whose rows have the same bits for any number of rows.

Measured on one core of an EPYC with AVX512, weight 2816 x 1024, microseconds for 1 / 8 / 32 rows: `F.linear` 790 / 1900 / 3130 (rows
differ), oneDNN 590 / 1240 / 2500, oneDNN with the weight in its own layout 780 / 830 / 1950. So weights are packed once, when a model is
loaded. From 2 rows on oneDNN's rows have the same bits; one row alone may take another path, and is then computed twice.
"""

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ztk.core.runtime.host_memory import use_huge_pages
from ztk.inference.stored import Stored, rows_of_largest, values_of
from ztk.nn.linear import HAS_ONEDNN, linear

_PACKED_FOR = 64  # rows that the packed layout is best for
# Without a look-up by its operands in every call, which takes as long as a small operation.
_by_onednn = torch.ops.mkldnn._linear_pointwise.default if HAS_ONEDNN else None


@dataclass(kw_only=True, slots=True)
class Affine:
    """weight [out, in] and bias [out] of a linear layer, or weight and bias [C] of a norm.

    full: [out, inputs of all ranks], of which `weight` holds the columns from `start` on. Quantised formats take scales, or columns of the
    first and the last group, from it, so that all ranks use the weights of a single rank.
    columns: number of columns of `weight` that `full` has; further ones are padding.
    moments: float64 [in, in], the sum of x x^T over inputs x of all ranks; int4 weights then minimise the error of the outputs.
    """

    weight: Tensor
    bias: Tensor | None = None
    full: "Tensor | Stored | None" = None
    start: int = 0
    columns: int = 0
    moments: Tensor | None = None


@dataclass(kw_only=True, slots=True)
class UnreadAffine:
    """An `Affine` whose values are not read yet, without moments."""

    weight: Stored
    bias: Stored | None = None
    full: Stored | None = None
    start: int = 0
    columns: int = 0


def in_groups(affine: Affine, *, group: int) -> tuple[Tensor, range, int]:
    """The input of quantisation: (fp32 [out, n] of whole groups of `group` inputs, this rank's range of them, number of leading columns of
    another rank). With second moments, n are the inputs of all ranks.
    """
    front, columns = affine.start % group, affine.weight.shape[1]
    width = -(-(front + columns) // group) * group
    if affine.full is not None and affine.moments is not None:
        full, first = values_of(affine.full), affine.start - front
        stop = first + width
        return F.pad(full, (0, max(stop - full.shape[1], -full.shape[1] % group))), range(first, stop), front
    own = affine.weight
    if affine.full is not None and width > affine.columns:
        first = affine.start - front
        before = values_of(affine.full[:, first : affine.start])
        after = values_of(affine.full[:, affine.start + affine.columns : first + width])
        own = torch.cat([before, own[:, : affine.columns], after], dim=1)
        return F.pad(own, (0, width - own.shape[1])), range(width), front
    return F.pad(own, (front, width - front - columns)), range(width), front


def largest_of(affine: Affine) -> Tensor | None:
    """fp32 [out]: the largest absolute weights over all ranks' inputs. None if `weight` has all inputs."""
    return None if affine.full is None else rows_of_largest(affine.full)


class Product:
    """x fp32 [M, in] -> fp32 [M, out]. shape: (out, in). doubles: a lone row is computed twice, as determined by `probe`.

    parts: names of the tensors that it computes with. opaque: parts in a layout of oneDNN. front: inputs of another rank in its first
    group.
    """

    parts: ClassVar[tuple[str, ...]] = ("weight", "bias")
    opaque: ClassVar[frozenset[str]] = frozenset({"weight"}) if HAS_ONEDNN else frozenset()
    front = 0

    def __init__(self, affine: Affine) -> None:
        out, of = affine.weight.shape
        self.shape = (out, of)
        self.nbytes = affine.weight.nbytes
        self.doubles = True
        self._bias = affine.bias
        if HAS_ONEDNN:
            self._weight = torch.ops.mkldnn._reorder_linear_weight(affine.weight.contiguous(), _PACKED_FOR)
        else:
            self._weight = affine.weight

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """The product, plus `residual`."""
        if self.doubles and x.shape[0] == 1:
            found = self.multiply(x.repeat(2, 1))[:1]
        else:
            found = self.multiply(x)
        return found if residual is None else found.add_(residual)

    def tensors(self) -> dict[str, Tensor]:
        """Its memory by name, [*] of any dtype. Writes to it change the product. An opaque part is uint8 [bytes]."""
        found = {name: getattr(self, f"_{name}") for name in self.parts}
        return {
            name: memory_of(tensor) if name in self.opaque else tensor
            for name, tensor in found.items()
            if tensor is not None
        }

    def adopt(self, tensors: Mapping[str, Tensor]) -> None:
        """Replaces its memory by tensors [*] of the same shapes and dtypes."""
        for name, tensor in tensors.items():
            own = over(tensor, like=getattr(self, f"_{name}")) if name in self.opaque else tensor
            setattr(self, f"_{name}", own)

    def settle(self, *, doubles: bool) -> None:
        """Fixes its memory, in huge pages."""
        self.doubles = doubles
        for tensor in self.tensors().values():
            use_huge_pages(tensor)

    def multiply(self, x: Tensor) -> Tensor:
        """The product, without the rule for a single row."""
        if _by_onednn is not None:
            return _by_onednn(x, self._weight, self._bias, "none", [], "")
        return linear(x, weight=self._weight, bias=self._bias)


class Recorded(Product):
    """A product that adds up the second moments of its inputs, float64 [in, in]: the sum of x x^T over all rows x."""

    def __init__(self, affine: Affine) -> None:
        super().__init__(affine)
        self.moments = torch.zeros(self.shape[1], self.shape[1], dtype=torch.float64)

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        wide = x.double()
        self.moments.addmm_(wide.t(), wide)
        return super().__call__(x, residual)


# Weights in oneDNN's own layout, and memory that they are read into. torch makes such a weight from a plain one and owns its memory. A layer
# that is streamed is read into memory of ours, so its weights are tensors over that memory; torch makes them for the programs that its
# ahead-of-time compiler writes, by the C functions used here.

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
