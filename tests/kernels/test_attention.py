"""Tests of attention beyond the generic ones: several blocks of 16-bit tiles, fused projections, block ranges, refusals."""

import pytest
import torch

from ztk.kernels import set_backend
from ztk.kernels.ops.attention import attention, attention_reference, attention_varlen


def relative(actual, expected):
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.mark.parametrize("window", [0, 40])
def test_many_blocks(window):
    """133 tokens over tiles of 64 and 32: full blocks, the diagonal, the window's edge and the tail."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 133, heads, 16, requires_grad=True) for heads in (2, 1, 1))
    narrow = [x.detach().bfloat16().requires_grad_() for x in (q, k, v)]
    d_out = torch.randn(1, 133, 2, 16)
    attention_reference(q, k, v, window=window).backward(d_out)
    set_backend("triton")
    out = attention(*narrow, window=window)
    out.backward(d_out.bfloat16())
    for name, wide, half in zip("qkv", (q, k, v), narrow, strict=True):
        assert relative(half.grad, wide.grad) < 2**-6, f"d_{name}"


@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_slices_of_a_fused_projection_are_read_in_place(backend):
    fused = torch.randn(2, 20, 4, 16)
    q, k, v = fused[:, :, :2], fused[:, :, 2:3], fused[:, :, 3:]
    expected = attention_reference(q, k, v)
    set_backend(backend)
    assert relative(attention(q, k, v), expected) < 1e-6


@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_packed_sequences_do_not_see_each_other(backend):
    set_backend(backend)
    q, k, v = (torch.randn(24, 1, 16) for _ in range(3))
    cu_seqlens = torch.tensor([0, 10, 24], dtype=torch.int32)
    before = attention_varlen(q, k, v, cu_seqlens=cu_seqlens, max_seqlen=14)
    k[:10], v[:10] = 100.0, -100.0
    after = attention_varlen(q, k, v, cu_seqlens=cu_seqlens, max_seqlen=14)
    assert torch.equal(before[10:], after[10:]) and not torch.equal(before[:10], after[:10])


def test_sequences_of_one_length_have_the_bits_that_they_have_alone():
    """On the CPU those that follow each other are one batch; gradients, too."""
    torch.manual_seed(0)
    lengths = [5, 5, 0, 5, 3, 3, 7, 5]
    q, k, v = (torch.randn(sum(lengths), heads, 16, requires_grad=True) for heads in (4, 2, 2))
    d_out, cu_seqlens = torch.randn(sum(lengths), 4, 16), torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0)
    together = attention_varlen(q, k, v, cu_seqlens=cu_seqlens.int(), max_seqlen=7)
    gradients = torch.autograd.grad(together, (q, k, v), d_out)
    parts = [x.detach().split(lengths) for x in (q, k, v, d_out, together, *gradients)]
    for q_1, k_1, v_1, d_1, *expected in zip(*parts, strict=True):
        if len(q_1):
            own = [x.clone().requires_grad_() for x in (q_1, k_1, v_1)]
            alone = attention_varlen(
                *own, cu_seqlens=torch.tensor([0, len(q_1)], dtype=torch.int32), max_seqlen=len(q_1)
            )
            found = (alone, *torch.autograd.grad(alone, own, d_1))
            assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_future_and_far_past_change_nothing(backend):
    """The mask: changes tokens that must be invisible to token 20 under a window of 8."""
    set_backend(backend)
    q, k, v = (torch.randn(1, 40, 1, 16) for _ in range(3))
    before = attention(q, k, v, window=8)[0, 20]
    for hidden in (slice(0, 13), slice(21, 40)):
        k[:, hidden] += 3.0
        v[:, hidden] -= 5.0
    assert torch.equal(attention(q, k, v, window=8)[0, 20], before)
    v[:, 13] += 1.0
    assert not torch.equal(attention(q, k, v, window=8)[0, 20], before)


def test_refuses_unsupported_arguments():
    q = torch.zeros(1, 4, 3, 16)
    with pytest.raises(ValueError, match="divide"):
        attention(q, q[:, :, :2], q[:, :, :2])
    with pytest.raises(ValueError, match="window=4"):
        attention(q, q, q, causal=False, window=4)
    with pytest.raises(ValueError, match="head dimension 512"):
        attention(*(torch.zeros(1, 2, 1, 512),) * 3)
    with pytest.raises(ValueError, match="scale=-1"):
        attention(q, q, q, scale=-1.0)
    with pytest.raises(ValueError, match="cu_seqlens"):
        attention_varlen(q[0], q[0], q[0], cu_seqlens=torch.tensor([0, 4]), max_seqlen=4)
