"""The generic tests must fail on a wrong kernel: mistakes are planted in a copy of the source, which is then run."""

import importlib.util
import itertools
import sys

import pytest
import torch

from tests.kernels.planting import planted, spec_of
from tests.kernels.test_ops import check_against_reference, check_reach
from ztk.kernels import (
    OpSpec,
    _library,
    attention,
    cross_entropy,
    rms_norm,
    rope,
    set_backend,
    swiglu,
)

_numbers = itertools.count()
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
    pytest.param(cross_entropy, " - weight * (1.0 - smoothing)", "", (3, 41), id="cross entropy: no target term"),
    pytest.param(
        cross_entropy, "b_sum * tl.exp2(b_shift - b_new)", "b_sum", (4, 9001), id="cross entropy: sum not rescaled"
    ),
    pytest.param(
        attention, "i_n >= last_full", "i_n > last_full", (1, 35, 2, 24), id="attention: diagonal block not masked"
    ),
]


def load_copy(function, *, old: str, new: str, tmp_path, monkeypatch):
    """The op's module with one piece of source replaced, registering its ops under another namespace."""
    original = sys.modules[function.__module__]
    source = open(original.__file__).read()
    assert old in source, f"the source no longer says {old!r}"
    path = tmp_path / "planted.py"
    namespace = f"planted_copy_{next(_numbers)}"  # FLOPs are registered once per namespace
    path.write_text(source.replace(old, new).replace("torch.ops.ztk.", f"torch.ops.{namespace}."))
    monkeypatch.setattr(_library, "LIBRARY", torch.library.Library(namespace, "DEF"))
    monkeypatch.setattr(_library, "NAMESPACE", namespace)
    monkeypatch.setattr(_library, "LAUNCHERS", {})  # or the ops' own would launch the copy's kernels from here on
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


# Mistakes in files that ops share, and those that lived through the tests once, with the check that now ends each: a variant
# of a small shape, or a `Reach`.
IN_PARTS = [
    pytest.param("adamw", "_adam.py", "1.0 - lr * weight_decay", "1.0", {}, id="adamw: no weight decay"),
    pytest.param("adamw", "_adam.py", "beta2) * b_g * b_g", "beta2) * b_g", {}, id="adamw: gradient not squared"),
    pytest.param("adamw", "_adam.py", "inverse_bias2 + eps", "inverse_bias2", {"eps": 0.1}, id="adamw: no eps"),
    pytest.param("rms_norm", "_rows.py", "range(0, P, ROWS)", "range(0, ROWS, ROWS)", (600, 2100), id="32 partial sums"),
    pytest.param(
        "layer_norm", "layer_norm.py", "range(0, num_partials, BLOCK_P)", "range(0, BLOCK_P, BLOCK_P)", (300, 2100),
        id="layer_norm: 32 partial sums",
    ),
    pytest.param(
        "moe_route", "moe_routing.py", "b_count += tl.sum(b_partial", "b_count = tl.sum(b_partial", (530, 600), id="scan without carry"
    ),
    pytest.param(
        "attention", "attention_backward.py", "i_key + BLOCK_N + window - 1", "i_key + BLOCK_N + window - 2", (1, 100, 1, 16),
        id="window of dK and dV off by one",
    ),
    pytest.param("grouped_matmul_pair", "_grouped_tiles.py", "p_x = x2_ptr", "p_x = x_ptr", {}, id="grouped pair: one gradient twice"),
    pytest.param("grouped_matmul_pair", "_grouped_tiles.py", "range(0, 2 * num_k)", "range(0, num_k)", {}, id="grouped pair: not added"),
    pytest.param(
        "grouped_matmul_pair", "_grouped_tiles.py", "w = weight2", "w = weight", (200, 3, 150, 200), id="grouped pair: one descriptor twice"
    ),
    pytest.param("grouped_matmul", "_grouped_tiles.py", "[i_e, i_k, i_n]", "[0, i_k, i_n]", (200, 3, 150, 200), id="descriptor: expert"),
]  # fmt: skip


@pytest.fixture(scope="module")
def unchanged(tmp_path_factory):
    """A copy of the package without a mistake, the same for all."""
    with planted(tmp_path_factory.mktemp("unchanged"), file="_adam.py", old="beta2", new="beta2") as package:
        yield package


@pytest.mark.parametrize("op, file, old, new, where", IN_PARTS)
def test_mistake_in_a_part_is_caught(op, file, old, new, where, tmp_path, poisoned, unchanged):
    variant = where if isinstance(where, dict) else None
    # tests/kernels/test_ops.py holds the source to its reaches: the unchanged copy needs a small shape only.
    spec = spec_of(unchanged, op)
    check_against_reference(spec, spec.small_shapes[1], spec.variants[0] if variant is None else variant, torch.float32)
    with planted(tmp_path, file=file, old=old, new=new) as package, pytest.raises(AssertionError):
        spec, machine = spec_of(package, op), sys.modules[f"{package.__name__}._machine"]
        if variant is not None:
            check_against_reference(spec, spec.small_shapes[1], variant, torch.float32)
        for reach in spec.reach:
            if reach.shape == where:
                check_reach(spec, reach, machine=machine)
