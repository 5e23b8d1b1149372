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
_RECORDED = ("train.quick=",)  # says what a run records; a plan refuses it


def plan_run(*overrides: str, **keys: Any) -> "Plan":
    """The plan of the run that `ztk.run` would start with these words: what it keeps, moves and computes. Starts nothing.

        plan = ztk.plan_run("zero=stage3", "model=7b", "launch.ranks=64", hardware="h100")
        plan.as_dict()["peak_memory.device_bytes"], plan.fits

    overrides, keys: as in `ztk.run`. `ztk.plan` plans a model of your own.

    Raises:
        ValueError: the configuration is refused, or a run that cannot be planned.
    """
    words = _words(overrides, keys=keys)
    return import_task("experiments.plan").make_plan(compose(*words, output_dir="."))


def search_layouts(
    *overrides: str, folder: str | os.PathLike | None = None, quiet: bool = False, **keys: Any
) -> "Search":
    """Ranks the layouts of a run, the most promising of them planned: `.rows()` for a frame, `.dropped` says why others are not there.

    overrides, keys: as in `ztk.run`, with `hardware`; `plan.traced` says how many are planned. folder: gets `search.json` and
    `search.csv`; None: nothing is written. quiet: prints neither progress nor table.

    Raises:
        ValueError: the configuration is refused, as without `hardware`.
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
            raise ValueError(f"{word}: is not planned; leave it out, to plan the pretraining run")
    return [*(word for word in words if not word.startswith(("task=", *_RECORDED))), _TASK]
