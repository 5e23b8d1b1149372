"""The scheduler section: one of five schedules, and its parameters."""

from dataclasses import dataclass
from typing import Any

from ztk.core.policies.suggest import did_you_mean
from ztk.deepspeed.config.keys import (
    Convert,
    Findings,
    anything,
    at_least,
    boolean,
    fixed,
    nearest,
    one_of,
    read_section,
    shown,
    takes,
    whole_number,
)

SECTION = {"type": takes(anything), "params": takes(anything)}


def _per_group(convert: Convert) -> Convert:
    """Returns a conversion for one number, or a list with one per parameter group."""

    def converted(value: object) -> object:
        return [convert(item) for item in value] if isinstance(value, (list, tuple)) else convert(value)

    return converted


def _or_none(convert: Convert) -> Convert:
    return lambda value: None if value is None else convert(value)


_rate = _per_group(at_least(0))
_LAST = {"last_batch_iteration": fixed(-1, why="a checkpoint has the position of a schedule; leave it out")}
# The Hugging Face Trainer fills in 0 if there is no warmup_steps. DeepSpeed treats values below 2 as 2.
_WARMUP = {"warmup_num_steps": takes(whole_number(0)), "warmup_type": takes(one_of("log", "linear")), **_LAST}
_RATES = {"warmup_min_lr": takes(_rate), "warmup_max_lr": takes(_or_none(_rate))}
_TOTAL = {"total_num_steps": takes(whole_number(1))}
TYPES = {
    "LRRangeTest": {
        "lr_range_test_min_lr": takes(_rate),
        "lr_range_test_step_size": takes(whole_number(1)),
        "lr_range_test_step_rate": takes(at_least(0)),
        "lr_range_test_staircase": takes(boolean),
        **_LAST,
    },
    "OneCycle": {
        "cycle_min_lr": takes(_rate),
        "cycle_max_lr": takes(_rate),
        "decay_lr_rate": takes(at_least(0)),
        "cycle_first_step_size": takes(whole_number(1)),
        "cycle_second_step_size": takes(_or_none(whole_number(0))),
        "cycle_first_stair_count": takes(whole_number(0)),
        "cycle_second_stair_count": takes(_or_none(whole_number(0))),
        "decay_step_size": takes(whole_number(0)),
        "cycle_momentum": takes(boolean),
        "cycle_min_mom": takes(_rate),
        "cycle_max_mom": takes(_rate),
        "decay_mom_rate": takes(at_least(0)),
        **_LAST,
    },
    "WarmupLR": {**_RATES, **_WARMUP},
    "WarmupDecayLR": {**_TOTAL, **_RATES, **_WARMUP},
    "WarmupCosineLR": {
        **_TOTAL,
        **_WARMUP,
        "warmup_min_ratio": takes(at_least(0)),
        "cos_min_ratio": takes(at_least(0)),
    },
}
_REQUIRED = {
    "OneCycle": ("cycle_min_lr", "cycle_max_lr"),
    "WarmupDecayLR": ("total_num_steps",),
    "WarmupCosineLR": ("total_num_steps",),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleChoice:
    """A schedule and its parameters, with DeepSpeed's names."""

    type: str
    params: dict


def read_scheduler(given: object, *, findings: Findings) -> ScheduleChoice | None:
    """Reads the section. Returns None if it is missing or faulty."""
    if given is None:
        return None
    section = read_section(given, path="scheduler.", keys=SECTION, findings=findings)
    name = section.get("type")
    if name is None:
        if given:
            findings.faults.append(f"scheduler.type: is missing; give one of {', '.join(TYPES)}")
        return None
    if not isinstance(name, str) or name not in TYPES:
        near = did_you_mean(nearest(str(name), known=TYPES))
        findings.faults.append(f"scheduler.type={shown(name)}: must be one of {', '.join(TYPES)}{near}")
        return None
    params: Any = section.get("params") or {}
    values = read_section(params, path="scheduler.params.", keys=TYPES[name], findings=findings)
    for key in _REQUIRED.get(name, ()):
        if params.get(key) is None:
            findings.faults.append(f"scheduler.params.{key}: is missing; {name} needs it")
    return ScheduleChoice(type=name, params=values)
