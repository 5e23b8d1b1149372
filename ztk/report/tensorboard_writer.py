"""TensorBoard logger: event files in the folder `tensorboard` of the run folder."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

FOLDER = "tensorboard"


class TensorboardWriter:
    """Writes every number of a row as a scalar, and the configuration, samples and the summary as texts.

    A run that continues or restarts adds another event file to the folder. Its first event tells TensorBoard to drop later steps of older
    files.
    """

    notice: str | None = None

    def __init__(self, config: Mapping[str, Any], *, directory: str, first_step: int) -> None:
        self._events = SummaryWriter(str(Path(directory, FOLDER)), purge_step=first_step + 1)
        self._events.add_text("config", _code(config), global_step=first_step)

    def row(self, row: Mapping[str, Any]) -> None:
        """See `ztk.report.tracker.Writer`."""
        for key, value in row.items():
            if key != "step" and isinstance(value, int | float):
                self._events.add_scalar(key, value, global_step=row["step"])
        self._events.flush()

    def texts(self, records: Sequence[Mapping[str, Any]], *, step: int) -> None:
        """See `ztk.report.tracker.Writer`."""
        rows = [
            list(records[0]),
            ["---"] * len(records[0]),
            *([record[name] for name in records[0]] for record in records),
        ]
        lines = ["| " + " | ".join(_cell(value) for value in row) + " |" for row in rows]
        self._events.add_text("samples", "\n".join(lines), global_step=step)

    def finish(self, summary: Mapping[str, Any], *, failed: bool) -> None:
        """See `ztk.report.tracker.Writer`."""
        self._events.add_text("summary", _code(summary), global_step=summary.get("steps"))
        self._events.close()


def _code(values: Mapping[str, Any]) -> str:
    """Formats a markdown code block: its lines begin with four spaces."""
    text = json.dumps(dict(values), indent=2, default=str)
    return "\n".join(f"    {line}" for line in text.splitlines())


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")
