"""wandb logger: offline by default, without prompts."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import wandb


class WandbWriter:
    """One wandb run, below the run folder or on the server."""

    def __init__(
        self, config: Mapping[str, Any], *, directory: str, mode: str, labels: Mapping[str, str | None]
    ) -> None:
        """labels: the project, group, name and job_type of the run."""
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
        """See `ztk.report.tracker.Writer`."""
        self._run.log(dict(row), step=row["step"])

    def texts(self, records: Sequence[Mapping[str, Any]], *, step: int) -> None:
        """See `ztk.report.tracker.Writer`."""
        columns = list(records[0])
        rows = [[record[name] for name in columns] for record in records]
        self._run.log({"samples": wandb.Table(columns=columns, data=rows)}, step=step)

    def finish(self, summary: Mapping[str, Any], *, failed: bool) -> None:
        """See `ztk.report.tracker.Writer`."""
        self._run.summary.update(dict(summary))
        self._run.finish(exit_code=int(failed))


def _logged_in() -> bool:
    """Returns whether a key is stored, without prompting for one."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        return bool(wandb.login(prompt=False))
    except TypeError:  # a wandb version without `prompt` would ask
        return False
