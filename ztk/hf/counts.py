"""Parameters and operations of a model of transformers, counted from its modules."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

EXPERTS = "experts"  # as transformers names the module that has a layer's experts


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelCounts:
    """parameters: each once; trained: those of them that need gradients; expert_parameters: those of them in experts.

    expert_choices: choices of a token, over all layers. flops: of a token, forward and backward.
    """

    parameters: int
    trained: int
    expert_parameters: int
    expert_choices: int
    flops: int


def count_model(model: Any, *, seq_len: int, experts: int) -> ModelCounts:
    """Of a `PreTrainedModel`, on meta or not, at sequences of `seq_len`. experts: of a layer that has some, 0 if none has.

    Operations as `DecoderConfig.flops_per_token`: six per weight that is multiplied (the embedding is looked up, of the experts those that a
    token uses), and 12 * hidden size * seq_len per layer for attention (PaLM, https://arxiv.org/abs/2204.02311, appendix B). Adapters count
    as multiplied; that a frozen weight has no gradient is not taken off.
    """
    text = model.config.get_text_config()
    parameters = list(model.parameters())  # tied ones once
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
