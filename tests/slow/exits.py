"""Processes that end without `destroy()`, also by an exception, end as they should: no abort while threads are inside torch.

    python -m tests.slow.exits                       200 exits next to two busy processes per core, some minutes
    python -m tests.slow.exits --exits 12 --busy 0   few, in some seconds

Every exit is a fork of this process, in which torch is imported, that runs a script to its end and lets the interpreter end. Prints a line
per kind of script; exit code 1 if any process ended by a signal or with another code than its script's.
"""

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import partial

import torch
import torch._dynamo  # the scripts would import these one by one, seconds each
import torch.distributed
from torch import nn

from ztk.deepspeed.serving.entry import init_inference
from ztk.deepspeed.start.entry import initialize

WIDTH, LIMIT_SECONDS = 1024, 120


def model() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))


def train(*, fails: bool = False, stage: int = 3) -> None:
    """Everything in main memory at stage 3: the last update runs on when the script ends."""
    tier = {"device": "cpu"}
    zero = {"stage": stage} | ({"offload_optimizer": tier, "offload_param": tier} if stage == 3 else {})
    section = {"type": "AdamW", "params": {"lr": 1e-3}}
    ds_config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero, "optimizer": section}
    engine, *_ = initialize(model=model(), config=ds_config)
    for _ in range(2):
        engine.backward(engine(torch.ones(1, WIDTH)).square().mean())
        engine.step()
    if fails and os.environ["RANK"] == "0":
        raise RuntimeError("as intended")


def infer() -> None:
    """Sharded inference with a forward that keeps a graph: units are gathered ahead when the script ends."""
    engine = init_inference(model(), config={"dtype": "fp32", "zero": {"stage": 3}})
    engine(torch.ones(1, WIDTH))


def reduce() -> None:
    """Gloo's thread may still hold the tensor of the last line's collective when the script ends."""
    train(stage=2)
    torch.distributed.all_reduce(torch.ones(10))


def fail() -> None:
    train(fails=True)


# kind -> (script, ranks, exit codes of rank 0)
KINDS: dict[str, tuple[Callable[[], None], int, int]] = {
    "train, 1 rank": (train, 1, 0),
    "train, 2 ranks": (train, 2, 0),
    "inference, 2 ranks": (infer, 2, 0),
    "stage 1, 2 ranks": (partial(train, stage=1), 2, 0),
    "a collective last, 2 ranks": (reduce, 2, 0),
    "error, 2 ranks": (fail, 2, 1),
}


def burn() -> None:
    while True:
        sum(range(10_000))


def start(kind: str, *, folder: str, number: int) -> list[int]:
    """The process ids of one run's ranks. A child returns an empty list: it has run its script, and only has to end."""
    script, world_size, _ = KINDS[kind]
    children = []
    for rank in range(world_size):
        if child := os.fork():
            children.append(child)
            continue
        log = os.open(f"{folder}/{number}.{rank}", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
        os.environ["LOCAL_WORLD_SIZE"], os.environ["ZTK_STORE"] = str(world_size), f"{folder}/{number}.store"
        script()
        return []
    return children


def wait(children: list[int]) -> list[str]:
    """How each ended, in rank order: its exit code or signal."""
    ended, deadline = {}, time.monotonic() + LIMIT_SECONDS
    while len(ended) < len(children):
        for child in children:
            if child not in ended and (status := os.waitpid(child, os.WNOHANG))[0]:
                code = os.waitstatus_to_exitcode(status[1])
                ended[child] = f"signal {-code}" if code < 0 else f"exit {code}"
            elif child not in ended and time.monotonic() > deadline:
                os.kill(child, 9)
        time.sleep(0.005)
    return [ended[child] for child in children]


def main() -> bool:
    """Whether all ended as they should; True in a child, whose own exit is looked at."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--exits", type=int, default=200, help="runs in all")
    parser.add_argument("--busy", type=int, default=2 * (os.cpu_count() or 1), help="busy processes next to them")
    options = parser.parse_args()
    torch.set_num_threads(1)
    busy = [multiprocessing.get_context("spawn").Process(target=burn, daemon=True) for _ in range(options.busy)]
    for process in busy:
        process.start()
    parent, wrong = os.getpid(), Counter()
    folder = tempfile.mkdtemp(prefix="ztk-exits-")
    for number in range(options.exits):
        kind = list(KINDS)[number % len(KINDS)]
        children = start(kind, folder=folder, number=number)
        if os.getpid() != parent:
            return True
        started = time.monotonic()
        ended = wait(children)
        print(f"{number}: {kind}: {', '.join(ended)} after {time.monotonic() - started:.1f} s", flush=True)
        expected = f"exit {KINDS[kind][2]}"
        # A rank whose peer failed may end by its own error.
        bad = ended[0] != expected or any(end not in (expected, "exit 0", "exit 1") for end in ended)
        if bad:
            wrong[kind] += 1
            print(f"{kind}: {', '.join(ended)}; see {folder}/{number}.*", flush=True)
    for process in busy:
        process.kill()
    for number, kind in enumerate(KINDS):
        runs = len(range(number, options.exits, len(KINDS)))
        print(f"{kind}: {runs - wrong[kind]} of {runs} ended as they should")
    return not wrong


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
