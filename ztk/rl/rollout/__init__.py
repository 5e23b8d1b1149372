"""Rollouts: samples from the engine in training, their rewards, and log-probabilities with the trainer's bits."""

from ztk.rl.rollout.ahead import Ahead, Drawn
from ztk.rl.rollout.buffer import Buffer, Samples, share_of_rank
from ztk.rl.rollout.cached import CachedRollouts
from ztk.rl.rollout.clients import ServerFault
from ztk.rl.rollout.engine_attention import EngineAttention, has_engine_attention, use_engine_attention
from ztk.rl.rollout.environments import EnvironmentFault, Environments, Episode
from ztk.rl.rollout.episodes import EpisodePolicy, play
from ztk.rl.rollout.equality import Difference, RolloutMismatch, compare, first_layer, token_logprobs
from ztk.rl.rollout.fleet import Fleet, ServersLost
from ztk.rl.rollout.guards import GuardPolicy, Guards, RolloutStopped
from ztk.rl.rollout.head import (
    answer_logit_loss,
    answer_logits,
    answer_logprobs,
    has_large_logits,
    logits_by_part,
    token_loss,
)
from ztk.rl.rollout.hybrid import Requests, Rollouts, TrainerRollouts, TurnDraws, any_rank, draw_once, generate
from ztk.rl.rollout.kept import Kept, hide_of
from ztk.rl.rollout.layout import Layout, can_pack, lay_out, pack_exactly
from ztk.rl.rollout.rewards import (
    Answered,
    Reward,
    Rewarded,
    RewardError,
    RewardFunctions,
    TrainingState,
    load_function,
)
from ztk.rl.rollout.routing import Routers, same_experts
from ztk.rl.rollout.served import ServedRollouts
from ztk.rl.rollout.weights import (
    RolloutPolicy,
    RolloutWeights,
    SettledWeights,
    rollout_weights,
    settle_weights,
    states_away,
)

__all__ = [
    "Ahead",
    "Answered",
    "Buffer",
    "CachedRollouts",
    "Difference",
    "Drawn",
    "EngineAttention",
    "EnvironmentFault",
    "Environments",
    "Episode",
    "EpisodePolicy",
    "Fleet",
    "GuardPolicy",
    "Guards",
    "Kept",
    "Layout",
    "Requests",
    "Reward",
    "RewardError",
    "RewardFunctions",
    "Rewarded",
    "RolloutMismatch",
    "RolloutPolicy",
    "RolloutStopped",
    "RolloutWeights",
    "Rollouts",
    "Routers",
    "Samples",
    "ServedRollouts",
    "ServerFault",
    "ServersLost",
    "SettledWeights",
    "TrainerRollouts",
    "TrainingState",
    "TurnDraws",
    "answer_logit_loss",
    "answer_logits",
    "answer_logprobs",
    "any_rank",
    "can_pack",
    "compare",
    "draw_once",
    "first_layer",
    "generate",
    "has_engine_attention",
    "has_large_logits",
    "hide_of",
    "lay_out",
    "load_function",
    "logits_by_part",
    "pack_exactly",
    "play",
    "rollout_weights",
    "same_experts",
    "settle_weights",
    "share_of_rank",
    "states_away",
    "token_logprobs",
    "token_loss",
    "use_engine_attention",
]
