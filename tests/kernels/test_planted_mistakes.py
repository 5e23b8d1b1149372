"""The generic tests must fail on a wrong kernel: mistakes are planted in a copy of the source, which is then run."""

import importlib.util
import sys

import pytest
import torch

from tests.kernels.test_ops import check_against_reference
from ztk.kernels import (
    OpSpec,
    _library,
    adamw,
    attention,
    cross_entropy,
    grouped_matmul_pair,
    rms_norm,
    rope,
    set_backend,
    swiglu,
)

MISTAKES = [
    # op, what its module says, what it is made to say, shape that shows it
    pytest.param(swiglu, "m_n = o_n < N\n", "m_n = o_n < N - 1\n", (3, 41), id="swiglu: unwritten tail"),
    pytest.param(swiglu, "(1.0 + b_gate * (1.0 - b_sigmoid))", "1.0", (3, 41), id="swiglu: missing gradient term"),
    pytest.param(rms_norm, " - b_hat * b_mean[:, None]", "", (3, 41), id="rms_norm: missing gradient term"),
    pytest.param(
        rms_norm, "first += num_programs * BLOCK_M", "first += BLOCK_M", (200, 1025), id="rms_norm: rows twice"
    ),
    pytest.param(rope, "b_sin = -b_sin", "b_sin = b_sin", (2, 5, 3, 64), id="rope: gradient rotates the wrong way"),
    pytest.param(
        rope, "(o_token % T) * stride_t", "(o_token % H) * stride_t", (2, 5, 3, 64), id="rope: wrong position"
    ),
    pytest.param(cross_entropy, "b_grad - hit", "b_grad", (3, 41), id="cross entropy: no target term"),
    pytest.param(
        cross_entropy, "b_sum * b_decay + 1.0", "b_sum + 1.0", (4, 9001), id="cross entropy: sum not rescaled"
    ),
    pytest.param(
        attention, "i_n >= last_whole", "i_n > last_whole", (1, 35, 2, 24), id="attention: diagonal block not masked"
    ),
    pytest.param(
        grouped_matmul_pair, "x2_ptr + o_x", "x_ptr + o_x", (21, 3, 17, 33), id="grouped pair: one gradient twice"
    ),
    pytest.param(
        grouped_matmul_pair, "(b_acc, x2_ptr", "(b_acc * 0.0, x2_ptr", (21, 3, 17, 33), id="grouped pair: not added"
    ),
    pytest.param(adamw, "1.0 - lr * weight_decay", "1.0", (528,), id="adamw: no weight decay"),
    pytest.param(adamw, "(1.0 - beta2) * b_g * b_g", "(1.0 - beta2) * b_g", (528,), id="adamw: gradient not squared"),
]


def load_copy(function, *, old: str, new: str, tmp_path, monkeypatch):
    """The op's module with one piece of source replaced, registering its ops under another namespace."""
    original = sys.modules[function.__module__]
    source = open(original.__file__).read()
    assert old in source, f"the source no longer says {old!r}"
    path = tmp_path / "planted.py"
    path.write_text(source.replace(old, new))
    library = torch.library.Library(f"planted_{tmp_path.name}", "DEF")
    monkeypatch.setattr(_library, "LIBRARY", library)
    monkeypatch.setattr(_library, "NAMESPACE", f"planted_{tmp_path.name}")
    spec = importlib.util.spec_from_file_location("planted", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def check_all_variants(module, *, function, shape):
    specs = [value for value in vars(module).values() if isinstance(value, OpSpec)]
    (spec,) = (spec for spec in specs if spec.op.__name__ == function.__name__)
    for variant in spec.variants:
        check_against_reference(spec, shape, variant, torch.float32)


@pytest.mark.parametrize("function, old, new, shape", MISTAKES)
def test_mistake_is_caught(function, old, new, shape, tmp_path, monkeypatch, poisoned):
    set_backend("triton")
    right = load_copy(function, old=old, new=old, tmp_path=tmp_path, monkeypatch=monkeypatch)
    check_all_variants(right, function=function, shape=shape)
    (tmp_path / "w").mkdir()
    wrong = load_copy(function, old=old, new=new, tmp_path=tmp_path / "w", monkeypatch=monkeypatch)
    with pytest.raises(AssertionError):
        check_all_variants(wrong, function=function, shape=shape)
