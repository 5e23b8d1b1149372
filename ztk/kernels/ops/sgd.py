"""SGD with momentum on a flat partition: unscale, clip, skip, update and the 16-bit copy in one pass.

    g               = grad * grad_coefficient + weight_decay * master
    momentum_buffer = momentum * momentum_buffer + g
    master          = master - lr * (g + momentum * momentum_buffer   if nesterov else   momentum_buffer)
    out             = master, rounded

Reads 10 and writes 10 bytes per parameter with a 16-bit gradient and `out` (6 and 6 without a momentum buffer). The
momentum buffer starts at zero, so the first step needs no case of its own.
"""

import torch
import triton.language as tl
from torch import Tensor

from ztk.kernels.launch.jit import jit
from ztk.kernels.shared import flat
from ztk.kernels.shared.control import COEFFICIENT, LR, MOMENTUM, SKIP, WEIGHT_DECAY, Control
from ztk.kernels.shared.cpu import scaled_float32
from ztk.kernels.shared.math import cast
from ztk.kernels.shared.spec import compute_dtype
from ztk.kernels.shared.tiles import part_of
from ztk.kernels.shared.workers import in_parts


@jit
def _sgd(
    master_ptr, grad_ptr, momentum_ptr, control_ptr, out_ptr, tiles_ptr, N,
    NESTEROV: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One tile of the module docstring's update"""
    if tl.load(control_ptr + SKIP) == 0.0:
        first, stop, control_ptr, _ = part_of(tiles_ptr, control_ptr, N, 0, PROGRAMS, BLOCK)
        o_n = first + tl.arange(0, BLOCK)
        m_n = o_n < stop
        coefficient = tl.load(control_ptr + COEFFICIENT)
        lr = tl.load(control_ptr + LR)
        weight_decay = tl.load(control_ptr + WEIGHT_DECAY)
        momentum = tl.load(control_ptr + MOMENTUM)

        b_p = tl.load(master_ptr + o_n, mask=m_n, other=0.0)
        b_g = tl.load(grad_ptr + o_n, mask=m_n, other=0.0).to(tl.float32) * coefficient + weight_decay * b_p
        if momentum_ptr is not None:
            b_buffer = momentum * tl.load(momentum_ptr + o_n, mask=m_n, other=0.0) + b_g
            tl.store(momentum_ptr + o_n, b_buffer, mask=m_n)
            if NESTEROV:
                b_g = b_g + momentum * b_buffer
            else:
                b_g = b_buffer
        b_p = b_p - lr * b_g
        tl.store(master_ptr + o_n, b_p, mask=m_n)
        if out_ptr is not None:
            tl.store(out_ptr + o_n, cast(b_p, out_ptr.dtype.element_ty), mask=m_n)


def _cpu(
    master: Tensor, grad: Tensor, momentum_buffer: Tensor | None, control: list, out: Tensor | None, nesterov: bool
) -> None:
    # Full 16-element units through torch's fused kernel: a function of the element alone, as in adamw.
    c = control
    momentum = 0.0 if momentum_buffer is None else c[Control.momentum]  # 0 in one group among others that have some

    def part(cut: slice) -> None:
        p = master[cut]
        g = scaled_float32(grad[cut], scale=c[Control.grad_coefficient])
        torch._fused_sgd_(
            [p],
            [g],
            [momentum_buffer[cut]] if momentum else [],
            weight_decay=c[Control.weight_decay],
            momentum=momentum,
            lr=c[Control.lr],
            dampening=0.0,
            nesterov=nesterov and momentum > 0.0,
            maximize=False,
            is_first_step=False,
        )
        if out is not None:
            out[cut].copy_(p)

    in_parts(master.numel(), part)


_op = flat.register(
    "sgd(Tensor(a!) master, Tensor grad, Tensor(b!)? momentum_buffer, Tensor control, Tensor(c!)? out, bool nesterov, "
    "Tensor? tiles) -> ()",
    kernel=_sgd,
    update=_cpu,
)


def sgd(
    master: Tensor,
    *,
    grad: Tensor,
    momentum_buffer: Tensor | None = None,
    control: Tensor,
    out: Tensor | None = None,
    nesterov: bool = False,
    tiles: Tensor | None = None,
) -> None:
    """One SGD step in place, with momentum when `momentum_buffer` is given.

    Skipped steps, and the independence of results from an element's position, are as in `adamw`.

    Args:
        master: float32 [n], n a multiple of 16.
        grad: float32, bfloat16 or float16 [n].
        momentum_buffer: optional float32 [n], zeros before the first step.
        control: one row float32 [16] of `step_control`.
        out: optional 16-bit [n] that receives the rounded master.
        nesterov: step along g + momentum * momentum_buffer.
        tiles: made by `tiles_of` for this n, for parts with separate hyperparameters: one launch for all. `control` is then float32
            [rows, 16], which the tiles index; elements outside of all tiles do not change.

    Raises:
        ValueError: a tensor of another shape, dtype or device, or not contiguous; `nesterov` without a buffer.
    """
    tensors = {
        "master": (master, flat.FLOAT32),
        "grad": (grad, flat.GRAD_DTYPES),
        "momentum_buffer": (momentum_buffer, flat.FLOAT32),
    }
    flat.check("sgd", tensors=tensors | {"out": (out, flat.GRAD_DTYPES)}, control=control, tiles=tiles)
    if nesterov and momentum_buffer is None:
        raise ValueError("sgd: nesterov=True needs a momentum_buffer; pass one, or nesterov=False")
    flat.dispatch(
        _op, reference=_reference, master=master, grad=grad, momentum_buffer=momentum_buffer, control=control, out=out,
        nesterov=nesterov, tiles=tiles,
    )  # fmt: skip


@flat.by_tiles
def _reference(master, grad, control, momentum_buffer=None, out=None, nesterov=False) -> None:
    """The same update, one plain operation at a time."""
    c = control.to(compute_dtype(master))
    step = buffer = grad.to(c.dtype) * c[Control.grad_coefficient] + c[Control.weight_decay] * master
    if momentum_buffer is not None:
        buffer = c[Control.momentum] * momentum_buffer + step
        step = step + c[Control.momentum] * buffer if nesterov else buffer
    p = master - c[Control.lr] * step
    flat.write_unless_skipped(c, (out, p), (master, p), (momentum_buffer, buffer))


def _make_inputs(
    shape: tuple[int, ...], *, dtype: torch.dtype, device: str, momentum: bool = True, **options: object
) -> dict[str, object]:
    states = {"master": torch.clone, "momentum_buffer": torch.clone}
    inputs = flat.make_inputs(shape, dtype=dtype, device=device, states=states, **({"with_out": True} | options))
    return inputs if momentum else inputs | {"momentum_buffer": None}


SPEC = flat.spec(
    "sgd",
    op=sgd,
    reference=_reference,
    make_inputs=_make_inputs,
    mutated=("master", "momentum_buffer", "out"),
    bench_shapes=((1 << 28,),),
    variants=({}, {"momentum": False}, {"nesterov": True, "with_out": False}, {"skip": True}, {"segments": True}),
    traffic=lambda itemsize: 16 + 2 * itemsize,
    flops=6,
)
