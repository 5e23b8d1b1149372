"""Packed documents in sequences of transformers models.

The masks of transformers separate documents if the model gets positions that restart and no mask
(`transformers.masking_utils.find_packed_sequence_indices`). Models whose mask ignores positions (BLOOM, OPT), and models with a state
across tokens, do not separate them. Only tested families get documents. ztk's kernel (`model.kernels`) also gets the documents' borders
and needs no mask.
"""

import functools
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from ztk.hf.attention_interface import NAME
from ztk.nn import Documents

# Families tested to compute packed documents like separate ones.
TESTED = (
    *("llama", "mistral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "mixtral", "gemma", "gemma2", "phi3", "olmo2"),
    *("gpt2", "gpt_neox", "phi", "stablelm"),
)
_SEARCH = "find_packed_sequence_indices"  # in transformers.masking_utils
_BY_MASK_ALONE = ("stablelm",)  # their layers do not forward the model's keyword arguments to attention
# Whether the current forward has one document per sequence.
_has_none: ContextVar[bool] = ContextVar("ztk_has_no_documents", default=False)


def documents_fault(config: Any, *, in_parts: bool = False) -> str | None:
    """Returns why a model of this configuration cannot get documents, or None if it can. in_parts: each rank has a part of every
    sequence.
    """
    if in_parts and config.model_type in _BY_MASK_ALONE:
        return (
            f"data.packing=documents: models of type {config.model_type} keep documents apart by a mask over full sequences; use "
            "data.packing=concatenate, or topology.sequence=1 topology.context=1"
        )
    if keeps_apart(config):
        return None
    return (
        f"data.packing=documents: models of type {config.model_type} are not known to keep documents apart, only "
        f"{', '.join(sorted(TESTED))}; use data.packing=concatenate"
    )


def keeps_apart(config: Any) -> bool:
    """Returns whether a model of this configuration is tested to compute packed documents like separate ones."""
    return config.model_type in TESTED


def arguments_of(
    documents: Documents | None, *, config: Any, own: Tensor | slice | None = None, device: torch.device | None = None
) -> dict[str, Any]:
    """Returns the keyword arguments of a model's forward for `documents`, on `device`.

    own: positions of this rank's tokens in the sequences, int64 [T / n] or a slice. If omitted, the rank has all tokens.

    Raises ValueError for a model that would attend across documents.
    """
    if documents is None:
        return {} if own is None else {"position_ids": _places(own, device=device)[None]}
    if (fault := documents_fault(config, in_parts=own is not None)) is not None:
        raise ValueError(fault)
    if own is not None:  # attention over parts handles documents itself
        positions = documents.positions
        inside = _places(own, device=positions.device).clamp(max=positions.shape[1] - 1)  # padding follows the end
        return {"position_ids": positions[:, inside], "documents": documents}
    given: dict[str, Any] = {"position_ids": documents.positions}
    if _by_kernel(config):
        given |= dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), documents.cu_seqlens)
        given |= dict.fromkeys(("max_length_q", "max_length_k"), documents.longest)
    return given


def _by_kernel(config: Any) -> bool:
    return getattr(config, "_attn_implementation", None) == NAME


@contextmanager
def known_documents(documents: Documents | None, *, config: Any = None) -> Iterator[None]:
    """Disables transformers' search for documents in positions if there are none, or if the kernel gets their borders: a mask of N packed
    tokens has N x N elements.

    Otherwise every forward reads a number from the device to check that each sequence is one document. A GPU would wait for it, and a
    plan has no value. Other threads, for example one with a reward model, are not affected.
    """
    if documents is not None and not (_by_kernel(config) and config.model_type not in _BY_MASK_ALONE):
        yield
        return
    _let_search_ask()
    token = _has_none.set(True)
    try:
        yield
    finally:
        _has_none.reset(token)


@functools.cache
def _let_search_ask() -> None:
    """Makes transformers' search return nothing in a thread without documents."""
    masks = importlib.import_module("transformers.masking_utils")
    search = getattr(masks, _SEARCH, None)
    if search is None:
        return

    @functools.wraps(search)
    def asked(position_ids: Tensor) -> Tensor | None:
        return None if _has_none.get() else search(position_ids)

    setattr(masks, _SEARCH, asked)


def _places(own: Tensor | slice, *, device: torch.device | None) -> Tensor:
    return torch.arange(own.start, own.stop, device=device) if isinstance(own, slice) else own
