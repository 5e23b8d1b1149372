"""AdamW in main memory next to the same operations in torch's teams of threads. An item of `scripts/gpu_item.py`."""

import os
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ztk.core.runtime import Process
from ztk.kernels import adamw
from ztk.kernels.shared.adam import _NEVER
from ztk.kernels.shared.control import Control
from ztk.kernels.shared.cpu import UPDATE_PIECE
from ztk.kernels.shared.flat import control_row

ROUNDS = 4  # by turns; the first is not counted
BYTES = 28  # that a step reads and writes per element


def host_update(process: Process) -> dict:
    """Shortest seconds of a step by ztk's workers and by torch's teams, for each number of threads, and the workers' bytes per second.

    Raises:
        RuntimeError: their bits differ.
    """
    numel = 1 << (28 if process.device.type == "cuda" else 20)
    cores, before = os.cpu_count() or 1, torch.get_num_threads()
    states = {"workers": make(numel), "teams": make(numel)}
    control = control_row(step=1_000_000)  # whose corrections of the bias are 1
    steps: dict[str, Callable[[], None]] = {
        "workers": partial(by_workers, states["workers"], control=control),
        "teams": partial(by_teams, states["teams"], control=control.tolist()),
    }
    found = {}
    try:
        for threads in sorted({cores, max(1, cores * 3 // 4), max(1, cores // 2)}):
            torch.set_num_threads(threads)
            spent: dict[str, list[float]] = {name: [] for name in steps}
            for number in range(ROUNDS):
                for name in sorted(steps, reverse=number % 2 == 1):
                    start = time.perf_counter()
                    steps[name]()
                    spent[name].append(time.perf_counter() - start)
            for name, seconds in spent.items():
                found[f"{name}_{threads}"] = min(seconds[1:])
    finally:
        torch.set_num_threads(before)
    if not all(torch.equal(tensor, states["teams"][name]) for name, tensor in states["workers"].items()):
        raise RuntimeError("workers and teams of threads have different bits")
    rate = BYTES * numel / min(seconds for name, seconds in found.items() if name.startswith("workers"))
    return {"elements": numel, "bytes_per_second": rate} | found


def make(numel: int) -> dict[str, Tensor]:
    """A partition with random values that repeat: to draw all of them takes longer than the steps."""
    generator, drawn = torch.Generator().manual_seed(0), min(numel, 1 << 20)
    states = {
        name: torch.randn(drawn, generator=generator).abs_().repeat(numel // drawn)
        for name in ("master", "exp_avg", "exp_avg_sq")
    }
    grad = torch.randn(drawn, generator=generator).bfloat16().repeat(numel // drawn)
    return states | {"grad": grad, "out": torch.zeros(numel, dtype=torch.bfloat16)}


def by_workers(states: dict[str, Tensor], *, control: Tensor) -> None:
    """One step, called as training calls it."""
    adamw(states["master"], **{name: tensor for name, tensor in states.items() if name != "master"}, control=control)


def by_teams(states: dict[str, Tensor], *, control: list[float]) -> None:
    """Four operations per piece, each divided between all threads. control: with bias corrections of 1."""
    c = control
    p, m, v = (states[name] for name in ("master", "exp_avg", "exp_avg_sq"))
    wide = torch.empty(UPDATE_PIECE)
    for start in range(0, p.numel(), UPDATE_PIECE):
        cut = slice(start, start + UPDATE_PIECE)
        g = wide[: p[cut].numel()].copy_(states["grad"][cut]).mul_(c[Control.grad_coefficient])
        torch._fused_adamw_(
            [p[cut]], [g], [m[cut]], [v[cut]], [], [_NEVER], lr=c[Control.lr], beta1=c[Control.beta1], beta2=c[Control.beta2],
            weight_decay=c[Control.weight_decay], eps=c[Control.eps], amsgrad=False, maximize=False,
        )  # fmt: skip
        states["out"][cut].copy_(p[cut])
