"""Rotary positions with ztk's kernel, in the attention modules of a transformers model.

The modules call a function `apply_rotary_pos_emb(q, k, cos, sin)` of their file. It is wrapped once, and the wrapper uses the kernel only
while a replaced module runs. The kind of rotation (halves or neighbours) is detected on a sample of the function and of the model's
tables, of which the kernel reads half. Results have the dtype of q and k.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from ztk.kernels import rope

FUNCTION = "apply_rotary_pos_emb"
_HEADS, _TOKENS = 3, 5  # of the samples
_RELATIVE, _ABSOLUTE = 1e-5, 1e-6  # as in ztk.hf.kernels
_by_kernel: ContextVar[bool] = ContextVar("ztk_rotary_by_kernel", default=False)


class Rotation:
    """`apply_rotary_pos_emb` of a file. Uses the kernel inside `by_kernel()`. interleaved: the same as in `ztk.kernels.rope`."""

    def __init__(self, original: Callable, *, interleaved: bool) -> None:
        self.original, self.interleaved = original, interleaved

    def __call__(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **options: Any):
        """Rotates q [B, H, T, D] and k [B, K, T, D] with cos and sin [B or 1, T, h]. Shapes and dtypes are kept."""
        if not _by_kernel.get() or args or options.get("unsqueeze_dim", 1) != 1 or cos.dim() != 3:
            return self.original(q, k, cos, sin, *args, **options)
        cos, sin = (half_of(x, interleaved=self.interleaved) for x in (cos, sin))
        return self._rotated(q, cos=cos, sin=sin), self._rotated(k, cos=cos, sin=sin)

    def _rotated(self, x: Tensor, *, cos: Tensor, sin: Tensor) -> Tensor:
        return rope(x.transpose(1, 2), cos=cos, sin=sin, interleaved=self.interleaved).transpose(1, 2)


def rotation_of(module: nn.Module, *, model: nn.Module) -> Rotation | None:
    """Returns the wrapped rotation of an attention module's file, or None if the kernel's result differs on a sample."""
    file = sys.modules.get(type(module).__module__)
    function = getattr(file, FUNCTION, None)
    if function is None or "Attention" not in type(module).__name__:
        return None
    known = function if isinstance(function, Rotation) else None
    original = known.original if known is not None else function
    for interleaved in (False, True) if known is None else (known.interleaved,):
        if _is_rotation(original, interleaved=interleaved) and _has_tables(model, interleaved=interleaved):
            found = known or Rotation(original, interleaved=interleaved)
            setattr(file, FUNCTION, found)
            return found
    return None


@contextmanager
def by_kernel() -> Iterator[None]:
    """Makes rotations in this thread use the kernel."""
    token = _by_kernel.set(True)
    try:
        yield
    finally:
        _by_kernel.reset(token)


def half_of(table: Tensor, *, interleaved: bool) -> Tensor:
    """Converts a table of angles for the kernel: [B or 1, T, h] -> fp32 [B, T, h / 2] or [T, h / 2]."""
    own = table[..., ::2] if interleaved else table[..., : table.shape[-1] // 2]
    return (own[0] if own.shape[0] == 1 else own).float()


def _full_of(half: Tensor, *, interleaved: bool) -> Tensor:
    return half.repeat_interleave(2, dim=-1) if interleaved else torch.cat([half, half], dim=-1)


def _is_rotation(function: Callable, *, interleaved: bool) -> bool:
    numbers = torch.Generator().manual_seed(1)
    q, k = (torch.randn(2, _HEADS, _TOKENS, 8, generator=numbers) for _ in range(2))
    cos, sin = (torch.randn(1, _TOKENS, 4, generator=numbers) for _ in range(2))
    full = (_full_of(x, interleaved=interleaved) for x in (cos, sin))
    try:
        with torch.no_grad():
            expected = function(q, k, *full)
    except Exception:  # it takes other arguments
        return False
    found = [rope(x.transpose(1, 2), cos=cos[0], sin=sin[0], interleaved=interleaved).transpose(1, 2) for x in (q, k)]
    return len(expected) == 2 and all(
        torch.allclose(one, other, rtol=_RELATIVE, atol=_ABSOLUTE) for one, other in zip(found, expected, strict=True)
    )


def _has_tables(model: nn.Module, *, interleaved: bool) -> bool:
    """Returns whether all tables of the model have equal halves, or equal neighbours with `interleaved`."""
    makers = [module for module in model.modules() if type(module).__name__.endswith("RotaryEmbedding")]
    for maker in makers:
        try:
            device = next(maker.buffers()).device
            with torch.no_grad():
                tables = maker(torch.zeros(1, _TOKENS, 1, device=device), torch.arange(_TOKENS, device=device)[None])
        except Exception:  # it takes other arguments
            return False
        for table in tables:
            halves = _full_of(half_of(table, interleaved=interleaved), interleaved=interleaved)
            if table.dim() != 3 or not torch.equal(halves, table[0].float()):
                return False
    return bool(makers)
