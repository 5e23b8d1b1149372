"""`resize_token_embeddings` to the current size, at stage 3.

At other stages, transformers leaves embedding and head unchanged in this case. At stage 3 it creates new ones of the same size, draws
their values, and overwrites them with the old ones. The draws advance torch's generator, so later random values, such as the value head
of DeepSpeed-Chat's reward model, would differ from stage 0.
"""

import functools
from types import ModuleType
from typing import Any


def complete(modeling_utils: ModuleType) -> None:
    """Keeps a layer that already has the requested size, at every stage. modeling_utils: the module transformers.modeling_utils."""
    model = modeling_utils.PreTrainedModel
    embeddings, head = model._get_resized_embeddings, model._get_resized_lm_head

    @functools.wraps(embeddings)
    def _get_resized_embeddings(
        self: Any,
        old_embeddings: Any,
        new_num_tokens: int | None = None,
        pad_to_multiple_of: int | None = None,
        *rest,
        **options,
    ):
        count = old_embeddings.weight.shape[0]
        wanted = count if new_num_tokens is None else new_num_tokens
        if isinstance(pad_to_multiple_of, int):
            wanted = -(-wanted // pad_to_multiple_of) * pad_to_multiple_of
        if wanted != count:
            return embeddings(self, old_embeddings, new_num_tokens, pad_to_multiple_of, *rest, **options)
        old_embeddings.num_embeddings = count
        return old_embeddings

    @functools.wraps(head)
    def _get_resized_lm_head(
        self: Any, old_lm_head: Any, new_num_tokens: int | None = None, transposed: bool = False, *rest, **options
    ):
        count = old_lm_head.weight.shape[1 if transposed else 0]
        if new_num_tokens is not None and new_num_tokens != count:
            return head(self, old_lm_head, new_num_tokens, transposed, *rest, **options)
        old_lm_head.out_features = count
        return old_lm_head

    model._get_resized_embeddings, model._get_resized_lm_head = _get_resized_embeddings, _get_resized_lm_head
