"""Symmetric products beyond the generic tests: bits across the diagonal, the numbering of tiles, and Muon's iteration through the kernel."""

import pytest
import torch
import triton
import triton.language as tl

from ztk.kernels import set_backend, symmetric_product
from ztk.kernels.launch.machine import MACHINES, assume
from ztk.kernels.ops.symmetric_product import _place
from ztk.optim.muon import orthogonalise


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("N", "K"), [(1, 16), (63, 40), (64, 200), (65, 64), (130, 131)])
def test_both_sides_of_the_diagonal_have_the_same_bits(N, K, dtype, target):
    set_backend("triton")
    x = (torch.randn(N, K, generator=torch.Generator().manual_seed(N)) * K**-0.5).to(dtype)
    with assume(MACHINES[target]):
        gram = symmetric_product(x)
        square = symmetric_product(gram, square=2.0315, linear=-4.775)
    assert torch.equal(gram, gram.T) and torch.equal(square, square.T)
    expected = (x.double() @ x.double().T).float()
    assert (gram.float() - expected).abs().max() <= expected.abs().max() * torch.finfo(dtype).eps


@triton.jit
def _places(first, rows_ptr, columns_ptr, BLOCK: tl.constexpr):
    o_t = first + tl.arange(0, BLOCK)
    i_i, i_j = _place(o_t.to(tl.int64))
    tl.store(rows_ptr + tl.arange(0, BLOCK), i_i)
    tl.store(columns_ptr + tl.arange(0, BLOCK), i_j)


@pytest.mark.parametrize("column", [0, 1, 31, 1023, 4095, 16383])
def test_tiles_are_numbered_without_gaps(column):
    """1,024 tiles after the first one of a column. With 16,384 columns a matrix has 2^20 rows and more."""
    first = max(0, column * (column + 1) // 2 - 512)
    rows, columns = (torch.empty(1024, dtype=torch.int64) for _ in range(2))
    _places[(1,)](first, rows, columns, BLOCK=1024)
    assert ((rows >= 0) & (rows <= columns)).all()
    assert torch.equal(columns * (columns + 1) // 2 + rows, torch.arange(first, first + 1024))


@pytest.mark.parametrize("shape", [(40, 72), (72, 40), (24, 24)])
def test_muons_iteration_runs_through_the_kernel(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    plain = orthogonalise(matrix.half())
    set_backend("triton")
    assert torch.equal(orthogonalise(matrix), _in_full(matrix))
    assert (orthogonalise(matrix.half()) - plain).abs().max() < 0.02  # of singular values of about one


def _in_full(matrix):
    set_backend("auto")
    try:
        return orthogonalise(matrix)
    finally:
        set_backend("triton")


def test_other_shapes_are_refused():
    with pytest.raises(ValueError, match=r"symmetric_product: x is \(4, 6\) torch.float32"):
        symmetric_product(torch.zeros(4, 6), linear=1.0)
    with pytest.raises(ValueError, match="pass bfloat16, float16 or float32"):
        symmetric_product(torch.zeros(4, 4, dtype=torch.float64))
