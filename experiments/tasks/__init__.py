"""Tasks with generated prompts, answers and exact rewards, by the names of `rollout.task`."""

from experiments.tasks.arithmetic import Arithmetic
from experiments.tasks.copying import Copying
from experiments.tasks.lexicon import Lexicon
from experiments.tasks.sorting import Sorting
from experiments.tasks.task import Task
from ztk.config import Config

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
