"""One item of `scripts/check_gpus.py` on all its ranks; rank 0 writes one JSON object into --out.

    python scripts/gpus_rank.py identity bf16 --ranks 2 --device cuda --out FILE [--shared]

Without RANK in the environment the script starts itself on all ranks. --shared: all ranks use the first GPU, and their collectives use gloo
through main memory, because NCCL allows one rank per GPU.
"""

import argparse
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts import gpu_item
from ztk.core.launch import run_ranks
from ztk.core.runtime import Process
from ztk.core.runtime.comm.gloo import GlooTransport
from ztk.core.runtime.comm.transport import SeparateMemory, SingleRankTransport, Transport

LAYOUTS = ("0 none", "1 none", "2 none", "3 none", "1 cpu", "3 cpu")


class HostedGloo(SeparateMemory):
    """Gloo collectives for tensors on any device, through copies in main memory."""

    blocking = True
    checks_labels = False

    def __init__(self, *, group: dist.ProcessGroup) -> None:
        self._gloo = GlooTransport(group=group)

    def all_gather(self, full: Tensor, *, label: str) -> None:
        here = full.cpu()
        self._gloo.all_gather(here, label=label)
        full.copy_(here)

    def reduce_scatter(self, full: Tensor, *, out: Tensor, label: str) -> None:
        here = torch.empty(out.shape, dtype=out.dtype)
        self._gloo.reduce_scatter(full.cpu(), out=here, label=label)
        out.copy_(here)

    def all_to_all(self, source: Tensor, *, out: Tensor, label: str) -> None:
        here = torch.empty(out.shape, dtype=out.dtype)
        self._gloo.all_to_all(source.cpu(), out=here, label=label)
        out.copy_(here)

    def all_to_all_uneven(
        self, source: Tensor, *, out: Tensor, send: Sequence[int], receive: Sequence[int], label: str
    ) -> None:
        here = torch.empty(out.shape, dtype=out.dtype)
        self._gloo.all_to_all_uneven(source.cpu(), out=here, send=send, receive=receive, label=label)
        out.copy_(here)

    def broadcast(self, tensor: Tensor, *, source: int, label: str) -> None:
        here = tensor.cpu()
        self._gloo.broadcast(here, source=source, label=label)
        tensor.copy_(here)

    def send(self, tensor: Tensor, *, to: int, label: str) -> None:
        self._gloo.send(tensor.cpu(), to=to, label=label)

    def recv(self, out: Tensor, *, source: int, label: str) -> None:
        here = torch.empty(out.shape, dtype=out.dtype)
        self._gloo.recv(here, source=source, label=label)
        out.copy_(here)

    def close(self) -> None:
        self._gloo.close()


def hosted(group: dist.ProcessGroup, **_: object) -> Transport:
    """Replaces the choice of a transport by device."""
    return SingleRankTransport() if group.size() == 1 else HostedGloo(group=group)


def identity(process: Process, *, precision: str) -> dict:
    """Digests of losses and final weights over the same ranks, per stage and tier. They are equal for optimizers in the same memory."""
    on_gpu = process.device.type == "cuda"
    config, micro_batch, seq_len, steps = (gpu_item.SMALL, 4, 256, 10) if on_gpu else (gpu_item.TINY, 2, 64, 3)
    digests = {}
    for layout in LAYOUTS:
        stage, tier = layout.split()
        engine = gpu_item.build(config, process=process, precision=precision, stage=int(stage), tier=tier)
        stream = gpu_item.batches(
            config, micro_batch=micro_batch, seq_len=seq_len, device=process.device, rank=process.rank
        )
        losses = torch.stack([gpu_item.train_step(engine, *next(stream)) for _ in range(steps)]).cpu()
        bits = hashlib.sha256(losses.numpy().tobytes())
        for _, parameter in sorted(engine.zero.full_parameters()):
            bits.update(parameter.cpu().contiguous().view(torch.uint8).numpy().tobytes())
        digests[layout] = bits.hexdigest()
        engine.close()
    return {"digests": digests}


def volume(process: Process) -> dict:
    """Counted bytes of a rank's collectives in one step per byte of bf16 parameters: 2 at stages 0 to 2, 3 at stage 3."""
    on_gpu = process.device.type == "cuda"
    config, seq_len = (gpu_item.SMALL, 256) if on_gpu else (gpu_item.TINY, 64)
    counted = {}
    for stage in range(4):
        engine = gpu_item.build(config, process=process, precision="bf16", stage=stage)
        stream = gpu_item.batches(config, micro_batch=2, seq_len=seq_len, device=process.device, rank=process.rank)
        for _ in range(2):  # the first step records the order of uses
            process.comm.counters.reset()
            gpu_item.train_step(engine, *next(stream))
        moved = process.comm.counters.bytes
        total = sum(moved.get(kind, 0) for kind in ("all_gather", "reduce_scatter", "all_reduce"))
        counted[str(stage)] = total / (2 * engine.num_parameters)
        engine.close()
    return {"counted": counted}


def main() -> None:
    options = parse()
    if "RANK" not in os.environ:
        start(options)
        return
    with mock.patch("ztk.core.runtime.comm.connect._transport", hosted) if options.shared else nullcontext():
        process = Process.start(device=options.device)
        match options.item, options.arguments:
            case "identity", [precision]:
                answer = identity(process, precision=precision)
            case "volume", []:
                answer = volume(process)
            case "overlap", [contender]:
                answer = gpu_item.overlap(process, contender=contender)
            case "speed", [contender]:
                answer = gpu_item.speed(process, contender=contender)
            case _:
                raise SystemExit(f"{options.item} does not take {options.arguments}")
        if process.rank == 0:
            Path(options.out).write_text(json.dumps(answer))
        process.stop()


def start(options: argparse.Namespace) -> None:
    """Runs this script on every rank."""
    ranks = options.ranks
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(
            [sys.executable, *sys.argv],
            ranks=ranks,
            threads=max(1, (os.cpu_count() or 1) // ranks),
            output_dir=folder,
            places=[0] * ranks if options.shared else None,
        )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("item", choices=("identity", "volume", "overlap", "speed"))
    parser.add_argument("arguments", nargs="*")
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--shared", action="store_true", help="all ranks on the first GPU, collectives over gloo")
    parser.add_argument("--out", required=True, help="file that rank 0 writes")
    return parser.parse_args()


if __name__ == "__main__":
    main()
