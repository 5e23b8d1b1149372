"""Registers ztk's attention kernel with transformers' attention interface.

The kernel handles full sequences (the prefill of a prompt, an encoder) and packed documents, whose borders transformers passes as
`cu_seq_lens_q`. Their mask is made only where the kernel cannot compute (dropout). With a mask (padding, a window shorter than the text)
or a cache with more keys than queries, torch's attention computes as before. Results have the dtype of the query.
"""

import sys
from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor, nn

from ztk.kernels import attention, attention_varlen

NAME = "ztk"
_MODELS, _MASKS = "transformers.modeling_utils", "transformers.masking_utils"
_MAX_HEAD = 256


def use_attention(model: nn.Module) -> str | None:
    """Lets a Hugging Face model with torch's attention use ztk's kernel where it fits.

    Returns the model's previous attention implementation, or None for any other model, which stays unchanged.
    """
    modeling = sys.modules.get(_MODELS)
    if modeling is None or not isinstance(model, modeling.PreTrainedModel):
        return None
    before = model.config._attn_implementation
    if before != "sdpa" or not model._can_set_attn_implementation():
        return None
    masks = sys.modules[_MASKS].ALL_MASK_ATTENTION_FUNCTIONS
    modeling.ALL_ATTENTION_FUNCTIONS.register(NAME, attention_forward)
    masks.register(NAME, masks["sdpa"])  # returns None for purely causal masks, as attention_forward expects
    model.set_attn_implementation(NAME)
    return before


def restore_attention(model: nn.Module, *, implementation: str) -> None:
    """Restores the attention implementation from before `use_attention`."""
    # pyrefly: ignore[not-callable]  # nn.Module types every attribute as Tensor or Module
    model.set_attn_implementation(implementation)


def attention_forward(  # noqa: PLR0917 - as transformers calls it
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """An attention function of transformers: query [B, H, T, D], key and value [B, K, S, D]; returns [B, T, H, D]."""
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    fits = _fits(query, key=key, value=value, dropout=dropout, extra=kwargs)
    borders = kwargs.get("cu_seq_lens_q") if causal else None
    if borders is not None:
        window = window_of(module, given=kwargs)
        if fits:
            return _over_documents(query, key=key, value=value, scaling=scaling, window=window, extra=kwargs), None
        attention_mask = _mask(borders, rows=query.shape[0], window=window, device=query.device)
    if attention_mask is not None or query.shape[2] == 1 or not fits:
        return _torch()(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
        )
    out = attention(*(x.transpose(1, 2) for x in (query, key, value)), causal=causal, scale=scaling)
    return out, None


def window_of(module: nn.Module, *, given: dict) -> int:
    """Returns the window size in tokens from the call's or the layer's `sliding_window`; 0 for unlimited attention."""
    window = given.get("sliding_window")
    return (getattr(module, "sliding_window", None) if window is None else window) or 0


def _over_documents(
    query: Tensor, *, key: Tensor, value: Tensor, scaling: float | None, window: int, extra: dict
) -> Tensor:
    """Attends within documents: query [B, H, T, D], key and value [B, K, T, D] -> [B, T, H, D]."""
    B, _, T, _ = query.shape
    rows = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    borders = {"cu_seqlens": extra["cu_seq_lens_q"], "max_seqlen": extra["max_length_q"]}
    out = attention_varlen(*rows, **borders, window=window, scale=scaling)
    return out.unflatten(0, (B, T))


def _mask(cu_seqlens: Tensor, *, rows: int, window: int, device: torch.device) -> Tensor:
    """Returns the keys that each query of packed documents sees, bool [B, 1, T, T], for attention other than the kernel's."""
    starts = torch.zeros(int(cu_seqlens[-1]), dtype=torch.int64, device=device)
    starts[cu_seqlens[1:-1].long()] = 1
    document = starts.cumsum(0).view(rows, 1, -1)
    at = torch.arange(document.shape[2], device=device)
    distance = at[:, None] - at
    seen = (distance >= 0) & (distance < (window or len(at)))
    return seen & (document.unsqueeze(3) == document.unsqueeze(2))


def _fits(query: Tensor, *, key: Tensor, value: Tensor, dropout: float, extra: dict) -> bool:
    """Returns whether the kernels compute this call, apart from a mask.

    Without a mask, transformers attends to all keys, or causally if there are as many keys as queries.
    """
    return (
        dropout == 0.0
        and extra.get("position_bias") is None
        and key.shape == value.shape
        and query.shape[2] == key.shape[2]
        and query.shape[3] <= _MAX_HEAD
        and query.dtype == key.dtype == value.dtype
    )


def _torch() -> Callable:
    modeling: ModuleType = sys.modules[_MODELS]
    return modeling.ALL_ATTENTION_FUNCTIONS["sdpa"]
