"""Rules of `task=plan`, which traces command lines of pretraining runs, and of the hardware in plans and floors."""

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig

from ztk.config.arguments import conf_dir
from ztk.config.own import TARGET
from ztk.config.topology import settled_ranks
from ztk.core.policies.config import Config
from ztk.core.policies.hardware import CEILINGS, COMMAND, HERE, REQUIRED, read_measured
from ztk.core.policies.machine import Machine
from ztk.core.policies.peers import Peer
from ztk.core.policies.plan import rank_faults
from ztk.core.policies.runs import device_of, times_kernels

PLAN = "plan"


def planning_faults(config: Config, *, machine: Machine) -> Iterator[str]:
    """Yields one line per fault, with its fix."""
    if config.task.name != PLAN:
        return
    if machine.started_ranks:
        yield f"task=plan runs on one process and {machine.started_ranks} ranks are started: start it by `python run.py`"
    yield from _hardware_faults(config, machine)
    yield from rank_faults(config.plan)
    if config.hardware.curves is not None:
        yield from _peer_faults(config)
    if config.plan.search and config.hardware.name is None:
        yield "plan.search=true ranks layouts by memory and seconds: choose hardware=h100, hardware=here or another"
    if config.plan.search:
        sizeless = [*(["model"] if "model" in config.own else []), *([] if config.data.seq_len else ["data"])]
        for target in (config.own[section][TARGET] for section in sizeless):
            yield (
                f"plan.search=true: layouts are ranked by the sizes of a decoder and its sequences, which {target} does not name: leave it "
                "out, and plan single layouts, such as zero=stage0 and zero=stage3"
            )
    yield from _price_faults(config)


def _price_faults(config: Config) -> Iterator[str]:
    """Yields faults of a price in tokens for data of the user's, whose items have no known number of tokens."""
    for name in ("tokens", "budget_hours"):
        if getattr(config.plan, name) is not None and not config.data.seq_len:
            target = config.own["data"][TARGET]
            yield f"plan.{name}: has no effect with items that have no number of tokens: leave it out, or give {target} an argument seq_len"


def _peer_faults(config: Config) -> Iterator[str]:
    """Yields faults of another library's rates, which are fractions of GPU rates: hardware.curves are measured CPU times."""
    for name in (field.name for field in fields(Peer)):
        value = getattr(config.plan, name)
        if value is not None:
            word = str(value).lower()
            yield f"plan.{name}={word}: has no effect with hardware.curves, the measured seconds of a CPU: leave it out"


def take_measured(choices: DictConfig) -> list[str]:
    """Sets the open values of `hardware=here` from its file. Returns one line per fault."""
    hardware = choices.hardware
    if choices.task.name not in (PLAN, "pretrain") and not choices.kernels.log_every:
        return []  # without effect; `effect_faults` reports keys that the user set
    if hardware.name != HERE:
        return (
            [f"hardware.file={hardware.file}: is read with hardware=here alone: leave it out"] if hardware.file else []
        )
    try:
        measured = read_measured(hardware.file)
    except ValueError as error:
        return [str(error)]
    for name, value in measured.items():
        if hardware[name] is None and (choices.task.name == PLAN or name in CEILINGS):
            hardware[name] = value
    return []


def _hardware_faults(config: Config, machine: Machine) -> Iterator[str]:
    """Yields a fault if hardware is described only partially."""
    hardware = config.hardware
    needed = [name for name in REQUIRED if hardware.name != HERE or not name.startswith("network")]
    missing = [name for name in needed if getattr(hardware, name) is None]
    if missing and len(missing) < len(needed):
        keys = " ".join(f"hardware.{name}=VALUE" for name in missing)
        yield f"hardware.{missing[0]} has no value: choose hardware=h100 or another, or add {keys}"
    elif hardware.name == HERE and hardware.network_bandwidth is None:
        ranks = settled_ranks(config, machine=machine)
        if hardware.ranks_per_node is not None and ranks > hardware.ranks_per_node:
            yield (
                f"launch.ranks={ranks}: hardware=here was measured with {hardware.ranks_per_node} ranks on one machine: run `{COMMAND} "
                f"--ranks {ranks}`, or add hardware.network_latency=SECONDS hardware.network_bandwidth=BYTES_PER_SECOND"
            )


def floor_faults(config: Config, *, machine: Machine) -> Iterator[str]:
    """Yields faults of the hardware whose floors `kernels.log_every` compares with."""
    hardware = config.hardware
    if not times_kernels(config):
        return
    if hardware.name not in (None, HERE) and device_of(config, machine=machine) == "cpu":
        yield (
            f"hardware={hardware.name}: this run computes on the CPU, whose share of the floor would be another device's: use hardware=here, "
            "or leave it out"
        )
    missing = [name for name in CEILINGS if getattr(hardware, name) is None]
    if missing and (hardware.name is not None or len(missing) < len(CEILINGS)):
        keys = " ".join(f"hardware.{name}=VALUE" for name in missing)
        yield f"hardware.{missing[0]} has no value: choose hardware=h100 or another, or add {keys}"


def hardware_values(name: str) -> dict[str, Any]:
    """Returns keyword arguments of `ztk.Hardware` for the option `name` of the group hardware.

    Raises:
        ValueError: there is no such option, or hardware=here has not been measured.
    """
    if name == HERE:
        return read_measured()
    folder = Path(conf_dir(), "hardware")
    path = folder / f"{name}.yaml"
    if not path.is_file():
        raise ValueError(
            f"hardware={name}: must be one of {', '.join(sorted(file.stem for file in folder.glob('*.yaml')))}"
        )
    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    texts = ("name", "source")  # YAML parses 1e9 as text
    return {
        key: float(value) if isinstance(value, str) and key not in texts else value for key, value in values.items()
    }
