"""`deepspeed_chat.reward_model`: a language model with one number per token, and its loss over pairs."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RewardModel(nn.Module):
    """A model of transformers without its vocabulary's head, and a linear layer `v_head` of one output.

    base_model: a causal language model or the decoder inside one; its weights are used, not copied. tokenizer: its `pad_token_id` ends a
    row. num_padding_at_beginning: padding tokens in front of every row that do not end it (1 for OPT's tokenizer).

    Raises:
        ValueError: a tokenizer without a padding token, or a model whose output is not as wide as its configuration says.
    """

    def __init__(self, base_model: Any, tokenizer: Any, num_padding_at_beginning: int = 0) -> None:
        super().__init__()
        if tokenizer.pad_token_id is None:
            raise ValueError(
                "tokenizer.pad_token_id is None, and padding says where a row ends: set tokenizer.pad_token = tokenizer.eos_token"
            )
        self.config = base_model.config
        self.rwtransformer = getattr(base_model, "base_model", base_model)  # without the vocabulary's head
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
        """The value at the last token of every row: int64 [B, T] -> [B]. With return_value_only those of all tokens, [B, T].

        attention_mask: [B, T]; None is right for padding behind the text, which a causal model does not see. prompt_length: padding
        ends a row from this position on only, as behind prompts that are padded on the left.

        Raises:
            ValueError: a row of padding alone.
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
        """DeepSpeed-Chat's name: the values [B, T], or with them those at the last tokens as `chosen_end_scores`."""
        values = self(input_ids, attention_mask, return_value_only=True)
        if return_value_only:
            return values
        return {
            "values": values,
            "chosen_end_scores": self.at_last(values, input_ids=input_ids, prompt_length=prompt_length),
        }

    def at_last(self, values: Tensor, *, input_ids: Tensor, prompt_length: int = 0) -> Tensor:
        """Of values [B, T] those at the last token before the padding behind a row: [B].

        input_ids: int64 [B, T]. prompt_length: tokens in front, whose padding does not count.
        Raises ValueError for a row of padding alone.
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
        """Of the language model."""
        self.rwtransformer.gradient_checkpointing_enable(**options)

    def gradient_checkpointing_disable(self) -> None:
        """Of the language model."""
        self.rwtransformer.gradient_checkpointing_disable()


def compute_reward_loss(reward_model: nn.Module, chosen_ids: Tensor, rejected_ids: Tensor) -> Tensor:
    """The mean of -log sigmoid(chosen - rejected) (Ouyang et al. 2022, arXiv 2203.02155), in float32: a scalar.

    reward_model: a `RewardModel`, or an engine over one. chosen_ids, rejected_ids: int64 [B, T], which may differ in T. It stays finite
    for any difference, where the logarithm of a rounded sigmoid is infinite below about -104.
    """
    return -F.logsigmoid(reward_model(chosen_ids).float() - reward_model(rejected_ids).float()).mean()
