"""Compares checkpoints of ztk and torch.distributed.checkpoint: stall, bytes, load time and peak memory.

    python scripts/bench_checkpoints.py [FOLDER] [--ranks 2] [--rounds 5] [--layers 10]

Both train the same fp32 decoder with AdamW on the same ranks. ztk runs stage 3 and saves synchronously and asynchronously. FSDP2 uses torch's
`save`, `async_save` and `load` on its sharded state_dict. They take turns in every round. Each writes 12 bytes per parameter to FOLDER and
syncs the files; the previous checkpoint is removed outside the measurement. "stand-still" is the time until training may continue. "done" is
the time until the checkpoint is complete on disk. Peak memory is the growth of the resident set during a load.

With --nvme: ztk with all states on NVMe, where a save copies nothing. A save costs the duration of `save` plus the delay of the next two
steps, because an asynchronous save reads and writes during them.
"""

import random
import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.bench import Peak, parser_of, release_memory, status_bytes, timed
from tests.ranks import RankPool
from ztk.checkpoint import Saver, load, save
from ztk.core.policies.zero import ZeroPolicy
from ztk.core.runtime import Process
from ztk.nn import Decoder, DecoderConfig
from ztk.optim import OptimizerPolicy
from ztk.parallel.apply import parallelize
from ztk.zero.offload import OffloadPolicy


def config_of(layers: int) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=256,
        dim=512,
        layers=layers,
        heads=8,
        kv_heads=4,
        hidden_dim=1408,
        max_seq_len=128,
        tie_embeddings=True,
    )


class Ztk:
    """Stage 3, saved by `ztk.checkpoint`."""

    def __init__(self, process: Process, *, layers: int, folder: Path) -> None:
        torch.manual_seed(0)
        self.engine = parallelize(
            Decoder(config_of(layers)), process=process, optimizer=OptimizerPolicy(lr=1e-3), zero=ZeroPolicy(stage=3)
        )
        self.folder = folder
        self.saver = Saver(self.engine, folder=folder, asynchronous=True)

    def save(self) -> None:
        save(self.engine, folder=self.folder)

    def start_save(self) -> None:
        self.saver.save()

    def finish_save(self) -> None:
        self.saver.wait()

    def load(self) -> None:
        load(self.engine, path=self.folder)


class Torch:
    """FSDP2, saved by torch.distributed.checkpoint."""

    def __init__(self, process: Process, *, layers: int, folder: Path) -> None:
        torch.manual_seed(0)
        mesh = init_device_mesh("cpu", (process.world_size,))
        self.model = Decoder(config_of(layers))
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        tokens = torch.zeros(1, 8, dtype=torch.int64)
        self.model(tokens, tokens).backward()
        self.optimizer.step()  # the moments exist from the first step on
        self.optimizer.zero_grad()
        self.folder, self.group = folder, dist.new_group(backend="gloo")
        self.pending: Any = None

    def _state(self) -> dict:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer}

    def _writer(self) -> dcp.FileSystemWriter:
        return dcp.FileSystemWriter(self.folder / "dcp", sync_files=True)

    def save(self) -> None:
        dcp.save(self._state(), storage_writer=self._writer())

    def start_save(self) -> None:
        self.pending = dcp.async_save(self._state(), storage_writer=self._writer(), process_group=self.group)

    def finish_save(self) -> None:
        assert self.pending is not None
        self.pending.result()

    def load(self) -> None:
        state = self._state()
        dcp.load(state, storage_reader=dcp.FileSystemReader(self.folder / "dcp"))
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])


Found = dict[tuple[str, str], float]  # contender and subject -> median


def measure(process: Process, *, rounds: int, layers: int, folder: Path) -> tuple[Found, int]:
    """On a rank: medians, and the number of parameters."""
    contenders = {
        name: kind(process, layers=layers, folder=folder / name) for name, kind in (("ztk", Ztk), ("torch", Torch))
    }
    found: dict[tuple[str, str], list[float]] = defaultdict(list)

    def note(name: str, what: str, call: Callable[[], None]) -> None:
        process.comm.barrier()
        found[name, what].append(timed(call)[0])

    def empty(path: Path) -> None:
        process.comm.barrier()
        if process.rank == 0:
            shutil.rmtree(path, ignore_errors=True)
        process.comm.barrier()

    for round_number in range(rounds + 1):
        names = list(contenders)
        random.Random(round_number).shuffle(names)
        for name in names:
            contender = contenders[name]
            empty(contender.folder)
            note(name, "save, stall until complete", contender.save)
            process.comm.barrier()
            found[name, "bytes on disk (MB)"].append(_size(contender.folder) / 1e6)
            release_memory()
            before = status_bytes("VmRSS")
            with Peak(lambda: status_bytes("VmRSS")) as peak:
                note(name, "load", contender.load)
            found[name, "load, peak memory (MB)"].append((peak.value - before) / 1e6)
            empty(contender.folder)
            process.comm.barrier()
            start = time.perf_counter()
            note(name, "async save, stand-still", contender.start_save)
            contender.finish_save()
            found[name, "async save, done"].append(time.perf_counter() - start)
        if round_number == 0:
            found.clear()  # first touches of memory and files
    for contender in contenders.values():
        empty(contender.folder)
    # pyrefly: ignore[missing-attribute]  # the contender "ztk" has an engine
    parameters = contenders["ztk"].engine.zero.num_parameters
    return {key: statistics.median(values) for key, values in found.items()}, parameters


def measure_nvme(process: Process, *, rounds: int, layers: int, folder: Path) -> tuple[Found, int]:
    """Measures synchronous and asynchronous saves with states on NVMe. Returns the same as `measure`."""
    torch.manual_seed(0)
    engine = parallelize(
        Decoder(config_of(layers)),
        process=process,
        optimizer=OptimizerPolicy(lr=1e-3),
        zero=ZeroPolicy(stage=3),
        offload=OffloadPolicy(optimizer="nvme", parameters="nvme", nvme_path=str(folder)),
    )
    tokens = torch.randint(256, (1, 64))

    def two_steps() -> None:
        for _ in range(2):
            engine.backward(engine(tokens, tokens))
            engine.step()

    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for round_number in range(rounds + 1):
        for asynchronous in (False, True):
            name = "async" if asynchronous else "sync"
            with Saver(engine, folder=folder / name, asynchronous=asynchronous) as saver:
                plain, _ = timed(two_steps)
                start = time.perf_counter()
                saver.save()
                found[name, "save() takes"].append(time.perf_counter() - start)
                found[name, "a save costs"].append(found[name, "save() takes"][-1] + timed(two_steps)[0] - plain)
                saver.wait()
                found[name, "async save: until complete on disk"].append(time.perf_counter() - start)
        if round_number == 0:
            found.clear()  # first touches of memory and files
    return {key: statistics.median(values) for key, values in found.items()}, engine.zero.num_parameters


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("folder", nargs="?", default=tempfile.gettempdir())
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--nvme", action="store_true", help="the cost of saves with states on NVMe; FOLDER is the disk")
    parser.add_argument("--layers", type=int, default=10, help="2.9M parameters each")
    options = parser.parse_args()
    pool = RankPool(options.ranks, seconds=3600)
    with tempfile.TemporaryDirectory(prefix="ztk-bench-", dir=options.folder) as place:
        given = {"rounds": options.rounds, "layers": options.layers, "folder": Path(place)}
        results = pool.run(measure_nvme if options.nvme else measure, **given)
        pool.close()
    parameters = results[0][1]
    print(
        f"{parameters:,} parameters, 12 bytes of state each: {12 * parameters / 1e6:.1f} MB, {options.ranks} ranks, medians"
    )
    one, other = ("async", "sync") if options.nvme else ("ztk", "torch")
    print(f"{'':32}{one:>10}{other:>10}   {other} / {one}")
    for what in dict.fromkeys(what for _, what in results[0][0]):
        first, second = (max(result[0][name, what] for result in results) for name in (one, other))
        print(f"{what:32}{first:10.3f}{second:10.3f}{second / max(first, 1e-9):11.2f}")


if __name__ == "__main__":
    main()
