"""Loggers that get a run's rows in addition to its folder: wandb, TensorBoard or a CSV file. Their errors never stop a run."""

import csv
import io
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ztk.core.policies.records import replace_file
from ztk.core.policies.train import TrackerPolicy


class Writer(Protocol):
    """One logger of one run. notice: a message to the user, printed once."""

    notice: str | None

    def row(self, row: Mapping[str, Any]) -> None:
        """Logs one row of `metrics.jsonl`."""

    def texts(self, records: Sequence[Mapping[str, Any]], *, step: int) -> None:
        """Logs the table `samples` of `step`: records with equal keys."""

    def finish(self, summary: Mapping[str, Any], *, failed: bool) -> None:
        """Ends the log. summary: the content of `summary.json`."""


class Tracker:
    """The logger of a run. After its first error, which becomes `notice`, the run continues without it."""

    def __init__(self, policy: TrackerPolicy, *, directory: str, first_step: int = 0) -> None:
        """directory: the run folder. first_step: the last recorded step of the run that continues; later ones are dropped."""
        self.notice: str | None = None
        self._name = "wandb" if policy.mode in ("offline", "online") else policy.mode
        self._writer: Writer | None = None
        try:
            self._writer = _opened(policy, directory=directory, first_step=first_step)
            self.notice = self._writer.notice
        except Exception as error:  # noqa: BLE001 - a broken logger must not break a run
            self._give_up(error)

    def row(self, row: Mapping[str, Any]) -> None:
        """See `Writer`."""
        self._attempt(lambda writer: writer.row(row))

    def texts(self, records: Sequence[Mapping[str, Any]], *, step: int) -> None:
        """See `Writer`."""
        self._attempt(lambda writer: writer.texts(records, step=step))

    def finish(self, summary: Mapping[str, Any], *, failed: bool) -> None:
        """See `Writer`."""
        self._attempt(lambda writer: writer.finish(summary, failed=failed))
        self._writer = None

    def _attempt(self, action: Callable[[Writer], None]) -> None:
        if self._writer is None:
            return
        try:
            action(self._writer)
        except Exception as error:  # noqa: BLE001 - as above
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._writer = None
        self.notice = f"{self._name}: off for the rest of this run ({type(error).__name__}: {error})"


def _opened(policy: TrackerPolicy, *, directory: str, first_step: int) -> Writer:
    """Opens the chosen logger. The others are not imported."""
    if policy.mode == "tensorboard":
        return TensorboardWriter(policy.config, directory=directory, first_step=first_step)
    if policy.mode == "csv":
        return CsvWriter(directory=directory, first_step=first_step)
    labels = {"project": policy.project, "group": policy.group, "name": policy.name, "job_type": policy.job_type}
    return WandbWriter(policy.config, directory=directory, mode=str(policy.mode), labels=labels)


# CSV logger: `metrics.csv` and `samples.csv` in the run folder, one line per row of `metrics.jsonl` and per sampled text.

METRICS, SAMPLES = "metrics.csv", "samples.csv"


class CsvWriter:
    """Writes each row immediately. A missing key becomes an empty field, and a new key becomes a new last column."""

    notice: str | None = None

    def __init__(self, *, directory: str, first_step: int) -> None:
        self._metrics = _Table(Path(directory, METRICS), last_step=first_step)
        self._samples = _Table(Path(directory, SAMPLES), last_step=first_step)

    def row(self, row: Mapping[str, Any]) -> None:
        """See `Writer`."""
        self._metrics.write([row])

    def texts(self, records: Sequence[Mapping[str, Any]], *, step: int) -> None:
        """See `Writer`."""
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


# TensorBoard logger: event files in the folder `tensorboard` of the run folder.

FOLDER = "tensorboard"


class TensorboardWriter:
    """Writes every number of a row as a scalar, and the configuration, samples and the summary as texts.

    A run that continues or restarts adds another event file to the folder. Its first event tells TensorBoard to drop later steps of older
    files.
    """

    notice: str | None = None

    def __init__(self, config: Mapping[str, Any], *, directory: str, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # slow to import

        self._events = SummaryWriter(str(Path(directory, FOLDER)), purge_step=first_step + 1)
        self._events.add_text("config", _code(config), global_step=first_step)

    def row(self, row: Mapping[str, Any]) -> None:
        """See `Writer`."""
        for key, value in row.items():
            if key != "step" and isinstance(value, int | float):
                self._events.add_scalar(key, value, global_step=row["step"])
        self._events.flush()

    def texts(self, records: Sequence[Mapping[str, Any]], *, step: int) -> None:
        """See `Writer`."""
        rows = [
            list(records[0]),
            ["---"] * len(records[0]),
            *([record[name] for name in records[0]] for record in records),
        ]
        lines = ["| " + " | ".join(_cell(value) for value in row) + " |" for row in rows]
        self._events.add_text("samples", "\n".join(lines), global_step=step)

    def finish(self, summary: Mapping[str, Any], *, failed: bool) -> None:
        """See `Writer`."""
        self._events.add_text("summary", _code(summary), global_step=summary.get("steps"))
        self._events.close()


def _code(values: Mapping[str, Any]) -> str:
    """Formats a markdown code block: its lines begin with four spaces."""
    text = json.dumps(dict(values), indent=2, default=str)
    return "\n".join(f"    {line}" for line in text.splitlines())


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")


# wandb logger: offline by default, without prompts.


class WandbWriter:
    """One wandb run, below the run folder or on the server."""

    def __init__(
        self, config: Mapping[str, Any], *, directory: str, mode: str, labels: Mapping[str, str | None]
    ) -> None:
        """labels: the project, group, name and job_type of the run."""
        import wandb  # slow to import

        self.notice: str | None = None
        if mode == "online" and not _logged_in():
            mode = "offline"
            self.notice = "wandb: not logged in, so offline; upload later with `wandb sync`, or run `wandb login` once"
        self._run = wandb.init(
            mode=mode,
            dir=directory,
            config=dict(config),
            **labels,
            # No banners and no captured output, because ztk draws the progress bar.
            settings=wandb.Settings(silent=True, console="off"),
        )
        self._run.define_metric("*", step_metric="step")

    def row(self, row: Mapping[str, Any]) -> None:
        """See `Writer`."""
        self._run.log(dict(row), step=row["step"])

    def texts(self, records: Sequence[Mapping[str, Any]], *, step: int) -> None:
        """See `Writer`."""
        columns = list(records[0])
        rows = [[record[name] for name in columns] for record in records]
        import wandb

        self._run.log({"samples": wandb.Table(columns=columns, data=rows)}, step=step)

    def finish(self, summary: Mapping[str, Any], *, failed: bool) -> None:
        """See `Writer`."""
        self._run.summary.update(dict(summary))
        self._run.finish(exit_code=int(failed))


def _logged_in() -> bool:
    """Returns whether a key is stored, without prompting for one."""
    import wandb

    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        return bool(wandb.login(prompt=False))
    except TypeError:  # a wandb version without `prompt` would ask
        return False
