"""Documents that share a sequence, for models of transformers.

transformers' masks keep documents apart where a model is given positions that start again and no mask
(`transformers.masking_utils.find_packed_sequence_indices`). Models whose mask does not see the positions (BLOOM, OPT), or that carry a state
from token to token, ignore that: only families that are tested get documents. Where ztk's kernel attends (`model.kernels`), it gets the
documents' borders, too, and needs no mask.
"""

import functools
import importlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ztk.hf.attention import NAME
from ztk.nn import Documents

# Families whose packed documents are tested to compute what each document computes alone.
TESTED = (
    *("llama", "mistral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "mixtral", "gemma", "gemma2", "phi3", "olmo2"),
    *("gpt2", "gpt_neox", "phi", "stablelm"),
)
_SEARCH = "find_packed_sequence_indices"  # of transformers.masking_utils
_BY_MASK_ALONE = ("stablelm",)  # their layers do not hand on to attention what a model is called with


class _Thread(threading.local):
    """has_none: the forward that runs in this thread has one document per sequence."""

    has_none = False


_this_thread = _Thread()


def documents_fault(config: Any, *, in_parts: bool = False) -> str | None:
    """Why a model of this configuration of transformers gets no documents; None if it does. in_parts: a rank has a part of each sequence."""
    if in_parts and config.model_type in _BY_MASK_ALONE:
        return (
            f"data.packing=documents: models of type {config.model_type} keep documents apart by a mask over full sequences; use "
            "data.packing=concatenate, or topology.sequence=1 topology.context=1"
        )
    if config.model_type in TESTED:
        return None
    return (
        f"data.packing=documents: models of type {config.model_type} are not known to keep documents apart, only "
        f"{', '.join(sorted(TESTED))}; use data.packing=concatenate"
    )


def arguments_of(
    documents: Documents | None, *, config: Any, own: Tensor | slice | None = None, device: torch.device | None = None
) -> dict[str, Any]:
    """What the forward of a model is given for `documents` and for `own`, the places of its tokens in the sequences (int64 [T / n] or a
    slice; None: all tokens are there), on `device`. Raises ValueError for a model that would attend across documents."""
    if documents is None:
        return {} if own is None else {"position_ids": _places(own, device=device)[None]}
    if (fault := documents_fault(config, in_parts=own is not None)) is not None:
        raise ValueError(fault)
    if own is not None:  # the attention of parts knows the documents by themselves
        positions = documents.positions
        inside = _places(own, device=positions.device).clamp(max=positions.shape[1] - 1)  # behind the end is padding
        return {"position_ids": positions[:, inside], "documents": documents}
    given: dict[str, Any] = {"position_ids": documents.positions}
    if config._attn_implementation == NAME:
        given |= dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), documents.cu_seqlens)
        given |= dict.fromkeys(("max_length_q", "max_length_k"), documents.longest)
    return given


@contextmanager
def known_documents(documents: Documents | None) -> Iterator[None]:
    """Inside, transformers does not look for documents in positions where there are none to be found: to see that every sequence is one
    document it reads a number from the device in every forward, for which a GPU waits and of which a plan has none. Other threads, such as one
    with a model of rewards, look as ever."""
    if documents is not None:
        yield
        return
    _let_search_ask()
    before, _this_thread.has_none = _this_thread.has_none, True
    try:
        yield
    finally:
        _this_thread.has_none = before


@functools.cache
def _let_search_ask() -> None:
    """Makes transformers' search find nothing in a thread that has none."""
    masks = importlib.import_module("transformers.masking_utils")
    search = getattr(masks, _SEARCH, None)
    if search is None:
        return

    @functools.wraps(search)
    def asked(position_ids: Tensor) -> Tensor | None:
        return None if _this_thread.has_none else search(position_ids)

    setattr(masks, _SEARCH, asked)


def _places(own: Tensor | slice, *, device: torch.device | None) -> Tensor:
    return torch.arange(own.start, own.stop, device=device) if isinstance(own, slice) else own
