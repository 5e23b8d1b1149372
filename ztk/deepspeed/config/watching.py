"""Measurements and output during a run: monitors, the FLOPs profiler, the communication log, timers."""

import importlib.util
from dataclasses import dataclass, field

from ztk.deepspeed.collectives.log import LogSwitches
from ztk.deepspeed.config.keys import (
    Findings,
    anything,
    at_least,
    boolean,
    one_of,
    optional,
    read_section,
    takes,
    text,
    whole_number,
)


def _texts(value: object) -> tuple[str, ...]:
    if isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value):
        return tuple(value)
    raise ValueError("must be a list of texts")


def _depth(value: object) -> int:
    try:
        return whole_number(-1)(value)
    except ValueError as error:
        raise ValueError(f"{error}; -1 is for the innermost modules") from None


_ON = {"enabled": takes(boolean)}
_FILES = {**_ON, "output_path": takes(text), "job_name": takes(text)}
SECTIONS = {
    "tensorboard": _FILES,
    "csv_monitor": _FILES,
    "wandb": {
        **_ON,
        **dict.fromkeys(("group", "team"), takes(optional(text))),
        "project": takes(text),
    },
    "comet": {
        **_ON,
        "samples_log_interval": takes(whole_number(1)),
        **dict.fromkeys(
            ("project", "workspace", "api_key", "experiment_name", "experiment_key"), takes(optional(text))
        ),
        "online": takes(optional(boolean)),
        "mode": takes(optional(one_of("get", "create", "get_or_create"))),
    },
    "flops_profiler": {
        **_ON,
        "recompute_fwd_factor": takes(at_least(0)),
        "profile_step": takes(whole_number(0)),
        "module_depth": takes(_depth),
        "top_modules": takes(whole_number(1)),
        "detailed": takes(boolean),
        "output_file": takes(optional(text)),
    },
    "comms_logger": {
        **_ON,
        **dict.fromkeys(("verbose", "prof_all", "debug"), takes(boolean)),
        "prof_ops": takes(_texts),
    },
    "timers": {"throughput": takes(anything)},
}
_THROUGHPUT = {"enabled": takes(boolean), "synchronized": takes(boolean)}
_NEEDS = {"tensorboard": "tensorboard", "wandb": "wandb", "comet": "comet_ml"}  # packages


@dataclass(frozen=True, kw_only=True, slots=True)
class FilesPolicy:
    """A monitor writes into the folder output_path/job_name."""

    output_path: str = ""
    job_name: str = "DeepSpeedJobName"


@dataclass(frozen=True, kw_only=True, slots=True)
class WandbPolicy:
    """The run's place in wandb. team: wandb's entity."""

    group: str | None = None
    team: str | None = None
    project: str = "deepspeed"


@dataclass(frozen=True, kw_only=True, slots=True)
class CometPolicy:
    """An experiment of Comet. Values of None use Comet's own configuration or defaults.

    An event is logged once per samples_log_interval samples.
    """

    samples_log_interval: int = 100
    project: str | None = None
    workspace: str | None = None
    api_key: str | None = field(default=None, repr=False)  # not in the repr, because settings are printed
    experiment_name: str | None = None
    experiment_key: str | None = None
    online: bool | None = None
    mode: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class FlopsPolicy:
    """The profiled step (number of steps before it), and the printed tables.

    recompute_fwd_factor: number of forwards that a backward repeats. module_depth: -1 for all. output_file: defaults to the terminal.
    """

    recompute_fwd_factor: float = 0.0
    profile_step: int = 1
    module_depth: int = -1
    top_modules: int = 1
    detailed: bool = True
    output_file: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ThroughputPolicy:
    """Samples per second, every `steps_per_print`. synchronized: waits for the GPU, so that the times are complete."""

    enabled: bool = True
    synchronized: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class MonitorPolicy:
    """The enabled monitors; None for the others."""

    tensorboard: FilesPolicy | None = None
    csv_monitor: FilesPolicy | None = None
    wandb: WandbPolicy | None = None
    comet: CometPolicy | None = None

    @property
    def enabled(self) -> bool:
        """Whether any monitor writes."""
        return any(one is not None for one in (self.tensorboard, self.csv_monitor, self.wandb, self.comet))


@dataclass(frozen=True, kw_only=True, slots=True)
class Watching:
    """The settings of all measurements; None for disabled ones."""

    monitors: MonitorPolicy
    flops: FlopsPolicy | None
    comms: LogSwitches | None
    throughput: ThroughputPolicy


def read_watching(given: dict, *, findings: Findings) -> Watching:
    """Reads the sections. given: the full configuration."""
    read = {
        name: read_section(given[name], path=f"{name}.", keys=keys, findings=findings)
        for name, keys in SECTIONS.items()
        if given.get(name) is not None
    }
    throughput = read.pop("timers", {}).get("throughput", {})
    throughput = read_section(throughput, path="timers.throughput.", keys=_THROUGHPUT, findings=findings)
    on = {name: values for name, values in read.items() if values.pop("enabled", False)}
    for name, package in _NEEDS.items():
        if name in on and importlib.util.find_spec(package) is None:
            findings.faults.append(
                f"{name}.enabled: the package {package} is not installed; pip install {package}, or use csv_monitor"
            )

    def policy(name: str, make: type):
        return make(**on[name]) if name in on else None

    return Watching(
        monitors=MonitorPolicy(
            tensorboard=policy("tensorboard", FilesPolicy),
            csv_monitor=policy("csv_monitor", FilesPolicy),
            wandb=policy("wandb", WandbPolicy),
            comet=policy("comet", CometPolicy),
        ),
        flops=policy("flops_profiler", FlopsPolicy),
        comms=LogSwitches(enabled=True, **on["comms_logger"]) if "comms_logger" in on else None,
        throughput=ThroughputPolicy(**throughput),
    )
