"""Sequence parallelism for transformers models: their attention, called through transformers' interface, runs `ztk.parallel.sequence`.

All other operations of a decoder act on single tokens with their positions. No mask is created: the tested families need only causality,
a window and documents, which the parallel attention implements. Results have the dtype of the query.
"""

import importlib
import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ztk.hf.attention_interface import NAME, window_of
from ztk.hf.documents import TESTED as WITH_DOCUMENTS
from ztk.kernels import attention, attention_varlen
from ztk.nn import Documents
from ztk.parallel.sequence import Divisible

# Families tested to compute parts like full sequences. Others (GPT-J, BLOOM, Falcon) have their own attention functions, which ignore
# this rank's position in the sequence.
TESTED = (*WITH_DOCUMENTS, "gpt_bigcode", "opt", "cohere", "starcoder2")
_BY_LENGTH = ("dynamic", "longrope")  # rotary tables that depend on the longest position of a rank
_names = (f"ztk_parts_{number}" for number in itertools.count())


def sequences_fault(config: Any, *, key: str) -> str | None:
    """Returns why sequences of a model of this configuration cannot be divided, or None if they can.

    key: topology.sequence or topology.context.
    """
    text = config.get_text_config()
    if text.model_type not in TESTED:
        return f"{key}: sequences of models of type {text.model_type} are not divided, only of {', '.join(sorted(TESTED))}; use {key}=1"
    rotary = getattr(text, "rope_parameters", None) or {}
    if rotary.get("rope_type") in _BY_LENGTH:
        return (
            f"{key}: rotary positions of rope_type={rotary['rope_type']} depend on the length of a sequence, of which a rank has a part; use "
            f"{key}=1"
        )
    if getattr(text, "output_router_logits", False):
        return (
            f"{key}: the router's loss is taken over all tokens of a sequence, of which a rank has a part; set output_router_logits to false "
            f"in config.json, or use {key}=1"
        )
    return None


class PartAttention:
    """The attention of all layers of a model.

    core: `(query [B, T, H, D], key=, value=, documents=, window=, scale=)` -> [B, T, H, D]; wrapped by `cut_sequences`.
    positions: this rank's tokens of a sequence, int64 [T / n] or a slice. None if the rank has all.
    """

    def __init__(self, *, kernels: bool) -> None:
        self.core: nn.Module = FullAttention(kernels=kernels)
        self.positions: Tensor | slice | None = None

    def __call__(  # noqa: PLR0917 - as transformers calls it
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """query [B, H, T, D], key and value [B, K, T, D] -> [B, T, H, D].

        Raises ValueError for dropout and for a mask, which need full sequences.
        """
        del is_causal
        if dropout or attention_mask is not None:
            raise ValueError(
                f"attention over parts of sequences: dropout={dropout} and a mask need full sequences: use topology.sequence=1 "
                "topology.context=1"
            )
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        options = {"documents": kwargs.get("documents"), "window": window_of(module, given=kwargs), "scale": scaling}
        return self.core(query, key=key, value=value, **options), None


class FullAttention(nn.Module):
    """Causal attention over full sequences, with torch or ztk's kernels; see `PartAttention`."""

    def __init__(self, *, kernels: bool) -> None:
        super().__init__()
        self._kernels = kernels

    def forward(
        self,
        query: Tensor,
        *,
        key: Tensor,
        value: Tensor,
        documents: Documents | None = None,
        window: int = 0,
        scale: float | None = None,
    ) -> Tensor:
        """query [B, T, H, D], key and value [B, T, K, D] -> [B, T, H, D].

        window: number of visible tokens, 0 for all. scale: defaults to D ** -0.5.
        """
        B, T = query.shape[:2]
        if documents is not None or 0 < window < T:
            borders = documents.cu_seqlens if documents is not None else _borders(B, length=T, device=query.device)
            rows = (x.flatten(0, 1) for x in (query, key, value))
            longest = documents.longest if documents is not None else T
            out = attention_varlen(*rows, cu_seqlens=borders, max_seqlen=longest, window=window, scale=scale)
            return out.view(query.shape)
        if self._kernels:
            return attention(query, key, value, causal=True, scale=scale)
        heads_first = (x.transpose(1, 2) for x in (query, key, value))
        out = F.scaled_dot_product_attention(*heads_first, is_causal=True, scale=scale, enable_gqa=True)
        return out.transpose(1, 2)


def _borders(count: int, *, length: int, device: torch.device) -> Tensor:
    return torch.arange(0, (count + 1) * length, length, dtype=torch.int32, device=device)


def divisible(model: Any) -> Divisible:
    """Makes `model` use a `PartAttention`, stored as `part_attention`. Raises ValueError for the reasons of `sequences_fault`."""
    if (fault := sequences_fault(model.config, key="topology.sequence, topology.context")) is not None:
        raise ValueError(fault)
    functions = importlib.import_module("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS
    own = PartAttention(kernels=model.config._attn_implementation == NAME)
    functions.register(name := next(_names), own.__call__)
    model.set_attn_implementation(name)  # transformers creates no mask for a name without a mask function
    model.part_attention = own
    text = model.config.get_text_config()
    experts = any(isinstance(getattr(text, name, None), int) for name in ("num_local_experts", "num_experts"))
    return Divisible(layers=[("attention", own)], has_experts=experts)


def own_places(model: Any) -> Tensor | slice | None:
    """Returns this rank's tokens of a sequence, int64 [T / n] or a slice. None if the rank has all."""
    attention = getattr(model, "part_attention", None)
    return None if attention is None else attention.positions
