"""One launch over parts with control rows and positions of their own: the bits of one launch for each part."""

import pytest
import torch

from tests.kernels.test_adamw_variants import STEPS as NARROW
from ztk.kernels import UpdatePart, adamw, lion, set_backend, sgd, tiles_of
from ztk.kernels.launch.machine import INTERPRETER
from ztk.kernels.shared.flat import control_row
from ztk.kernels.shared.tiles import TILE_PER_THREAD, threads

CPU = torch.device("cpu")
TILE = TILE_PER_THREAD * threads(INTERPRETER)
N = 3 * TILE + 128
PARTS = (  # of several tiles, of less than one, to the last element but the padding; and between the last two are elements of none
    UpdatePart(start=0, stop=TILE + 96, row=1, position=(1 << 62) - 64),
    UpdatePart(start=TILE + 96, stop=TILE + 128, row=0, position=0),
    UpdatePart(start=TILE + 128, stop=3 * TILE + 32, row=2, position=(1 << 32) - 1024),  # its index passes 2^32
    UpdatePart(start=3 * TILE + 64, stop=N - 16, row=0, position=32),
)
CONTROL = torch.stack(
    [control_row(step=5), control_row(step=5, lr=0.3, weight_decay=0.0), control_row(step=7, betas=(0.5, 0.6))]
)


def state_wide(n):
    generator = torch.Generator().manual_seed(0)
    state = {name: torch.randn(n, generator=generator) for name in ("master", "exp_avg", "exp_avg_sq")}
    return state | {"exp_avg_sq": state["exp_avg_sq"].square(), "out": torch.zeros(n, dtype=torch.bfloat16)}


def state_lion(n):
    state = state_wide(n)
    del state["exp_avg_sq"]
    return state


def state_sgd(n):
    state = state_lion(n)
    return {"master": state["master"], "momentum_buffer": state["exp_avg"], "out": state["out"]}


OPS = {
    "adamw": (adamw, state_wide),
    "lion": (lion, state_lion),
    "sgd": (sgd, state_sgd),
    **{f"adamw_{name}": made for name, made in NARROW.items()},
}


def update(op, state, *, grad, control, **options):
    first, *rest = state
    op(state[first], grad=grad, control=control, **{name: state[name] for name in rest}, **options)


def cut(tensor: torch.Tensor, *, part: UpdatePart, name: str = "") -> torch.Tensor:
    group = 32 if name.startswith("scale") else 1
    return tensor[part.start // group : -(-part.stop // group)]


@pytest.mark.parametrize("backend", ["auto", "triton", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OPS)
def test_parts_in_one_launch_have_the_bits_of_a_launch_for_each(name, dtype, backend):
    set_backend(backend)
    op, make = OPS[name]
    joined, apart, before = make(N), make(N), make(N)
    grad = torch.randn(N, generator=torch.Generator().manual_seed(1)).to(dtype)
    is_drawn = name.removeprefix("adamw_") in NARROW
    seed = {"seed": 3} if is_drawn else {}
    update(op, joined, grad=grad, control=CONTROL, tiles=tiles_of(PARTS, device=CPU), **seed)
    for part in PARTS:
        state = {key: cut(tensor, part=part, name=key) for key, tensor in apart.items()}
        position = {"start": part.position} if is_drawn else {}
        update(op, state, grad=cut(grad, part=part), control=CONTROL[part.row], **position, **seed)
    for key, tensor in joined.items():
        assert torch.equal(tensor, apart[key]), key
        assert all(
            not torch.equal(cut(tensor, part=part, name=key), cut(before[key], part=part, name=key)) for part in PARTS
        ), key


@pytest.mark.parametrize("name", OPS)
def test_a_skipped_step_leaves_all_parts(name):
    op, make = OPS[name]
    for backend in ("auto", "triton", "reference"):
        set_backend(backend)
        state, before = make(N), make(N)
        control = torch.stack([control_row(skip=True)] * 3)
        update(op, state, grad=torch.full((N,), float("nan")), control=control, tiles=tiles_of(PARTS, device=CPU))
        assert all(torch.equal(tensor, before[key]) for key, tensor in state.items()), backend


@pytest.mark.parametrize(
    ("tiles", "control", "message"),
    [
        (
            torch.zeros(1, 3, dtype=torch.int32),
            CONTROL,
            r"tiles \(1, 3\) torch.int32 are not of tiles_of: int64 \[tiles, 4\]",
        ),
        (tiles_of(PARTS, device=CPU), CONTROL[0], r"pass rows float32 \[rows, 16\]"),
        (None, CONTROL, r"pass one row float32 \[16\]"),
    ],
)
@pytest.mark.parametrize("name", OPS)
def test_other_tables_are_refused(name, tiles, control, message):
    op, make = OPS[name]
    with pytest.raises(ValueError, match=message):
        update(op, make(N), grad=torch.zeros(N), control=control, tiles=tiles)


@pytest.mark.parametrize("start, stop", [(16, 64), (0, 40)])
def test_parts_lie_where_groups_of_states_do(start, stop):
    with pytest.raises(AssertionError, match="padded"):
        tiles_of([UpdatePart(start=start, stop=stop, row=0)], device=CPU)
