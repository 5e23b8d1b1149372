"""The direct call starts the same compiled kernel as Triton's launch, with the same arguments."""

import itertools
import random

import pytest
import torch
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from tests.kernels.stand_in import launching
from ztk.kernels.launch.descriptors import Layout
from ztk.kernels.launch.jit import LaunchedKernel, Prepared, bind, jit


def _body(x_ptr, y_ptr, N, M, eps, FLAG: tl.constexpr, BLOCK: tl.constexpr = 64):
    tl.store(y_ptr, tl.load(x_ptr) + N * M * eps + FLAG * BLOCK)


def _kernel(**options) -> LaunchedKernel:
    return LaunchedKernel(_body, **options)


_BYTES = torch.zeros(4096, dtype=torch.uint8)
_POINTERS = [
    *(_BYTES[offset : offset + 512].view(dtype) for offset in (0, 4, 16) for dtype in (torch.float32, torch.int32)),
    torch.nn.Parameter(torch.zeros(8)),
    torch.zeros(8, dtype=torch.bfloat16),
    None,
]
_INTEGERS = [0, 1, 2, 15, 16, 17, 32, -16, 2**31 - 16, 2**31, 2**31 + 1, 2**40, True, False, 0.5, 0.0]
_FLOATS = [0.0, -0.0, 1.0, 1e-5, 1, 16]
_NAMED = [
    {"FLAG": flag, **block, "num_warps": warps}
    for flag in (True, False, 1, 0, None, tl.float32, tl.bfloat16, "name")
    for block in ({"BLOCK": 64}, {"BLOCK": 128}, {})
    for warps in (4, 8)
] + [{"num_warps": 4, "BLOCK": 64, "FLAG": 1}, {"FLAG": 0.0, "num_warps": 4}, {"FLAG": -0.0, "num_warps": 4}]


@pytest.mark.parametrize("options", [{}, {"do_not_specialize": ["N"]}, {"do_not_specialize_on_alignment": ["x_ptr"]}])
def test_every_call_equals_tritons_launch(options):
    kernel, draw, started = _kernel(**options), random.Random(0), []
    with launching(lambda program, *args: started.append((program, args))) as driver:
        for _ in range(3000):
            driver.device, driver.stream = draw.randrange(2), draw.randrange(2)
            args = tuple(map(draw.choice, (_POINTERS, _POINTERS, _INTEGERS, _INTEGERS, _FLOATS)))
            grid, named = draw.choice([(3,), (3, 2), (3, 2, 5)]), draw.choice(_NAMED)
            kernel[grid](*args, **named)
            JITFunction.run(kernel, *args, grid=grid, warmup=False, **named)
            (short, given), (usual, wanted) = started[-2:]
            assert short is usual
            assert (*given[:6], *given[9:]) == (*wanted[:6], *wanted[9:])  # between them: hooks and their metadata
            assert all(x is y for x, y in zip(given[9:], wanted[9:], strict=True))
    assert sum(len(prepared._programs) for prepared in kernel._prepared.values()) > 500 and len(started) == 6000


def test_every_bound_call_equals_tritons_launch():
    kernel, draw, started = _kernel(), random.Random(0), []
    integers, floats = [0, 1, 15, 16, -16, 2**31, 2**40], [1e-5, 1.0, 16]
    grids, named = [(3,), (3, 2), (3, 2, 5)], [*_NAMED[:9], {"FLAG": 0.0, "num_warps": 4}]
    sizes = [tuple(map(draw.choice, (grids, integers, integers, floats, named))) for _ in range(40)]
    bounds = [bind(kernel, N, M, eps, grid=grid, **options) for grid, N, M, eps, options in sizes]
    with launching(lambda program, *args: started.append((program, args))) as driver:
        for _ in range(6000):
            driver.device, driver.stream, place = draw.randrange(2), draw.randrange(2), draw.randrange(len(sizes))
            (grid, N, M, eps, options), tensors = sizes[place], (draw.choice(_POINTERS), draw.choice(_POINTERS))
            bounds[place].launch(*tensors)
            JITFunction.run(kernel, *tensors, N, M, eps, grid=grid, warmup=False, **options)
            (short, given), (usual, wanted) = started[-2:]
            assert short is usual
            assert (*given[:6], *given[9:]) == (*wanted[:6], *wanted[9:])
            assert all(x is y for x, y in zip(given[9:], wanted[9:], strict=True))
    assert sum(len(bound._programs) for bound in bounds) > 500


def test_a_known_call_follows_the_current_stream():
    """The argument after the grid's three axes."""
    kernel, started, x = _kernel(), [], torch.zeros(8)
    bound = bind(kernel, 4, 4, 0.5, grid=(1,), FLAG=True, num_warps=4)
    with launching(lambda program, *args: started.append(args[3])) as driver:
        for driver.stream in (0, 1, 0, 2):
            kernel[(1,)](x, x, 4, 4, 0.5, FLAG=True, num_warps=4)
            bound.launch(x, x)
    assert started == [77, 77, 87, 87, 77, 77, 97, 97]


@pytest.mark.parametrize("grid", [(2**31,), (2**16, 2**15), (1, 2**16), (1, 1, 2**16)])
def test_a_grid_outside_of_cudas_limits_is_refused(grid):
    with pytest.raises(ValueError, match="outside of CUDA's limits"):
        bind(_kernel(), 4, 4, 0.5, grid=grid)
    bind(_kernel(), 4, 4, 0.5, grid=(2**31 - 1,))


def test_a_bound_call_with_a_count_equals_tritons_launch():
    kernel, draw, started = _kernel(do_not_specialize=["N"]), random.Random(0), []
    bound = bind(kernel, 3, 0.5, grid=(3,), FLAG=True, num_warps=4)
    with launching(lambda program, *args: started.append((program, args))) as driver:
        for _ in range(1000):
            driver.device, tensors = draw.randrange(2), (draw.choice(_POINTERS), draw.choice(_POINTERS))
            count = draw.choice([0, 1, 15, 16, 2**31 - 1, 2**31, 2**40])
            bound.launch(*tensors, count=count)
            JITFunction.run(kernel, *tensors, count, 3, 0.5, grid=(3,), warmup=False, FLAG=True, num_warps=4)
            (short, given), (usual, wanted) = started[-2:]
            assert short is usual
            assert (*given[:6], *given[9:]) == (*wanted[:6], *wanted[9:])
    assert 20 < len(bound._programs) < 60


def test_a_bound_call_passes_tritons_encoding_of_a_descriptor():
    kernel, draw, started = _kernel(), random.Random(0), []
    layouts = {0: Layout(shape=(4, 16), strides=(16, 1), block=(1, 8), dtype=torch.bfloat16)}
    bound = bind(kernel, 16, 3, 0.5, grid=(3,), layouts=layouts, FLAG=True, num_warps=4)
    described = [_BYTES[offset : offset + 128].view(torch.bfloat16).view(4, 16) for offset in (0, 16, 512)]
    others = [tensor for tensor in _POINTERS if tensor is None or tensor.data_ptr() % 16 == 0 or tensor is _POINTERS[2]]
    with launching(lambda program, *args: started.append((program, args))) as driver:
        for _ in range(300):
            driver.device, x, y = draw.randrange(2), draw.choice(described), draw.choice(others)
            bound.launch(x, y)
            descriptor = TensorDescriptor(x, shape=[4, 16], strides=[16, 1], block_shape=[1, 8])
            JITFunction.run(kernel, descriptor, y, 16, 3, 0.5, grid=(3,), warmup=False, FLAG=True, num_warps=4)
            (short, given), (usual, wanted) = started[-2:]
            assert short is usual and "tensordesc" in short.key and given[:6] == wanted[:6]
            assert vars(given[9]) == vars(descriptor) and given[9].base is x
            assert all(one is other for one, other in zip(given[10:], wanted[10:], strict=True))
    assert 4 < len(bound._programs) < 20


def test_a_bound_call_that_is_known_looks_at_tensors_only():
    kernel, x, prepared = _kernel(), torch.zeros(8), []
    bound = bind(kernel, 4, 4, 0.5, grid=(1,), FLAG=True, num_warps=4)
    with launching(lambda *_: None), pytest.MonkeyPatch.context() as patch:
        bound.launch(x, x)
        patch.setattr(Prepared, "launch", lambda *_: prepared.append(1))
        bound.launch(x, torch.ones(8))
        assert not prepared
        for tensors in ((x, x.int()), (x, None), (x, x[1:])):
            bound.launch(*tensors)
        assert len(prepared) == 3


def _observe(what: str, *, kernel, patch: pytest.MonkeyPatch) -> None:
    """Installs the observer of launches that `what` names, if any."""
    if what == "hook":
        patch.setattr(knobs.runtime, "launch_enter_hook", lambda metadata: None)
    elif what == "debug":
        patch.setattr(knobs.runtime, "debug", True)
    elif what == "pre-run hook":
        kernel.add_pre_run_hook(lambda *args, **named: None)


@pytest.mark.parametrize("what", ["hook", "pre-run hook", "debug", "AMD"])
def test_a_bound_call_that_the_key_does_not_see_takes_the_long_way(what):
    kernel, x, prepared = _kernel(), torch.zeros(8), []
    bound = bind(kernel, 4, 4, 0.5, grid=(1,), FLAG=True, num_warps=4)
    with launching(lambda *_: None) as driver, pytest.MonkeyPatch.context() as patch:
        if what == "AMD":
            patch.setattr(type(driver), "get_current_target", lambda self: GPUTarget("hip", "gfx942", 64))
        bound.launch(x, x)
        _observe(what, kernel=kernel, patch=patch)
        launch = Prepared.launch
        patch.setattr(Prepared, "launch", lambda *args: prepared.append(1) or launch(*args))
        bound.launch(x, x)
        assert prepared
        if what == "debug":  # the program for debugging is not kept for later
            patch.undo()
            assert [key[1:] for key, *_ in bound._programs] == [[torch.float32, torch.float32]]


def test_a_known_call_does_not_bind_again():
    kernel, started = _kernel(), []
    x = torch.zeros(8)
    with launching(lambda program, *args: started.append(program)), pytest.MonkeyPatch.context() as patch:
        kernel[(1,)](x, x, 4, 4, 0.5, FLAG=True, num_warps=4)
        patch.setattr(JITFunction, "run", lambda *args, **named: pytest.fail("the ordinary launch"))
        for step in itertools.islice(itertools.count(), 3):
            kernel[(1,)](x, x, 5 + step, 4, 0.5 * step, FLAG=True, num_warps=4)
    assert len(started) == 4 and len(set(started)) == 1


@pytest.mark.parametrize("what", ["hook", "position", "keyword", "float", "pre-run hook", "debug"])
def test_what_the_key_does_not_see_takes_tritons_way(what):
    kernel, x, ordinary = _kernel(), torch.zeros(8), []
    args, named = (x, x, 4, 4, 0.5), {"FLAG": True, "num_warps": 4}
    with launching(lambda *_: None), pytest.MonkeyPatch.context() as patch:
        if what == "position":
            args, named = (*args, True), {"num_warps": 4}
        elif what == "keyword":
            args, named = args[:-1], {**named, "eps": 0.5}
        elif what == "float":
            named["FLAG"] = 0.0
        kernel[(1,)](*args, **named)
        _observe(what, kernel=kernel, patch=patch)
        patch.setattr(JITFunction, "run", lambda *args, **named: ordinary.append(1))
        kernel[(1,)](*args, **named)
    assert ordinary == [1]


def test_the_interpreter_has_tritons_own_function():
    assert not isinstance(jit(_body), JITFunction)
    assert not isinstance(jit(do_not_specialize=["N"])(_body), JITFunction)
