"""Tests of the fused linear cross entropy beyond the generic ones: memory, chunks and refusals."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ztk.kernels import set_backend
from ztk.kernels.ops.linear_cross_entropy import _run, chunk_rows, linear_cross_entropy, linear_cross_entropy_reference


class Largest(TorchDispatchMode):
    """Elements of the largest two-dimensional tensor with `columns` columns that any operation returns."""

    def __init__(self, columns: int):
        super().__init__()
        self.columns, self.rows = columns, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.dim() == 2 and out.shape[1] == self.columns:
            self.rows = max(self.rows, out.shape[0])
        return out


def inputs(T=200, H=16, V=97):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(T, H, generator=generator, requires_grad=True)
    weight = torch.randn(V, H, generator=generator, requires_grad=True)
    return x, weight, torch.randint(0, V, (T,), generator=generator)


def test_the_full_logits_never_exist():
    x, weight, target = inputs()
    with Largest(97) as seen:
        _run(x.detach(), weight.detach(), target, torch.ones(1), torch.empty(40, 97), -100, 0.0, 0.0, True)
    assert seen.rows == 40


@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_chunks_do_not_change_the_result(backend):
    set_backend(backend)
    results = []
    for chunk_bytes in (7 * 97 * 4, 1 << 30):
        x, weight, target = inputs()
        target[::5] = -100
        loss = linear_cross_entropy(x, weight, target, chunk_bytes=chunk_bytes)
        (3.0 * loss).backward()
        results.append((loss.detach(), x.grad, weight.grad))
    for a, b in zip(*results, strict=True):
        assert torch.allclose(a, b, atol=1e-6)


def test_without_gradients_none_are_computed():
    x, weight, target = inputs()
    _, d_x, d_weight = _run(
        x.detach(), weight.detach(), target, torch.ones(1), torch.empty(40, 97), -100, 0.0, 0.0, False
    )
    assert d_x.numel() == 0 and d_weight.numel() == 0
    with torch.no_grad():
        loss = linear_cross_entropy(x, weight, target)
    assert torch.allclose(loss, linear_cross_entropy_reference(x, weight, target).detach(), atol=1e-5)


def test_all_targets_ignored_is_zero_not_nan():
    x, weight, target = inputs()
    loss = linear_cross_entropy(x, weight, torch.full_like(target, -100))
    loss.backward()
    assert loss == 0 and not x.grad.any() and not weight.grad.any()


def test_chunk_rows():
    assert chunk_rows(tokens=8192, vocabulary=131072, itemsize=2, chunk_bytes=512 << 20) == 2048
    assert chunk_rows(tokens=100, vocabulary=1000, itemsize=2, chunk_bytes=1 << 30) == 100
    assert (
        chunk_rows(tokens=5000, vocabulary=131072, itemsize=2, chunk_bytes=512 << 20) == 1792
    )  # 3 of 1667, rounded up
    assert chunk_rows(tokens=10, vocabulary=1000, itemsize=4, chunk_bytes=1) == 1


def test_refuses_unsupported_arguments():
    x, weight, target = inputs()
    with pytest.raises(ValueError, match="reduction='none'"):
        linear_cross_entropy(x, weight, target, reduction="none")
    with pytest.raises(ValueError, match=r"\[V, H\]"):
        linear_cross_entropy(x, weight.T, target)


def test_a_power_of_two_scales_exactly():
    """float16 under a loss scale: the same bits as without it, shifted."""
    gradients = []
    for scale in (1.0, 1024.0):
        x, weight, target = (t.detach().half().requires_grad_() if t.is_floating_point() else t for t in inputs())
        (linear_cross_entropy(x, weight, target) * scale).backward()
        gradients.append((x.grad.float() / scale, weight.grad.float() / scale))
    normal = gradients[0][0].abs() > 2.0**-14  # below, the unscaled float16 gradient is subnormal
    assert torch.equal(gradients[0][0][normal], gradients[1][0][normal])
