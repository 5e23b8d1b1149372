"""Tasks with generated prompts, answers and exact rewards, by the names of `rollout.task`."""

from ztk.config import Config
from ztk.experiments.tasks.arithmetic import Arithmetic
from ztk.experiments.tasks.copying import Copying
from ztk.experiments.tasks.lexicon import Lexicon
from ztk.experiments.tasks.sorting import Sorting
from ztk.experiments.tasks.task import Task

TASKS: dict[str, Task] = {
    "sorting": Sorting(),
    "arithmetic": Arithmetic(),
    "copying": Copying(),
    "lexicon": Lexicon(),
}

__all__ = ["TASKS", "Task", "name_of"]


def name_of(config: Config) -> str:
    """Returns the task of a run without files."""
    return "sorting" if config.rollout.task is None else config.rollout.task.value
