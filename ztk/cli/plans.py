"""`ztk.plan_run` and `ztk.search_layouts`: `task=plan` and `plan.search=true` from Python, in this process."""

import contextlib
import importlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ztk.cli.calls import ConfigDir, command_words, config_dirs
from ztk.config import Config, compose
from ztk.worker import import_task

if TYPE_CHECKING:
    from ztk.planner import Plan, Search

_TASK, _TRAINING = "task=plan", "task=pretrain"
_RECORDED = ("train.quick=",)  # keys about a run's record; a plan rejects them


def plan_run(*overrides: str, config_dir: ConfigDir = None, **keys: Any) -> "Plan":
    """Plans the run that `ztk.run` would start with the same arguments: its memory, traffic and compute. Starts nothing.

        plan = ztk.plan_run("zero=stage3", "model=7b", "launch.ranks=64", hardware="h100")
        plan.as_dict()["peak_memory.device_bytes"], plan.fits

    overrides, config_dir, keys: as in `ztk.run`. Python imports modules of the user's once: reload one that has changed.

    Raises:
        ValueError: the configuration is invalid or cannot be planned.
    """
    words = _words(overrides, keys=keys)
    with importable(folders := config_dirs(config_dir)):
        return import_task("ztk.experiments.plan").make_plan(compose(*words, output_dir=".", folders=folders))


def search_layouts(
    *overrides: str,
    folder: str | os.PathLike[str] | None = None,
    config_dir: ConfigDir = None,
    quiet: bool = False,
    **keys: Any,
) -> "Search":
    """Ranks the layouts of a run and plans the best of them. Returns them as `.rows()`, and the reasons for excluded ones as `.dropped`.

    overrides, config_dir, keys: as in `ztk.run`, with `hardware`. `plan.traced` sets how many layouts are planned.
    folder: where to write `search.json` and `search.csv`. If omitted, nothing is written.
    quiet: suppresses the progress and the table.

    Raises:
        ValueError: the configuration is invalid, for example without `hardware`.
    """
    words = [*_words(overrides, keys=keys), "plan.search=true"]
    with contextlib.ExitStack() as stack:
        place = folder if folder is not None else stack.enter_context(tempfile.TemporaryDirectory())
        Path(place).mkdir(parents=True, exist_ok=True)
        folders = config_dirs(config_dir)
        stack.enter_context(importable(folders))
        config = compose(*words, output_dir=place, folders=folders)
        if quiet:
            stack.enter_context(contextlib.redirect_stdout(stack.enter_context(open(os.devnull, "w"))))
        return _search(config, words=words, folders=folders)


def _search(config: Config, *, words: list[str], folders: list[str]) -> "Search":
    given = dict(word.split("=", maxsplit=1) for word in words)
    make_plan = import_task("ztk.experiments.plan").make_plan
    return import_task("ztk.experiments.layouts").find_layouts(
        config, given=given, make_plan=make_plan, folders=folders
    )


@contextlib.contextmanager
def importable(folders: list[str]) -> Iterator[None]:
    """Finds modules next to the folders of `config_dir`, as a run does."""
    before = sys.path[:]
    sys.path[:0] = map(os.path.dirname, folders)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path[:] = before


def _words(overrides: tuple[str, ...], *, keys: dict[str, Any]) -> list[str]:
    words = command_words(overrides, keys=keys)
    for word in words:
        if word.startswith("task=") and word not in (_TRAINING, _TASK):
            raise ValueError(f"{word}: cannot be planned; leave it out to plan the pretraining run")
    return [*(word for word in words if not word.startswith(("task=", *_RECORDED))), _TASK]
