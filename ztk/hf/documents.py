"""Documents that share a sequence, for models of transformers.

transformers' masks keep documents apart where a model is given positions that start again and no mask
(`transformers.masking_utils.find_packed_sequence_indices`). Models whose mask does not see the positions (BLOOM, OPT), or that carry a state
from token to token, ignore that: only families that are tested get documents. Where ztk's kernel attends (`model.kernels`), it gets the
documents' borders, too, and needs no mask.
"""

from typing import Any

from ztk.hf.attention import NAME
from ztk.nn import Documents

# Families whose packed documents are tested to compute what each document computes alone.
TESTED = (
    *("llama", "mistral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "mixtral", "gemma", "gemma2", "phi3", "olmo2"),
    *("gpt2", "gpt_neox", "phi", "stablelm"),
)


def documents_fault(config: Any) -> str | None:
    """Why a model of this configuration of transformers gets no documents; None if it does."""
    if config.model_type in TESTED:
        return None
    return (
        f"data.packing=documents: models of type {config.model_type} are not known to keep documents apart, only "
        f"{', '.join(sorted(TESTED))}; use data.packing=concatenate"
    )


def arguments_of(documents: Documents | None, *, config: Any) -> dict[str, Any]:
    """What the forward of a model is given for `documents`. Raises ValueError for a model that would attend across them."""
    if documents is None:
        return {}
    if (fault := documents_fault(config)) is not None:
        raise ValueError(fault)
    given: dict[str, Any] = {"position_ids": documents.positions}
    if config._attn_implementation == NAME:
        given |= dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), documents.cu_seqlens)
        given |= dict.fromkeys(("max_length_q", "max_length_k"), documents.longest)
    return given
