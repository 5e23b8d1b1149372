"""`reward.function` and `reward.functions`, and a test call before ranks start."""

import copy
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ztk.config.keys import write
from ztk.config.lengths import prompts_of
from ztk.config.own import TARGET, call_later
from ztk.core.policies.config import Config
from ztk.core.policies.runs import draws, is_own

if TYPE_CHECKING:
    from ztk.rl.align import Prompt
    from ztk.rl.rollout.rewards import RewardFunctions

_ANSWER, _PROMPT = "42", "cab>"  # for the test call without data.path


def named_rewards(config: Config) -> list[tuple[str, float]]:
    """Returns the configured functions, `FILE.py:FUNCTION` or `MODULE:FUNCTION`, each with its weight."""
    reward = config.reward
    if reward.function is not None:
        return [(reward.function, 1.0)]
    return [
        (entry, 1.0) if isinstance(entry, str) else (entry["function"], float(entry.get("weight", 1.0)))
        for entry in _entries(reward.functions)
    ]


def has_rewards(config: Config) -> bool:
    """Returns whether the user's functions provide rewards."""
    reward = config.reward
    return is_own(config, section="reward") or reward.function is not None or bool(reward.functions)


def reward_faults(config: Config) -> Iterator[str]:
    """Yields a fault if two keys name rewards."""
    if is_own(config, section="reward") and (config.reward.function is not None or config.reward.functions):
        key = "reward.function" if config.reward.function is not None else "reward.functions"
        yield f"{key}={config.reward.function or config.reward.functions}: reward._target_ names a reward, too; leave one of them out"


def prepare_rewards(config: Config) -> None:
    """Imports the reward functions and calls each once, with the first prompt of the data and the answer "42".

    Raises:
        ValueError: a function cannot be imported, raises, times out, or does not return a number or None per answer.
    """
    if not draws(config):
        return
    own = evaluation_config(config)
    for entry in (config,) if own is None else (config, own):
        if has_rewards(entry):
            _call_once(entry)


def evaluation_config(config: Config) -> Config | None:
    """Returns the configuration with the prompts and reward functions of evaluations, or None if they are the same as for training."""
    if config.data.eval_path is None and not config.reward.eval_functions:
        return None
    own = copy.deepcopy(config)
    if config.data.eval_path is not None:
        own.data.path, own.rollout.task = config.data.eval_path, None
    if config.reward.eval_functions:
        own.own.pop("reward", None)
        write(own, key="reward.function", value=None)
        write(own, key="reward.functions", value=config.reward.eval_functions)
    return own


def _call_once(config: Config) -> None:
    from ztk.rl.rollout.rewards import Answered, RewardError, TrainingState  # imported late: torch takes a second

    functions = open_rewards(config)
    prompt, state = first_prompt(config), TrainingState(global_step=0, max_steps=config.train.steps)
    common = {"texts": [prompt.text], "records": [prompt.record], "is_chat": [prompt.is_chat], "state": state}
    try:
        functions.score(Answered(answers=[_ANSWER], token_ids=[list(_ANSWER.encode())], **common))
    except RewardError as error:
        raise ValueError(f"{_key(config)}: called once before the run starts: {error}") from None


def open_rewards(config: Config) -> "RewardFunctions":
    """Imports the user's functions that the configuration names.

    Raises:
        ValueError: a function cannot be imported, or two have the same name.
    """
    from ztk.rl.rollout.rewards import Reward, RewardFunctions, load_function

    assert config.reward.timeout_seconds is not None, "the configuration is checked"
    if is_own(config, section="reward"):
        node = config.own["reward"]
        own = Reward(name=str(node[TARGET]).rpartition(".")[2], function=call_later(node))
        return RewardFunctions([own], timeout_seconds=config.reward.timeout_seconds)
    key, named = _key(config), named_rewards(config)
    short = [name.rpartition(":")[2] for name, _ in named]
    long = [
        f"{os.path.basename(name.rpartition(':')[0]).removesuffix('.py')}.{last}"
        for (name, _), last in zip(named, short, strict=True)
    ]
    if twice := [name for name in dict.fromkeys(long) if long.count(name) > 1]:
        raise ValueError(f"{key}: {twice[0]} is there twice, and rows name functions: give one of the two another name")
    rewards = [
        Reward(name=last if short.count(last) == 1 else full, function=load_function(name, key=key), weight=weight)
        for (name, weight), last, full in zip(named, short, long, strict=True)
    ]
    return RewardFunctions(rewards, timeout_seconds=config.reward.timeout_seconds)


def first_prompt(config: Config) -> "Prompt":
    """Returns the first prompt of the data."""
    from ztk.rl.align import Prompt  # imported late: torch takes a second

    if config.data.path is None:
        return Prompt(text=_PROMPT, tokens=list(_PROMPT.encode()), record={"number": 0})
    return prompts_of(config)[0]


def _key(config: Config) -> str:
    if is_own(config, section="reward"):
        return f"reward.{TARGET}"
    return "reward.function" if config.reward.function is not None else "reward.functions"


def _entries(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, list) else [value]
