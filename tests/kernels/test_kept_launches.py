"""A kept launch equals a launch computed anew for its sizes: grid, numbers, constexprs, options and the memory of results."""

import contextlib
import functools
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction

from tests.kernels.aot.record import Launching, _tensors
from ztk.kernels import ALL_OPS, attention, rope
from ztk.kernels.launch import memory
from ztk.kernels.launch.jit import Bound
from ztk.kernels.launch.library import LAUNCHERS
from ztk.kernels.launch.machine import MACHINES, assume
from ztk.kernels.shared.spec import OpSpec

SPECS = {spec.name: spec for spec in ALL_OPS}
BOUND = (
    "swiglu", "geglu", "rms_norm", "layer_norm", "rope", "attention", "cross_entropy", "sum_of_squares", "cast_copy", "moe_combine",
    "cache_rows", "paged_attention", "linear_rows", "gated_rows", "draw_rows", "adamw", "adamw_bf16", "adamw_8bit", "adamw_stochastic", "lion",
    "sgd", "moe_route", "router_losses", "select_rows", "quantize", "dequantize", "dequantize_reduce", "sharded_cross_entropy", "segment_scan",
    "copy_blocks", "step_control", "linear_logprob", "grouped_matmul", "grouped_matmul_pair", "float8_largest",
    "float8_codes", "symmetric_product",
)  # fmt: skip


def launches(spec: OpSpec, *, anew: bool) -> Iterator[tuple]:
    """(kind, grid, numbers, constexprs and options, layouts, count, tensors) of every kernel that the op launches for its shapes, variants
    and machines in turn.

    anew: clears the caches before each call.
    """
    noted, known = [], kept_functions() if anew else []

    def note(bound: Bound, *tensors: object, count: int | None = None) -> None:
        made = [None if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors]
        noted.append((what, bound.grid, bound.numbers, bound.prepared.named, bound.layouts, count, made))

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
                with assume(MACHINES[target]), Launching():
                    outputs = [out for out in _tensors(spec.op(**inputs)) if out.requires_grad]
                    torch.autograd.backward(outputs, [torch.empty_like(out) for out in outputs])
                yield from noted
                noted.clear()


@functools.cache
def computed_launches(name: str) -> list[tuple]:
    """All launches of the op, each computed anew."""
    return list(launches(SPECS[name], anew=True))


DOUBLED = {  # sizes that can be doubled alone, where not all can
    "paged_attention": (0, 1, 2, 4),  # query heads divide by key heads
    "copy_blocks": (0, 1),  # pairs are of as many blocks
}


def shapes(spec: OpSpec) -> list[tuple[int, ...]]:
    """Of the spec, and each with one of its sizes doubled: any two sizes come with two others, too."""
    found = [shape for shape in spec.small_shapes if 0 not in shape]
    sizes = DOUBLED.get(spec.name, range(len(found[0])))
    doubled = ((*shape[:i], 2 * shape[i], *shape[i + 1 :]) for shape in found for i in sizes if i < len(shape))
    return [*found, *doubled]


def kept_functions() -> list[Any]:
    """The caches in the kernels' modules, launchers' closures included."""
    modules = [module for name, module in sys.modules.items() if name.startswith("ztk.kernels")]
    cells = itertools.chain.from_iterable(launcher.__closure__ or () for launcher in LAUNCHERS.values())
    values = [
        *itertools.chain.from_iterable(vars(module).values() for module in modules),
        *(cell.cell_contents for cell in cells),
    ]
    return list({id(value): value for value in values if type(value) is functools._lru_cache_wrapper}.values())


@pytest.mark.parametrize("name", BOUND)
def test_a_kept_launch_is_that_of_its_sizes(name):
    computed = computed_launches(name)
    assert computed and list(launches(SPECS[name], anew=False)) == computed
    assert len({repr(launch[1:6]) for launch in computed}) > 2  # the cases differ


def test_all_that_is_kept_is_found():
    found = {function.__module__ for function in kept_functions()}
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("ztk.kernels.")]
    assert {module.__name__ for module in modules if "@kept" in inspect.getsource(module)} <= found
    assert {"ztk.kernels.ops.rms_norm", "ztk.kernels.shared.glu"} <= found  # the latter's is in closures of launchers


# Functions that keep the memory of results with a launch, and the values whose lack in a key the test finds. In all cases the others follow
# from these or are constant; strides have tests of their own.
KEYS = {
    ("rms_norm", "_forward_for"): "target shape dtype",
    ("layer_norm", "_forward_for"): "target shape dtype",
    ("attention", "_forward_for"): "target tokens dtype T causal window",
    ("cross_entropy", "_forward_for"): "target M V dtype",
    ("cache_rows", "_kernel_for"): "M width dtype half",
    ("paged_attention", "_kernels_for"): "target H dtype cache_dtype width",
    ("quantize", "_quantize_for"): "target W N itemsize bits group",
    ("dequantize", "_dequantize_for"): "target W N bits group dtype",
    ("dequantize_reduce", "_reduce_for"): "target W N bits group dtype",
    ("sharded_cross_entropy", "_statistics_for"): "target M itemsize",
    ("sharded_cross_entropy", "_join_for"): "M z_loss",
    ("linear_rows", "_rows_for"): "target M N K dtype kind",
    ("linear_rows", "_few_for"): "M N K dtype",
    ("grouped_matmul", "_product_for"): "target bits shape dtype top_k transposed",
    ("grouped_matmul", "_weight_gradient_for"): "target E N top_k",
}


@pytest.mark.parametrize(("name", "function"), KEYS)
def test_a_key_without_one_of_its_values_is_found(monkeypatch, name, function):
    module, computed = sys.modules[SPECS[name].op.__module__], computed_launches(name)
    complete, found = getattr(module, function), []
    for place, value in enumerate(inspect.signature(complete).parameters):
        monkeypatch.setattr(module, function, _without(complete, place=place))
        try:
            with contextlib.closing(launches(SPECS[name], anew=False)) as found_launches:  # until one differs
                pairs = itertools.zip_longest(found_launches, computed)
                is_same = all(one == other for one, other in pairs)
        except (RuntimeError, ValueError):  # a result of another shape, which autograd or the next op refuses
            is_same = False
        if not is_same:
            found.append(value)
    assert found == KEYS[name, function].split()


def _without(complete: Callable, *, place: int) -> Callable:
    """`complete`, which keeps its results by all values but the one at `place`."""
    known: dict[tuple, object] = {}

    def kept_badly(*values: object) -> object:
        key = (*values[:place], *values[place + 1 :])
        return known[key] if key in known else known.setdefault(key, complete(*values))

    return kept_badly


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bfloat16])
def test_short_results_equal_torch(dtype):
    like = torch.zeros(3, dtype=torch.float16)

    def made() -> list[torch.Tensor]:
        shapes = (), (5,), (0,), (2, 5), (2, 0, 3), (4, 3, 1, 2)
        by_memory = [memory.maker(like)(*memory.memory_of(*shape, dtype=dtype)) for shape in shapes]
        assert [tensor.shape for tensor in by_memory] == list(shapes)
        matrix = memory.empty_matrix(2, columns=5, dtype=dtype, like=like)
        return [memory.empty_vector(5, dtype=dtype, like=like), matrix, *by_memory]

    usual = made()
    with mock.patch.dict(memory._FAST, {False: torch._C._dynamo.guards._empty_strided_cpu}):
        fast = made()
        with torch.inference_mode():
            assert memory.empty_vector(0, dtype=dtype, like=like).is_inference()
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
    with mock.patch.object(Bound, "launch", lambda bound, *tensors: noted.append(bound.numbers)), Launching():
        for heads in (fused[:, :, :2], fused[:, :, :2].contiguous(), fused[:, :, :2].transpose(0, 1)[:2]):
            rope(heads, cos=table[: heads.shape[1]], sin=table[: heads.shape[1]])
    assert [numbers[:3] for numbers in noted] == [(384, 128, 16), (96, 32, 16), (128, 384, 16)]


def test_the_strides_of_each_of_attentions_tensors_are_sizes():
    fused, noted = torch.zeros(1, 3, 8, 16, device="meta"), []
    parts = [fused[:, :, :2], fused[:, :, :2].contiguous()]
    with mock.patch.object(Bound, "launch", lambda bound, *tensors: noted.append(bound.numbers)), Launching():
        for q, k, v in itertools.product(parts, repeat=3):
            attention(q, k, v)
    assert [numbers[:3] for numbers in noted] == list(itertools.product((128, 32), repeat=3))
