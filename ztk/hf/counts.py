"""Counts parameters and operations of a transformers model from its modules."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

EXPERTS = "experts"  # transformers' name for the module with a layer's experts


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelCounts:
    """parameters: without duplicates. trained: parameters that need gradients. expert_parameters: parameters in experts.

    expert_choices: experts per token, summed over layers. flops: per token, forward and backward.
    """

    parameters: int
    trained: int
    expert_parameters: int
    expert_choices: int
    flops: int


def count_model(model: Any, *, seq_len: int, experts: int) -> ModelCounts:
    """Counts a `PreTrainedModel`, on meta or not, at sequences of `seq_len`. experts: number per layer that has some, 0 without experts.

    Operations are as in `DecoderConfig.flops_per_token`: six per multiplied weight (embeddings are looked up, and only a token's own
    experts count), plus 12 * hidden size * seq_len per layer for attention (PaLM, https://arxiv.org/abs/2204.02311, appendix B). Adapters
    count as multiplied weights. The missing gradients of frozen weights are not subtracted.
    """
    text = model.config.get_text_config()
    parameters = list(model.parameters())  # tied parameters once
    of_experts = [list(module.parameters()) for module in _experts(model)] if experts else []
    expert_parameters = sum(parameter.numel() for layer in of_experts for parameter in layer)
    per_token = text.num_experts_per_tok if of_experts else 0
    used = expert_parameters * per_token // experts if of_experts else 0
    multiplied = sum(parameter.numel() for parameter in parameters if parameter.dim() > 1) - expert_parameters + used
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is None or head.weight is not embedding.weight:
        multiplied -= embedding.weight.numel()
    attention = 12 * text.num_hidden_layers * text.hidden_size * seq_len
    return ModelCounts(
        parameters=sum(parameter.numel() for parameter in parameters),
        trained=sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        expert_parameters=expert_parameters,
        expert_choices=len(of_experts) * per_token,
        flops=6 * multiplied + attention,
    )


def _experts(model: nn.Module) -> Iterator[nn.Module]:
    for name, module in model.named_modules():
        if name.rpartition(".")[2] == EXPERTS:
            yield module
