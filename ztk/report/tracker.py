"""wandb beside the run folder: offline by default, without prompts; its errors never stop a run."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

# `tracker_mode` words: offline writes files under the run folder, online uploads, disabled imports nothing.
MODES = ("offline", "online", "disabled")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackerPolicy:
    """What is sent to wandb about a run.

    group: the sweep that the run belongs to; name: its overrides, joined; job_type: its task; config: every option,
    resolved.

    Raises:
        ValueError: an unknown mode.
    """

    mode: str = "offline"
    project: str = "ztk"
    group: str | None = None
    name: str | None = None
    job_type: str | None = None
    config: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"logger.mode={self.mode}: must be one of {', '.join(MODES)}")


class WandbTracker:
    """One wandb run. An error of wandb is stored in `notice` once, and the run goes on without it."""

    def __init__(self, policy: TrackerPolicy, *, directory: str | os.PathLike) -> None:
        self.notice: str | None = None
        self._run = None
        try:
            self._start(policy, directory=os.fspath(directory))
        except Exception as error:  # noqa: BLE001 - a broken tracker must not break a run
            self._give_up(error)

    def row(self, row: Mapping[str, Any]) -> None:
        self._attempt(lambda run: run.log(dict(row), step=row["step"]))

    def texts(self, records: Sequence[Mapping[str, Any]], *, step: int) -> None:
        """A table `samples` of records with equal keys, beside the row of `step`."""

        def send(run) -> None:
            import wandb

            columns = list(records[0])
            rows = [[record[name] for name in columns] for record in records]
            run.log({"samples": wandb.Table(columns=columns, data=rows)}, step=step)

        self._attempt(send)

    def finish(self, summary: Mapping[str, Any], *, failed: bool) -> None:
        def end(run) -> None:
            run.summary.update(dict(summary))
            run.finish(exit_code=int(failed))

        self._attempt(end)
        self._run = None

    def _start(self, policy: TrackerPolicy, *, directory: str) -> None:
        import wandb  # here, because it costs a second and only rank 0 uses it

        mode = policy.mode
        if mode == "online" and not _logged_in(wandb):
            mode = "offline"
            self.notice = "wandb: not logged in, so offline; upload later with `wandb sync`, or run `wandb login` once"
        self._run = wandb.init(
            mode=mode,
            dir=directory,
            project=policy.project,
            group=policy.group,
            name=policy.name,
            job_type=policy.job_type,
            config=dict(policy.config),
            settings=wandb.Settings(
                silent=True, console="off"
            ),  # no banners and no captured output: ztk draws the progress bar
        )
        self._run.define_metric("*", step_metric="step")

    def _attempt(self, action) -> None:
        if self._run is None:
            return
        try:
            action(self._run)
        except Exception as error:  # noqa: BLE001 - as above
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._run = None
        self.notice = f"wandb: off for the rest of this run ({type(error).__name__}: {error})"


def _logged_in(wandb) -> bool:
    """Whether a key is stored, without a prompt."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        return bool(wandb.login(prompt=False))
    except TypeError:  # a wandb without `prompt`: it would ask
        return False
