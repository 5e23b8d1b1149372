"""Reward functions: calls, return values, and failures."""

import asyncio
import math
import re
import threading
import time
from contextlib import nullcontext
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch

from tests.rl.rollout.runs import SMALL, Batches, OneRank, config_of, play, rows_of
from ztk.config import ConfigError, Machine, compose, from_yaml, prepare_rewards, to_yaml
from ztk.experiments.prompts import Prompts
from ztk.experiments.reward_models import RewardModel
from ztk.experiments.rewards import reward, reward_metrics
from ztk.rl.rollout import Requests, RolloutPolicy
from ztk.rl.rollout.rewards import (
    Answered,
    Reward,
    Rewarded,
    RewardError,
    RewardFunctions,
    TrainingState,
    load_function,
)


def answered(count: int = 1, *, is_chat: bool = False, **columns) -> Answered:
    prompt = [{"role": "user", "content": "p"}] if is_chat else "p"
    records = [
        {"prompt": prompt, "id": row} | {name: values[row] for name, values in columns.items()} for row in range(count)
    ]
    return Answered(
        texts=["<|user|>p" if is_chat else "p"] * count,
        answers=["a" * (row + 1) for row in range(count)],
        token_ids=[[7] * (row + 1) for row in range(count)],
        records=records,
        is_chat=[is_chat] * count,
        state=TrainingState(global_step=3, max_steps=9),
    )


def score(*functions, seconds: float = 5.0, weights=(), of: Answered | None = None):
    weights = weights or [1.0] * len(functions)
    rewards = [
        Reward(name=getattr(function, "__name__", "f"), function=function, weight=weight)
        for function, weight in zip(functions, weights, strict=True)
    ]
    return RewardFunctions(rewards, timeout_seconds=seconds).score(of or answered())


def test_a_function_with_a_parameter_answer_is_called_per_answer():
    found = score(lambda prompt, answer, record: record["id"] + len(prompt + answer), of=answered(2))
    assert found.total.tolist() == [2.0, 4.0]
    assert score(lambda prompt, answer, record: None).total.isnan().all()


def test_a_batch_is_one_call_with_lists_and_the_fields_of_the_records():
    calls = []

    def seen(prompts, completions, completion_ids, id, solution, **others):
        calls.append((prompts, completions, completion_ids, id, solution, others["trainer_state"]))
        return torch.tensor([1.0, 2.0])

    found = score(seen, of=answered(2, solution=["x", None]))
    state = TrainingState(global_step=3, max_steps=9)
    assert calls == [(["p", "p"], ["a", "aa"], [[7], [7, 7]], [0, 1], ["x", None], state)]
    assert found.total.tolist() == [1.0, 2.0]
    assert score(lambda completions: [len(text) for text in completions], of=answered(3)).total.tolist() == [1, 2, 3]


def test_conversations_are_lists_of_messages():
    def seen(prompts, completions):
        assert prompts == [[{"role": "user", "content": "p"}]]
        return [len(completion[0]["content"]) for completion in completions]

    assert score(seen, of=answered(is_chat=True)).total.tolist() == [1.0]


def test_weights_add_up_and_none_leaves_a_function_out_of_a_sum():
    """As in TRL: a sample without any value is left out."""
    first = [1.0, None, None]
    second = [10.0, 10.0, None]
    found = score(lambda completions: first, lambda completions: second, weights=(2.0, 0.5), of=answered(3))
    assert found.total[:2].tolist() == [7.0, 5.0] and found.total[2].isnan()
    assert found.values[:, 0].isnan().tolist() == [False, True, True]


# TRL's documentation of GRPOTrainer, "Using a custom reward function", as it stands.
LENGTH_IN_TOKENS = '''
def reward_func(completion_ids, **kwargs):
    """Reward function that assigns higher scores to longer completions (in terms of token count)."""
    return [float(len(ids)) for ids in completion_ids]
'''
LENGTH_IN_LETTERS = '''
def reward_func(completions, **kwargs):
    """Reward function that assigns higher scores to longer completions (in terms of character count)."""
    return [float(len(completion)) for completion in completions]
'''
FORMAT = '''
import re

def format_reward_func(completions, **kwargs):
    """Reward function that checks if the completion has a specific format."""
    pattern = r"^<think>.*?</think><answer>.*?</answer>$"
    completion_contents = [completion[0]["content"] for completion in completions]
    matches = [re.match(pattern, content) for content in completion_contents]
    return [1.0 if match else 0.0 for match in matches]
'''
REFERENCE = r"""
import re

def reward_func(completions, ground_truth, **kwargs):
    # Regular expression to capture content inside \boxed{}
    matches = [re.search(r"\\boxed\{(.*?)\}", completion) for completion in completions]
    contents = [match.group(1) if match else "" for match in matches]
    # Reward 1 if the content is the same as the ground truth, 0 otherwise
    return [1.0 if c == gt else 0.0 for c, gt in zip(contents, ground_truth)]
"""
MULTI_TASK = """
def check_math_solution(prompt, completion):
    return completion == "4"

def math_reward_func(prompts, completions, task, **kwargs):
    rewards = []
    for prompt, completion, t in zip(prompts, completions, task):
        if t == "math":
            # Calculate math-specific reward
            correct = check_math_solution(prompt, completion)
            reward = 1.0 if correct else -1.0
            rewards.append(reward)
        else:
            # Return None for non-math tasks
            rewards.append(None)
    return rewards
"""
ASYNC = """
import asyncio

async def async_reward_func(prompts, completions, **kwargs):
    # Simulate an I/O-bound call (e.g., HTTP request, database lookup)
    await asyncio.sleep(0.01)
    # Simple toy reward: 1.0 if the completion is non-empty, else 0.0
    return [1.0 if completion else 0.0 for completion in completions]
"""
THINK = "<think>1 + 2</think><answer>3</answer>"


@pytest.mark.parametrize(
    ("text", "name", "answers", "is_chat", "columns", "expected"),
    [
        (LENGTH_IN_TOKENS, "reward_func", ["ab", "c"], False, {}, [2.0, 1.0]),
        (LENGTH_IN_LETTERS, "reward_func", [" blue.", " in the sky."], False, {}, [6.0, 12.0]),
        (FORMAT, "format_reward_func", [THINK, "3"], True, {}, [1.0, 0.0]),
        (REFERENCE, "reward_func", [r" \boxed{2}.", r" \boxed{6}."], False, {"ground_truth": ["2", "5"]}, [1.0, 0.0]),
        (MULTI_TASK, "math_reward_func", ["4", "4"], False, {"task": ["math", "code"]}, [1.0, None]),
        (ASYNC, "async_reward_func", ["4", ""], False, {}, [1.0, 0.0]),
    ],
)
def test_functions_of_trls_documentation_run_unchanged(text, name, answers, is_chat, columns, expected, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(text)
    given = answered(2, is_chat=is_chat, **columns)
    given = Answered(
        texts=given.texts,
        answers=answers,
        token_ids=[list(answer.encode()) for answer in answers],
        records=given.records,
        is_chat=given.is_chat,
        state=given.state,
    )
    found = score(load_function(f"{file}:{name}", key="reward.functions"), of=given).total.tolist()
    assert [None if math.isnan(value) else value for value in found] == expected


@pytest.mark.parametrize("name", ["think_format_reward", "get_soft_overlong_punishment"])
def test_functions_of_trls_library_run_unchanged(name):
    pytest.importorskip("trl")
    function = load_function(f"trl.rewards:{name}", key="reward.functions")
    function = function(max_completion_len=100, soft_punish_cache=20) if name.startswith("get_") else function
    assert score(function, of=answered(2, is_chat=True)).total.tolist() == [0.0, 0.0]


def test_a_slow_judge_is_awaited_for_all_answers_at_once():
    """128 answers and a judge of a second: one function that gathers, one that is called per answer, one plain in one call."""

    async def judge(completion):
        await asyncio.sleep(1)
        return float(len(completion))

    async def batch(completions):
        return await asyncio.gather(*map(judge, completions))

    async def single(prompt, answer, record):
        return await judge(answer)

    def plain(completions):
        time.sleep(1)
        return [0.0] * len(completions)

    started = time.monotonic()
    found = score(batch, single, plain, of=answered(128))
    assert time.monotonic() - started < 3
    assert found.total.tolist() == [2.0 * (row + 1) for row in range(128)]


def test_coroutines_share_one_loop_between_batches():
    """A client opened in one batch is used in the next one."""
    loops = []

    async def seen(completions):
        loops.append(asyncio.get_running_loop())
        return [0.0]

    score(seen)
    score(seen)
    assert loops[0] is loops[1]


def failing(prompt, answer, record):
    raise KeyError("no such field")


async def failing_later(completions):
    raise KeyError("no such field")


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (failing, "failing raised KeyError: 'no such field'"),
        (failing_later, "failing_later raised KeyError: 'no such field'"),
        (lambda prompt, answer, record: float("nan"), "returned nan"),
        (lambda prompt, answer, record: float("inf"), "returned inf"),
        (lambda completions: ["good"], "returned 'good'"),
        (lambda completions: ["1.0"], "returned '1.0', a str"),
        (lambda completions: [torch.ones(1)], r"a Tensor of shape (1,)"),
        (lambda completions: [10**400], "a number that is not finite"),
        (lambda completions: [1j], "a complex"),
        (lambda completions: [[1.0]], "a list"),
        (lambda prompt, answer, record: "1.0", "returned '1.0', a str"),
    ],
)
def test_a_bad_reward_stops_and_shows_prompt_answer_and_record(function, said):
    with pytest.raises(RewardError) as caught:
        score(function)
    text = str(caught.value)
    assert said in text and "prompt 'p', answer 'a', record {'prompt': 'p', 'id': 0}" in text


def test_another_number_of_rewards_than_answers_is_refused():
    with pytest.raises(RewardError, match="returned 1 rewards for 2 answers: return one per answer"):
        score(lambda completions: [1.0], of=answered(2))
    with pytest.raises(RewardError, match="returned 1.0, a float: return a list, with a finite number, or None, per"):
        score(lambda completions: 1.0)


async def yields(completions):
    yield 1.0


@pytest.mark.parametrize(
    ("returned", "kind"),
    [
        ({0.0: "a", 1.0: "b"}, "a dict"),
        ({"reward": [1.0, 2.0], "note": [0.0, 0.0]}, "a dict"),
        ({"a": 1.0, "b": 2.0}.values(), "a dict_values"),
        ({1.0, 2.0}, "a set"),
        ("12", "a str"),
        (b"12", "a bytes"),
        (torch.ones(2, 1), r"a Tensor of shape \(2, 1\)"),
        (torch.tensor(1.0), r"a Tensor of shape \(\)"),
        (numpy.ones((1, 2)), r"a ndarray of shape \(1, 2\)"),
        ((number for number in (1.0, 2.0)), "a generator"),
        (map(float, (1, 2)), "a map"),
        (yields([]), "a async_generator"),
    ],
)
def test_another_kind_than_a_list_is_refused_by_name(returned, kind):
    """A dict's keys, a text's letters or the rows of a matrix are no rewards."""

    def mine(completions):
        return returned

    with pytest.raises(RewardError, match=f"(?s)the reward function mine returned .*, {kind}: return a list"):
        score(mine, of=answered(2))


@pytest.mark.parametrize(
    "returned",
    [
        (1, 0.5),
        [True, numpy.float32(0.5)],
        [torch.tensor(1.0), numpy.array(0.5)],
        [Fraction(1), 0.5],
        numpy.array([1.0, 0.5]),
        torch.tensor([1.0, 0.5], dtype=torch.bfloat16),
    ],
)
def test_numbers_of_all_kinds_are_rewards(returned):
    assert score(lambda completions: returned, of=answered(2)).total.tolist() == [1.0, 0.5]


def test_a_hanging_reward_stops_in_time():
    over = threading.Event()

    async def waits(completions):
        await asyncio.sleep(60)

    async def blocks(completions):
        over.wait(60)

    for function in (lambda prompt, answer, record: over.wait(60), lambda completions: over.wait(60), waits, blocks):
        with pytest.raises(RewardError, match=r"did not return within reward.timeout_seconds=0.1"):
            score(function, seconds=0.1)
        assert not over.is_set()  # raised while the function still waited
    over.set()


def test_a_function_logs_columns_and_metrics():
    def logs(completions, log_extra, log_metric):
        log_extra("parsed", [text.upper() for text in completions])
        log_metric("accuracy", 0.5)
        return [0.0] * len(completions)

    found = score(logs, of=answered(2))
    assert found.extra == {"parsed": ["A", "AA"]} and found.logged == {"accuracy": [0.5]}


@pytest.mark.parametrize(
    ("call", "arguments", "said"),
    [
        ("log_extra", ("reward", [1.0]), r"log_extra\('reward', ...\): the table of completions has this column: use"),
        ("log_extra", ("rewards.f", [1.0]), "the table of completions has this column"),
        ("log_extra", ("twice", [1.0]), "the table of completions has this column"),
        ("log_metric", ("lr", 1.0), "'lr' is a column of ztk's: use another name, such as 'my_lr'"),
        ("log_metric", ("memory.host_bytes", 1.0), "such as 'my_memory_host_bytes'"),
        ("log_metric", ("reward", 1.0), "'reward' is a column of ztk's"),
        ("log_metric", ("rollout_x", 1.0), "'rollout_x' is a column of ztk's"),
        ("log_metric", (1, 1.0), "1 is no name"),
        ("log_metric", ("accuracy", "0.5"), "got a str: give a finite number, or None"),
    ],
)
def test_a_function_cannot_replace_a_column_of_ztks(call, arguments, said):
    def logs(completions, **given):
        given["log_extra"]("twice", [0.0])
        given[call](*arguments)
        return [0.0]

    with pytest.raises(RewardError, match=said):
        score(logs)


@pytest.mark.parametrize(
    ("values", "said"),
    [([1], "has 1 values for 2 answers: give one per answer"), (1.0, "give a list, with a value per")],
)
def test_a_logged_column_of_another_length_is_refused(values, said):
    def logs(completions, log_extra):
        log_extra("parsed", values)
        return [0.0] * len(completions)

    with pytest.raises(RewardError, match=said):
        score(logs, of=answered(2))


def test_fields_of_records_do_not_replace_the_answers():
    seen = []

    def keeps(prompts, completions, **others):
        seen.append((prompts, completions))
        return [0.0]

    score(keeps, of=answered(1, completions=["of the record"]))  # as UltraFeedback's have
    assert seen == [(["p"], ["a"])]
    for name in ("prompts", "trainer_state", "log_extra", "log_metric"):
        with pytest.raises(RewardError, match=f"has an argument '{name}', and so has the record, .*: rename the field"):
            score(keeps, of=answered(1, **{name: ["of the record"]}))
    assert score(lambda completions: [1.0], of=answered(1, log_extra=["not taken"])).total.tolist() == [1.0]


def test_a_coroutine_function_that_refuses_its_call_is_named():
    async def needs(completions, missing):
        return [0.0]

    async def gives_up(completions):
        raise asyncio.CancelledError

    with pytest.raises(RewardError, match="the reward function needs raised TypeError: .*'missing'"):
        score(needs)
    with pytest.raises(RewardError, match="the reward function gives_up raised CancelledError"):
        score(gives_up)


def test_a_function_of_a_file_is_loaded_and_faults_name_the_fix(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def score(prompt, answer, record):\n    return 2.5\n")
    assert score(load_function(f"{file}:score", key="reward.function")).total.tolist() == [2.5]
    for name, said in (
        ("mine.score", "must be FILE.py:FUNCTION or MODULE:FUNCTION"),
        (f"{tmp_path}/other.py:score", "there is no file"),
        (f"{file}:points", "has no function 'points'; name one that it has"),
        (f"{file}:scores", "has no function 'scores'; did you mean score"),
        ("no_such_module:points", "ModuleNotFoundError while no_such_module was imported"),
    ):
        with pytest.raises(ValueError, match=said):
            load_function(name, key="reward.function")
    file.write_text("import nowhere_at_all\n")
    with pytest.raises(ValueError, match="ModuleNotFoundError while"):
        load_function(f"{file}:score", key="reward.function")


# In a configuration

TWO = "def short(completions, **kwargs):\n    return [-float(len(text)) for text in completions]\n"
HALF = "def half(prompt, answer, record):\n    return 0.5\n"


def entries(folder):
    (folder / "a.py").write_text(TWO)
    (folder / "b.py").write_text(HALF)
    return f"reward.functions=[{folder}/a.py:short,{{function: {folder}/b.py:half, weight: 0.2}}]"


def composed_with(*words):
    return compose("task=grpo", *SMALL, *words, output_dir="/run", machine=Machine(gpus=0, cores=2))


def test_entries_are_read_made_absolute_and_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    entries(tmp_path)
    config = composed_with("reward.functions=[a.py:short,{function: b.py:half, weight: 0.2}]")
    expected = [f"{tmp_path}/a.py:short", {"function": f"{tmp_path}/b.py:half", "weight": 0.2}]
    assert config.reward.functions == expected
    assert from_yaml(to_yaml(config)).reward.functions == expected
    rewards = Prompts(config).rewards
    assert rewards is not None and rewards.names == ("short", "half")
    assert [reward.weight for reward in rewards.rewards] == [1.0, 0.2]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("reward.functions=[mine.score]", "reward.functions=mine.score: must be FILE.py:FUNCTION or MODULE:FUNCTION"),
        ("reward.functions=[no/mine.py:score]", "there is no file no/mine.py"),
        ("reward.functions=[{name: a.py:f}]", "must be FILE.py:FUNCTION or {function: FILE.py:FUNCTION, weight: 0.2}"),
        ("reward.functions=[{function: HERE/b.py:half, weight: many}]", "weight: 'many' of HERE/b.py:half must be a finite"),
        ("reward.functions=[HERE/b.py:half] reward.function=HERE/b.py:half", "put all of them into reward.functions"),
    ],
)  # fmt: skip
def test_a_malformed_entry_is_refused(words, said, tmp_path):
    entries(tmp_path)
    with pytest.raises(ConfigError, match=re.escape(said.replace("HERE", str(tmp_path)))):
        composed_with(*re.split(r" (?=reward\.)", words.replace("HERE", str(tmp_path))))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import nowhere_at_all", "ModuleNotFoundError while"),
        ("def other(): ...", "has no function 'score'"),
        ("def score(completions, solution):\n    return [0.0]", "raised TypeError: score() missing 1 required positional"),
        ("def score(completions):\n    return [0.0, 0.0]", "called once before the run starts: the reward function score returned 2"),
        ("import time\ndef score(completions):\n    time.sleep(60)", "did not return within reward.timeout_seconds=0.2"),
    ],
)  # fmt: skip
def test_functions_are_called_before_ranks_start(text, said, tmp_path):
    (tmp_path / "mine.py").write_text(text)
    config = composed_with(f"reward.functions=[{tmp_path}/mine.py:score]", "reward.timeout_seconds=0.2")
    with pytest.raises(ValueError, match=re.escape(said)):
        prepare_rewards(config)
    evaluated = composed_with(
        "rollout.eval_every=1", f"reward.eval_functions=[{tmp_path}/mine.py:score]", "reward.timeout_seconds=0.2"
    )
    with pytest.raises(ValueError, match=re.escape(said)):
        prepare_rewards(evaluated)
    (tmp_path / "mine.py").write_text("def score(completions):\n    return [None]")
    prepare_rewards(config)


def test_rows_have_the_mean_of_every_function(ranks, tmp_path):
    (tmp_path / "run").mkdir()
    config = config_of("grpo", folder=tmp_path / "run", ranks=2, train__steps=2, reward__function=None)
    entries(tmp_path)
    config.reward.function = None
    config.reward.functions = [f"{tmp_path}/a.py:short", {"function": f"{tmp_path}/b.py:half", "weight": 0.2}]
    ranks(2).run(play, config=config)
    for row in rows_of(tmp_path / "run"):
        assert row["rewards.half"] == 0.5 and row["rewards.short"] <= 0
        assert math.isclose(row["reward"], row["rewards.short"] + 0.1, abs_tol=1e-9)


@pytest.mark.parametrize(("weight", "rewards"), [(None, [5.0, 6.0]), (0.5, [4.5, 3.0])])
def test_a_reward_model_trains_alone_or_in_a_sum_with_functions(weight, rewards, tmp_path):
    """The function gives 2 and None."""
    config = config_of("grpo", folder=tmp_path, reward="def score(completions):\n    return [2.0, None]\n")
    config.reward.path, config.reward.path_weight = "/run", weight
    prompts = Prompts(config)
    numbers = torch.arange(2)
    requests = Requests(prompts=[[1], [1]], numbers=numbers, prompt_numbers=numbers, copies=numbers)
    samples = requests.begin(RolloutPolicy(length=3, micro_batch=2, max_tokens=2, stops=(10,), pad=0))
    run: Any = SimpleNamespace(
        config=config,
        process=SimpleNamespace(mesh=OneRank()),
        prompts=prompts,
        reward_model=SimpleNamespace(score=lambda *_, **__: torch.tensor([5.0, 6.0]).double()),
        environments=None,
        episodes=(),
        actor=SimpleNamespace(global_steps=0),
    )
    reward(run, samples=samples, prompts=[prompts[0], prompts[1]])
    assert samples.rewards.tolist() == rewards and samples.included.all()
    assert run.rewarded.total[0] == 2 and run.rewarded.total[1].isnan()


def test_a_value_of_the_model_that_is_not_finite_ends_the_run():
    class Valued(Batches, SimpleNamespace):
        def __call__(self, tokens):
            return torch.where(tokens == 9, math.inf, 1.0).unsqueeze(-1)

    engine: Any = Valued(
        module=torch.nn.Identity(), evaluating=nullcontext, process=SimpleNamespace(device=torch.device("cpu"))
    )
    samples: Any = SimpleNamespace(tokens=torch.tensor([[1, 2], [3, 9]]), lengths=torch.tensor([2, 2]))
    answered: Any = SimpleNamespace(where=lambda row: f"for answer {row}")
    with pytest.raises(FloatingPointError, match="the value of the model of reward.path is not finite for answer 1"):
        RewardModel(engine).score(samples, answered=answered, micro_batch=2)


def test_logged_values_that_are_not_finite_are_no_metrics():
    run: Any = SimpleNamespace(
        config=SimpleNamespace(reward=SimpleNamespace(functions=None, path_weight=None)),
        reward_model=None,
        prompts=SimpleNamespace(rewards=None, is_own_reward=True),
        process=SimpleNamespace(mesh=OneRank()),
        rewarded=Rewarded(
            values=torch.zeros(1, 1), total=torch.zeros(1), logged={"a": [math.inf, 1.0], "b": [math.nan], "c": [2.0]}
        ),
    )
    assert reward_metrics(run) == {"c": 2.0}
