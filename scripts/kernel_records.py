"""Writes an offline wandb run and a picture of rows about kernels, next to the file of the rows.

Each row becomes a step of the run, so wandb shows every column over the ops; the picture has a bar per row.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from ztk.report.tracker import Tracker, TrackerPolicy

INCHES_PER_BAR = 0.18


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """title: name of the picture and of the run. column: value of the bars. line: an optional value to compare them with."""

    title: str
    column: str
    line: float | None = None

    def write(self, rows: Sequence[Mapping[str, Any]], *, folder: Path, name: str, labels: Sequence[str]) -> Path:
        """Writes `folder/name.png` and `name.svg`, and a run below `folder/wandb` unless WANDB_MODE=disabled. labels: one per row. Rows without
        the column have no bar. Returns the picture's path."""
        self._log(rows, folder=folder, labels=labels)
        shown = [
            (label, row[self.column]) for label, row in zip(labels, rows, strict=True) if row[self.column] is not None
        ]
        path = folder / f"{name}.png"
        with matplotlib.rc_context({"font.size": 8, "axes.spines.top": False, "axes.spines.right": False}):
            figure = Figure(figsize=(9, 1.2 + INCHES_PER_BAR * len(shown)), layout="constrained")
            axes = figure.subplots()
            axes.barh([label for label, _ in shown], [value for _, value in shown], color="#4477aa")
            axes.invert_yaxis()
            axes.set_xlabel(self.column.replace("_", " "))
            axes.set_title(self.title)
            axes.margins(y=0.01)
            if self.line is not None:
                axes.axvline(self.line, color="#ee6677", linewidth=1)
            figure.savefig(path, dpi=120)
            figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})
        return path

    def _log(self, rows: Sequence[Mapping[str, Any]], *, folder: Path, labels: Sequence[str]) -> None:
        mode = os.environ.get("WANDB_MODE", "offline")
        if mode == "disabled":
            return
        tracker = Tracker(TrackerPolicy(mode=mode, name=self.title, job_type="kernels"), directory=str(folder))
        for step, (label, row) in enumerate(zip(labels, rows, strict=True)):
            tracker.row(
                {"step": step, "label": label, **{key: value for key, value in row.items() if value is not None}}
            )
        tracker.finish({"rows": len(rows)}, failed=False)
        if tracker.notice:
            print(tracker.notice)
