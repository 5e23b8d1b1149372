"""Arguments, measuring processes, memory and CPU seconds, tables, and rows of results of the benchmarks."""

import argparse
import ctypes
import datetime
import gc
import json
import os
import platform
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.table import Table

from scripts.results import RESULTS, commit_of

ROOT = Path(__file__).resolve().parents[1]


def parser_of(doc: str) -> argparse.ArgumentParser:
    """A parser with a script's docstring as its help."""
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


# Processes


class Worker:
    """A process that answers each line of JSON on its standard input by one on its standard output."""

    def __init__(self, *command: str | Path, environment: Mapping[str, str], cwd: str | None = None) -> None:
        self._log = tempfile.TemporaryFile()
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._log, "text": True}
        self._process: Any = subprocess.Popen(list(map(str, command)), env=dict(environment), cwd=cwd, **pipes)

    def send(self, **task: object) -> None:
        with suppress(BrokenPipeError):  # `receive` raises the error of a process that has ended
            self._process.stdin.write(json.dumps(task) + "\n")
            self._process.stdin.flush()

    def receive(self) -> Any:
        """Raises RuntimeError with the end of the output if the process has ended."""
        if line := self._process.stdout.readline():
            return json.loads(line)
        self._log.seek(0)
        raise RuntimeError(self._log.read().decode(errors="replace")[-4000:] or "the process ended")

    def close(self) -> None:
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()


def measured_apart(*command: object, **environment: str) -> Any:
    """Runs a command in a process of its own. Returns the JSON of the last line that it prints."""
    done = subprocess.run(
        list(map(str, command)), stdout=subprocess.PIPE, text=True, check=True, env=os.environ | environment
    )
    return json.loads(done.stdout.splitlines()[-1])


def rotated(items: Sequence[Any], *, by: int) -> list[Any]:
    """The items in turn: from number `by` on, then the first ones."""
    place = by % max(1, len(items))
    return [*items[place:], *items[:place]]


# Memory and CPU seconds


def status_bytes(*keys: str, pid: int | str = "self") -> int:
    """The sum of values of /proc/PID/status, such as VmRSS."""
    lines = (line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return 1024 * sum(int(words[1]) for words in lines if words and words[0].rstrip(":") in keys)


def release_memory() -> None:
    """Frees garbage, and returns the memory that malloc keeps: otherwise it would hide a later growth."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


class Peak:
    """`with Peak(read) as peak:` samples `read()`; afterwards `peak.value` is the largest value inside the block."""

    def __init__(self, read: Callable[[], int], *, seconds: float = 0.002) -> None:
        self._read, self._seconds, self._ended = read, seconds, threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self.value = 0

    def _sample(self) -> None:
        while not self._ended.wait(self._seconds):
            self.value = max(self.value, self._read())

    def __enter__(self) -> "Peak":
        self.value = self._read()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self.value = max(self.value, self._read())


def timed(call: Callable[[], object]) -> tuple[float, float]:
    """Seconds of the clock and CPU seconds of this process, with all threads."""
    start, cpu = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - start, time.process_time() - cpu


# Tables and rows


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *, left: Sequence[str] = ()) -> Table:
    """A table for the terminal. left: columns of texts; the others are aligned to the right."""
    made = Table(title=title or None)
    for column in columns:
        made.add_column(column, justify="left" if column in left else "right")
    for row in rows:
        made.add_row(*row)
    return made


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    return "\n".join(f"| {' | '.join(line)} |" for line in (columns, ["---"] * len(columns), *rows))


def append_rows(path: Path | str, rows: Iterable[Mapping[str, object]], **origin: object) -> None:
    """Appends a line of JSON per row, with date, commit and `origin`. path: a file, or the name of one in experiments/results/cpu."""
    common = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit_of(ROOT),
        "machine": f"{platform.machine()} {os.cpu_count()} cores",
    } | origin
    path = path if isinstance(path, Path) else RESULTS / "cpu" / f"{path}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps(common | dict(row)) + "\n" for row in rows)
