"""Tests that need a device: compiled kernels in every dtype, CUDA graphs, offsets past 2^31.

Run as `TRITON_INTERPRET=0 pytest -m gpu tests/kernels`.
"""

import pytest
import torch

from tests.kernels.test_ops import cases, check_against_reference
from ztk.kernels import adamw, gated_rows, linear_rows, rms_norm, step_control, sum_of_squares, swiglu
from ztk.kernels.launch.library import interpreting
from ztk.kernels.ops.step_control import SPEC as STEP_CONTROL
from ztk.kernels.shared.flat import control_row

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or interpreting(), reason="needs a GPU and TRITON_INTERPRET=0"),
]


@pytest.mark.parametrize("spec, shape, variant, dtype", cases(lambda spec: spec.dtypes))
def test_compiled_kernel_matches_reference(spec, shape, variant, dtype, poisoned):
    check_against_reference(spec, shape, variant, dtype, device="cuda")


@pytest.mark.parametrize("N, K", [(4096, 4096), (14336, 4096), (4096, 14336), (1040, 520)])
@pytest.mark.parametrize("pair", [False, True])
def test_rows_of_many_have_the_bits_of_few(N, K, pair):
    """Prompts have larger tiles than steps of decoding."""
    torch.manual_seed(0)
    M = 8192 if N < 4096 else 2000
    x, *weights = (torch.randn(rows, K, device="cuda").bfloat16() for rows in (M, N, N))
    call = (lambda rows: gated_rows(rows, *weights)) if pair else (lambda rows: linear_rows(rows, weights[0]))
    full = call(x)
    for cut in (slice(0, 1), slice(60, 124), slice(100, 229), slice(M - 3, M)):
        assert torch.equal(call(x[cut]), full[cut])


def test_optimizer_step_is_captured_in_a_graph():
    """Statistics, control and update replay without host reads: two replays equal two eager steps."""

    def make():
        torch.manual_seed(0)
        n = 1 << 16
        flat = {name: torch.randn(n, device="cuda") for name in ("p", "g")}
        flat |= {name: torch.zeros(n, device="cuda") for name in ("m", "v")}
        return flat, STEP_CONTROL.make_inputs((1,), dtype=torch.float32, device="cuda")

    def step(flat, control):
        control["sumsq"].copy_(sum_of_squares(flat["g"]))
        step_control(**control)
        adamw(flat["p"], grad=flat["g"], exp_avg=flat["m"], exp_avg_sq=flat["v"], control=control["control"][0])

    step(*make())  # compiles
    eager, eager_control = make()
    for _ in range(2):
        step(eager, eager_control)
    captured, captured_control = make()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # as in ztk.inference.graphs
        step(captured, captured_control)
    for _ in range(2):
        graph.replay()
    assert torch.equal(eager_control["state"], captured_control["state"])
    assert all(torch.equal(eager[name], captured[name]) for name in eager)


def test_offsets_past_two_to_the_31():
    """The last elements of tensors longer than 32-bit offsets reach."""
    rows, columns = (1 << 31) // 4096 + 8, 4096
    x = torch.zeros(rows, columns, dtype=torch.bfloat16, device="cuda")
    x[-8:] = torch.randn(8, columns, device="cuda")
    tail = x[-8:].clone()
    weight = torch.ones(columns, dtype=torch.bfloat16, device="cuda")
    assert torch.equal(swiglu(x, x)[-8:], swiglu(tail, tail))
    assert torch.equal(rms_norm(x, weight)[-8:], rms_norm(tail, weight))
    assert torch.allclose(sum_of_squares(x.view(-1)), sum_of_squares(tail.view(-1)))


def test_adamw_on_a_row_of_a_larger_table():
    """A control row is a view of the table; the kernel reads its values in place."""
    n = 4096
    table = torch.stack([control_row(skip=True), control_row()]).cuda()
    p, g, m, v = (torch.ones(n, device="cuda") for _ in range(4))
    adamw(p, grad=g, exp_avg=m, exp_avg_sq=v, control=table[0])
    assert torch.equal(p, torch.ones_like(p))
    adamw(p, grad=g, exp_avg=m, exp_avg_sq=v, control=table[1])
    assert not torch.equal(p, torch.ones_like(p))
