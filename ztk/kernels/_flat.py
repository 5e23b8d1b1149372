"""What the optimizer ops on flat partitions share: their checks, and a control row for tests and benchmarks."""

import torch
from torch import Tensor

from ztk.kernels._control import CONTROL_COLUMNS, Control

ALIGNMENT = 16  # elements: a partition is whole 64-byte units of float32
GRAD_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_flat(
    op: str,
    master: Tensor,
    *,
    grad: Tensor,
    states: dict[str, Tensor | None],
    control: Tensor,
    out: Tensor | None,
    state_dtypes: tuple[torch.dtype, ...] = (torch.float32,),
) -> None:
    """Raise ValueError unless all tensors are contiguous [n] of the right dtypes on one device, n a multiple of 16."""
    n = master.numel()
    if n % ALIGNMENT:
        raise ValueError(f"{op}: master has {n} elements; pad the flat partition to a multiple of {ALIGNMENT}")
    expected = {"master": (master, (torch.float32,)), "grad": (grad, GRAD_DTYPES)}
    expected |= {name: (state, state_dtypes) for name, state in states.items() if state is not None}
    if out is not None:
        expected["out"] = (out, GRAD_DTYPES)
    for name, (tensor, dtypes) in expected.items():
        if tensor.shape != (n,) or tensor.dtype not in dtypes or not tensor.is_contiguous():
            raise ValueError(
                f"{op}: {name} is {tuple(tensor.shape)} {tensor.dtype}; it must be contiguous [{n}] of "
                f"{' or '.join(str(d)[6:] for d in dtypes)}"
            )
        if tensor.device != master.device:
            raise ValueError(f"{op}: {name} is on {tensor.device} and master on {master.device}; move one of them")
    if control.shape != (CONTROL_COLUMNS,) or control.dtype != torch.float32:
        raise ValueError(
            f"{op}: control is {tuple(control.shape)} {control.dtype}; pass one row float32 [{CONTROL_COLUMNS}]"
        )


def control_row(
    *,
    step: int = 3,
    skip: bool = False,
    grad_coefficient: float = 0.5,
    lr: float = 1e-2,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    momentum: float = 0.9,
    device: str = "cpu",
) -> Tensor:
    """A control row float32 [16] as `step_control` would write it."""
    row = [0.0] * CONTROL_COLUMNS
    row[Control.skip] = float(skip)
    row[Control.grad_coefficient] = grad_coefficient
    row[Control.lr] = lr
    row[Control.beta1], row[Control.beta2] = betas
    row[Control.eps], row[Control.weight_decay], row[Control.momentum] = eps, weight_decay, momentum
    row[Control.bias_correction1] = 1 - betas[0] ** step
    row[Control.bias_correction2_sqrt] = (1 - betas[1] ** step) ** 0.5
    row[Control.step] = step
    return torch.tensor(row, dtype=torch.float32, device=device)
