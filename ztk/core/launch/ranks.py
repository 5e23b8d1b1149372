"""Starts the ranks of one run on this machine as child commands; they find each other through a file store (no port, no race)."""

import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ztk.core.launch.errors import FAILURES, RankError, first_cause, forget_failure, log_path, read_failure
from ztk.core.launch.processes import Child, run_children


def run_ranks(
    command: Sequence[str],
    *,
    ranks: int,
    threads: int,
    output_dir: str | os.PathLike,
    places: Sequence[int] | None = None,
    drain_seconds: float = 0.0,
    save_seconds: float = 0.0,
    on_signal: Callable[[], None] | None = None,
    debug: int | None = None,
    cores: Sequence[tuple[int, ...]] | None = None,
) -> None:
    """Runs `command` once per rank and returns when all have ended well.

    places: `LOCAL_RANK`, and so the GPU, of each rank. Defaults to the rank's number. drain_seconds, save_seconds, on_signal: see
    `run_children`.

    Environment of a rank: `RANK`, `LOCAL_RANK`, `WORLD_SIZE`, `LOCAL_WORLD_SIZE`, `ZTK_STORE` (path of the file store),
    `OMP_NUM_THREADS`, and `allocator_settings`. Rank 0 has the terminal, the others write `ranks/rank{r}.log` in `output_dir`.
    debug: the rank that has the terminal and the keyboard in place of rank 0. cores: cores of each rank. Defaults to all of this process.

    Raises RankError with the first cause when a rank fails, KeyboardInterrupt after SIGINT, SystemExit(128 + signal)
    after SIGTERM and SIGHUP. In every case all ranks have ended before.
    """
    Path(output_dir, "ranks").mkdir(parents=True, exist_ok=True)
    for rank in range(ranks):
        forget_failure(output_dir, rank=rank)
    with _store() as store, _memory() as memory:
        children = [
            Child(
                rank=rank,
                command=command,
                environment=_environment(
                    rank,
                    place=rank if places is None else places[rank],
                    ranks=ranks,
                    threads=threads,
                    store=store,
                    memory=memory,
                ),
                log=None if rank == (debug or 0) else log_path(output_dir, rank=rank),
                cores=None if cores is None else cores[rank],
                has_keyboard=rank == debug,
            )
            for rank in range(ranks)
        ]
        failures = run_children(
            children,
            failure_of=lambda rank: read_failure(output_dir, rank=rank, memory=memory),
            drain_seconds=drain_seconds,
            save_seconds=save_seconds,
            on_signal=on_signal or (lambda: None),
        )
    if failures:
        cause = first_cause(failures)
        killed = tuple(failure.rank for failure in failures if failure.killed)
        raise RankError(cause, log=str(log_path(output_dir, rank=cause.rank)), killed=killed)


@contextmanager
def _store() -> Iterator[str]:
    """The path of the ranks' store. On Linux it is an unnamed file, which disappears with this process."""
    if Path("/proc/self/fd").is_dir():
        with tempfile.TemporaryFile() as file:
            yield f"/proc/{os.getpid()}/fd/{file.fileno()}"
    else:
        with tempfile.TemporaryDirectory(prefix="ztk_") as folder:
            yield os.path.join(folder, "store")


@contextmanager
def _memory() -> Iterator[str | None]:
    """The path of a file in this process's memory, which takes errors of ranks when the disk is full. None except on Linux."""
    if not hasattr(os, "memfd_create"):
        yield None
        return
    with open(os.memfd_create("ztk-failures"), "rb") as file:
        yield f"/proc/{os.getpid()}/fd/{file.fileno()}"


def worker_command(config_path: str | os.PathLike) -> list[str]:
    """The command that starts one rank of the run that `config_path` describes."""
    return [sys.executable, "-m", "ztk.worker", os.fspath(config_path)]


def python_path(*extra: str | os.PathLike) -> str:
    """PYTHONPATH for a child: `extra` first, then the folder that contains ztk, then the current value."""
    checkout = Path(__file__).resolve().parents[3]
    # pyrefly: ignore[incompatible-overload-argument]  # os.fspath of str is str
    return os.pathsep.join([*map(os.fspath, extra), str(checkout), *filter(None, [os.environ.get("PYTHONPATH")])])


def allocator_settings() -> dict[str, str]:
    """Environment of a rank: expandable segments of GPU memory, so that buffers of changing sizes leave no unusable gaps.
    Empty if the user has configured torch's allocator."""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
    return {} if any(name in os.environ for name in names) else {names[0]: "expandable_segments:True"}


def _environment(rank: int, *, place: int, ranks: int, threads: int, store: str, memory: str | None) -> dict[str, str]:
    own = {
        "RANK": str(rank),
        "LOCAL_RANK": str(place),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "ZTK_STORE": store,
        "OMP_NUM_THREADS": str(threads),
        "PYTHONPATH": python_path(),
    }
    return os.environ | allocator_settings() | own | ({} if memory is None else {FAILURES: memory})
