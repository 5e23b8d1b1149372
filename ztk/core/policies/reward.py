"""Keys of `reward`: functions and models that reward answers, and the model that learns rewards."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from ztk.core.policies.align import RewardLossName
from ztk.core.policies.key import When, key, tasks
from ztk.core.policies.paths import ObjectNames, Paths
from ztk.core.policies.ranges import NOT_NEGATIVE, Range
from ztk.core.policies.rollout import DRAWS, EVALUATED, StrategyConfig
from ztk.core.policies.runs import draws

if TYPE_CHECKING:
    from ztk.core.policies.config import Config

_REWARD_MODEL = When(
    f"{DRAWS.words} and reward.path", lambda config, machine: draws(config) and config.reward.path is not None
)
_LEARNS_REWARDS = tasks("reward")


def _function_faults(config: "Config") -> Iterator[str]:
    if config.reward.function is not None and config.reward.functions:
        yield (
            f"reward.function={config.reward.function}: reward.functions names functions, too; put all of them into reward.functions"
        )


@dataclass(kw_only=True)
class RewardConfig(StrategyConfig):
    """The reward of an answer, and the reward model that is trained, or that gives rewards (reward.path) in an engine of its own, like the
    critic."""

    acts: ClassVar = _REWARD_MODEL

    function: str | None = key(
        "one function, as an entry of reward.functions; null: the task's own, or reward.functions",
        acts=DRAWS,
        optional=True,
        contradicts=_function_faults,
        paths=ObjectNames(kind="FUNCTION", example="mine.py:score"),
    )
    functions: Any = key(
        "functions whose weighted sum is the reward: FILE.py:FUNCTION, MODULE:FUNCTION or {function: FILE.py:FUNCTION, weight: 0.2}. Called "
        "once per batch as TRL's are, f(prompts=, completions=, completion_ids=, fields of the records), or with a parameter `answer` once per "
        "answer, f(prompt=, answer=, record=). None leaves an answer out",
        acts=DRAWS,
        optional=True,
        paths=ObjectNames(kind="FUNCTION", example="mine.py:score", several=True),
    )
    path: str | None = key(
        "run folder or checkpoint of task=reward, of the policy's shape, or folder of a model of transformers for sequence classification with "
        "one label, which reads texts with its own tokenizer; its value at the last token is the reward; null: functions give it",
        acts=DRAWS,
        optional=True,
        paths=Paths(kind="run", fix="name a run folder with checkpoints, or leave it out"),
    )
    eval_functions: Any = key(
        "functions that reward the answers of evaluations, as reward.functions; null: as in training",
        acts=EVALUATED,
        optional=True,
        paths=ObjectNames(kind="FUNCTION", example="mine.py:score", several=True),
    )
    path_weight: float | None = key(
        "weight of the value of reward.path in the sum with the functions' rewards; null: the value alone trains, and the functions' sum is "
        "shown as true_reward",
        range=NOT_NEGATIVE,
        acts=_REWARD_MODEL,
        optional=True,
    )
    timeout_seconds: float | None = key(
        "longest time of one call of a function or an environment",
        range=Range(low=0, high=86_400, above=True),
        acts=DRAWS,
    )
    loss: RewardLossName | None = key(
        "of a reward model. bradley_terry: of the values at the last tokens; per_token: DeepSpeed-Chat's, of all values after the common "
        "beginning",
        acts=_LEARNS_REWARDS,
    )
    margin: float | None = key(
        "by which a chosen answer's value is to be larger, where a record has no margin",
        range=NOT_NEGATIVE,
        acts=_LEARNS_REWARDS,
    )
    centring: float | None = key(
        "factor of (chosen + rejected)^2, added to the loss", range=NOT_NEGATIVE, acts=_LEARNS_REWARDS
    )
