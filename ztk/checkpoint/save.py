"""Saves checkpoints.

Phases: agree on a temporary folder, write this rank's slices, agree, commit on rank 0, agree. An asynchronous save only copies the slices
to main memory before training continues; the rest runs on one thread per rank, which communicates over its own connections. If every node
has its own folder, the first rank of each node does rank 0's part there ([Note: Own folders]).
"""

import contextlib
import errno
import fcntl
import json
import logging
import os
import secrets
import threading
import time
import weakref
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ztk.checkpoint import folder as folders
from ztk.checkpoint.architecture import describe_model
from ztk.checkpoint.bits import BLOCK_BYTES
from ztk.checkpoint.errors import SaveFailed, agreed
from ztk.checkpoint.folder import Retention
from ztk.checkpoint.groups import gather_groups
from ztk.checkpoint.manifest import MANIFEST, Manifest, encode_manifest
from ztk.checkpoint.model import ModelInfo, control_values
from ztk.checkpoint.nodes import Nodes, check_own, spread_file
from ztk.checkpoint.shardfile import Append, ShardSource, Staging, describe_file, open_file
from ztk.checkpoint.tensorfile import TensorFileWriter
from ztk.checkpoint.torch_optimizer import gather_missed, gather_progress
from ztk.core.policies.records import OWN_RECORD
from ztk.core.runtime import Comm, Tier
from ztk.core.runtime.comm import connect
from ztk.core.runtime.ending import end_with_process, forget
from ztk.core.runtime.sections import SAVE, section
from ztk.train.engine import Engine

logger = logging.getLogger(__name__)

# The children of a killed process inherit the lock; a data loader's worker ends within 5 s after its parent.
PATIENCE_SECONDS = 7.0
_UNSUPPORTED = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS}


class WriterLock:
    """An advisory lock on the folder itself (flock(2)). It needs no lock file, and the system releases it with the process.

    Raises:
        SaveFailed: another run, or another `Saver` of this process, holds the lock.
        OSError: the folder cannot be opened.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._end = weakref.finalize(self, os.close, self._fd)  # if the `Saver` is dropped without `close`
        try:
            self._acquire(folder)
        except BaseException:
            self.release()
            raise

    def _acquire(self, folder: Path) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise SaveFailed(
                        f"another run or engine is saving checkpoints into {folder}; give this one a folder of its own "
                        "(hydra.run.dir on the command line, save_dir or tag in a script), or end the other"
                    ) from None
            except OSError as error:
                if error.errno not in _UNSUPPORTED:
                    raise
                logger.warning("%s: no file locks here (%s); see that one run alone saves into it", folder, error)
                return
            time.sleep(0.05)

    def release(self) -> None:
        """Releases the lock. Idempotent."""
        self._end()


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveReport:
    """A completed save.

    stall_seconds: time for which this rank's training waited. seconds: time until the checkpoint was the latest.
    nbytes: size of this rank's file. total_nbytes: size of all files.
    """

    path: Path
    step: int
    nbytes: int
    total_nbytes: int
    stall_seconds: float
    seconds: float
    removed: tuple[Path, ...] = ()


@dataclass(kw_only=True)
class _Job:
    """A save in progress."""

    temporary: Path
    token: str
    draft: dict[str, Any]  # the manifest without the list of files
    source: ShardSource
    writer: TensorFileWriter
    started: float
    stall_seconds: float = 0.0
    is_committed: bool = False  # in this node's own folder
    read: threading.Event | None = (
        None  # set once the state has been read; training waits for it before it changes the state
    )


class Saver:
    """Saves an engine's checkpoints into one folder. Every rank creates one and makes the same calls.

    From its first save to `close` no other `Saver` may save into the folder. A failed save raises SaveFailed on all ranks: a synchronous
    one immediately, an asynchronous one at the next `save` or `wait`.

    asynchronous: training continues after the state is copied to main memory. The copy has the size of the rank's state and counts in the
    engine's ledger. Optimizer states on NVMe are not copied: they are read and written during the next forward and backward, and the next
    update waits for the reads.
    trained_only: omits frozen parameters, for example with an adapter. A load then keeps the model's own.
    local: every node has its own folder, which gets the files of the node's ranks; see [Note: Own folders].
    """

    def __init__(
        self,
        engine: Engine,
        *,
        folder: str | Path,
        retention: Retention | None = None,
        asynchronous: bool = False,
        trained_only: bool = False,
        local: bool = False,
        timeout_seconds: float = 600.0,
        record: str | None = None,
    ) -> None:
        """timeout_seconds: how long a background save waits for the slowest rank. record: the run's configuration, kept as `run.yaml` in
        every checkpoint.
        """
        self._engine, self._folder = engine, Path(folder)
        self._retention = retention or Retention()
        self._process = process = engine.process
        self._trained_only, self._timeout_seconds = trained_only, timeout_seconds
        self._record = record
        self._local = local
        self._nodes: Nodes | None = None  # if `local`, from the first save on
        self._staging = Staging()
        self._lock: WriterLock | None = None  # on rank 0, or the first rank of a node, from the first save to `close`
        self._thread: threading.Thread | None = None
        self._job: _Job | None = None  # running on the thread
        self._outcome: SaveReport | Exception | None = None
        self._background: Comm | None = None
        self.stall_seconds = 0.0  # summed over all saves
        if asynchronous:
            self._background = connect(
                device=torch.device("cpu"),
                one_node=process.local_world_size == process.world_size,
                timeout_seconds=timeout_seconds,
            )

    @property
    def is_busy(self) -> bool:
        """Whether a background save is in progress."""
        return self._thread is not None and self._thread.is_alive()

    def save(self, *, data_state: Any = None, extra: Any = None, metric: float | None = None) -> SaveReport | None:
        """Saves the engine after its last optimizer step.

        Returns None if the save continues in the background; `wait` then returns its report.

        data_state, extra: JSON values, the same on all ranks; `load` returns them.
        metric: for `keep_best`; smaller is better.

        Raises:
            SaveFailed: on all ranks, if this save or the asynchronous one before it failed on any.
            RuntimeError: inside `engine.averaged()`.
            ValueError: between micro-batches of a step, and for values that JSON lacks.
        """
        with section(SAVE, detail=f"the save of step {self._engine.global_steps}"):
            return self._saved(data_state=data_state, extra=extra, metric=metric)

    def _saved(self, *, data_state: Any, extra: Any, metric: float | None) -> SaveReport | None:
        started = time.perf_counter()
        draft = self._draft(data_state=data_state, extra=extra, metric=metric)
        try:
            self.wait()
            job = self._open(draft, started=started)
            if self._background is None:
                return self._finish(job, stream=job.source.stream, comm=self._process.comm)
            self._stage(job)
            job.stall_seconds += time.perf_counter() - started
            self._job = job
            self._thread = threading.Thread(target=self._finish_behind, args=(job,), name="ztk-checkpoint", daemon=True)
            # Finishes a started save even if the script ends without `close`.
            end_with_process(self._thread, end=partial(self._thread.join, self._timeout_seconds))
            self._thread.start()
            return None
        finally:
            self.stall_seconds += time.perf_counter() - started

    @property
    def is_saving(self) -> bool:
        """Whether a background save is under way."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> SaveReport | None:
        """Waits for the background save, if there is one, and returns its report once.

        Raises:
            SaveFailed: the save failed.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        outcome, self._outcome = self._outcome, None
        if isinstance(outcome, Exception):
            raise outcome
        if outcome is None:
            return None
        assert self._job is not None, "an outcome is a job's"
        return replace(outcome, stall_seconds=self._job.stall_seconds)

    def close(self) -> SaveReport | None:
        """Waits for a running save, closes the background connections and releases the folder. Idempotent."""
        try:
            with section(SAVE, detail="the last background save"):
                return self.wait()
        finally:
            if self._background is not None:
                self._background.close()
                self._background = None
            self._unlock()
            self._book(-self._staging.nbytes)
            self._staging = Staging()

    def __enter__(self) -> "Saver":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        try:
            self.close()
        except Exception as failure:
            if error is None:
                raise
            error.add_note(f"and then: {failure}")  # the first error stays the one that is raised

    # Phases

    def _draft(self, *, data_state: Any, extra: Any, metric: float | None) -> dict[str, Any]:
        """Returns the checked manifest without the list of files."""
        engine = self._engine
        engine.zero.averaged.check_hidden("a checkpoint")
        if engine.micro_steps % engine.accumulation_steps:
            raise ValueError(
                f"the engine is after micro-batch {engine.micro_steps % engine.accumulation_steps} of "
                f"{engine.accumulation_steps} of a step; save after a step() that returned True"
            )
        for name, value in (("data_state", data_state), ("extra", extra), ("metric", metric)):
            try:
                json.dumps(value, allow_nan=False)
            except (TypeError, ValueError) as error:
                raise ValueError(f"{name}={value!r:.200} cannot be stored as JSON: {error}") from error
        zero = engine.zero
        return {
            "step": engine.global_steps,
            "created": time.time(),
            "versions": {"torch": torch.__version__},
            "world_size": self._process.world_size,
            "layout": {
                "stage": zero.policy.stage,
                "bucket_size": zero.policy.bucket_size,
                "tiers": zero.tiers,
                "dtype": str(zero.dtype).removeprefix("torch."),
                "topology": asdict(self._process.mesh.topology),
                "states": zero.kept_states,
                "dynamic_loss_scale": engine.control.scaling.dynamic,
            },
            "state_names": list(zero.state_names),
            "control": control_values(engine.control.state),
            "counters": {
                "micro_steps": engine.micro_steps,
                "global_steps": engine.global_steps,
                "accumulation_steps": engine.accumulation_steps,
            },
            "data": data_state,
            "extra": extra,
            "metric": metric,
            "block_bytes": BLOCK_BYTES,
        }

    def _open(self, draft: dict[str, Any], *, started: float) -> _Job:
        """Opens an empty file per rank in one temporary folder, or in its node's."""
        comm, rank = self._process.comm, self._process.rank
        info = ModelInfo.gather(self._engine)
        listed = [own for own in info.parameters if own.trainable or not self._trained_only]
        draft |= {
            "tied": info.tied,
            "parameters": listed,
            "left_out": [own.name for own in info.parameters if own not in listed],
            "buffers": info.buffers,
            "model": describe_model(self._engine.module),
            "groups": gather_groups(self._engine),
            "torch_optimizer": gather_progress(self._engine),
            "missed_updates": gather_missed(self._engine),
        }
        step, temporary, writer = draft["step"], None, None
        number = folders.free_number(self._folder, step=step) if self._keeps or self._local else 1
        offers = comm.gather_objects((secrets.token_hex(4), self._folder, number))
        (token, folder, _), number = offers[0], max(number for _, _, number in offers)
        try:
            if self._local:
                draft["layout"]["hosts"] = self._find_nodes(token=token).hosts
                folder = self._folder
            temporary = folders.temporary_of(folder, step=step, number=number, token=token)
            with agreed(comm, error=SaveFailed):
                if self._keeps:
                    self._lock = self._lock or WriterLock(folder)
                    folders.prepare(temporary)
                    if self._record is not None:
                        folders.write_file(temporary / OWN_RECORD, data=self._record.encode())
            with agreed(comm, error=SaveFailed):
                source = ShardSource(self._engine, buffers=info.own_buffers, trained_only=self._trained_only)
                writer = open_file(temporary, rank=rank, specs=source.specs)
        except SaveFailed as error:
            if writer is not None:
                writer.close()
            raise self._failed(error, step=step, temporary=temporary, comm=comm) from error
        return _Job(temporary=temporary, token=token, draft=draft, source=source, writer=writer, started=started)

    @property
    def _keeps(self) -> bool:
        """Whether this rank makes, commits and prunes a folder."""
        return self._process.rank == 0 if self._nodes is None else self._nodes.is_first

    def _find_nodes(self, *, token: str) -> Nodes:
        """Finds the ranks that share a folder, once. A collective call. token: the same on all ranks."""
        if self._nodes is None:
            comm = self._process.comm
            nodes = Nodes.of(comm, self._folder, error=SaveFailed)
            check_own(self._folder, nodes=nodes, comm=comm, token=token, error=SaveFailed)
            self._nodes = nodes
        return self._nodes

    def _stage(self, job: _Job) -> None:
        """Secures the state, so that the engine may change it: copies it to main memory, or makes the engine wait for the reads."""
        source = job.source
        try:
            with agreed(self._process.comm, error=SaveFailed):
                if (
                    self._engine.zero.tiers["optimizer"] == Tier.nvme
                ):  # a copy would defeat the purpose of this tier, which is to save main memory
                    source.keep_small()
                    job.read = threading.Event()
                    self._engine.zero.state.before_change(partial(self._await_reading, job))
                else:
                    self._book(-self._staging.nbytes)
                    self._staging.open(source.specs)
                    self._book(self._staging.nbytes)
                    source.stream(self._staging.append)
        except BaseException as error:
            job.writer.close()
            if job.read is not None:
                job.read.set()  # so that training does not wait for a read that will not come
            if not isinstance(error, SaveFailed):
                raise
            raise self._failed(
                error, step=job.draft["step"], temporary=job.temporary, comm=self._process.comm
            ) from error

    def _finish_behind(self, job: _Job) -> None:
        stream = self._staging.stream if job.read is None else partial(self._read_behind, job)
        try:
            self._outcome = self._finish(job, stream=stream, comm=self._background)
        except Exception as error:
            self._outcome = error
        finally:
            forget(threading.current_thread())

    def _read_behind(self, job: _Job, append: Append) -> None:
        try:
            job.source.stream(append, aside=True)
        finally:
            assert job.read is not None
            job.read.set()

    def _await_reading(self, job: _Job) -> None:
        """Called by the engine before it changes its state."""
        started = time.perf_counter()
        assert job.read is not None
        job.read.wait()
        seconds = time.perf_counter() - started
        job.stall_seconds += seconds
        self.stall_seconds += seconds

    def _finish(self, job: _Job, *, stream, comm: Comm) -> SaveReport:
        """Writes the opened file and commits the checkpoint."""
        try:
            with agreed(comm, error=SaveFailed):
                stream(job.writer.append)
                job.writer.finish()
            own = describe_file(job.writer, slices=list(job.source.slices.values()))
            files = comm.collect_objects(own, label="files of a save")  # 1 GB of 405B on 1,024 ranks: not to every rank
            with agreed(comm, error=SaveFailed):
                if files is not None:
                    folders.write_file(
                        job.temporary / MANIFEST, data=encode_manifest(Manifest(**job.draft, files=files))
                    )
                    if self._nodes is None:
                        folders.commit(job.temporary)
            if self._nodes is not None:
                spread_file(job.temporary / MANIFEST, nodes=self._nodes, comm=comm, error=SaveFailed)
                with agreed(comm, error=SaveFailed):
                    if self._keeps:
                        folders.commit(job.temporary)
                        job.is_committed = True
            sizes = comm.gather_numbers([job.writer.nbytes], label="bytes of files", dtype=torch.int64)
        except SaveFailed as error:
            if job.is_committed:  # and not on another node
                with contextlib.suppress(OSError):
                    folders.withdraw(folders.final_of(job.temporary), token=job.token)
            raise self._failed(error, step=job.draft["step"], temporary=job.temporary, comm=comm) from error
        finally:
            job.writer.close()
        path = folders.final_of(job.temporary)
        removed = self._prune(path, job=job, comm=comm)
        seconds = time.perf_counter() - job.started
        return SaveReport(
            path=path,
            step=job.draft["step"],
            nbytes=job.writer.nbytes,
            total_nbytes=sum(int(nbytes) for (nbytes,) in sizes),
            stall_seconds=job.stall_seconds or seconds,
            seconds=seconds,
            removed=removed,
        )

    def _prune(self, path: Path, *, job: _Job, comm: Comm) -> tuple[Path, ...]:
        removed: list[Path] = []
        try:
            with agreed(comm, error=SaveFailed):
                if self._keeps:
                    removed = folders.prune(path, retention=self._retention, token=job.token)
        except SaveFailed as error:
            raise SaveFailed(f"{path} is saved, but older checkpoints could not be removed: {error}") from error
        return tuple(removed)

    def _failed(self, error: SaveFailed, *, step: int, temporary: Path | None, comm: Comm) -> SaveFailed:
        """Removes the partial checkpoint. Returns the error, extended by the usable checkpoints. A collective call."""
        if self._keeps and temporary is not None and temporary.exists():
            with contextlib.suppress(OSError):  # the next save tries again, and the original error is more useful
                folders.discard(temporary, token="")
        self._unlock()  # an open folder prevents a full disk from being unmounted
        comm.barrier()
        failure = SaveFailed(f"the checkpoint of step {step} was not saved: {error}; {folders.usable(self._folder)}")
        failure.step = step
        return failure

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _book(self, nbytes: int) -> None:
        ledger, amount = self._engine.memory, abs(nbytes)
        (ledger.add if nbytes >= 0 else ledger.remove)(tier=Tier.host, category="checkpoint staging", nbytes=amount)


def save(
    engine: Engine,
    *,
    folder: str | Path,
    data_state: Any = None,
    extra: Any = None,
    metric: float | None = None,
    keep: int | None = 2,
    keep_every: int = 0,
    keep_best: bool = False,
    trained_only: bool = False,
    local: bool = False,
) -> SaveReport:
    """Saves once, synchronously: `folder/step-000123/` and `folder/latest`. See `Saver` and `Retention`. A collective call."""
    retention = Retention(keep=keep, keep_every=keep_every, keep_best=keep_best)
    with Saver(engine, folder=folder, retention=retention, trained_only=trained_only, local=local) as saver:
        report = saver.save(data_state=data_state, extra=extra, metric=metric)
    assert report is not None, "a synchronous save reports"
    return report
