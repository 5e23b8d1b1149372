"""The memory that an engine's sequences share: the cache, its slots, and the draft model.

[Note: Scales of an fp8 cache]
e4m3 has numbers up to 448, and above 2^-6 eight steps per power of two. So a head with larger keys (biases of some models give hundreds)
would be cut off, and one with small keys would lose its smaller elements. Each head of each layer has a scale for its keys and one for its
values: the power of two with which the largest element of a fixed text is between 28 and 56. Other texts may have elements eight times
as large, and one 1,800 times smaller than the largest still has three bits after its first. A power of two changes no number that fits,
and scales follow from the weights alone, so answers are as exact as without.
"""

import torch
from torch import nn

from ztk.core.policies.inference import InferencePolicy
from ztk.inference.base import Model
from ztk.inference.block_swap import SwapFile
from ztk.inference.cache import Cache, Span, block_bytes
from ztk.inference.capacity import StreamPlan, cache_blocks, cache_dtype
from ztk.inference.draft import DraftModel
from ztk.inference.opening import Opening
from ztk.inference.probe import check_model, random_tokens, settle_products
from ztk.inference.ranks import Ranks
from ztk.inference.schedule import Scheduler
from ztk.inference.slots import Slots
from ztk.kernels.shared.cached_attention import BLOCK

_SCALED = 256  # tokens of the text that scales are found by
_LARGEST = 56  # at most, of its elements divided by their scale


def open_draft(module: nn.Module | None, *, policy: InferencePolicy, follows: bool) -> Model | None:
    """The draft model, with weights of the same format. follows: this rank draws nothing.

    Raises:
        ValueError: `policy.draft_tokens` without a model or the other way round, or a draft that is not computed so.
    """
    count = policy.draft_tokens
    if (module is None) != (count == 0):
        raise ValueError(
            f"inference.draft_tokens={count} {'without' if module is None else 'with'} a draft model: give both, or neither"
        )
    if module is None or follows:
        return None
    if policy.weights == "fp8" or any(parameter.device.type != "cpu" for parameter in module.parameters()):
        raise ValueError(
            "the draft model is computed on the CPU, with weights as stored, int8 or int4: pass one on the CPU"
        )
    own = InferencePolicy(weights=policy.weights, device="cpu")
    model = Opening(policy=own).open(module).model
    settle_products(model, exact=check_model(model))
    return model


def check_draft(model: Model | None, *, vocabulary: int) -> None:
    """Raises ValueError for a draft model without the tokens of the model that answers. vocabulary: their number."""
    if model is not None and (size := model.description.vocab_size) != vocabulary:
        raise ValueError(
            f"the draft model has {size} tokens and the model {vocabulary}: use one with the same tokenizer"
        )


def shared_memory(
    model: Model,
    *,
    policy: InferencePolicy,
    positions: int,
    plan: StreamPlan | None,
    draft: Model | None,
    ranks: Ranks | None,
) -> tuple[Cache, Scheduler]:
    """Returns the cache and the scheduler of all sequences. positions: most tokens per sequence. plan: places streamed
    layers; it already counts all sequences at their longest. ranks: the ranks that share the model, which must all call this function.

    Raises:
        ValueError: there is not enough memory for one sequence.
    """
    slots, each = policy.max_sequences, -(-positions // BLOCK)
    assert slots is not None, "the policy is settled"
    blocks = drafted = slots * each
    if plan is None:
        options = {"policy": policy, "slots": slots, "positions": positions, "draft": draft, "ranks": ranks}
        blocks, drafted = cache_blocks(model, **options)
    of, dtype = model.description, cache_dtype(policy, model=model)
    swap = None
    if policy.offload is not None and policy.offload.uses_nvme and plan is None:
        swap = SwapFile(policy.offload, nbytes=block_bytes(of, dtype=dtype))
    where = {"slots": slots, "width": each}
    cache = Cache(of, blocks=blocks, device=model.placement.device, dtype=dtype, swap=swap, **where)
    find_scales(model, cache=cache)
    drafts = None
    if draft is not None and drafted:
        own = {"device": draft.placement.device, "dtype": draft.placement.dtype, "blocks": drafted}
        drafts = DraftModel(draft, count=policy.draft_tokens, cache=Cache(draft.description, **own, **where))
    return cache, Scheduler(policy, slots=Slots(cache, count=slots, draft_model=drafts), drafts=drafts)


@torch.inference_mode()
def find_scales(model: Model, *, cache: Cache) -> None:
    """Computes the scales of an empty fp8 cache from the model's weights. A collective call of the ranks that share the model."""
    if cache.dtype != torch.uint8:
        return
    of, length = model.description, min(_SCALED, model.description.max_len)
    plain = model.scratch(length)
    tokens, span = random_tokens(of.vocab_size, count=length), Span(slot=0, start=0, length=length, row=0)
    model.own_logits(tokens, spans=[span], cache=plain, rows=[])
    largest = [
        torch.stack(
            [
                part.transpose(1, 2).flatten(0, 1)[:length].abs().amax((0, 2))
                for part in (plain.keys[layer], plain.values[layer])
            ]
        )
        for layer in range(of.layers)
    ]
    exponents = torch.log2(torch.stack(largest).float() / _LARGEST).ceil()
    cache.scales = torch.where(exponents.isfinite(), exponents, 0.0).exp2()
