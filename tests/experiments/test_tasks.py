"""Generated tasks: their prompts and answers, and the lengths that the configuration derives from them."""

import pytest

from ztk.config import Machine, compose
from ztk.core.policies.prompt_tasks import TASK_LENGTHS, PromptTask
from ztk.experiments.lengths import histogram
from ztk.experiments.tasks import TASKS

EXAMPLES = {
    "sorting": ("dbace>", "abcde"),
    "arithmetic": ("7+15=", "22"),
    "copying": ("dbace>", "dbace"),
    "lexicon": ("chat>", "cat"),
}


def test_the_configuration_has_these_tasks():
    assert list(TASKS) == [task.value for task in PromptTask] == list(EXAMPLES)


@pytest.mark.parametrize("name", list(TASKS))
def test_answers_rewards_and_lengths(name):
    task, (text, answer) = TASKS[name], EXAMPLES[name]
    assert task.answer(text) == answer and task.score(prompt=text, answer=answer, record={}) == 1
    longest, texts = [0, 0], set()
    for number in [*range(-150, 150), 2**40]:
        made = task.prompt(seed=1, number=number)
        assert made == task.prompt(seed=1, number=number) and bytes(made.tokens).decode() == made.text
        wrong = task.wrong(made.text, seed=1, number=number)
        assert wrong != made.answer or len(set(made.answer)) == 1
        assert task.score(prompt=made.text, answer=wrong, record={}) == (wrong == made.answer)
        longest = [max(longest[0], len(made.text)), max(longest[1], len(made.answer) + 1, len(wrong) + 1)]
        texts.add(made.text)
    prompt, answer = TASK_LENGTHS[PromptTask(name)]
    assert longest[0] == prompt and longest[1] <= answer and len(texts) > 30


def test_files_take_the_place_of_the_task(tmp_path):
    file = tmp_path / "pairs.jsonl"
    file.write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n' * 4)

    def task_of(*overrides: str):
        return compose(*overrides, output_dir="/run", machine=Machine(gpus=0, cores=2)).rollout.task

    assert (
        task_of("task=dpo") is PromptTask.sorting and task_of("task=sft", "rollout.task=lexicon") is PromptTask.lexicon
    )
    assert task_of("task=dpo", f"data.path={file}", "warm_start.steps=0") is None


def test_a_histogram_of_lengths():
    assert histogram([7]) == f"7 to 7 tokens, median 7\n  7 {'#' * 32} 1"
    lengths = [*range(1, 17), *[2] * 100, 80]
    first, *rows = histogram(lengths).splitlines()
    assert first == "1 to 80 tokens, median 2" and len(rows) == 8
    assert [int(row.split()[-1]) for row in rows] == [110, 6, 0, 0, 0, 0, 0, 1]  # ten lengths each
    assert [row.count("#") for row in rows] == [32, 2, 0, 0, 0, 0, 0, 1]
