"""`deepspeed_chat.reward_model`: a language model with one number per token, and its loss over pairs."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RewardModel(nn.Module):
    """A transformers model without the language-model head, and a linear layer `v_head` with one output.

    base_model: a causal language model or its decoder; its weights are used, not copied.
    tokenizer: its `pad_token_id` marks the end of a row.
    num_padding_at_beginning: number of leading padding tokens in every row that do not end it (1 for OPT's tokenizer).

    Raises:
        ValueError: a tokenizer without a padding token, or a model whose output width differs from its configuration.
    """

    def __init__(self, base_model: Any, tokenizer: Any, num_padding_at_beginning: int = 0) -> None:
        super().__init__()
        if tokenizer.pad_token_id is None:
            raise ValueError(
                "tokenizer.pad_token_id is None, and padding marks the end of a row: set tokenizer.pad_token = tokenizer.eos_token"
            )
        self.config = base_model.config
        self.rwtransformer = getattr(base_model, "base_model", base_model)  # without the language-model head
        width = getattr(self.config, "word_embed_proj_dim", None) or self.config.hidden_size
        first = next(base_model.parameters())
        self.v_head = nn.Linear(width, 1, bias=False, device=first.device, dtype=first.dtype)
        self.PAD_ID, self.num_padding_at_beginning = tokenizer.pad_token_id, num_padding_at_beginning

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        return_value_only: bool = False,
        prompt_length: int = 0,
    ) -> Tensor:
        """Returns the value at the last token of every row: int64 [B, T] -> [B].

        With return_value_only, the values of all tokens, [B, T].

        attention_mask: [B, T]. Not needed for padding after the text, which causal attention hides.
        prompt_length: padding ends a row only from this position on, for prompts that are padded on the left.

        Raises:
            ValueError: a row of only padding.
        """
        hidden = self.rwtransformer(input_ids, attention_mask=attention_mask, use_cache=False)[0]
        if hidden.shape[-1] != self.v_head.in_features:
            raise ValueError(
                f"base_model returns {list(hidden.shape)} where hidden states [B, T, {self.v_head.in_features}] are needed: pass the "
                "language model itself; of a model with adapters, RewardModel(model.get_base_model(), ...) before they are added"
            )
        values = self.v_head(hidden).squeeze(-1)
        return values if return_value_only else self.at_last(values, input_ids=input_ids, prompt_length=prompt_length)

    def forward_value(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        return_value_only: bool = False,
        prompt_length: int = 0,
    ) -> Tensor | dict[str, Tensor]:
        """DeepSpeed-Chat's interface: returns the values [B, T], or a dict that also has the values at the last tokens as
        `chosen_end_scores`.
        """
        values = self(input_ids, attention_mask, return_value_only=True)
        if return_value_only:
            return values
        return {
            "values": values,
            "chosen_end_scores": self.at_last(values, input_ids=input_ids, prompt_length=prompt_length),
        }

    def at_last(self, values: Tensor, *, input_ids: Tensor, prompt_length: int = 0) -> Tensor:
        """Selects from values [B, T] the ones at the last token before the padding at the end of a row: [B].

        input_ids: int64 [B, T]. prompt_length: number of leading tokens whose padding does not count.

        Raises ValueError for a row of only padding.
        """
        padding = input_ids == self.PAD_ID
        padding[:, :prompt_length] = False
        behind = padding & (padding.cumsum(1) > (0 if prompt_length else self.num_padding_at_beginning))
        length = torch.where(behind.any(1), behind.int().argmax(1), input_ids.shape[1])
        if bool((length < 1).any()):
            raise ValueError(
                f"a row holds nothing but padding (token {self.PAD_ID}): leave it out, or set num_padding_at_beginning"
            )
        return values.gather(1, length.unsqueeze(1) - 1).squeeze(1)

    def gradient_checkpointing_enable(self, **options: Any) -> None:
        """Enables gradient checkpointing of the language model."""
        self.rwtransformer.gradient_checkpointing_enable(**options)

    def gradient_checkpointing_disable(self) -> None:
        """Disables gradient checkpointing of the language model."""
        self.rwtransformer.gradient_checkpointing_disable()


def compute_reward_loss(reward_model: nn.Module, chosen_ids: Tensor, rejected_ids: Tensor) -> Tensor:
    """Returns the mean of -log sigmoid(chosen - rejected) (Ouyang et al. 2022, arXiv 2203.02155) in float32, a scalar.

    Finite for any difference, unlike the logarithm of a rounded sigmoid, which is infinite below about -104.

    reward_model: a `RewardModel`, or an engine over one. chosen_ids, rejected_ids: int64 [B, T]; T may differ.
    """
    return -F.logsigmoid(reward_model(chosen_ids).float() - reward_model(rejected_ids).float()).mean()
