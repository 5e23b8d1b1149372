"""An element's update depends on that element alone: any 16-aligned cut of a buffer gives the bits of the full."""

import pytest
import torch

from ztk.kernels import activate_cpu, adamw, lion, sgd, sum_of_squares
from ztk.kernels.shared import workers
from ztk.kernels.shared.activation import ACTIVATIONS
from ztk.kernels.shared.cpu import GRAIN, VECTORS, even_cuts
from ztk.kernels.shared.cpu import UPDATE_PIECE as PIECE
from ztk.kernels.shared.flat import control_row

N = PIECE + 65536 + 4096 + 48
CUTS = {
    "halves": (N // 32 * 16,),
    "odd": (16, 48, 1040, 33_008, PIECE - 16, PIECE + 16, PIECE + 32_784),
    "unequal": (PIECE, N - 16),
}


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def threads(request):
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(1)


def adamw_step(tensors, control):
    adamw(
        tensors["p"],
        grad=tensors["g"],
        exp_avg=tensors["m"],
        exp_avg_sq=tensors["v"],
        control=control,
        out=tensors["out"],
    )


def adam_step(tensors, control):
    adamw(
        tensors["p"], grad=tensors["g"], exp_avg=tensors["m"], exp_avg_sq=tensors["v"], control=control, decoupled=False
    )


def sgd_step(tensors, control):
    sgd(
        tensors["p"],
        grad=tensors["g"],
        momentum_buffer=tensors["m"],
        control=control,
        out=tensors["out"],
        nesterov=True,
    )


def lion_step(tensors, control):
    lion(tensors["p"], grad=tensors["g"], exp_avg=tensors["m"], control=control, out=tensors["out"])


def make(grad_dtype):
    generator = torch.Generator().manual_seed(0)
    random = {name: torch.randn(N, generator=generator) for name in "pgmv"}
    return random | {
        "g": random["g"].to(grad_dtype),
        "v": random["v"].square(),
        "out": torch.zeros(N, dtype=torch.bfloat16),
    }


STEPS = [adamw_step, adam_step, sgd_step, lion_step]


@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS.keys())
@pytest.mark.parametrize("dtype, coefficient", [(torch.float32, 1.0), (torch.float32, 0.3), (torch.bfloat16, 0.3)])
@pytest.mark.parametrize("step", STEPS, ids=lambda f: f.__name__)
def test_cuts_equal_the_full(step, dtype, coefficient, cuts, threads):
    control = control_row(grad_coefficient=coefficient)
    full, parts = make(dtype), make(dtype)
    step(full, control)
    borders = (0, *cuts, N)
    for start, stop in zip(borders, borders[1:], strict=False):
        step({name: tensor[start:stop] for name, tensor in parts.items()}, control)
    for name, tensor in full.items():
        assert torch.equal(tensor, parts[name]), name


@pytest.mark.parametrize("step", STEPS, ids=lambda f: f.__name__)
def test_threads_do_not_change_bits(step, monkeypatch):
    monkeypatch.setattr(workers, "FROM", GRAIN + 1)  # several workers for a short update
    control = control_row()
    results = []
    for threads in (1, 2, 3, 5):
        torch.set_num_threads(threads)
        tensors = make(torch.bfloat16)
        step(tensors, control)
        results.append(tensors)
    torch.set_num_threads(1)
    for other in results[1:]:
        for name, tensor in results[0].items():
            assert torch.equal(tensor, other[name]), name


@pytest.mark.parametrize("step", STEPS, ids=lambda f: f.__name__)
def test_bfloat16_gradient_equals_its_float32_copy(step):
    control = control_row()
    narrow, wide = make(torch.bfloat16), make(torch.bfloat16)
    wide["g"] = wide["g"].float()
    step(narrow, control)
    step(wide, control)
    for name in ("p", "m", "out"):
        assert torch.equal(narrow[name], wide[name]), name


@pytest.mark.parametrize("step", STEPS, ids=lambda f: f.__name__)
def test_skip_leaves_everything_untouched(step):
    before, after = make(torch.bfloat16), make(torch.bfloat16)
    after["g"][5] = float("nan")
    step(after, control_row(skip=True, grad_coefficient=0.0))
    for name in ("p", "m", "v", "out"):
        assert torch.equal(before[name], after[name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sum_of_squares_is_a_function_of_content(dtype):
    grad = torch.randn(PIECE + 70_000 + 13, generator=torch.Generator().manual_seed(0)).to(dtype)
    shifted = torch.cat([torch.zeros(3, dtype=dtype), grad])[3:]  # another alignment in memory
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        results += [sum_of_squares(grad), sum_of_squares(shifted)]
    torch.set_num_threads(1)
    assert all(torch.equal(results[0], r) for r in results)
    assert torch.allclose(results[0].double(), grad.double().square().sum(), rtol=1e-6)


def test_adamw_agrees_with_torch():
    """Ten steps against torch.optim.AdamW: the same rule, so only rounding may differ."""
    generator = torch.Generator().manual_seed(1)
    parameter = torch.nn.Parameter(torch.randn(4096, generator=generator))
    master, m, v = parameter.detach().clone(), torch.zeros(4096), torch.zeros(4096)
    optimizer = torch.optim.AdamW([parameter], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(1, 11):
        grad = torch.randn(4096, generator=generator)
        parameter.grad = grad.clone()
        optimizer.step()
        adamw(master, grad=grad, exp_avg=m, exp_avg_sq=v, control=control_row(step=step, grad_coefficient=1.0))
    assert torch.allclose(master, parameter, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("count", [2, 3, 5])
def test_an_activations_bits_do_not_depend_on_the_number_of_others(count):
    """Of full vectors, at lengths that torch would divide in the middle of one."""
    x = torch.randn(5 * GRAIN, generator=torch.Generator().manual_seed(0))
    torch.set_num_threads(1)
    expected = {kind: activate_cpu(x, activation=kind) for kind in ACTIVATIONS}
    torch.set_num_threads(count)
    try:
        for length in (32, GRAIN + 32, 2 * GRAIN + 1024 + 64, 3 * GRAIN + 32, 4 * GRAIN + 96, 5 * GRAIN):
            for kind, full in expected.items():
                assert torch.equal(activate_cpu(x[:length], activation=kind), full[:length]), (kind, length)
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("count", range(1, 9))
@pytest.mark.parametrize("among_all", [False, True])
def test_threads_have_full_vectors(count, among_all, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: count)
    for numel in (0, 1, GRAIN - 1, GRAIN, 66_560, 3 * GRAIN + 17, 5 * GRAIN, 47 * GRAIN + 33):
        cuts = list(even_cuts(numel, among_all=among_all))
        stops = [cut.stop for cut in cuts]
        assert [cut.start for cut in cuts] == [0, *stops][: len(cuts)] and [0, *stops][-1] == numel
        for cut in cuts:
            size = cut.stop - cut.start
            parts = count if among_all else min(count, -(-size // GRAIN))  # as torch divides
            is_last_alone = cut is cuts[-1] and (count == 1 or size <= GRAIN // 2 or parts == 1)
            assert -(-size // parts) % VECTORS == 0 or is_last_alone
