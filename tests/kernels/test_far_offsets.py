"""Ops beyond 2^31 elements: the end of a huge tensor gives the same results as its elements alone; 32-bit offsets fail."""

import functools

import pytest
import torch
from torch import Tensor

from tests.kernels.large import BEYOND, behind, run_last_programs
from tests.kernels.planting import load_copy, spec_of
from tests.kernels.planting import planted as copied
from ztk.kernels import (
    adamw_8bit,
    cast_copy,
    cross_entropy,
    lion,
    quantize,
    set_backend,
    sgd,
    sum_of_squares,
    swiglu,
)  # fmt: skip

N = 4096  # elements at the end
PROGRAMS = 16  # of 256 elements and more: enough to cover them


@pytest.fixture
def last_programs(monkeypatch):
    """A function of how many programs run."""
    return functools.partial(run_last_programs, monkeypatch=monkeypatch)


WIDE = "program_id(0).to(tl.int64)"
NARROW = "program_id(0).to(tl.int32)"

# `shared.tiles.part_of` returns `first`, to which the optimizers' kernels add their offsets.
FLAT = {
    **dict.fromkeys([sgd, lion], ("first + tl", "first.to(tl.int32) + tl")),
    adamw_8bit: ("first // _GROUP", "(first // _GROUP).to(tl.int32)"),
    **dict.fromkeys([cast_copy, swiglu], (WIDE, NARROW)),
}


def tensors_of(inputs: dict) -> dict[str, Tensor]:
    """The inputs that run along the flat index: all but rows of control and scales of one element."""
    return {k: v for k, v in inputs.items() if isinstance(v, Tensor) and v.numel() not in (1, 16)}


def check_flat(op, *, spec) -> None:
    """The last N elements of a buffer of 2^31 + N equal a buffer of N: outputs and in-place results."""
    torch.manual_seed(0)
    near = spec.make_inputs((N,), dtype=torch.bfloat16, device="cpu")
    far = dict(near)
    for name, x in tensors_of(near).items():
        far[name] = behind(x, rows=(BEYOND + N) * x.numel() // N)
    if "start" in near:  # where the random bits of element 0 are counted from
        near["start"] += BEYOND
    near = {name: x.clone() if isinstance(x, Tensor) else x for name, x in near.items()}
    out_far, out_near = op(**far), op(**near)
    compared = [(far[name], near[name]) for name in tensors_of(near)]
    compared += [(out_far, out_near)] if isinstance(out_near, Tensor) else []
    for full, alone in compared:
        assert torch.equal(full[full.shape[0] - alone.shape[0] :], alone)


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """(the op's module, its copy with one piece of source replaced)"""

    def load(function, *, old=WIDE, new=NARROW):
        (tmp_path / "w").mkdir()
        right = load_copy(function, old=old, new=old, tmp_path=tmp_path, monkeypatch=monkeypatch)
        return right, load_copy(function, old=old, new=new, tmp_path=tmp_path / "w", monkeypatch=monkeypatch)

    return load


def check_planted(check, *, modules) -> None:
    """The check passes with the op as it is and fails with its 32-bit copy."""
    set_backend("triton")
    right, wrong = modules
    check(right)
    with pytest.raises(AssertionError):
        check(wrong)


@pytest.mark.parametrize("op", ["adamw", "adamw_bf16", "adamw_stochastic"])
def test_adam_ops(op, tmp_path, monkeypatch):
    """Their kernels share a template, so the mistake is in a copy of the package."""
    failed = []
    for new in ("first + tl", "first.to(tl.int32) + tl"):
        with (
            copied(tmp_path, file="shared/adam.py", old="first + tl", new=new) as package,
            monkeypatch.context() as patch,
        ):
            run_last_programs(PROGRAMS, monkeypatch=patch)
            try:
                check_flat(getattr(package, op), spec=spec_of(package, op))
            except AssertionError:
                failed.append(new)
    assert failed == ["first.to(tl.int32) + tl"]


@pytest.mark.parametrize("function", FLAT, ids=lambda f: f.__name__)
def test_flat_ops(function, planted, last_programs):
    last_programs(PROGRAMS)
    old, new = FLAT[function]
    check_planted(
        lambda module: check_flat(getattr(module, function.__name__), spec=module.SPEC),
        modules=planted(function, old=old, new=new),
    )


def test_quantize(planted, last_programs):
    last_programs(PROGRAMS)
    x = torch.randn(1, N).bfloat16()

    def check(module):
        far, near = (module._launch_quantize(v, 8, 256) for v in (behind(x[0], rows=BEYOND + N)[None], x))
        assert torch.equal(far[0, BEYOND : BEYOND + N], near[0, :N]), "codes"
        assert torch.equal(far[0, -(N // 64) :], near[0, -(N // 64) :]), "scales"
        back = module._launch_dequantize(far, BEYOND + N, 8, 256, torch.float32)
        assert torch.equal(back[0, BEYOND:], module._launch_dequantize(near, N, 8, 256, torch.float32)[0])
        total = module._launch_dequantize_reduce(far, BEYOND + N, 8, 256, torch.float32, 1.0)
        assert torch.equal(total[BEYOND:], back[0, BEYOND:])

    check_planted(check, modules=planted(quantize))


def test_sum_of_squares(planted, last_programs):
    last_programs(1)  # it walks its 513 tiles
    x = torch.randn(N).bfloat16()

    def check(module):
        total = module._launch(behind(x, rows=BEYOND + 512 * 8192))  # the last tile belongs to the last program
        torch.testing.assert_close(total.float(), x.float().square().sum()[None])

    offset = "start + tl.arange(0, BLOCK)"
    check_planted(check, modules=planted(sum_of_squares, old=offset, new=f"({offset}).to(tl.int32)"))


COLUMNS = 1 << 17
ROWS = 3


def test_cross_entropy(planted, last_programs):
    last_programs(ROWS)
    x, target = torch.randn(ROWS, COLUMNS).bfloat16(), torch.randint(0, COLUMNS, (ROWS,))

    def run(module, logits):
        every = torch.zeros(logits.shape[0], dtype=torch.int64)
        every[-ROWS:] = target
        loss, lse = module._launch_fwd(logits, every, -100, 0.0, 0.0)
        grad = module._launch_bwd(logits, every, lse, torch.ones(1), -100, 0.0, 0.0)
        module._launch_fwd_in_place(logits, every, torch.ones(1), -100, 0.0, 0.0)
        return loss, grad, logits

    def check(module):
        far, near = run(module, behind(x, rows=BEYOND // COLUMNS + 5)), run(module, x.clone())
        for full, alone in zip(far, near, strict=True):
            assert torch.equal(full[-ROWS:], alone)

    check_planted(check, modules=planted(cross_entropy))
