"""Extracts the keys of a sweep from a command line; Hydra composes runs from the rest."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from ztk.config.errors import ConfigError
from ztk.config.keys import SWEEP, line_keys
from ztk.config.planning import hardware_values
from ztk.core.policies.sweep import RepeatWith, SweepConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepWords:
    """words: the overrides without `sweep.*`. options: the values of `sweep.*`. given: the `sweep.*` words."""

    words: list[str]
    options: SweepConfig
    given: tuple[str, ...] = ()


def take_sweep_keys(words: Sequence[str]) -> SweepWords:
    """Extracts `sweep.*`. words: the result of `parse_arguments`.

    Raises ConfigError for numbers out of range and keys with several values.
    """
    given = tuple(word for word in words if word.startswith(f"{SWEEP}."))
    values: dict[str, Any] = {}
    faults = []
    for word in given:
        override = OverridesParser.create().parse_override(word)
        key = override.key_or_group
        if override.is_sweep_override():
            faults.append(f"{word}: a sweep has one value of {key}; start one sweep for each")
            continue
        value = override.value()
        values[key.removeprefix(f"{SWEEP}.")] = value
        allowed = line_keys()[key].range
        reason = allowed.fault(value) if allowed is not None and value is not None else ""
        faults += [f"{word}: {reason}"] if reason else []
    options = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(SweepConfig), values))
    assert isinstance(options, SweepConfig)
    rest = [word for word in words if word not in given]
    if options.repeat_with is RepeatWith.seeds and (own := [word for word in rest if word.startswith("train.seed=")]):
        faults.append(f"{own[0]}: {SWEEP}.repeat_with=seeds gives every repeat its seed; leave {own[0]} out")
    if options.quick and (own := [word for word in rest if word.startswith("train.quick=")]):
        faults.append(f"{own[0]}: {SWEEP}.quick=true sets it for every job; leave {own[0]} out")
    if options.launcher and (own := [word for word in rest if word.startswith(("launch=", "launch.starter="))]):
        faults.append(
            f"{SWEEP}.launcher={options.launcher}: is launch={options.launcher}, and {own[0]} is given; leave one of them out"
        )
    rest += [f"launch={options.launcher}"] if options.launcher else []
    rest += (
        ["train.quick=true"] if options.quick else []
    )  # both stay among the words, so that a resumed sweep has them too
    faults += _hardware_faults(options)
    if faults:
        raise ConfigError(faults)
    return SweepWords(words=rest, options=options, given=given)


def only_resume(options: SweepConfig) -> bool:
    """Returns whether only keys are set that do not affect the set of jobs. In that case the recorded repeats apply."""
    usual = SweepConfig()
    asked = {field.name for field in fields(options) if getattr(options, field.name) != getattr(usual, field.name)}
    return asked <= {"resume", "retries", "list", "hardware", "skip_misfits", "parallel"}


def _hardware_faults(options: SweepConfig) -> list[str]:
    if options.skip_misfits and options.hardware is None:
        return [
            "sweep.skip_misfits=true asks whether jobs fit: add sweep.hardware=h100, sweep.hardware=here or another"
        ]
    if options.hardware is not None and not (options.list or options.skip_misfits):
        return [
            f"sweep.hardware={options.hardware} has no effect without sweep.list=true or sweep.skip_misfits=true: add one of them, or "
            "leave it out"
        ]
    if options.hardware is None:
        return []
    try:
        hardware_values(options.hardware)
    except ValueError as error:
        return [f"sweep.{error}"]
    return []
