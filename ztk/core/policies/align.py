"""Ranges of the keys of supervised fine-tuning, reward models and DPO."""

from ztk.core.policies.ranges import NOT_NEGATIVE, POSITIVE, Range

RANGES = {
    "dpo.beta": POSITIVE,
    "dpo.label_smoothing": Range(low=0, high=0.499, float32=True),
    "dpo.sft_weight": NOT_NEGATIVE,
    "reward.margin": NOT_NEGATIVE,
    "reward.centring": NOT_NEGATIVE,
    "data.stop": Range(low=1, high=127),
}
