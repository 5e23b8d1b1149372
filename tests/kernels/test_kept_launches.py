"""A launch that was kept is that of its sizes: grid, numbers, constexprs and options are those that a launcher computes anew."""

import functools
import inspect
import itertools
import sys
from typing import Any
from unittest import mock

import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction

from ztk.kernels import ALL_OPS, _empty, rms_norm, rope
from ztk.kernels._jit import Bound
from ztk.kernels._library import LAUNCHERS
from ztk.kernels._machine import MACHINES, assume
from ztk.kernels._record import _Launching, _tensors
from ztk.kernels._spec import OpSpec

SPECS = {spec.name: spec for spec in ALL_OPS}
BOUND = (
    "swiglu", "geglu", "rms_norm", "layer_norm", "rope", "attention", "cross_entropy", "sum_of_squares", "cast_copy", "moe_combine",
    "cache_rows", "paged_attention", "linear_rows", "gated_rows", "draw_rows", "adamw", "adamw_bf16", "adamw_8bit", "adamw_stochastic", "lion",
    "sgd",
)  # fmt: skip


def launches(spec: OpSpec, *, anew: bool) -> list[tuple]:
    """(what, grid, numbers, constexprs and options) of every kernel that the op launches for its shapes, variants and machines in turn.

    anew: nothing is known from the calls before.
    """
    noted, known = [], kept_functions() if anew else []

    def note(bound: Bound, *tensors: object) -> None:
        noted.append((what, bound.grid, bound.numbers, bound.prepared.named))

    with (
        mock.patch.object(Bound, "launch", note),
        mock.patch.object(InterpretedFunction, "__getitem__", mock.MagicMock()),
    ):
        for target, shape, variant in itertools.product(("sm_90", "gfx942"), shapes(spec), spec.variants):
            for dtype in spec.interpreted_dtypes:
                what = (target, shape, dtype, tuple(variant))
                for function in known:
                    function.cache_clear()
                inputs = spec.make_inputs(shape, dtype=dtype, device="meta", **variant)
                for name in spec.differentiable:
                    if inputs[name] is not None:
                        inputs[name].requires_grad_()
                with assume(MACHINES[target]), _Launching():
                    outputs = [out for out in _tensors(spec.op(**inputs)) if out.requires_grad]
                    torch.autograd.backward(outputs, [torch.empty_like(out) for out in outputs])
    return noted


def shapes(spec: OpSpec) -> list[tuple[int, ...]]:
    """Of the spec, and each with one of its sizes doubled: any two sizes come with two others, too."""
    found = [shape for shape in spec.small_shapes if 0 not in shape]
    sizes = range(len(found[0])) if spec.name != "paged_attention" else (0, 1, 2, 4)  # heads divide by those of keys
    doubled = ((*shape[:i], 2 * shape[i], *shape[i + 1 :]) for shape in found for i in sizes if i < len(shape))
    return [*found, *doubled]


def kept_functions() -> list[Any]:
    """What remembers results in the kernels' modules, launchers' closures included."""
    modules = [module for name, module in sys.modules.items() if name.startswith("ztk.kernels")]
    cells = itertools.chain.from_iterable(launcher.__closure__ or () for launcher in LAUNCHERS.values())
    values = [
        *itertools.chain.from_iterable(vars(module).values() for module in modules),
        *(cell.cell_contents for cell in cells),
    ]
    return list({id(value): value for value in values if type(value) is functools._lru_cache_wrapper}.values())


@pytest.mark.parametrize("name", BOUND)
def test_a_kept_launch_is_that_of_its_sizes(name):
    computed = launches(SPECS[name], anew=True)
    assert computed and launches(SPECS[name], anew=False) == computed
    assert len({repr(launch[1:]) for launch in computed}) > 2  # the cases differ


def test_all_that_is_kept_is_found():
    found = {function.__module__ for function in kept_functions()}
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("ztk.kernels.")]
    assert {module.__name__ for module in modules if "@kept" in inspect.getsource(module)} <= found
    assert {"ztk.kernels.rms_norm", "ztk.kernels._glu"} <= found  # the latter's is in closures of launchers


@pytest.mark.parametrize("place", [0, 1, 2, 3], ids=["machine", "rows", "columns", "eps"])
def test_a_key_without_a_size_is_found(monkeypatch, place):
    module, known = sys.modules[rms_norm.__module__], {}
    complete = module._forward_for
    computed = launches(SPECS["rms_norm"], anew=True)

    def of_other_sizes(*sizes) -> Bound:
        return known.setdefault((*sizes[:place], *sizes[place + 1 :]), complete(*sizes))

    monkeypatch.setattr(module, "_forward_for", of_other_sizes)
    assert (launches(SPECS["rms_norm"], anew=False) == computed) == (place == 3)  # all cases have one eps


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bfloat16])
def test_short_results_are_those_of_torch(dtype):
    like = torch.zeros(3, dtype=torch.float16)
    usual = _empty.empty_vector(5, dtype=dtype, like=like), _empty.empty_matrix(2, columns=5, dtype=dtype, like=like)
    with mock.patch.dict(_empty._FAST, {False: torch._C._dynamo.guards._empty_strided_cpu}):
        fast = _empty.empty_vector(5, dtype=dtype, like=like), _empty.empty_matrix(2, columns=5, dtype=dtype, like=like)
        with torch.inference_mode():
            assert _empty.empty_vector(0, dtype=dtype, like=like).is_inference()
    for one, other in zip(usual, fast, strict=True):
        assert (one.shape, one.stride(), one.dtype, one.device) == (
            other.shape,
            other.stride(),
            other.dtype,
            other.device,
        )
        assert type(other) is torch.Tensor and not other.requires_grad


def test_strides_are_sizes_too():
    fused, table = torch.zeros(2, 3, 8, 16, device="meta"), torch.zeros(3, 8, device="meta")
    noted = []
    with mock.patch.object(Bound, "launch", lambda bound, *tensors: noted.append(bound.numbers)), _Launching():
        for heads in (fused[:, :, :2], fused[:, :, :2].contiguous(), fused[:, :, :2].transpose(0, 1)[:2]):
            rope(heads, cos=table[: heads.shape[1]], sin=table[: heads.shape[1]])
    assert [numbers[:3] for numbers in noted] == [(384, 128, 16), (96, 32, 16), (128, 384, 16)]
