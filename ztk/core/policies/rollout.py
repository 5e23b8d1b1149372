"""Ranges of the keys of rollouts and policy gradients."""

from ztk.core.policies.ranges import COUNT, COUNT_OR_ZERO, FRACTION, NOT_NEGATIVE, POSITIVE, Range

RANGES = {
    "rollout.prompts": COUNT,
    "rollout.group_size": COUNT,
    "rollout.max_tokens": COUNT,
    "rollout.tensor": COUNT,
    "rollout.temperature": POSITIVE,
    "rollout.correction_max": Range(low=1, float32=True),
    "rollout.show_every": COUNT_OR_ZERO,
    "rollout.stop_entropy_below": POSITIVE,
    "warm_start.steps": COUNT_OR_ZERO,
    "warm_start.correct": FRACTION,
    "warm_start.lr": POSITIVE,
    "warm_start.batch_size": COUNT,
    "advantage.gamma": FRACTION,
    "advantage.lam": FRACTION,
    "policy.clip_low": FRACTION,
    "policy.clip_high": NOT_NEGATIVE,
    "policy.dual_clip": Range(low=1, above=True, float32=True),
    "kl.coef": NOT_NEGATIVE,
    "kl.stop_above": POSITIVE,
    "critic.lr": POSITIVE,
    "critic.value_clip": NOT_NEGATIVE,
    "reward.timeout_seconds": Range(low=0, high=86_400, above=True),
}
