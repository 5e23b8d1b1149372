"""Products of many rows: when larger tiles are taken, and that every row keeps the bits that it has alone."""

import sys
from dataclasses import replace
from unittest import mock

import pytest
import torch

from tests.kernels.aot.record import Launching
from tests.kernels.planting import planted
from ztk.kernels import gated_rows, linear_rows, set_backend
from ztk.kernels.launch.jit import Bound
from ztk.kernels.launch.machine import MACHINES, assume
from ztk.kernels.ops.linear_rows import gated_rows_reference, linear_rows_reference

N, K = 264, 136  # past a tile of outputs, and past two steps over inputs


def small(package=sys.modules["ztk.kernels"]):
    """A GPU of two processors: two tiles are enough for large ones, so that the interpreter has few."""
    module = sys.modules[f"{package.__name__}.launch.machine"]
    return module.assume(replace(module.MACHINES["sm_90"], processors=2))


def launched(call) -> list[tuple[str, dict]]:
    """Kernels and constexprs that an op launches."""
    noted = []
    with (
        mock.patch.object(
            Bound, "launch", lambda bound, *_: noted.append((bound.prepared.kernel.fn.__name__, bound.prepared.named))
        ),
        Launching(),
    ):
        call()
    return noted


def tiles(M: int, N: int, K: int, *, pair: bool = False, dtype=torch.bfloat16, target="sm_90") -> tuple:
    """Kernel, rows, outputs and inputs of a program's step."""
    x, weight = torch.empty(M, K, dtype=dtype, device="meta"), torch.empty(N, K, dtype=dtype, device="meta")
    call = (lambda: gated_rows(x, weight, weight)) if pair else (lambda: linear_rows(x, weight))
    with assume(MACHINES[target]):
        ((name, named),) = launched(call)
    return name, named["BLOCK_M"], named["BLOCK_N"], named["BLOCK_K"]


@pytest.mark.parametrize(
    "M, N, pair, expected",
    [
        # 4096 outputs are 16 tiles of 256, so 132 processors have a program each from nine tiles of rows on.
        (1, 4096, False, ("_linear_rows", 64, 32, 128)),
        (1024, 4096, False, ("_linear_rows", 64, 32, 128)),
        (1025, 4096, False, ("_linear_many", 128, 256, 128)),
        (8192, 4096, False, ("_linear_many", 128, 256, 128)),
        (256, 14336, False, ("_linear_rows", 64, 128, 64)),
        (257, 14336, False, ("_linear_many", 128, 256, 64)),
        (128, 14336, True, ("_linear_rows", 64, 128, 64)),
        (129, 14336, True, ("_linear_many", 128, 128, 64)),
        (64, 128256, False, ("_linear_rows", 64, 128, 64)),  # one matrix instruction's rows: a step of decoding
        (65, 128256, False, ("_linear_many", 128, 256, 64)),
    ],
)
def test_tiles_by_rows(M, N, pair, expected):
    assert tiles(M, N, 4096, pair=pair) == expected


def test_a_step_over_inputs_does_not_depend_on_rows():
    for size in (64, 512, 4096, 14336, 128256):
        assert len({tiles(M, size, 4096)[3] for M in (1, 64, 65, 300, 2000, 8192)}) == 1


def test_other_machines_formats_and_sizes_keep_their_tiles():
    for target in ("sm_80", "sm_100", "gfx942"):
        assert tiles(8192, 14336, 4096, target=target)[0] == "_linear_rows"
    assert tiles(8192, 14336, 4096, dtype=torch.float32)[0] == "_linear_rows"
    assert tiles(8192, 14336, 4100)[0] == "_linear_rows"  # rows of 8,200 bytes are not aligned for the copy engine
    x, codes = (
        torch.empty(8192, 4096, dtype=torch.bfloat16, device="meta"),
        torch.empty(14336, 4096, dtype=torch.int8, device="meta"),
    )
    scales = torch.empty(14336, dtype=torch.bfloat16, device="meta")
    with assume(MACHINES["sm_90"]):
        ((name, _),) = launched(lambda: linear_rows(x, codes, scales))
    assert name == "_linear_rows"


def inputs(M: int, *, names: tuple[str, ...], dtype=torch.bfloat16) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"x": (M, K), "residual": (M, N), "weight": (N, K), "gate": (N, K), "up": (N, K)}
    return {name: torch.randn(shapes.get(name, (N,)), generator=generator).to(dtype) for name in ("x", *names)}


OPS = {
    "plain": (linear_rows, linear_rows_reference, ("weight",), {}),
    "all": (linear_rows, linear_rows_reference, ("weight", "bias", "residual"), {"activation": "gelu", "wide": True}),
    "pair": (gated_rows, gated_rows_reference, ("gate", "up", "gate_bias", "up_bias"), {}),
}


def check_rows(M: int, *, package=sys.modules["ztk.kernels"]) -> None:
    """Results are the reference's, and rows have the bits of a call with few rows."""
    for op, reference, names, options in OPS.values():
        call, given = getattr(package, op.__name__), inputs(M, names=names)
        with small(package):
            full = call(**given, **options)
            expected = reference(**given, **options).to(full.dtype)
            torch.testing.assert_close(full, expected, rtol=2e-2, atol=2e-2)
            for cut in (slice(0, 1), slice(60, 70), slice(M - 1, M)):
                few = given | {name: given[name][cut] for name in ("x", "residual") if name in given}
                assert torch.equal(call(**few, **options), full[cut])


@pytest.mark.parametrize("M", [129, 260])
def test_rows_have_the_bits_of_few_rows(M, poisoned):
    """With ends inside of tiles of rows and outputs, and of a step over inputs."""
    set_backend("triton")
    x, weight = (torch.empty(size, K, dtype=torch.bfloat16, device="meta") for size in (M, N))
    with small():
        ((name, _),) = launched(lambda: linear_rows(x, weight))
    assert name == "_linear_many"
    check_rows(M)


def test_a_band_has_every_tile_once(poisoned):
    """More tiles of rows than a band of them."""
    set_backend("triton")
    M = 128 * 17 + 5
    given = inputs(M, names=("weight",))
    given["x"], given["weight"] = given["x"][:, :8].contiguous(), given["weight"][:, :8].contiguous()
    with small():
        full = linear_rows(**given)
    torch.testing.assert_close(full, linear_rows_reference(**given), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    "file, old, new",
    [
        ("ops/linear_rows.py", "m_out = (o_m < M)[:, None]", "m_out = (o_m < M - 1)[:, None]"),
        ("ops/linear_rows.py", "described_product(x, weight2,", "described_product(x, weight,"),
        ("shared/product_tiles.py", "range(0, K, BLOCK_K):\n        b_acc", "range(0, K - 8, BLOCK_K):\n        b_acc"),
        ("shared/product_tiles.py", "tl.trans(weight.load([first_n, i_k]))", "tl.trans(weight.load([first_m, i_k]))"),
        (
            "shared/product_tiles.py",
            "block_k = LaunchConfig.for_weight(N, itemsize=2, target=target).block_k",
            "block_k = 32",
        ),
    ],
)
def test_planted_mistakes_are_found(file, old, new, tmp_path, poisoned):
    with planted(tmp_path, file=file, old=old, new=new) as package:
        package.set_backend("triton")
        with pytest.raises(AssertionError):
            check_rows(130, package=package)
