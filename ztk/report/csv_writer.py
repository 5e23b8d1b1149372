"""CSV logger: `metrics.csv` and `samples.csv` in the run folder, one line per row of `metrics.jsonl` and per sampled text."""

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ztk.core.policies.records import replace_file

METRICS, SAMPLES = "metrics.csv", "samples.csv"


class CsvWriter:
    """Writes each row immediately. A missing key becomes an empty field, and a new key becomes a new last column."""

    notice: str | None = None

    def __init__(self, *, directory: str, first_step: int) -> None:
        self._metrics = _Table(Path(directory, METRICS), last_step=first_step)
        self._samples = _Table(Path(directory, SAMPLES), last_step=first_step)

    def row(self, row: Mapping[str, Any]) -> None:
        """See `ztk.report.tracker.Writer`."""
        self._metrics.write([row])

    def texts(self, records: Sequence[Mapping[str, Any]], *, step: int) -> None:
        """See `ztk.report.tracker.Writer`."""
        self._samples.write([{"step": step} | dict(record) for record in records])

    def finish(self, summary: Mapping[str, Any], *, failed: bool) -> None:
        """Does nothing: every line is written already, and `summary.json` has the summary."""


class _Table:
    """A CSV file with the column `step`. last_step: later lines of an existing file are dropped."""

    def __init__(self, path: Path, *, last_step: int) -> None:
        self._path = path
        self._columns: list[str] = []
        if not path.exists():
            return
        with open(path, newline="", encoding="utf-8") as file:
            read = csv.DictReader(file)
            self._columns = list(read.fieldnames or ())
            # A line that a kill has truncated has None in its last fields.
            kept = [row for row in read if None not in row.values() and int(row["step"]) <= last_step]
        self._replace(kept)

    def write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Appends the rows. Rewrites the file if they have new keys."""
        new = [key for key in dict.fromkeys(key for row in rows for key in row) if key not in self._columns]
        if new:
            kept = self._read()
            self._columns += new
            self._replace(kept)
        with open(self._path, "a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, self._columns, restval="", lineterminator="\n").writerows(rows)

    def _read(self) -> list[dict[str, str]]:
        if not self._path.exists():
            return []
        with open(self._path, newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))

    def _replace(self, rows: Sequence[Mapping[str, Any]]) -> None:
        text = io.StringIO()
        writer = csv.DictWriter(text, self._columns, restval="", lineterminator="\n")
        if self._columns:
            writer.writeheader()
        writer.writerows(rows)
        replace_file(self._path, text=text.getvalue())
