"""The run folder with all files of a run. Notebooks, sweeps and checks read only this folder.

This file and its imports need only the standard library, so that the process that starts the ranks can write a failed summary.
"""

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ztk.core.policies.records import replace_file

ENVIRONMENT, METRICS, SUMMARY = "env.json", "metrics.jsonl", "summary.json"
PACKED = ".packed"  # temporary packed weights; removed after the run, or by the next command if the run was killed
JOB = "slurm.json"  # the job that this run was submitted as
OPTIONS = "options.json"  # group -> chosen option, including groups that the command line does not name


class LineFile:
    """Appends lines to a file. A full disk ends nothing: lines wait in memory, and the next `write` tries again.

    notice: a message to the user after the first error, until it is taken.
    """

    def __init__(self, path: str | os.PathLike) -> None:
        self.notice: str | None = None
        self._path, self._waiting = Path(path), b""
        self._has_failed = False

    def write(self, lines: Iterable[str]) -> None:
        """Appends the lines, each without its end."""
        self._waiting += "".join(f"{line}\n" for line in lines).encode()
        try:
            self._append()
        except OSError as error:
            if not self._has_failed:
                self._has_failed = True
                self.notice = (
                    f"{self._path}: cannot be written ({error.strerror}); its lines wait in memory, and the run goes on"
                )

    def close(self) -> None:
        """Writes the lines that wait. Raises OSError if they cannot be written."""
        if self._waiting:
            self._append()

    def _append(self) -> None:
        fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        try:
            size, left = os.fstat(fd).st_size, memoryview(self._waiting)
            try:
                while left:
                    left = left[os.write(fd, left) :]
            except OSError:
                os.ftruncate(fd, size)  # no reader finds a part of a line
                raise
            self._waiting = b""
        finally:
            os.close(fd)


class RunFolder:
    """Writes the JSON files of one run. A file is replaced atomically; a row is written when `row` returns, see `LineFile`.

    JSON has no infinity and no NaN: they are written as null.
    """

    def __init__(self, path: str | os.PathLike) -> None:
        self.path = Path(path)
        self.path.mkdir(parents=True, exist_ok=True)
        self._metrics = LineFile(self.path / METRICS)

    def take_notice(self) -> str | None:
        """Returns a message to the user about rows that cannot be written, once."""
        notice, self._metrics.notice = self._metrics.notice, None
        return notice

    @property
    def checkpoints(self) -> Path:
        """The folder of the run's checkpoints."""
        return self.path / "checkpoints"

    @property
    def tokenizer(self) -> Path:
        """The folder of the run's tokenizer, if it has one."""
        return self.path / "tokenizer"

    def write_environment(self, values: Mapping[str, Any]) -> None:
        """Writes `env.json`."""
        write_json(self.path / ENVIRONMENT, values=values)

    def row(self, row: Mapping[str, Any]) -> None:
        """Appends one line to `metrics.jsonl`."""
        self._metrics.write([json.dumps(_finite(row), allow_nan=False)])

    def drop_rows_after(self, step: int) -> None:
        """Removes the rows of steps that a run resumed at `step` will repeat."""
        kept = [row for row in read_rows(self.path) if row["step"] <= step]
        text = "".join(json.dumps(row) + "\n" for row in kept)
        replace_file(self.path / METRICS, text=text)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Writes `summary.json`."""
        write_json(self.path / SUMMARY, values=summary)

    def close(self) -> None:
        """Raises OSError if rows are not written."""
        self._metrics.close()


def write_failed_summary(path: str | os.PathLike, *, error: str, status: str = "failed") -> None:
    """Records in `summary.json` that the run failed, or was refused, with the reason and the values of its rows.

    Works for a run that died before it wrote anything. If rank 0 has written a summary, its other keys are kept.
    """
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    rows = list(read_rows(folder))
    known = {"steps": rows[-1]["step"] if rows else 0}
    if rows:
        known |= {"first_loss": rows[0]["loss"], "final_loss": rows[-1]["loss"]}
    if (folder / SUMMARY).exists():
        known |= json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
    (folder / METRICS).touch()  # readers of a sweep expect every file in every folder
    write_json(folder / SUMMARY, values=known | {"status": str(status), "error": error})


def read_rows(path: str | os.PathLike) -> Iterator[dict[str, Any]]:
    """Yields the rows of a run folder's `metrics.jsonl`, except a last line truncated by a kill."""
    try:
        lines = (Path(path) / METRICS).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return
    for number, line in enumerate(lines):
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            if number != len(lines) - 1:
                raise


def write_json(path: str | os.PathLike, *, values: Mapping[str, Any]) -> None:
    """Writes the file atomically."""
    replace_file(Path(path), text=json.dumps(_finite(values), indent=2, allow_nan=False) + "\n")


def _finite(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in values.items()
    }
