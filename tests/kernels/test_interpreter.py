"""tests/interpreter.py: a launch changes Triton's language once for each module, and takes it back."""

import torch
import triton
import triton.language as tl
from triton.runtime import interpreter


@triton.jit
def _doubled(b_x):
    return b_x + b_x


@triton.jit
def _sums(x_ptr, y_ptr, N: tl.constexpr):
    """2^3 times the sum of row i"""
    i_m = tl.program_id(0)
    b_x = tl.load(x_ptr + i_m * N + tl.arange(0, N))
    for _ in range(3):
        b_x = _doubled(b_x)
    tl.store(y_ptr + i_m, tl.sum(b_x, axis=0))


def test_a_launch_changes_the_language_once_for_each_module(monkeypatch):
    change, changed = interpreter._patch_lang_core, []
    monkeypatch.setattr(
        interpreter, "_patch_lang_core", lambda lang, scope: (changed.append(lang), change(lang, scope))
    )
    load = tl.load
    for _ in range(2):
        x, y = torch.arange(32.0).view(4, 8), torch.empty(4)
        _sums[(4,)](x, y, N=8)
        assert torch.equal(y, 8 * x.sum(1)) and tl.load is load
        # `tl` and `tl.core` at most, for this module and the module of `tl.sum`; of 4 programs with 4 calls each Triton makes 17 or more.
        assert 2 <= len(changed) <= 4
        changed.clear()
