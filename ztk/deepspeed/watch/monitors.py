"""Events of a run, written to TensorBoard, wandb, Comet and CSV files by rank 0. An event is (name, value, step)."""

import csv
import importlib
import os
from collections.abc import Iterable
from pathlib import Path

import torch.distributed as dist

from ztk.deepspeed.config.keys import Findings
from ztk.deepspeed.config.watching import CometPolicy, FilesPolicy, MonitorPolicy, WandbPolicy, read_watching
from ztk.deepspeed.tools.log import logger

Event = tuple[str, float, int]


class MonitorMaster:
    """All monitors of a policy. Does nothing on ranks other than 0."""

    def __init__(self, monitor_config: MonitorPolicy) -> None:
        self.monitor_config, self.enabled = monitor_config, monitor_config.enabled
        self._monitors: list = []
        if dist.is_initialized() and dist.get_rank():
            return
        for policy, make in (
            (monitor_config.tensorboard, TensorBoardMonitor),
            (monitor_config.wandb, WandbMonitor),
            (monitor_config.comet, CometMonitor),
            (monitor_config.csv_monitor, CsvMonitor),
        ):
            if policy is not None:
                self._monitors.append(make(policy))

    def write_events(self, event_list: Iterable[Event]) -> None:
        """Writes events. When it returns, they are on the disk, or passed to wandb or Comet."""
        events = list(event_list)
        for monitor in self._monitors:
            monitor.write_events(events)

    def close(self) -> None:
        for monitor in self._monitors:
            monitor.close()


def get_monitor_config(config: dict) -> MonitorPolicy:
    """Returns the monitors of a configuration. Raises DeepSpeedConfigError."""
    findings = Findings()
    watching = read_watching(config, findings=findings)
    findings.check()
    return watching.monitors


class CsvMonitor:
    """One file per event name in output_path/job_name, with the columns step and value."""

    def __init__(self, policy: FilesPolicy) -> None:
        self._folder = Path(policy.output_path, policy.job_name)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._begun: set[Path] = set()

    def write_events(self, events: Iterable[Event]) -> None:
        for name, value, step in events:
            path = self._folder / f"{name.replace('/', '_').replace(' ', '_')}.csv"
            with path.open("a", newline="") as file:
                writer = csv.writer(file)
                if path not in self._begun:
                    self._begun.add(path)
                    writer.writerow(["step", name.rpartition("/")[2]])
                writer.writerow([step, value])

    def close(self) -> None:
        """Does nothing: files are closed after every event."""


class TensorBoardMonitor:
    """Scalars in output_path/job_name."""

    def __init__(self, policy: FilesPolicy) -> None:
        module = importlib.import_module("torch.utils.tensorboard")
        self._writer = module.SummaryWriter(log_dir=os.path.join(policy.output_path, policy.job_name))

    def write_events(self, events: Iterable[Event]) -> None:
        for event in events:
            self._writer.add_scalar(*event)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbMonitor:
    """One run of wandb. Offline without a login, because a job cannot answer a prompt."""

    def __init__(self, policy: WandbPolicy) -> None:
        wandb = importlib.import_module("wandb")  # optional, and slow to import
        mode = os.environ.get("WANDB_MODE")
        if mode is None and not os.environ.get("WANDB_API_KEY") and not wandb.login(prompt=False):
            mode = "offline"
            logger.warning("wandb: not logged in, so offline; upload later with `wandb sync`")
        self._run = wandb.init(project=policy.project, group=policy.group, entity=policy.team, mode=mode)

    def write_events(self, events: Iterable[Event]) -> None:
        for name, value, step in events:
            self._run.log({name: value}, step=step)

    def close(self) -> None:
        self._run.finish()


class CometMonitor:
    """One experiment of Comet. An event is logged if enough samples, according to the policy, have passed since its name's last event."""

    def __init__(self, policy: CometPolicy) -> None:
        comet = importlib.import_module("comet_ml")  # optional
        self._experiment = comet.start(
            api_key=policy.api_key,
            project=policy.project,
            workspace=policy.workspace,
            experiment_key=policy.experiment_key,
            mode=policy.mode,
            online=policy.online,
        )
        if policy.experiment_name is not None:
            self._experiment.set_name(policy.experiment_name)
        self._interval, self._last = policy.samples_log_interval, {}

    def write_events(self, events: Iterable[Event]) -> None:
        for name, value, step in events:
            if name not in self._last or step - self._last[name] >= self._interval:
                self._last[name] = step
                self._experiment.log_metric(name, value, step=step)

    def close(self) -> None:
        self._experiment.end()
