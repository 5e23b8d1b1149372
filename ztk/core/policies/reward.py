"""Keys of `reward`: functions and models that reward answers, and the model that learns rewards."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar

from ztk.core.policies.key import Changes, When, key, key_faults, section, tasks
from ztk.core.policies.paths import ObjectNames, Paths
from ztk.core.policies.ranges import NOT_NEGATIVE, POSITIVE, Range, member, refuse
from ztk.core.policies.rollout import DRAWS, EVALUATED, StrategyConfig, address_faults
from ztk.core.policies.runs import draws

if TYPE_CHECKING:
    from ztk.core.policies.config import Config

_REWARD_MODEL = When(
    f"{DRAWS.words} and reward.path", lambda config, machine: draws(config) and config.reward.path is not None
)
_SCORED = When(
    f"{DRAWS.words} and reward.servers", lambda config, machine: draws(config) and bool(config.reward.servers)
)
_LEARNED = When(
    f"{DRAWS.words}, and reward.path or reward.servers",
    lambda config, machine: _REWARD_MODEL.test(config, machine) or _SCORED.test(config, machine),
)
_LEARNS_REWARDS = tasks("reward")
_LAST_VALUES = When(
    "task=reward with reward.loss=bradley_terry",
    lambda config, machine: config.task.name == "reward" and config.reward.loss == "bradley_terry",
    section="reward",
    section_test=lambda values: values.loss == "bradley_terry",
)


class RewardLossName(StrEnum):
    """reward.loss: the loss of a reward model."""

    bradley_terry = "bradley_terry"
    per_token = "per_token"


def _function_faults(config: "Config") -> Iterator[str]:
    if config.reward.function is not None and config.reward.functions:
        yield (
            f"reward.function={config.reward.function}: reward.functions names functions, too; put all of them into reward.functions"
        )


def _server_faults(config: "Config") -> Iterator[str]:
    reward = config.reward
    yield from address_faults(reward.servers, key="reward.servers")
    if reward.servers and reward.path is not None:
        yield f"reward.servers with reward.path={reward.path}: the servers have the reward model; leave one of the two out"


class ScoreInput(StrEnum):
    """reward.servers_input: the form of the answers that servers score."""

    tokens = "tokens"
    text = "text"


@dataclass(frozen=True, kw_only=True, slots=True)
class PairwisePolicy:
    """The loss of a reward model over pairs.

    loss: bradley_terry is -log sigmoid(chosen - rejected - margin) of the values at the last tokens (Ouyang et al. 2022, arXiv 2203.02155;
    margin: Touvron et al. 2023, arXiv 2307.09288). per_token is DeepSpeed-Chat's: the mean of -log sigmoid(chosen - rejected) over the
    positions from the first token in which the sequences differ to the end of the longer one. centring is in Eisenstein et al. 2023, arXiv
    2312.09244.

    Raises:
        ValueError: a number out of its range, an unknown loss, or a margin with per_token.
    """

    acts: ClassVar = _LEARNS_REWARDS

    loss: RewardLossName = key(
        "of a reward model. bradley_terry: of the values at the last tokens; per_token: DeepSpeed-Chat's, of all values after the common "
        "beginning",
        default=RewardLossName.bradley_terry,
        acts=_LEARNS_REWARDS,
    )
    margin: float = key(
        "by which a chosen answer's value is to be larger, where a record has no margin",
        default=0.0,
        range=NOT_NEGATIVE,
        acts=_LAST_VALUES,
    )
    centring: float = key(
        "factor of (chosen + rejected)^2 at the last tokens, added to the loss",
        default=0.0,
        range=NOT_NEGATIVE,
        acts=_LEARNS_REWARDS,
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "loss", member(self.loss, of=RewardLossName, key="reward.loss"))
        refuse(key_faults(self, section="reward"))


@section
class RewardConfig(PairwisePolicy, StrategyConfig):
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
    servers: list[str] | None = key(
        "addresses of servers that have the reward model, as in [http://a:8000]: task=serve with a run of task=reward or with a model of "
        "transformers, or vLLM; null: none",
        optional=True,
        acts=DRAWS,
        contradicts=_server_faults,
    )
    servers_input: ScoreInput | None = key(
        "tokens: servers read the policy's tokens; text: servers read texts and messages with a tokenizer of their own",
        default=ScoreInput.tokens,
        acts=_SCORED,
    )
    servers_wait: float | None = key(
        "seconds without an answer of reward.servers after which the run ends",
        default=600.0,
        range=POSITIVE,
        acts=_SCORED,
        changes=Changes.nothing,
    )
    servers_key_variable: str | None = key(
        "environment variable with the key of reward.servers; null: they need none",
        optional=True,
        acts=_SCORED,
        changes=Changes.nothing,
    )
    eval_functions: Any = key(
        "functions that reward the answers of evaluations, as reward.functions; null: as in training",
        acts=EVALUATED,
        optional=True,
        paths=ObjectNames(kind="FUNCTION", example="mine.py:score", several=True),
    )
    path_weight: float | None = key(
        "weight of the value of reward.path or reward.servers in the sum with the functions' rewards; null: the value alone trains, and the "
        "functions' sum is shown as true_reward",
        range=NOT_NEGATIVE,
        acts=_LEARNED,
        optional=True,
    )
    timeout_seconds: float | None = key(
        "longest time of one call of a function or an environment",
        range=Range(low=0, high=86_400, above=True),
        acts=DRAWS,
    )
