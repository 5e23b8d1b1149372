"""Products of experts with TMA descriptors of their weights: the choice of descriptors, and tiles that end with their expert."""

import itertools
import sys

import pytest
import torch

from tests.kernels.aot.record import Launching
from tests.kernels.planting import planted
from ztk.kernels import grouped_matmul, grouped_matmul_pair, set_backend
from ztk.kernels.launch.descriptors import Layout, can_describe
from ztk.kernels.launch.jit import Bound
from ztk.kernels.launch.machine import MACHINES, assume

SIZES = E, D, N = 3, 40, 24  # tiles are of 64 x 128
OFFSETS = torch.tensor([0, 5, 5, 9], dtype=torch.int32)  # the second expert has no token


def product(*, package=None, spoilt: int | None, pair: bool) -> list[torch.Tensor]:
    """Results and gradients of x, where the weights of one expert are NaN."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(9, D, generator=generator).half().requires_grad_()
    weights = [torch.randn(SIZES, generator=generator).half() for _ in range(2 if pair else 1)]
    if spoilt is not None:
        for weight in weights:
            weight[spoilt] = float("nan")
    package = sys.modules["ztk.kernels"] if package is None else package
    machine = sys.modules[f"{package.__name__}.launch.machine"]
    with machine.assume(machine.MACHINES["sm_90"]):
        outs = (package.grouped_matmul_pair if pair else package.grouped_matmul)(x, *weights, offsets=OFFSETS)
        outs = outs if pair else (outs,)
        torch.autograd.backward(outs, [torch.ones_like(out) for out in outs])
    return [*(out.detach() for out in outs), x.grad]


def check_neighbours(*, package=None) -> None:
    """NaN in an expert's weight are in its tokens' rows, and there alone: zero times NaN would be seen."""
    for pair, spoilt in itertools.product((False, True), range(E)):
        right, rows = product(package=package, spoilt=None, pair=pair), torch.zeros(9, dtype=torch.bool)
        rows[OFFSETS[spoilt] : OFFSETS[spoilt + 1]] = True
        for expected, found in zip(right, product(package=package, spoilt=spoilt, pair=pair), strict=True):
            assert found[rows].isnan().all() and torch.equal(found[~rows], expected[~rows])


def test_a_tile_ends_with_its_expert(poisoned):
    set_backend("triton")
    check_neighbours()


@pytest.mark.parametrize(
    "new",
    [
        "shape=(shape[0], shape[1] + 1, shape[2])",
        "shape=(shape[0], shape[1], shape[2] + 8)",
        "shape=(shape[0] - 1, *shape[1:])",
    ],
)
def test_a_descriptor_that_covers_the_next_expert_is_caught(new, tmp_path, poisoned):
    with (
        planted(tmp_path, file="ops/grouped_gemm.py", old="shape=shape, strides", new=f"{new}, strides") as package,
        pytest.raises(AssertionError),
    ):
        check_neighbours(package=package)


@pytest.mark.parametrize(
    "target, dtype, sizes, offset, described",
    [
        ("sm_90", torch.bfloat16, (3, 64, 64), 0, True),
        ("sm_90", torch.float16, (3, 33, 72), 0, True),  # a row is 144 bytes
        ("sm_90", torch.bfloat16, (3, 64, 68), 0, False),  # of 136
        ("sm_90", torch.bfloat16, (3, 64, 64), 8, True),
        ("sm_90", torch.bfloat16, (3, 64, 64), 4, False),  # at a multiple of 8 bytes
        ("sm_90", torch.float32, (3, 64, 64), 0, False),
        ("sm_80", torch.bfloat16, (3, 64, 64), 0, False),
        ("sm_100", torch.bfloat16, (3, 64, 64), 0, False),
        ("gfx942", torch.bfloat16, (3, 64, 64), 0, False),
    ],
)
def test_descriptors_are_chosen_where_they_can_describe(monkeypatch, target, dtype, sizes, offset, described):
    number, noted = sizes[0] * sizes[1] * sizes[2], []
    buffer = torch.zeros(number + 8, dtype=dtype)
    first = -buffer.data_ptr() % 16 // dtype.itemsize + offset
    weight = buffer[first : first + number].view(sizes).requires_grad_()
    monkeypatch.setattr(Bound, "launch", lambda bound, *tensors, count=None: noted.append(bound))
    with assume(MACHINES[target]), Launching():
        x = torch.zeros(9, sizes[1], dtype=dtype, requires_grad=True)
        grouped_matmul(x, weight, offsets=OFFSETS).sum().backward()
        grouped_matmul_pair(x, weight, weight.detach(), offsets=OFFSETS)[0].sum().backward()
    products = [bound for bound in noted if "DESCRIBED" in bound.prepared.named]
    assert len(products) == 5
    for bound in products:
        assert bound.prepared.named["DESCRIBED"] == described == bool(bound.layouts)
        block = (1, 128, 64) if bound.prepared.named["TRANSPOSED"] else (1, 64, 128)
        expected = Layout(shape=sizes, strides=weight.stride(), block=block, dtype=dtype) if described else None
        assert not described or bound.layouts == {1: expected, 3: expected}


def test_a_second_weight_elsewhere_takes_pointers(monkeypatch):
    buffer, noted = torch.zeros(2 * E * 64 * 64 + 4, dtype=torch.bfloat16), []
    first, second = (buffer[start:][: E * 64 * 64].view(E, 64, 64) for start in (0, E * 64 * 64 + 4))
    monkeypatch.setattr(Bound, "launch", lambda bound, *tensors, count: noted.append(bound.prepared.named["DESCRIBED"]))
    d_out = torch.zeros(9, 64, dtype=torch.bfloat16)
    with assume(MACHINES["sm_90"]), Launching():
        for weight in (first, second):
            torch.ops.ztk.grouped_matmul(d_out, first, d_out, weight, OFFSETS, None, 1, True)
    assert noted == [True, False]


def test_what_a_descriptor_cannot_say():
    half = torch.float16
    assert can_describe((3, 5, 8), strides=(40, 8, 1), dtype=half)
    assert not can_describe((3, 5, 7), strides=(35, 7, 1), dtype=half)
    assert not can_describe((3, 5, 8), strides=(40, 1, 5), dtype=half)  # transposed
    assert not can_describe((3, 5, 8), strides=(0, 8, 1), dtype=half)  # one weight of all
    assert not can_describe((3, 0, 8), strides=(8, 8, 1), dtype=half)
    with pytest.raises(ValueError, match="no descriptor"):
        Layout(shape=(3, 5, 7), strides=(35, 7, 1), block=(1, 8, 8), dtype=half)
    layout = Layout(shape=(2, 8), strides=(8, 1), block=(2, 8), dtype=half)
    with pytest.raises(AssertionError, match="16-byte aligned"):
        layout.describe(torch.zeros(20, dtype=half)[1:17].view(2, 8))
