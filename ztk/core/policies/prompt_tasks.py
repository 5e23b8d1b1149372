"""Tasks whose prompts, answers and rewards are generated."""

from enum import StrEnum


class PromptTask(StrEnum):
    """rollout.task: generated prompts."""

    sorting = "sorting"
    arithmetic = "arithmetic"
    copying = "copying"
    lexicon = "lexicon"


# Most bytes of a prompt and of an answer, its end included.
TASK_LENGTHS = {
    PromptTask.sorting: (6, 6),
    PromptTask.arithmetic: (6, 3),
    PromptTask.copying: (6, 6),
    PromptTask.lexicon: (7, 7),
}
