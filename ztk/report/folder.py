"""The run folder with all files of a run. Notebooks, sweeps and checks read only this folder.

This file and its imports need only the standard library, so that the process that starts the ranks can write a failed summary.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ztk.core.policies.records import replace_file

ENVIRONMENT, METRICS, SUMMARY = "env.json", "metrics.jsonl", "summary.json"
PACKED = ".packed"  # temporary packed weights; removed after the run, or by the next command if the run was killed
OPTIONS = "options.json"  # group -> chosen option, including groups that the command line does not name


class RunFolder:
    """Writes the JSON files of one run. A file is replaced atomically; a row is written when `row` returns.

    JSON has no infinity and no NaN: they are written as null.
    """

    def __init__(self, path: str | os.PathLike) -> None:
        self.path = Path(path)
        self.path.mkdir(parents=True, exist_ok=True)
        self._metrics = None

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
        if self._metrics is None:
            self._metrics = open(self.path / METRICS, "a", buffering=1, encoding="utf-8")
        self._metrics.write(json.dumps(_finite(row), allow_nan=False) + "\n")

    def drop_rows_after(self, step: int) -> None:
        """Removes the rows of steps that a run resumed at `step` will repeat."""
        assert self._metrics is None, "rows are dropped before the first is written"
        kept = [row for row in read_rows(self.path) if row["step"] <= step]
        text = "".join(json.dumps(row) + "\n" for row in kept)
        replace_file(self.path / METRICS, text=text)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Writes `summary.json`."""
        write_json(self.path / SUMMARY, values=summary)

    def close(self) -> None:
        if self._metrics is not None:
            self._metrics.close()
            self._metrics = None


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
