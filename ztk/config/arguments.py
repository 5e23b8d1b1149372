"""Checks the command line before Hydra does: moves flags to the front and reports every wrong name, option and value at once."""

import difflib
import functools
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ztk.config.ds_config import KEY as DS_CONFIG
from ztk.config.errors import ConfigError
from ztk.config.keys import (
    expected,
    flatten,
    holds_int,
    holds_number,
    holds_table,
    holds_text,
    line_keys,
    named_by,
    section_of,
)
from ztk.config.own import FREE, OBJECTS, TARGET, USER, is_emptied
from ztk.config.suggest import near_keys, near_options
from ztk.core.launch import quoted
from ztk.core.policies.suggest import did_you_mean

_REPLACED = (
    "model",
    "data",
    "optimizer",
    "scheduler",
)  # an object of the user's replaces the option that config.yaml chooses
_WITH_PATH = {"data": "data.path", "model": "model=hf model.path"}
_NULLABLE = ("experiment", "sweep", *FREE)  # of these groups, a line may choose no option
OVERLAYS = (
    "algorithm",
    "task",
    "weights",
)  # groups whose options set keys of other groups, in the order of conf/config.yaml
_OVERLAY_MARK = "# @package _global_"  # marks an option file that sets keys of several groups
# Hydra's flags that take a value.
_WITH_VALUE = {
    *("--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd"),
    *("--package", "-p", "--cfg", "-c", "--experimental-rerun"),
}
FOLDERS = ("hydra.run.dir", "hydra.sweep.dir")
SEARCH_PATH = "hydra.searchpath"
CONFIG_DIRS = "ZTK_CONFIG_DIRS"  # environment variable of a run's ranks: the folders of `--config-dir`
_INFO = {"all", "config", "defaults", "defaults-tree", "plugins", "searchpath"}
_OVERRIDE = re.compile(r"(?P<sign>\+\+|\+|~)?(?P<key>[^=]+?)(@(?P<package>[^=]*))?(=(?P<value>.*))?", re.DOTALL)
_NAME = re.compile(r"[a-z_][\w-]*", re.ASCII | re.IGNORECASE)  # of a key or group in Hydra's grammar
_TEXTS = re.compile(r"[^\[\](){}'\"$\\]*|\[[^\[\](){}'\"$\\]*\]")  # values without quotes, or a list of them
_FLOAT = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)[eE][+-]?\d+|[+-]?\d+\.0*", re.ASCII)


def split_flags(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Splits arguments into flags with their values, and overrides. Hydra 1.3 rejects a flag between overrides."""
    flags, overrides = [], []
    pending = iter(arguments)
    for argument in pending:
        if not argument.startswith("-"):
            overrides.append(argument)
            continue
        flags.append(argument)
        takes_value = argument in _WITH_VALUE
        if takes_value or argument in ("--info", "-i"):
            value = next(pending, None)
            if value is not None:
                (flags if takes_value or value in _INFO else overrides).append(value)
    return flags, overrides


def extra_folders(flags: list[str]) -> list[str]:
    """Returns the folders of `--config-dir`, which a line may have several times."""
    return _take_folders(flags)[0]


def folders_of_run() -> list[str]:
    """Returns the folders of `--config-dir` of the command that started this rank."""
    return [folder for folder in os.environ.get(CONFIG_DIRS, "").split(os.pathsep) if folder]


def join_folders(flags: list[str]) -> list[str]:
    """Returns the flags with one word per folder, `--config-dir=/ABSOLUTE`."""
    folders, others = _take_folders(flags)
    return [*others, *(f"--config-dir={os.path.abspath(folder)}" for folder in folders)]


def flags_of_hydra(flags: list[str]) -> list[str]:
    """Returns the flags for Hydra, whose `--config-dir` is one folder and which finds several by `hydra.searchpath`."""
    folders, others = _take_folders(flags)
    return [*others, search_path(folders)] if folders else others


def search_path(folders: Sequence[str | os.PathLike]) -> str:
    """Returns the override by which Hydra reads option files of `folders`, after ztk's own."""
    return f"{SEARCH_PATH}=[{','.join(quoted(f'file://{Path(folder).absolute()}') for folder in folders)}]"


def _take_folders(flags: list[str]) -> tuple[list[str], list[str]]:
    """Returns the folders of `--config-dir` and the other flags."""
    folders, others = [], []
    pending = iter(flags)
    for flag in pending:
        if flag in ("--config-dir", "-cd"):
            folders += [value for value in [next(pending, None)] if value is not None]
        elif flag.startswith("--config-dir="):
            folders.append(flag.partition("=")[2])
        else:
            others.append(flag)
    return list(dict.fromkeys(folders)), others


def conf_dir() -> str:
    """Returns the folder of the option files: next to `ztk/` in a checkout, inside it when installed.

    Raises:
        FileNotFoundError: it is in neither place.
    """
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "conf", package.parent / "conf"):
        if (folder / "config.yaml").is_file():
            return str(folder)
    raise FileNotFoundError(f"conf/config.yaml is neither in {package} nor next to it: reinstall ztk")


def options_of(folders: list[str]) -> dict[str, list[str]]:
    """Returns the option files of every group: `{"zero": ["ddp", ...], ...}`."""
    found: dict[str, set[str]] = {}
    for folder in folders:
        for path in Path(folder).glob("*/*.yaml"):
            found.setdefault(path.parent.name, set()).add(path.stem)
    return {group: sorted(names) for group, names in sorted(found.items()) if group != "hydra"}


def own_groups(folders: Sequence[str]) -> frozenset[str]:
    """Returns the groups that only the user's folders have. folders: hold the option files; the first is ztk's."""
    return frozenset(options_of([*folders[1:]])) - frozenset([*options_of([*folders[:1]]), *FREE, *OBJECTS])


def read_option(path: Path) -> tuple[bool, dict[str, Any]]:
    """Returns whether an option file sets keys of several groups, and its nested values."""
    return _read_option(path, path.stat().st_mtime_ns)


@functools.cache
def _read_option(path: Path, modified: int) -> tuple[bool, dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        text = file.read()
        file.seek(0)
        return _OVERLAY_MARK in text, yaml.safe_load(file) or {}  # an error names the file


def parse_arguments(overrides: list[str], *, folders: list[str], sweep: bool = False) -> list[str]:
    """Returns the overrides in the form that Hydra accepts. Raises ConfigError with all faults.

    For integer keys, 5e8 becomes 500000000. An option of a group of the user's own sets keys below `user.GROUP`.

    folders: where the option files are. sweep: allows several values per key.
    """
    overrides = [_quoted_folder(word) for word in overrides]
    options = options_of(folders)
    groups = own_groups(folders)
    _check_folders(folders, groups=groups)
    declare_groups(groups)
    own = _own_sections(overrides, folders=folders)
    accepted, faults = [], [*_misspelt(overrides, known=_user_keys(folders[1:], groups=groups))]
    sweep = sweep or any(override.startswith(("sweep=", "hydra.mode=")) for override in overrides)
    for word in overrides:
        override = word.removeprefix("+") if named_by(word) in groups else word
        found = list(_faults(override, options=options, own=own))
        if not found and not sweep and _is_sweep(override):
            found = [
                f"{override}: several values are a sweep, add -m; a list is written [a,b], a text with a comma 'a,b'"
            ]
        faults += found
        if not found:
            accepted.append(_for_hydra(override, options=options, groups=groups, own=own))
    for name in (name for name in FREE if is_emptied(name, words=accepted)):
        faults += [
            f"~{name} and {word}: exclude each other; take single ones away by ~{name}.NAME"
            for word in accepted
            if word.lstrip("+").startswith(f"{name}.")
        ]
    if faults:
        raise ConfigError(faults)
    named = [named_by(word) for word in accepted]
    replaced = [section for section in _REPLACED if f"{section}.{TARGET}" in named and section not in named]
    return [f"{section}=own" for section in replaced] + accepted


def _quoted_folder(word: str) -> str:
    """Quotes the folder of a run or sweep if Hydra would read its name as something else, such as a list or a number."""
    key, _, value = word.partition("=")
    if key not in FOLDERS or "${" in value:
        return word
    try:
        override = OverridesParser.create().parse_override(word)
        is_quoted = value[:1] in ("'", '"') and value[-1:] == value[:1]
        is_read = is_quoted or (not override.is_sweep_override() and str(override.value()) == value)
    except HydraException:
        is_read = False
    return word if is_read else f"{key}={quoted(value)}"


def folder_of_run(words: Iterable[str]) -> str | None:
    """Returns the folder that accepted words give the run, or None."""
    parser = OverridesParser.create()
    return next((str(parser.parse_override(word).value()) for word in words if word.startswith("hydra.run.dir=")), None)


def declare_groups(groups: Iterable[str] = ()) -> None:
    """Adds groups of the user's to the defaults list of config.yaml, from which a run chooses no option by itself."""
    defaults = [{f"{group}@{USER}.{group}": None} for group in sorted(groups)]
    ConfigStore.instance().store(name="ztk_groups", node={"defaults": defaults})


def _for_hydra(
    override: str, *, options: Mapping[str, Sequence[str]], groups: frozenset[str], own: frozenset[str]
) -> str:
    """Returns an accepted override as Hydra reads it. groups: the user's option groups. own: sections that take any key."""
    name = named_by(override)
    if name in _NULLABLE and is_emptied(name, words=[override]):
        return f"~{name}" if name in options else f"{name}=null"  # Hydra has no null for groups
    if name in groups:
        return f"{name}@{USER}.{name}={override.partition('=')[2]}"
    return override if name.partition(".")[0] in own else _quoted_texts(_whole_numbers(override))


def _check_folders(folders: list[str], *, groups: frozenset[str]) -> None:
    """Raises ConfigError if a user's option file has the name of one of ztk's, which would hide it (identical files are fine), or if a
    group of the user's (`groups`) has the name of a section of keys."""
    ours, *others = map(Path, folders)
    if missing := [folder for folder in others if not folder.is_dir()]:
        raise ConfigError([f"--config-dir={folder}: there is no such folder" for folder in missing])
    taken = groups & {"output_dir", *(name.partition(".")[0] for name in line_keys())}
    faults = [
        f"{group}: a section of ztk has the name of your group of options; rename its folder" for group in sorted(taken)
    ]
    first: dict[str, Path] = {}
    for path in (path for folder in others for path in sorted(folder.glob("*/*.yaml"))):
        usual = ours / path.parent.name / path.name
        other = first.setdefault(f"{path.parent.name}={path.stem}", path)
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            faults.append(f"{path}: {error}; save the file as UTF-8")
            continue
        if path.parent.name in groups and "\n# @package" in f"\n{text}":
            faults.append(
                f"{path}: `# @package` does not act in a group of your own, whose options set keys of user.{path.parent.name}; leave the "
                "line out, or move the file to experiment/"
            )
        if usual.is_file() and usual.read_bytes() != path.read_bytes():
            word = f"{path.parent.name}={path.stem}"
            faults.append(
                f"{word}: ztk has an option of this name, which would be taken in place of {path}; rename your file"
            )
        if other.read_bytes() != path.read_bytes():
            faults.append(
                f"{path.parent.name}={path.stem}: is in {other} and in {path}, and they differ; rename one file"
            )
    if faults:
        raise ConfigError(faults)


def check_doubled(overrides: Iterable[str], *, flags: Sequence[str] = ()) -> None:
    """Raises ConfigError for every key, group and flag that a command line sets twice. Hydra would silently use the last value."""
    flags = _take_folders([*flags])[1]
    words = [*overrides, *(flag for flag in flags if "=" in flag)]
    words += [f"{flag}={value}" for flag, value in pairwise(flags) if flag in _WITH_VALUE]
    given: dict[str, list[str]] = {}
    for word in words:
        values = given.setdefault(named_by(word), [])
        if (value := word.partition("=")[2]) not in values:
            values.append(value)
    doubled = {name: [f"{name}={value}" for value in values] for name, values in given.items() if len(values) > 1}
    if doubled:
        raise ConfigError([f"{' and '.join(words)}: {name} has one value; keep one" for name, words in doubled.items()])


def _user_keys(folders: Sequence[str], *, groups: frozenset[str]) -> list[str]:
    """Returns the keys below `user` that the user's option files set or refer to. groups: the user's option groups, which set user.GROUP."""
    found: set[str] = set()
    for path in (path for folder in folders for path in Path(folder).glob("*/*.yaml")):
        try:
            is_overlay, values = read_option(path)
            text = path.read_text(encoding="utf-8")
        except (OSError, ValueError, yaml.YAMLError):
            continue  # reported if the option is chosen
        group = path.parent.name
        below = values if group == USER else {group: values} if group in groups else {}
        if isinstance(values, dict) and is_overlay:
            below = values.get(USER)
        if isinstance(below, dict):
            found.update(name for name, _ in flatten(below))
        found.update(re.findall(r"\$\{user\.([\w.-]+)\}", text))
    return sorted(found)


def _misspelt(overrides: Sequence[str], *, known: Sequence[str]) -> Iterator[str]:
    """Yields one line per new key below `user` that is spelt like one of the option files."""
    for word in overrides:
        key, _, value = word.partition("=")
        name = key.removeprefix(f"{USER}.")
        if key == name or name in known or any(other.startswith(f"{name}.") for other in known):
            continue  # another section, `+user.KEY`, or a key of the option files
        if near := difflib.get_close_matches(name, known, n=1, cutoff=0.8):
            yield f"{word}: no option file has this key; did you mean {USER}.{near[0]}? A new key is written +{key}={value}"


def _own_sections(overrides: list[str], *, folders: list[str]) -> frozenset[str]:
    """Returns the sections that take any key: the user's, and those whose object this line or the user's option files replace."""
    theirs, found = options_of(folders[1:]), {*FREE}
    for name, value in ((named_by(word), word.partition("=")[2]) for word in overrides):
        section = name.partition(".")[0]
        if name in ("experiment", "sweep") and theirs:
            found |= {*OBJECTS}  # an option file may set any of them
        elif name.endswith(f".{TARGET}"):
            found.add(section)
        elif name in OBJECTS and {option.strip() for option in value.split(",")} & {*theirs.get(name, ())}:
            found.add(name)
    return frozenset(found & {*FREE, *OBJECTS})


def _faults(override: str, *, options: dict[str, list[str]], own: frozenset[str]) -> Iterator[str]:
    match = _OVERRIDE.fullmatch(override)
    if match is None:
        yield f"{override}: an option is written key=value; --help lists all"
        return
    sign, key, value = match["sign"] or "", match["key"], match["value"]
    if key == SEARCH_PATH:
        yield f"{override}: own options are found by --config-dir FOLDER, or config_dir=FOLDER in Python; give it once per folder"
        return
    if key == "hydra" or key.startswith(("hydra.", "hydra/")):
        try:
            OverridesParser.create().parse_override(override)
        except HydraException:
            yield f"{override}: not readable; put quotes around the value, as in {_in_shell(key, str(value))}"
        return
    if "." in key and key.partition(".")[0] in own and (value is not None or sign == "~"):
        yield from _free_faults(override, sign=sign, key=key)
    else:
        yield from _known_faults(override, match=match, options=options)


def _known_faults(override: str, *, match: re.Match, options: dict[str, list[str]]) -> Iterator[str]:
    sign, key, value = match["sign"] or "", match["key"], match["value"]
    known = line_keys()
    if value is None and sign != "~":
        near = did_you_mean(_completed(override, options=options, keys=known))
        yield f"{override}: an option is written key=value{near}"
    elif key == "output_dir":
        yield f"{override}: set the run folder with hydra.run.dir=FOLDER, the folder of a sweep with hydra.sweep.dir=FOLDER"
    elif key in options:
        yield from _group_faults(sign, key, value, package=match["package"], options=options)
    elif key in known:
        if sign == "~":
            yield f"{override}: a key cannot be removed; set it, or leave it out for its default"
        elif sign == "+":
            yield f"{override}: the key exists, write {key}={value}"
        else:
            yield from _value_faults(key, value, hint=known[key].hint)
    elif key in FREE and (sign, value) in (("~", None), ("", "null")):
        return
    elif key in FREE or any(name.startswith(f"{key}.") for name in known):
        if sign or (value and value[0] not in "{$"):
            near = did_you_mean(near_keys(key, keys=known))
            yield f"{override}: write its keys one by one, {key}.KEY=value{near}"
    else:
        plus = f"; keys of your own are below user: user.{key}={value}" if "+" in sign else ""
        yield f"{key}: there is no such key{plus}{did_you_mean(near_keys(key, keys=[*known, *options, DS_CONFIG]))}"


def _free_faults(override: str, *, sign: str, key: str) -> Iterator[str]:
    value = override.partition("=")[2]
    if not all(_NAME.fullmatch(part) or (part.isascii() and part.isdecimal()) for part in key.split(".")):
        yield f"{override}: {key} is no key: names of a to z, digits, _ and -, a letter first, with dots between them"
    elif sign != "~":
        try:
            OverridesParser.create().parse_override(override)
        except HydraException:
            yield f"{key}={value}: not readable; put quotes around it, as in {_in_shell(key, value)}"


def _in_shell(key: str, value: str) -> str:
    """Returns the word for a shell that gives `key` this text."""
    is_simple = '"' not in value and not value.endswith("\\")
    return shlex.quote(f'{key}="{value}"' if is_simple else f"{key}={quoted(value)}")


def _group_faults(
    sign: str, group: str, value: str | None, *, package: str | None, options: dict[str, list[str]]
) -> Iterator[str]:
    if package is not None:
        yield f"{group}@{package}: a group has one place; write {group}={value}"
    if (sign, value) in (("~", None), ("", "null"), ("", "")) and group in _NULLABLE:
        return
    if sign:
        yield f"{sign}{group}: a run has one option of this group; write {group}=OPTION"
        return
    assert value is not None
    if not _NAME.fullmatch(group):
        yield f"{group}: a group's name has a to z, digits, _ and -, a letter first; rename its folder"
        return
    for word in value.split(","):
        plain = re.fullmatch(r"[\w.-]*", word.strip())
        if plain and word.strip() not in options[group]:
            near = did_you_mean(near_options(word.strip(), group=group, options=options))
            if "." in word and group in OBJECTS:
                near = f"; for an object of your own write {group}.{TARGET}={word.strip()}"
            yield f"{group}={word.strip()}: there is no such option, only {', '.join(options[group])}{near}"
        elif group in _WITH_PATH and "/" in word and word.strip() not in options[group]:
            yield f"{group}={word.strip()}: there is no such option; for files write {_WITH_PATH[group]}={word.strip()}"
        elif plain and not isinstance(OverridesParser.create().parse_override(f"{group}={word}").value(), str):
            yield f"{group}={word.strip()}: the option's name reads as a value, not as a text; rename its file, as in v{word.strip()}.yaml"


def _value_faults(key: str, value: str, *, hint: object) -> Iterator[str]:
    if "${" in value:
        return
    for piece in _pieces(key, value):
        if holds_number(hint) and not piece.isascii():
            yield f"{key}={piece}: must be {expected(hint)}, with the digits 0 to 9"
            continue
        if piece.startswith("{") and holds_table(hint):
            yield f"{key}={piece}: must be {expected(hint)}"
            continue
        text = _whole_number(piece) if holds_int(hint) else piece
        try:
            parsed = OverridesParser.create().parse_override(f"{key}={text}").value()
            OmegaConf.structured(section_of(key))[key.rpartition(".")[2]] = parsed
        except HydraException:
            yield f"{key}={piece}: not readable; put quotes around it, as in {_in_shell(key, piece)}"
        except OmegaConfBaseException:
            yield f"{key}={piece}: must be {expected(hint)}"


def _pieces(key: str, value: str) -> list[str]:
    """Returns the single values of a sweep `a,b,c`, and any other value by itself. Hydra handles other kinds of sweeps."""
    try:
        override = OverridesParser.create().parse_override(f"{key}={value}")
    except HydraException:
        return [value]
    if not override.is_sweep_override():
        return [value]
    return value.split(",") if re.fullmatch(r"[^\[\](){}'\"]*", value) else []


def _is_sweep(override: str) -> bool:
    try:
        return OverridesParser.create().parse_override(override).is_sweep_override()
    except HydraException:
        return False


def _whole_numbers(override: str) -> str:
    key, equals, value = override.partition("=")
    declared = line_keys().get(key.lstrip("+"))
    if declared is None or not holds_int(declared.hint):
        return override
    return key + equals + ",".join(map(_whole_number, value.split(",")))


def _whole_number(text: str) -> str:
    """Converts `5e8` to `500000000`. Returns other texts unchanged."""
    if _FLOAT.fullmatch(text.strip()) and float(text).is_integer():  # 1e999 is infinite and not an integer
        return str(int(float(text)))
    return text


def _quoted_texts(override: str) -> str:
    """Quotes values of a text key that Hydra would read as numbers or flags, such as a folder 2026_11_30. Also in a list or a sweep."""
    key, equals, value = override.partition("=")
    declared = line_keys().get(key.lstrip("+"))
    if declared is None or not (holds_text(declared.hint) or declared.paths) or not _TEXTS.fullmatch(value):
        return override
    return key + equals + re.sub(r"[^\[\],]+", lambda found: _quoted_text(found[0], key=key), value)


def _quoted_text(text: str, *, key: str) -> str:
    try:
        parsed = OverridesParser.create().parse_override(f"{key}={text.strip()}").value()
    except HydraException:
        return text
    return quoted(text.strip()) if isinstance(parsed, bool | int | float) else text


def _completed(word: str, *, options: dict[str, list[str]], keys: dict[str, object]) -> list[str]:
    """Returns completions of a word without `=`: options of a group, or keys."""
    groups = [f"{group}={word}" for group, names in options.items() if word in names]
    return groups[:3] or [f"{key}=VALUE" for key in near_keys(word, keys=[*keys, *options])]
