"""The experts of drawn tokens in the trainer."""

from enum import StrEnum
from typing import TYPE_CHECKING

from ztk.core.policies.key import When
from ztk.core.policies.runs import draws

if TYPE_CHECKING:
    from ztk.core.policies.config import Config

HELP = (
    "experts of drawn tokens in scoring and update. replay: those that the inference engine chose, with weights from the trainer's "
    "scores of them; own: the trainer's choice"
)


class RolloutExperts(StrEnum):
    """rollout.experts: the experts of drawn tokens in the trainer."""

    replay = "replay"
    own = "own"


def replays_experts(config: "Config") -> bool:
    """Whether the inference engine draws with experts, which the trainer can replay."""
    rollout = config.rollout
    return (
        draws(config)
        and rollout.identity == "corrected"
        and rollout.engine == "generator"
        and rollout.environment is None
        and config.model.experts is not None
    )


ROUTES = When(
    "rollout.identity=corrected and rollout.engine=generator without rollout.environment, for a model with experts",
    lambda config, machine: replays_experts(config),
)
