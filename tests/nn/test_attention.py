"""Every way of computing attention against the definition."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ztk.kernels import set_backend
from ztk.nn import Decoder, DecoderConfig
from ztk.nn.self_attention import _blockwise, _fused, causal_attention


def inputs(*, length: int, heads: int, kv_heads: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(length)
    return [
        torch.randn(2, length, h, 16, generator=generator).to(dtype).requires_grad_()
        for h in (heads, kv_heads, kv_heads)
    ]


def definition(query, key, value):
    """float64, every head and position on its own."""
    out = torch.zeros(query.shape, dtype=torch.float64)
    group = query.shape[2] // key.shape[2]
    for h in range(query.shape[2]):
        for t in range(query.shape[1]):
            scores = (key[:, : t + 1, h // group].double() @ query[:, t, h, :, None].double())[..., 0] / 16**0.5
            out[:, t, h] = (scores.softmax(-1)[..., None] * value[:, : t + 1, h // group].double()).sum(1)
    return out


@pytest.mark.parametrize("way", [_blockwise, _fused, causal_attention])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("length,heads,kv_heads", [(1, 2, 1), (7, 4, 2), (128, 2, 2), (129, 3, 1)])
def test_forward_and_gradients(way, dtype, length, heads, kv_heads):
    query, key, value = inputs(length=length, heads=heads, kv_heads=kv_heads, dtype=dtype)
    out = way(query, key=key, value=value)
    d_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    gradients = torch.autograd.grad(out, (query, key, value), d_out)
    expected = definition(query, key, value)
    expected_gradients = torch.autograd.grad(expected, (query, key, value), d_out.double())

    assert out.shape == query.shape
    assert out.dtype == dtype
    tolerance = 4 * torch.finfo(dtype).eps  # scores, weights, their gradient and the result are rounded
    for got, wanted in zip((out, *gradients), (expected, *expected_gradients), strict=True):
        error, size = (got.double() - wanted).pow(2).mean().sqrt(), wanted.double().pow(2).mean().sqrt()
        assert error <= tolerance * max(size, 0.5)


class Names(TorchDispatchMode):
    """Keeps the names of all operations."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.found.add(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "head_dim, backend, is_own", [(16, "auto", True), (512, "auto", False), (16, "reference", False)]
)
def test_a_gpu_attends_by_the_kernel_whose_backward_has_one_order(head_dim, backend, is_own):
    """On tensors without values, which take the branches of a GPU. Plain PyTorch is compared with as it is."""
    query, key = (torch.empty(2, 8, heads, head_dim, device="meta", requires_grad=True) for heads in (4, 2))
    set_backend(backend)
    try:
        with Names() as names:
            causal_attention(query, key=key, value=key).sum().backward()
    finally:
        set_backend("auto")
    assert query.grad.shape == query.shape
    for name in ("ztk::attention", "ztk::attention_backward"):
        assert (name in names.found) == is_own


class Picks(TorchDispatchMode):
    """Counts reads of rows by index."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten.index.Tensor
        return func(*args, **(kwargs or {}))


def test_rows_of_the_tables_are_picked_once_for_queries_and_keys():
    """Where a rank has two chunks of a sequence: a row of cosines and one of sines per token and layer."""
    sizes = {"vocab_size": 11, "dim": 16, "layers": 1, "heads": 2, "kv_heads": 2, "hidden_dim": 16, "max_seq_len": 8}
    model = Decoder(DecoderConfig(**sizes))
    layer = model.blocks[0].attention
    layer.positions = torch.tensor([0, 1, 6, 7])
    with Picks() as picks:
        layer(torch.randn(1, 4, 16), cos=model.rope_cos, sin=model.rope_sin)
    assert picks.count == 2
