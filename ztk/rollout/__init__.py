"""Rollouts: samples drawn from the engine that trains, their rewards, and the trainer's bits in their log-probabilities."""

from ztk.rollout.attention import CachedAttention, TextCache, use_cached_attention
from ztk.rollout.buffer import Buffer, Samples, share_of_rank
from ztk.rollout.cached import CachedRollouts
from ztk.rollout.draws import choose, sample_keys, uniforms
from ztk.rollout.equality import Difference, RolloutMismatch, compare, first_layer, token_logprobs
from ztk.rollout.guards import GuardPolicy, Guards, RolloutStopped
from ztk.rollout.head import Answers, answer_logits, large_answers
from ztk.rollout.hybrid import Requests, RolloutPolicy, generate
from ztk.rollout.layout import Layout, can_pack, has_cache, lay_out, pack_exactly
from ztk.rollout.rewards import RewardError, RewardFunction, load_reward, score
from ztk.rollout.states import states_away
from ztk.rollout.weights import RolloutWeights, SettledWeights, rollout_weights, settle_weights

__all__ = [
    "Answers",
    "Buffer",
    "CachedAttention",
    "CachedRollouts",
    "Difference",
    "GuardPolicy",
    "Guards",
    "Layout",
    "Requests",
    "RewardError",
    "RewardFunction",
    "RolloutMismatch",
    "RolloutPolicy",
    "RolloutStopped",
    "RolloutWeights",
    "Samples",
    "SettledWeights",
    "TextCache",
    "answer_logits",
    "can_pack",
    "choose",
    "compare",
    "first_layer",
    "generate",
    "has_cache",
    "large_answers",
    "lay_out",
    "load_reward",
    "pack_exactly",
    "rollout_weights",
    "sample_keys",
    "score",
    "settle_weights",
    "share_of_rank",
    "states_away",
    "token_logprobs",
    "uniforms",
    "use_cached_attention",
]
