"""Reads and writes the `config.yaml` of a run."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import InterpolationKeyError, MissingMandatoryValue, OmegaConfBaseException

from ztk.config.errors import ConfigError
from ztk.config.keys import no_values, run_keys
from ztk.config.own import USER, nameless, nodes_of, recorded, take_objects, take_user, written_user
from ztk.core.policies.config import Config
from ztk.core.policies.records import check_aliases


@cache
def key_types() -> DictConfig:
    """Returns the types of all keys, whose making takes four times as long as their copy in a merge."""
    return OmegaConf.structured(Config)


@cache
def _types_of_records() -> DictConfig:
    """Returns `key_types` with None for every key that a record may lack."""
    return OmegaConf.merge(key_types(), no_values())


def save(config: Config, *, path: str | os.PathLike) -> None:
    """Writes `config.yaml`."""
    Path(path).write_text(to_explained_yaml(config), encoding="utf-8")


def to_yaml(config: Config) -> str:
    """Returns the values as text for `from_yaml`."""
    values = OmegaConf.structured(replace(config, user={}, own={}))
    with open_dict(values):
        for section in ("own", *config.own):
            values.pop(section, None)
        values.user = written_user(config.user)
        if not values.user:
            values.pop(USER)
    plain: Any = OmegaConf.to_container(values)
    return OmegaConf.to_yaml(plain | nodes_of(config))


def to_explained_yaml(config: Config, *, acting_alone: bool = False) -> str:
    """Returns `to_yaml` with a comment for each derived value, the reason; this is the text of `save`.

    acting_alone: omits keys without effect in the run.
    """
    text = to_yaml(config)
    if acting_alone:
        text = OmegaConf.to_yaml(_acting(OmegaConf.to_container(OmegaConf.create(text))))
    return explained(text, reasons=config.reasons)


def explained(text: str, *, reasons: Mapping[str, str]) -> str:
    """Returns a YAML configuration with the reasons as comments. reasons: one per dotted key."""
    lines, path = [], []
    for line in text.splitlines():
        name, is_key, _ = line.partition(":")
        depth = (len(name) - len(name.lstrip())) // 2
        reason = None
        if is_key and depth <= len(path):
            path[depth:] = [name.strip()]
            reason = None if line.endswith(": null") else reasons.get(".".join(path))
        if reason is None:
            lines.append(line)
        elif _is_whole(line):
            lines.append(f"{line}  # {reason}")
        else:  # the value continues on the next line
            lines += [f"{'  ' * depth}# {reason}", line]
    return "\n".join(lines) + "\n"


def _is_whole(line: str) -> bool:
    """Returns whether a line contains the full value of its key."""
    _, _, value = line.partition(":")
    try:
        return value.strip() not in ("", "|", "|-", ">", ">-") and yaml.safe_load(value) is not None
    except yaml.YAMLError:
        return False


def _acting(values: Any, *, prefix: str = "") -> dict[str, Any]:
    """Returns nested values without keys of ztk that are None, and without empty sections."""
    kept = {}
    for name, value in values.items():
        if isinstance(value, dict) and any(key.startswith(f"{prefix}{name}.") for key in run_keys()):
            if inner := _acting(value, prefix=f"{prefix}{name}."):
                kept[name] = inner
        elif value is not None or prefix + name not in run_keys():
            kept[name] = value
    return kept


def load(path: str | os.PathLike) -> Config:
    """Reads a record, a file of `save`, as data: nothing that it names is imported, and its objects cannot be created.

    Raises ConfigError for a file that is no such record.
    """
    path = Path(path)
    try:
        config, user = _parsed(path.read_text(encoding="utf-8"))
    except (
        OmegaConfBaseException,
        yaml.YAMLError,
        AssertionError,
        AttributeError,
        RecursionError,
        TypeError,
        ValueError,
    ) as error:
        raise ConfigError([f"{path}: is no record of a run ({' '.join(str(error).split())})"]) from None
    config.own, config.user = recorded(config.own), user
    return config


def from_yaml(text: str) -> Config:
    """Parses the text of `to_yaml` for a rank of the run itself. Raises ConfigError for values that `user._schema_` rejects."""
    config, user = _parsed(text)
    choices = OmegaConf.create({USER: user})
    if faults := take_user(choices):
        raise ConfigError(faults)
    node: Any = choices[USER]
    config.user = node if OmegaConf.get_type(node) is dict else OmegaConf.to_object(node)
    return config


def _parsed(text: str) -> tuple[Config, dict[str, Any]]:
    """Returns a configuration without `user`, and `user` as plain values. Interpolations are texts, because `to_yaml` has resolved them."""
    if "&" in text:
        check_aliases(yaml.compose(text, Loader=yaml.SafeLoader))
    values: Any = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    user = values.pop(USER, None) or {}
    own = take_objects(values)
    config: Any = OmegaConf.to_object(OmegaConf.merge(_types_of_records(), _literal(values)))
    config.own = own
    return config, user


def _literal(value: Any) -> Any:
    """Returns nested values in which OmegaConf finds no interpolation."""
    if isinstance(value, dict):
        return {key: _literal(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_literal(entry) for entry in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def without_objects(choices: DictConfig, *, overrides: Sequence[str] = ()) -> tuple[DictConfig, dict[str, Any], Any]:
    """Splits a resolved configuration into ztk's keys, the nodes of the user's objects, and the group `user`.

    Raises:
        ConfigError: a key without a value, or an object without a name.
    """
    try:
        OmegaConf.resolve(choices)
        unset = OmegaConf.missing_keys(choices)
        with open_dict(choices):
            user = choices.pop(USER, None)
            user = OmegaConf.create({}) if user is None else user
        values = OmegaConf.to_container(choices, resolve=True)
    except MissingMandatoryValue as error:
        raise ConfigError([f"{error.full_key}: has no value; choose an option of its group or set it"]) from None
    except OmegaConfBaseException as error:
        raise refusal(error, overrides=overrides) from None
    if faults := nameless(values):
        raise ConfigError(faults)
    own = take_objects(values)
    if missing := {key for key in unset if key.partition(".")[0] in (USER, *own)}:
        raise ConfigError([f"{key}: has no value; set it, {key}=VALUE" for key in sorted(missing)])
    typed = OmegaConf.get_type(user) is not dict
    return OmegaConf.create(values), own, OmegaConf.to_object(user) if typed else user


def refusal(
    error: HydraException | OmegaConfBaseException | yaml.YAMLError, *, overrides: Sequence[str] = ()
) -> ConfigError:
    """Converts an error of Hydra, OmegaConf or an option file's YAML: removes the search path and the advice to add keys.

    overrides: contain the value at fault.
    """
    if isinstance(error, yaml.YAMLError):
        return ConfigError([" ".join(str(error).split())])
    if isinstance(error, OmegaConfBaseException):
        reason = str(error).splitlines()[0]
        named = next((word for word in overrides if "${" in word), error.full_key)
        if isinstance(error, InterpolationKeyError):
            reason += f"; add {reason.partition(chr(39))[2].partition(chr(39))[0]}=VALUE"
        return ConfigError([f"{named}: {reason}" if named and named not in reason else reason])
    text = "\n".join(dict.fromkeys(filter(None, [str(error), str(error.__cause__ or "")])))
    text = re.sub(r"\nConfig search path:.*", "", text, flags=re.DOTALL)
    text = re.sub(r"\n?\s*(full_key|object_type|reference_type)[:=].*", "", text)
    text = re.sub(r"\n?To append to your config use.*", "", text)
    match = re.search(r"Value '(?P<value>[^']*)' of type 'float' could not be converted to Integer", text)
    if match and float(match["value"]).is_integer():
        text += f"; write {int(float(match['value']))}"
    return ConfigError([text.strip()])
