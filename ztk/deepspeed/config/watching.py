"""Measurements and output during a run: monitors and timers."""

import importlib.util
from dataclasses import dataclass, field
from typing import Annotated

from ztk.deepspeed.config.keys import (
    Findings,
    anything,
    boolean,
    hint,
    keys_of,
    one_of,
    optional,
    read_section,
    takes,
    whole_number,
)


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

    samples_log_interval: Annotated[int, whole_number(1)] = 100
    project: str | None = None
    workspace: str | None = None
    api_key: str | None = field(default=None, repr=False)  # not in the repr, because settings are printed
    experiment_name: str | None = None
    experiment_key: str | None = None
    online: bool | None = None
    mode: Annotated[str | None, optional(one_of("get", "create", "get_or_create"))] = None


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
    """The settings of all measurements."""

    monitors: MonitorPolicy
    throughput: ThroughputPolicy


_MONITORS = {"tensorboard": FilesPolicy, "csv_monitor": FilesPolicy, "wandb": WandbPolicy, "comet": CometPolicy}
_COUNTS = "ztk prints no profile: with torch.utils.flop_counter.FlopCounterMode(): engine(batch) counts each module's operations"
_TIMES = "ztk logs no collectives: torch.profiler.profile has the time and the bytes of each one"
_NEEDS = {"tensorboard": "tensorboard", "wandb": "wandb", "comet": "comet_ml"}  # packages
SECTIONS = {
    **{name: {"enabled": takes(boolean), **keys_of(policy)} for name, policy in _MONITORS.items()},
    "flops_profiler": {
        "enabled": hint(boolean, _COUNTS, usual=(False,)),
        **{
            name: takes(anything)
            for name in (
                "recompute_fwd_factor",
                "profile_step",
                "module_depth",
                "top_modules",
                "detailed",
                "output_file",
            )
        },
    },
    "comms_logger": {
        "enabled": hint(boolean, _TIMES, usual=(False,)),
        **{name: takes(anything) for name in ("verbose", "prof_all", "debug", "prof_ops")},
    },
    "timers": {"throughput": takes(anything)},
}


def read_watching(given: dict, *, findings: Findings) -> Watching:
    """Reads the sections. given: the full configuration."""
    read = {
        name: read_section(given[name], path=f"{name}.", keys=keys, findings=findings)
        for name, keys in SECTIONS.items()
        if given.get(name) is not None
    }
    throughput = read.pop("timers", {}).get("throughput", {})
    throughput = read_section(throughput, path="timers.throughput.", keys=keys_of(ThroughputPolicy), findings=findings)
    on = {name: values for name, values in read.items() if values.pop("enabled", False)}
    for name, package in _NEEDS.items():
        if name in on and importlib.util.find_spec(package) is None:
            findings.faults.append(
                f"{name}.enabled: the package {package} is not installed; pip install {package}, or use csv_monitor"
            )

    return Watching(
        monitors=MonitorPolicy(**{name: policy(**on[name]) for name, policy in _MONITORS.items() if name in on}),
        throughput=ThroughputPolicy(**throughput),
    )
