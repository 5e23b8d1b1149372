"""Loggers that get a run's rows in addition to its folder: wandb, TensorBoard or a CSV file. Their errors never stop a run."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

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
        from ztk.report.tensorboard_writer import TensorboardWriter

        return TensorboardWriter(policy.config, directory=directory, first_step=first_step)
    if policy.mode == "csv":
        from ztk.report.csv_writer import CsvWriter

        return CsvWriter(directory=directory, first_step=first_step)
    from ztk.report.wandb_writer import WandbWriter

    labels = {"project": policy.project, "group": policy.group, "name": policy.name, "job_type": policy.job_type}
    return WandbWriter(policy.config, directory=directory, mode=str(policy.mode), labels=labels)
