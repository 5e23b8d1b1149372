"""Calls the user's reward functions with time limits and checks.

A function gets a whole batch as lists, as in TRL: f(prompts=, completions=, completion_ids=, further fields of the records) -> one number
or None per answer. A function with a parameter `answer` is called per answer instead: f(prompt=, answer=, record=) -> a number or None.
Both may be `async def`: all calls are awaited together, on an event loop that lives as long as the process, so that clients can keep
their connections.
"""

import difflib
import importlib
import importlib.util
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ztk.core.policies.columns import column_fault
from ztk.core.policies.paths import is_object_name
from ztk.rl.rollout.calls import NUMBER, Call, Calls, asked, is_async, number_of, parameters_of, values_of

RewardFunction = Callable[..., Any]
# Columns of an answer in the table of completions, where functions add theirs by `log_extra`.
ANSWER_COLUMNS = ("step", "prompt", "answer", "reward", "length", "kl", "finished", "turns", "ended", "turn_rewards")
FUNCTION_COLUMNS = "rewards."  # of the values of single functions, followed by their names
# Columns of a rollout in the step's row, where functions add theirs by `log_metric`.
ROLLOUT_COLUMNS = (
    *("reward", "true_reward", "length", "kl", "entropy", "truncated", "empty", "excluded", "equal_groups", "clipped"),
    *("turns", "ended_done", "ended_max_turns", "critic_loss"),
)
ROLLOUT_PREFIXES = (FUNCTION_COLUMNS, "rollout_", "eval_")
# Fields of a record that contain the conversation itself.
OWN_ARGUMENTS = ("prompts", "trainer_state", "log_extra", "log_metric")  # that no field of a record may replace
OWN_FIELDS = ("prompt", "completion", "completion_ids", "messages")


class RewardError(RuntimeError):
    """A reward function failed. The message has its name, the record and the answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingState:
    """The `trainer_state` of reward functions: the number of optimizer steps so far, and the steps of the run."""

    global_step: int
    max_steps: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Answered:
    """Answers to reward. texts: the prompts as text, including special tokens. token_ids: the answers' tokens, including the end. records:
    lines of the data.

    is_chat: whether prompts are messages. conversations: messages after each prompt of messages, if they are more than the answer.
    """

    texts: Sequence[str]
    answers: Sequence[str]
    token_ids: Sequence[Sequence[int]]
    records: Sequence[Mapping[str, Any]]
    is_chat: Sequence[bool]
    state: TrainingState
    conversations: Sequence[Sequence[Mapping[str, Any]]] | None = None

    def __len__(self) -> int:
        return len(self.answers)

    def where(self, row: int) -> str:
        """Describes an answer in an error."""
        return f"for prompt {self.texts[row]!r}, answer {self.answers[row]!r}, record {dict(self.records[row])!r}"

    def columns(self) -> dict[str, list[Any]]:
        """The arguments of a function that takes batches."""
        names = dict.fromkeys(name for record in self.records for name in record if name not in OWN_FIELDS)
        rows = list(zip(self.texts, self.answers, self.records, self.is_chat, strict=True))
        fields = {name: [record.get(name) for record in self.records] for name in names}
        return fields | {  # UltraFeedback's records have their own field "completions"
            "prompts": [
                record.get("prompt", record.get("messages")) if chat else text for text, _, record, chat in rows
            ],
            "completions": [self.messages(row) if chat else text for row, (_, text, _, chat) in enumerate(rows)],
            "completion_ids": [list(ids) for ids in self.token_ids],
        }

    def messages(self, row: int) -> list[Mapping[str, Any]]:
        """Returns the messages after a prompt of messages."""
        if self.conversations is not None:
            return list(self.conversations[row])
        return [{"role": "assistant", "content": self.answers[row]}]


@dataclass(frozen=True, kw_only=True, slots=True)
class Reward:
    """A reward function with its weight in the sum. name: label in rows, tables and errors."""

    name: str
    function: RewardFunction
    weight: float = 1.0

    @property
    def per_answer(self) -> bool:
        """Whether it is called once per answer."""
        return "answer" in parameters_of(self.function)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rewarded:
    """values: rewards of S answers by F functions, float64 [S, F], NaN for None. total: the weighted sums, [S], NaN if all functions returned
    None.

    extra: further columns of the completions' table (`log_extra`). logged: values for a step's row (`log_metric`).
    """

    values: Tensor
    total: Tensor
    extra: Mapping[str, list[Any]] = field(default_factory=dict)
    logged: Mapping[str, list[float]] = field(default_factory=dict)


class RewardFunctions:
    """Several functions, whose weighted sum is the reward. A function that returns None for an answer is excluded from its sum."""

    def __init__(self, rewards: Sequence[Reward], *, timeout_seconds: float) -> None:
        """timeout_seconds: the time limit of one call."""
        self.rewards, self._calls = tuple(rewards), Calls(seconds=timeout_seconds, fault=RewardError)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the functions, in order."""
        return tuple(reward.name for reward in self.rewards)

    @property
    def overlap(self) -> bool:
        """Whether some functions are coroutines, which compute after `begin` next to other work."""
        return any(is_async(reward.function) for reward in self.rewards)

    def score(self, answered: Answered) -> Rewarded:
        """Returns the rewards of a batch.

        Raises:
            RewardError: a function raised, exceeded the time limit, or did not return one finite number or None per answer.
        """
        return self.begin(answered)()

    def begin(self, answered: Answered) -> Callable[[], Rewarded]:
        """Starts coroutines. The result calls plain functions, waits for all, and returns the rewards. It raises as `score`."""
        extra: dict[str, list[Any]] = {}
        logged: dict[str, list[float]] = {}
        given = answered.columns() | {
            "trainer_state": answered.state,
            "log_extra": partial(_log_extra, extra),
            "log_metric": partial(_log_metric, logged),
        }
        # Coroutines run on their loop while plain functions run here.
        started = [self._calls.start(_calls_of(reward, answered=answered, given=given)) for reward in self.rewards]

        def wait_for_all() -> Rewarded:
            found = []
            for reward, wait in zip(self.rewards, started, strict=True):
                values = wait()
                values = values if reward.per_answer else values[0]
                found.append(_checked(values, reward=reward, answered=answered))
            values = torch.tensor(found, dtype=torch.float64).view(len(self.rewards), len(answered)).T
            weights = torch.tensor([reward.weight for reward in self.rewards], dtype=torch.float64)
            total = torch.where(values.isnan().all(1), math.nan, (values.nan_to_num() * weights).sum(1))
            return Rewarded(values=values, total=total, extra=_columns(extra, answered=answered), logged=logged)

        return wait_for_all


def load_function(name: str, *, key: str, kind: str = "function") -> RewardFunction:
    """Imports the function `name`, `FILE.py:FUNCTION` or `MODULE:FUNCTION`. key: the configuration's key, and kind: the object's kind,
    appear in errors.

    Raises:
        ValueError: another form, a missing file or module, a failing import, or no such function.
    """
    source, _, function = name.rpartition(":")
    if not is_object_name(name):
        raise ValueError(f"{key}={name}: must be FILE.py:FUNCTION or MODULE:FUNCTION; use {key}=mine.py:score")
    try:
        module = _module_of_file(source) if source.endswith(".py") else importlib.import_module(source)
    except FileNotFoundError as error:
        raise ValueError(f"{key}={name}: {error}") from None
    except Exception as error:
        raise ValueError(f"{key}={name}: {type(error).__name__} while {source} was imported: {error}") from error
    found = getattr(module, function, None)
    if not callable(found):
        own = [known for known, value in vars(module).items() if callable(value) and not known.startswith("_")]
        near = difflib.get_close_matches(function, own, n=1)
        fix = f"did you mean {near[0]}?" if near else "name one that it has"
        raise ValueError(f"{key}={name}: {source} has no {kind} {function!r}; {fix}")
    return found


def _module_of_file(source: str) -> Any:
    file = Path(source).expanduser()
    if not file.is_file():
        raise FileNotFoundError(f"there is no file {file.absolute()}; give its path")
    spec = importlib.util.spec_from_file_location(f"reward_{file.stem}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _calls_of(reward: Reward, *, answered: Answered, given: Mapping[str, Any]) -> list[Call]:
    """Returns the calls of a function: one, or one per answer."""
    common = {"said": f"the reward function {reward.name}", "function": reward.function}
    if not reward.per_answer:
        where = f"for {len(answered)} answers, the first {answered.where(0)}"
        arguments = asked(reward.function, given=given)
        if taken := [name for name in OWN_ARGUMENTS if name in arguments and any(name in r for r in answered.records)]:
            raise RewardError(
                f"{common['said']} has an argument {taken[0]!r}, and so has the record, {where}: rename the field of the records"
            )
        return [Call(where=where, arguments=arguments, **common)]
    rows = enumerate(zip(answered.texts, answered.answers, answered.records, strict=True))
    return [
        Call(where=answered.where(row), arguments={"prompt": text, "answer": answer, "record": dict(record)}, **common)
        for row, (text, answer, record) in rows
    ]


def _log_extra(extra: dict[str, Any], column: str, values: Any) -> None:
    """Adds a column to the table of completions. Raises ValueError for one that is there."""
    if column in extra or column in ANSWER_COLUMNS or str(column).startswith(FUNCTION_COLUMNS):
        raise ValueError(f"log_extra({column!r}, ...): the table of completions has this column: use another name")
    extra[column] = values


def _log_metric(logged: dict[str, list[float]], name: str, value: Any) -> None:
    """Adds a value to the mean of a column of the step's row. Raises ValueError for a column of ztk's, and for another value than a number."""
    if fault := column_fault(name, more=ROLLOUT_COLUMNS, prefixes=ROLLOUT_PREFIXES):
        raise ValueError(f"log_metric: {fault}")
    try:
        logged.setdefault(name, []).append(number_of(value))
    except TypeError as kind:
        raise ValueError(f"log_metric({name!r}, {value!r}) got {kind}: give {NUMBER}") from None


def _columns(extra: Mapping[str, Any], *, answered: Answered) -> dict[str, list[Any]]:
    """Returns the columns of `log_extra` as lists. Raises RewardError if a length differs from the number of answers."""
    found = {}
    for name, values in extra.items():
        try:
            found[name] = list(values)
        except TypeError:
            raise RewardError(f"log_extra({name!r}, {values!r}): give a list, with a value per answer") from None
        if len(found[name]) != len(answered):
            raise RewardError(
                f"log_extra({name!r}, ...) has {len(found[name])} values for {len(answered)} answers: give one per answer"
            )
    return found


def _checked(values: Any, *, reward: Reward, answered: Answered) -> list[float]:
    """Returns a finite number per answer, NaN for None. Raises RewardError for anything else."""
    said = f"the reward function {reward.name} returned"
    try:
        found = values_of(values)
    except TypeError as kind:
        raise RewardError(f"{said} {values!r}, {kind}: return a list, with {NUMBER}, per answer") from None
    if len(found) != len(answered):
        raise RewardError(f"{said} {len(found)} rewards for {len(answered)} answers: return one per answer")
    rewards = []
    for row, value in enumerate(found):
        try:
            rewards.append(number_of(value))
        except TypeError as kind:
            raise RewardError(f"{said} {value!r}, {kind}, {answered.where(row)}: return {NUMBER}") from None
    return rewards
