"""A kill at any moment leaves a complete last checkpoint: ranks get SIGKILL at random moments around saves.

Every run continues the last one's folder under another random layout (stage, tier, number of ranks, synchronous or asynchronous saves), trains,
saves after each step, and loses a random rank at a random moment. Every sixth run loses it while ranks build, connect their savers and load.
Disk calls are delayed by random milliseconds, so that kills hit every moment of a save. After the kill:

* every complete checkpoint must verify to the last byte;
* the latest one must exist and be at least as new as the last save that a rank reported;
* loading it in the next run, in that run's layout, must give the state whose hash was taken before the save;
* the other ranks must end by themselves within 5 seconds.

100 kills; tests/checkpoint/test_kill.py makes some of them.
"""

import hashlib
import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path

import torch

from tests.ranks import forkserver
from ztk.checkpoint import CheckpointError, Retention, Saver, checkpoints, load, read_manifest, resolve
from ztk.checkpoint.verify import verify
from ztk.core.policies.zero import ZeroPolicy
from ztk.core.runtime import Process
from ztk.data import SyntheticStream
from ztk.data.stream import Share
from ztk.nn import Decoder, DecoderConfig
from ztk.optim import OptimizerPolicy
from ztk.parallel.apply import parallelize
from ztk.train.engine import Engine
from ztk.zero.offload import OffloadPolicy

MODEL = DecoderConfig(vocab_size=64, dim=32, layers=2, heads=2, kv_heads=2, hidden_dim=96, max_seq_len=32)
START_SECONDS, END_SECONDS = 90.0, 5.0
EARLY_SPAN_SECONDS = 0.3  # about the duration of building, connecting and loading
DISK_CALLS = ("pwrite", "fsync", "rename", "replace", "unlink", "rmdir")


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """How a run shards and saves."""

    ranks: int
    stage: int
    offload: str
    asynchronous: bool
    slow_seconds: float  # upper bound of the delay of a disk call
    killed_early: bool  # before the ranks train
    folder: str

    @staticmethod
    def draw(number: int, *, chance: random.Random, folder: Path) -> "Layout":
        return Layout(
            ranks=chance.choice((2, 2, 3)),
            stage=chance.randrange(4),
            offload=chance.choice(("none", "cpu", "nvme")),
            asynchronous=number % 2 == 1,
            slow_seconds=chance.choice((0.0, 0.005, 0.02)),
            killed_early=chance.randrange(6) == 0,
            folder=str(folder),
        )


# On a rank


def train_until_killed(rank: int, layout: Layout, store: str, pipe: Connection) -> None:
    """Loads, checks, then trains and saves. Sends the parent each loaded and saved step."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(layout.ranks), ZTK_STORE=store)
    torch.set_num_threads(1)
    try:
        process = Process.start(device="cpu", timeout_seconds=60)
        pipe.send(("joined", 0))
        with tempfile.TemporaryDirectory(dir=layout.folder, prefix="offload-") as scratch:
            engine = build_engine(process, layout=layout, scratch=scratch)
        saver = Saver(
            engine,
            folder=layout.folder,
            retention=Retention(keep=2),
            asynchronous=layout.asynchronous,
            timeout_seconds=60,
        )
        resume(engine, layout=layout, pipe=pipe)
        slow_down(layout.slow_seconds, seed=rank)
        train(engine, saver=saver, pipe=pipe)
    except BaseException as error:
        pipe.send(("error", f"{type(error).__name__}: {error}"))
    os._exit(1)


def build_engine(process: Process, *, layout: Layout, scratch: str) -> Engine:
    torch.manual_seed(0)
    return parallelize(
        Decoder(MODEL),
        process=process,
        optimizer=OptimizerPolicy(lr=1e-3),
        zero=ZeroPolicy(stage=layout.stage, bucket_size=8192),
        offload=OffloadPolicy(
            optimizer=layout.offload,
            parameters=layout.offload if layout.stage == 3 else "none",
            nvme_path=scratch if layout.offload == "nvme" else None,
            buffer_bytes=1 << 16,
            block_bytes=1 << 16,
            threads=1,
            direct_io=False,
        ),
    )


def resume(engine: Engine, *, layout: Layout, pipe: Connection) -> None:
    try:
        found = resolve(layout.folder)
    except CheckpointError:
        pipe.send(("ready", 0))
        return
    report = load(engine, path=found)
    assert state_hash(engine) == report.extra["hash"], (
        f"{report.path} was loaded with other values than it was saved with"
    )
    pipe.send(("ready", report.step))


def train(engine: Engine, *, saver: Saver, pipe: Connection) -> None:
    process = engine.process
    share = Share(micro_batch=1, rank=process.rank, world_size=process.world_size)
    stream = SyntheticStream(vocab_size=MODEL.vocab_size, seq_len=16, share=share, seed=0)
    while True:
        batch = stream.next_batch()
        engine.backward(engine(batch.tokens, batch.targets))
        engine.step()
        done = saver.wait()  # the report of the last background save, if there was one
        done = saver.save(extra={"hash": state_hash(engine)}) or done
        if done is not None:
            pipe.send(("saved", done.step))


def state_hash(engine: Engine) -> str:
    """The hash of all master weights and moments, in an order that is the same for all layouts."""
    own = [(shard.kind, shard.name, shard.start, shard.value.numpy().tobytes()) for shard in engine.zero.state.shards()]
    total = hashlib.sha256()
    for _, _, _, data in sorted(part for parts in engine.comm.gather_objects(own) for part in parts):
        total.update(data)
    return total.hexdigest()


def slow_down(seconds: float, *, seed: int) -> None:
    """Delays every disk call of this process by up to `seconds`, and each of the many writes of values by a twentieth of that."""
    chance = random.Random(seed)

    def slowed(call, *, most: float):
        def run(*args, **kwargs):
            time.sleep(chance.uniform(0, most))
            return call(*args, **kwargs)

        return run

    for name in DISK_CALLS:
        setattr(os, name, slowed(getattr(os, name), most=seconds / 20 if name == "pwrite" else seconds))


# In the parent


@dataclass(kw_only=True)
class Run:
    """The parent's record of one run."""

    layout: Layout
    trained: bool = False  # a rank finished loading
    loaded: int = 0  # first step of the run
    saved: int = 0  # last step that a rank reported as saved
    errors: list[str] = field(default_factory=list)  # of ranks, except the loss of the killed peer
    survivors_seconds: float = 0.0


def run_and_kill(layout: Layout, *, chance: random.Random) -> Run:
    """Starts the ranks, waits until they have loaded (or only joined), and kills one after a random time."""
    run, context = Run(layout=layout), forkserver()
    with tempfile.TemporaryDirectory() as place:
        processes, pipes = [], []
        for rank in range(layout.ranks):
            mine, theirs = context.Pipe()
            args = (rank, layout, os.path.join(place, "store"), theirs)
            processes.append(context.Process(target=train_until_killed, args=args, daemon=True))
            processes[-1].start()
            theirs.close()
            pipes.append(mine)
        awaited = "joined" if layout.killed_early else "ready"
        ready = [_receive(pipe, run=run, until=awaited, seconds=START_SECONDS) for pipe in pipes]
        if all(ready):
            span = EARLY_SPAN_SECONDS if layout.killed_early else 0.4 + 100 * layout.slow_seconds
            time.sleep(chance.uniform(0, span))
            processes[chance.randrange(layout.ranks)].kill()
        else:
            run.errors.append("the ranks did not start")
        _await_end(processes, run=run)
        for pipe in pipes:
            _receive(pipe, run=run, until="the end", seconds=0.1)
    return run


def _receive(pipe: Connection, *, run: Run, until: str, seconds: float) -> bool:
    """Receives a rank's messages up to one of the kind `until`. Returns False if the rank ended or a message took too long."""
    while wait([pipe], timeout=seconds):
        try:
            kind, value = pipe.recv()
        except (EOFError, OSError):
            return False
        if kind == "ready":
            run.loaded, run.trained = value, True
        elif kind == "saved":
            run.saved = max(run.saved, value)
        elif kind == "error" and not value.startswith("PeerLost"):
            run.errors.append(value)
        if kind == until:
            return True
    return False


def _await_end(processes: list, *, run: Run) -> None:
    start = time.perf_counter()
    while any(process.is_alive() for process in processes) and time.perf_counter() - start < END_SECONDS:
        time.sleep(0.01)
    run.survivors_seconds = time.perf_counter() - start
    if any(process.is_alive() for process in processes):
        run.errors.append(f"ranks were still there {END_SECONDS:g} s after the kill")
    for process in processes:
        if process.is_alive():
            os.kill(process.pid, signal.SIGKILL)
        process.join()


def moment_of_kill(folder: Path, *, before: set[str], run: Run) -> str:
    """The moment of the kill, from the folder's new files. `before`: the names before the run."""
    complete = {path.name: read_manifest(path).step for path in checkpoints(folder)}
    newest = max(complete.values(), default=0)
    fresh = [path for path in folder.iterdir() if path.name not in before]
    leftovers = [path for path in fresh if ".tmp-" in path.name]
    pointed = (folder / "latest").read_text().strip() if (folder / "latest").exists() else None
    unpointed = (
        complete and complete.get(pointed, 0) < newest and any(complete.get(path.name) == newest for path in fresh)
    )
    if unpointed or any(path.name.startswith("latest") for path in leftovers):
        return "between rename and pointer"
    for path in leftovers:
        if int(path.name[5:11]) <= newest:
            return "while an old checkpoint was removed"
        return "with the manifest written" if (path / "manifest.json").exists() else "while rank files were written"
    if run.layout.killed_early and not run.trained:
        return "before training"
    return "after a save, before its report" if newest > max(run.saved, run.loaded) else "between saves"


def judge(folder: Path, *, run: Run) -> list[str]:
    """The checks that fail after a kill."""
    faults = list(run.errors)
    for path in checkpoints(folder):
        faults += verify(path).faults
    try:
        step = read_manifest(resolve(folder)).step
    except CheckpointError as error:
        return faults if max(run.loaded, run.saved) == 0 else [*faults, str(error)]
    if step < max(run.loaded, run.saved):
        faults.append(f"the latest checkpoint has step {step}, but step {max(run.loaded, run.saved)} was saved")
    return faults


def kill_often(folder: Path, *, kills: int, show: Callable[[str], None] = print) -> list[str]:
    """Kills runs that continue each other in `folder`. Returns the faults."""
    chance, slowest, found = random.Random(0), 0.0, []
    moments: Counter[str] = Counter()
    for number in range(kills):
        layout = Layout.draw(number, chance=chance, folder=folder)
        before = {path.name for path in folder.iterdir()}
        run = run_and_kill(layout, chance=chance)
        moment = f"{'async' if layout.asynchronous else 'sync'}, {moment_of_kill(folder, before=before, run=run)}"
        moments[moment] += 1
        slowest = max(slowest, run.survivors_seconds)
        where = f"kill {number + 1}, {layout.ranks} ranks, stage {layout.stage}, {layout.offload}, {moment}, from step {run.loaded}"
        found += [f"{where}: {fault}" for fault in judge(folder, run=run)]
    show(f"{kills} kills; the other ranks ended within {slowest:.2f} s")
    for moment, count in sorted(moments.items()):
        show(f"{count:5} {moment}")
    return found


def test_a_kill_leaves_a_complete_checkpoint(tmp_path, show, amount):
    assert not kill_often(tmp_path, kills=amount(100), show=show)
