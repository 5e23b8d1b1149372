"""Losses of supervised fine-tuning, reward models, direct preference optimisation, distillation and policy gradients over packed
sequences, and their data records.
"""

from ztk.core.policies.align import WITHOUT_REFERENCE, DistillPolicy, DpoPolicy
from ztk.core.policies.reward import PairwisePolicy
from ztk.rl.align.advantages import (
    Mismatch,
    equal_groups,
    generalised_advantages,
    group_advantages,
    importance_weights,
    mismatch_sums,
)
from ztk.rl.align.encoding import ANSWER_END, Encoding, Part, Prompt, Text, last_answer
from ztk.rl.align.preferences import (
    PairLogprobs,
    PairLosses,
    dpo_loss,
    dpo_losses,
    kto_losses,
    last_values,
    pairwise_losses,
)
from ztk.rl.align.records import (
    Example,
    RecordFormat,
    Truncation,
    answer_end,
    fitted,
    read_examples,
    read_prompts,
    without_rejected,
)
from ztk.rl.align.sequences import Packing, Sequences, counted_logprobs, segment_sums
from ztk.rl.align.templates import ChatTemplate, ChatTemplateError
from ztk.rl.align.token_losses import (
    Frontier,
    PolicyLoss,
    TokenLoss,
    distill_losses,
    divergence,
    policy_loss,
    token_weights,
    value_loss,
)

__all__ = [
    "ANSWER_END",
    "WITHOUT_REFERENCE",
    "ChatTemplate",
    "ChatTemplateError",
    "DistillPolicy",
    "DpoPolicy",
    "Encoding",
    "Example",
    "Frontier",
    "Mismatch",
    "Packing",
    "PairLogprobs",
    "PairLosses",
    "PairwisePolicy",
    "Part",
    "PolicyLoss",
    "Prompt",
    "RecordFormat",
    "Sequences",
    "Text",
    "TokenLoss",
    "Truncation",
    "answer_end",
    "counted_logprobs",
    "distill_losses",
    "divergence",
    "dpo_loss",
    "dpo_losses",
    "equal_groups",
    "fitted",
    "generalised_advantages",
    "group_advantages",
    "importance_weights",
    "kto_losses",
    "last_answer",
    "last_values",
    "mismatch_sums",
    "pairwise_losses",
    "policy_loss",
    "read_examples",
    "read_prompts",
    "segment_sums",
    "token_weights",
    "value_loss",
    "without_rejected",
]
