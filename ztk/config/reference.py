"""Meanings of all groups, options and keys, for `run.py --help GROUP` and for the configuration page of the documentation."""

import re
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from ztk.config.arguments import OVERLAYS, options_of, own_groups, read_option
from ztk.config.errors import ConfigError
from ztk.config.keys import expected, flatten, line_keys, section_of
from ztk.config.own import FREE
from ztk.config.suggest import near_keys
from ztk.core.policies.config import Config
from ztk.core.policies.key import Key, written
from ztk.core.policies.suggest import did_you_mean

# Groups without keys of their own: their files set keys and options of other groups.
_SETS = {
    "algorithm": "The keys of a policy gradient by the name of its paper; task=grpo and task=ppo choose one.",
    "experiment": "A named set of options and values; none is chosen unless the command line does.",
    "weights": "The format of the weights of a model that answers; task=generate, task=serve and task=eval.",
    "sweep": "A named grid of runs; none is chosen unless the command line does.",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyReference:
    """One key.

    takes: description of the accepted values.
    default: value of the usual option, then of options that differ; `null` if no option sets it.
    only: the choice that the key needs to have an effect; empty if it always has one.
    """

    name: str
    takes: str
    default: str
    meaning: str
    only: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupReference:
    """One group. options: name -> meaning, in alphabetical order. usual: the default option, or None."""

    name: str
    meaning: str
    options: dict[str, str]
    usual: str | None
    keys: tuple[KeyReference, ...]


def build_reference(folders: Sequence[str]) -> dict[str, GroupReference]:
    """Returns group -> its reference, in the order of the schema. folders: hold the option files; the first has `config.yaml`."""
    root = yaml.safe_load(Path(folders[0], "config.yaml").read_text(encoding="utf-8"))
    usual = {group: option for entry in root["defaults"] if isinstance(entry, dict) for group, option in entry.items()}
    options = options_of(list(folders))
    names = [field.name for field in fields(Config) if field.name not in ("output_dir", "own", *FREE)]
    found = {}
    overlays = _overlays(options, folders=folders)
    own = {group: f"A group of your own, whose option sets keys of user.{group}." for group in own_groups(folders)}
    for group in [*names, *FREE, *_SETS, *sorted(own)]:
        files = {option: _option_file(group, option=option, folders=folders) for option in options.get(group, [])}
        read = {option: read_option(path) for option, path in files.items()}
        values = {
            option: dict(flatten(own, prefix=f"{group}."))
            for option, (is_overlay, own) in read.items()
            if not is_overlay and isinstance(own, dict)
        }
        values |= overlays
        keys = [key for key in line_keys() if key.startswith(f"{group}.")]
        found[group] = GroupReference(
            name=group,
            meaning=(FREE | _SETS | own).get(group) or _summary(section_of(f"{group}.").__doc__),
            options={option: _first_comment(path) for option, path in files.items()},
            usual=usual.get(group),
            keys=tuple(_key_reference(key, values=values, usual=usual.get(group) or "") for key in keys),
        )
    return found


def find_reference(topic: str, *, reference: dict[str, GroupReference]) -> GroupReference | KeyReference:
    """Returns the group or key of this name. Raises ConfigError with similar names."""
    keys = {key.name: key for group in reference.values() for key in group.keys}
    found = reference.get(topic) or keys.get(topic)
    if found is None:
        near = did_you_mean(near_keys(topic, keys=[*keys, *reference]))
        raise ConfigError([f"--help {topic}: there is no such group or key{near}; --help lists all"])
    return found


def _key_reference(key: str, *, values: dict[str, dict[str, Any]], usual: str) -> KeyReference:
    declared = line_keys()[key]
    return KeyReference(
        name=key,
        takes=_takes(declared),
        default=_default(declared, values=values, usual=usual),
        meaning=declared.meaning,
        only=declared.acts.words if declared.acts else "",
    )


def _takes(key: Key) -> str:
    """Formats the type, then the range, then null."""
    kind, limits = expected(key.hint), key.range.brief if key.range else ""
    name, null, _ = kind.partition(" or null")
    return f"{name}, {limits}{',' * bool(null)}{null}" if limits else kind


def _default(key: Key, *, values: dict[str, dict[str, Any]], usual: str) -> str:
    """Formats defaults: `1; 2 with pp2, pp2_dp2; 4 with pp4`. The usual option's or declared value comes first, then options that
    differ.
    """
    by_value: dict[str, list[str]] = {}
    for option, set_here in values.items():
        if key.name in set_here:
            by_value.setdefault(_written(set_here[key.name]), []).append(option)
    first = [value for value, options in by_value.items() if usual in options]
    if not first and key.default is not MISSING and (key.default is not None or key.acts is None):
        first = [written(key.default)]
    others = [f"{value} with {', '.join(options)}" for value, options in by_value.items() if value not in first]
    return "; ".join(first + others) or "null"


def _written(value: Any) -> str:
    """Formats a value of an option file. A reference to another key becomes that key's name."""
    reference = re.fullmatch(r"\$\{(?P<key>[\w.]+)\}", value) if isinstance(value, str) else None
    return f"as {reference['key']}" if reference else written(value)


def _option_file(group: str, *, option: str, folders: Sequence[str]) -> Path:
    return next(path for folder in folders if (path := Path(folder, group, f"{option}.yaml")).is_file())


def _overlays(options: dict[str, list[str]], *, folders: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Returns `task=grpo` -> the keys that this choice sets, for every option of the groups whose options set keys of others."""
    found = {}
    for group in OVERLAYS:
        for option in options.get(group, []):
            is_overlay, values = read_option(_option_file(group, option=option, folders=folders))
            if is_overlay:
                found[f"{group}={option}"] = dict(flatten(values))
    return found


def _first_comment(path: Path) -> str:
    """Returns an option file's first comment, its description. Lines for Hydra (`# @package`) do not count."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return next((line[2:] for line in lines if line.startswith("# ") and not line.startswith("# @")), "")


def _summary(docstring: str | None) -> str:
    return " ".join((docstring or "").partition("\n\n")[0].split())
