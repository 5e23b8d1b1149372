"""Attention by ztk's kernel, through transformers' attention interface.

The kernel attends over full sequences: a prompt's first pass, an encoder. Where there is a mask (padding, a window that is shorter than
the text) or a cache with more keys than queries, torch's attention computes as before.
"""

import sys
from collections.abc import Callable
from types import ModuleType

from torch import Tensor, nn

from ztk.kernels import attention

NAME = "ztk"
_MODELS, _MASKS = "transformers.modeling_utils", "transformers.masking_utils"
_MAX_HEAD = 256


def use_attention(model: nn.Module) -> str | None:
    """Lets a Hugging Face model that attends by torch's kernel attend by ztk's where it fits; the name of what it did before, or None
    for any other model."""
    modeling = sys.modules.get(_MODELS)
    if modeling is None or not isinstance(model, modeling.PreTrainedModel):
        return None
    before = model.config._attn_implementation
    if before != "sdpa" or not model._can_set_attn_implementation():
        return None
    masks = sys.modules[_MASKS].ALL_MASK_ATTENTION_FUNCTIONS
    modeling.ALL_ATTENTION_FUNCTIONS.register(NAME, attention_forward)
    masks.register(NAME, masks["sdpa"])  # None where causality alone masks, as attention_forward expects
    model.set_attn_implementation(NAME)
    return before


def restore_attention(model: nn.Module, *, implementation: str) -> None:
    """As before `use_attention`."""
    # pyrefly: ignore[not-callable]  # nn.Module says Tensor | Module for every name that a model has
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
    """As transformers' attention functions: query [B, H, T, D], key and value [B, K, S, D]; returns [B, T, H, D]."""
    if not _fits(query, key=key, value=value, mask=attention_mask, dropout=dropout, extra=kwargs):
        return _torch()(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
        )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    out = attention(*(x.transpose(1, 2) for x in (query, key, value)), causal=causal, scale=scaling)
    return out, None


def _fits(query: Tensor, *, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, extra: dict) -> bool:
    """Without a mask transformers means all keys, or causality between as many keys as queries."""
    return (
        mask is None
        and dropout == 0.0
        and extra.get("position_bias") is None
        and key.shape == value.shape
        and query.shape[2] == key.shape[2] > 1
        and query.shape[3] <= _MAX_HEAD
        and query.dtype == key.dtype == value.dtype
    )


def _torch() -> Callable:
    modeling: ModuleType = sys.modules[_MODELS]
    return modeling.ALL_ATTENTION_FUNCTIONS["sdpa"]
