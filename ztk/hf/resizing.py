"""`resize_token_embeddings` to the size that a model has, at stage 3.

At the other stages transformers then leaves embedding and head as they are. At stage 3 it makes new ones of the same size, draws their values,
and copies the old ones over them. The draws move torch's generator on, so that whatever the script draws next, such as the value head of
DeepSpeed-Chat's reward model, would start with other values than at stage 0.
"""

import functools
from types import ModuleType
from typing import Any


def complete(modeling_utils: ModuleType) -> None:
    """modeling_utils: transformers.modeling_utils. A layer that has as many tokens as it is to have stays, at every stage."""
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
