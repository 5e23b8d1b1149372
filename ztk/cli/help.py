"""Text of `run.py --help GROUP` and `--help KEY`: options, keys, defaults and meanings."""

import shutil
import textwrap

from ztk import config
from ztk.config import ConfigError, GroupReference, KeyReference

_COLUMN = 12


def requested_help(arguments: list[str]) -> str | None:
    """Returns the text for `--help GROUP` or `--help KEY`, or None for any other command line.

    Raises ConfigError for unknown names, and for overrides, which the text would not reflect.
    """
    flags, words = config.split_flags(arguments)
    topics = [word for word in words if "=" not in word]
    if not topics or not {"--help", "-h"} & set(flags):
        return None
    if others := [word for word in words if word not in topics]:
        raise ConfigError([f"--help {' '.join(topics)}: shows options and defaults; leave out {' '.join(others)}"])
    reference = config.build_reference([config.conf_dir(), *config.extra_folders(flags)])
    return "\n\n".join(help_text(config.find_reference(topic, reference=reference)) for topic in topics)


def help_text(topic: GroupReference | KeyReference) -> str:
    """Returns the help of one group or key, wrapped to the terminal's width."""
    width = max(60, min(120, shutil.get_terminal_size().columns))
    lines = _key_lines(topic, width=width) if isinstance(topic, KeyReference) else _group_lines(topic, width=width)
    return "\n".join(lines)


def _group_lines(group: GroupReference, *, width: int) -> list[str]:
    lines = _wrap(f"{group.name}: {group.meaning}", width=width)
    if group.options:
        usual = f", {group.usual} unless chosen" if group.usual else ""
        lines += ["", f"Options ({group.name}=OPTION{usual})"]
        for option, meaning in group.options.items():
            lines += _entry(option, text=meaning, indent=2, width=width)
    if group.keys:
        lines += ["", f"Keys ({group.name}.KEY=VALUE)"]
        for key in group.keys:
            lines += _key_lines(key, width=width)
    return lines


def _key_lines(key: KeyReference, *, width: int) -> list[str]:
    lines = [f"  {key.name}", *_wrap(key.meaning, width=width, initial_indent=" " * 4, subsequent_indent=" " * 4)]
    for label, text in (("takes", key.takes), ("default", key.default), ("only with", key.only)):
        lines += _entry(label, text=text, indent=6, width=width) if text else []
    return lines


def _entry(label: str, *, text: str, indent: int, width: int) -> list[str]:
    start = f"{' ' * indent}{label:<{_COLUMN - 1}} "
    return _wrap(start + text, width=width, subsequent_indent=" " * (indent + _COLUMN))


def _wrap(text: str, *, width: int, **indents: str) -> list[str]:
    """Breaks lines at spaces only, so that names and paths can be copied."""
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False, **indents)
