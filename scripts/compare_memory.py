"""Compares the CPU memory of a rank at stages 0 and 1 with DDP and with DDP and ZeroRedundancyOptimizer.

    python scripts/compare_memory.py               100 million parameters, AdamW, fp32, 2 ranks
    python scripts/compare_memory.py --layers 24   a quarter of the parameters

A resident set (Rss) counts the shared pages that a rank reads from other ranks' memory once per rank. The proportional set (Pss, from
/proc/self/smaps_rollup) divides each page by the number of its processes, so the sum over ranks is the machine's memory.
"""

import gc
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.bench import parser_of, table
from tests.ranks import RankPool
from ztk.core.policies.zero import ZeroPolicy
from ztk.core.runtime import Process
from ztk.optim import OptimizerPolicy
from ztk.parallel.apply import parallelize

WIDTH, ROWS, STEPS = 1024, 8, 3
KEYS = ("Rss", "Pss", "Private_Dirty", "Shared_Dirty", "Pss_Shmem", "Pss_File")


def build(layers: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))


def memory() -> dict[str, int]:
    """This process's current MiB by kind of page."""
    rows = (line.split() for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    found = {row[0].rstrip(":"): int(row[1]) // 1024 for row in rows}
    return {key: found.get(key, 0) for key in KEYS}


def of_ztk(process: Process, *, layers: int, stage: int) -> dict[str, int]:
    engine = parallelize(
        build(layers), process=process, optimizer=OptimizerPolicy(lr=1e-4), zero=ZeroPolicy(stage=stage)
    )
    return _train(engine, backward=engine.backward, step=engine.step)


def of_ddp(process: Process, *, layers: int, sharded: bool) -> dict[str, int]:
    model = DistributedDataParallel(build(layers))
    optimizer = (
        ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, lr=1e-4)
        if sharded
        else torch.optim.AdamW(model.parameters(), lr=1e-4)
    )

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return _train(model, backward=lambda loss: loss.backward(), step=step)


def _train(model: Callable, *, backward: Callable[[Tensor], object], step: Callable[[], object]) -> dict[str, int]:
    """Memory between the last backward and its step, while gradients exist."""
    for number in range(STEPS):
        backward(model(torch.randn(ROWS, WIDTH)).square().mean())
        if number < STEPS - 1:
            step()
    gc.collect()
    dist.barrier()
    found = memory()
    dist.barrier()
    step()
    return found


CASES = {
    "ztk, stage 0": partial(of_ztk, stage=0),
    "DDP": partial(of_ddp, sharded=False),
    "ztk, stage 1": partial(of_ztk, stage=1),
    "DDP, ZeroRedundancyOptimizer": partial(of_ddp, sharded=True),
}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--layers", type=int, default=96)
    options = parser.parse_args()
    rows = []
    for name, run in CASES.items():
        pool = RankPool(2)
        found = pool.run(run, layers=options.layers)[0]
        pool.close()
        rows.append([name, *(str(found[key]) for key in KEYS)])
    title = f"MiB of rank 0 of 2, {options.layers * WIDTH * (WIDTH + 1) / 1e6:.0f} M parameters"
    Console(width=140).print(table(title, ("", *KEYS), rows, left=("",)))


if __name__ == "__main__":
    main()
