"""`ztk.plan_run` and `ztk.search_layouts`: `task=plan` and `plan.search=true` from Python, in this process."""

import contextlib
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ztk.cli.calls import command_words
from ztk.config import Config, compose
from ztk.worker import import_task

if TYPE_CHECKING:
    from ztk.planner import Plan, Search

_TASK, _TRAINING = "task=plan", "task=pretrain"
_RECORDED = ("train.quick=",)  # keys about a run's record; a plan rejects them


def plan_run(*overrides: str, **keys: Any) -> "Plan":
    """Plans the run that `ztk.run` would start with the same arguments: its memory, traffic and compute. Starts nothing.

        plan = ztk.plan_run("zero=stage3", "model=7b", "launch.ranks=64", hardware="h100")
        plan.as_dict()["peak_memory.device_bytes"], plan.fits

    overrides, keys: as in `ztk.run`. Use `ztk.plan` for a model of your own.

    Raises:
        ValueError: the configuration is invalid or cannot be planned.
    """
    words = _words(overrides, keys=keys)
    return import_task("experiments.plan").make_plan(compose(*words, output_dir="."))


def search_layouts(
    *overrides: str, folder: str | os.PathLike | None = None, quiet: bool = False, **keys: Any
) -> "Search":
    """Ranks the layouts of a run and plans the best of them. Returns them as `.rows()`, and the reasons for excluded ones as `.dropped`.

    overrides, keys: as in `ztk.run`, with `hardware`. `plan.traced` sets how many layouts are planned.
    folder: where to write `search.json` and `search.csv`. If omitted, nothing is written.
    quiet: suppresses the progress and the table.

    Raises:
        ValueError: the configuration is invalid, for example without `hardware`.
    """
    words = [*_words(overrides, keys=keys), "plan.search=true"]
    with contextlib.ExitStack() as stack:
        place = folder if folder is not None else stack.enter_context(tempfile.TemporaryDirectory())
        Path(place).mkdir(parents=True, exist_ok=True)
        config = compose(*words, output_dir=place)
        if quiet:
            stack.enter_context(contextlib.redirect_stdout(stack.enter_context(open(os.devnull, "w"))))
        return _search(config, words=words)


def _search(config: Config, *, words: list[str]) -> "Search":
    given = dict(word.split("=", maxsplit=1) for word in words)
    program = import_task("experiments.plan")
    return import_task("experiments.layouts").find_layouts(config, given=given, make_plan=program.make_plan)


def _words(overrides: tuple[str, ...], *, keys: dict[str, Any]) -> list[str]:
    words = command_words(overrides, keys=keys)
    for word in words:
        if word.startswith("task=") and word not in (_TRAINING, _TASK):
            raise ValueError(f"{word}: cannot be planned; leave it out to plan the pretraining run")
    return [*(word for word in words if not word.startswith(("task=", *_RECORDED))), _TASK]
