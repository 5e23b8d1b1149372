"""Losses of supervised fine-tuning, reward models and direct preference optimisation over packed sequences; their records in files."""

from ztk.align.dpo import DpoLosses, DpoPolicy, PairLogprobs, dpo_loss, dpo_losses
from ztk.align.logprobs import token_logprobs
from ztk.align.pairwise import PairwiseLosses, PairwisePolicy, last_values, pairwise_losses
from ztk.align.prompt_records import PromptRecord, Truncation, answer_end, fitted, read_prompts
from ztk.align.records import ANSWER_END, Example, RecordFormat, Text, chat_prompt, read_examples
from ztk.align.sequences import Sequences, segment_sums
from ztk.align.templates import ChatTemplate, ChatTemplateError

__all__ = [
    "ANSWER_END",
    "ChatTemplate",
    "ChatTemplateError",
    "DpoLosses",
    "DpoPolicy",
    "Example",
    "PairLogprobs",
    "PairwiseLosses",
    "PairwisePolicy",
    "PromptRecord",
    "RecordFormat",
    "Sequences",
    "Text",
    "Truncation",
    "answer_end",
    "chat_prompt",
    "dpo_loss",
    "dpo_losses",
    "fitted",
    "last_values",
    "pairwise_losses",
    "read_examples",
    "read_prompts",
    "segment_sums",
    "token_logprobs",
]
