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

from ztk.inference.base import Model
from ztk.inference.block_cache import BlockCache, block_bytes
from ztk.inference.block_swap import SwapFile
from ztk.inference.cache import Cache
from ztk.inference.cache_attention import BLOCK
from ztk.inference.capacity import Room, StreamPlan, free_device_memory, free_memory, room_of, room_of_drafts
from ztk.inference.draft import DraftModel
from ztk.inference.opening import Opening
from ztk.inference.policy import InferencePolicy
from ztk.inference.probe import check_model, random_tokens, settle_products
from ztk.inference.ranks import Ranks
from ztk.inference.schedule import Scheduler
from ztk.inference.slab_cache import SlabCache
from ztk.inference.slots import BlockSlots, SlabSlots
from ztk.inference.steps import Span

_SHARE = 0.8  # of the free memory that the cache may take
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
    own = InferencePolicy(weights=policy.weights, cache="slabs", device="cpu")
    model = Opening(policy=own).open(module).model
    settle_products(model, exact=check_model(model))
    return model


def drafts_of(model: Model | None, *, policy: InferencePolicy, vocabulary: int) -> DraftModel | None:
    """Drafts of an opened model. vocabulary: tokens of the model that answers. Raises ValueError for another one."""
    if model is None:
        return None
    size = model.description.vocab_size
    if size != vocabulary:
        raise ValueError(
            f"the draft model has {size} tokens and the model {vocabulary}: use one with the same tokenizer"
        )
    assert policy.max_sequences is not None, "the policy is settled"
    return DraftModel(model, slots=policy.max_sequences, count=policy.draft_tokens)


def shared_memory(
    model: Model,
    *,
    policy: InferencePolicy,
    positions: int,
    plan: StreamPlan | None,
    drafts: DraftModel | None,
    ranks: Ranks | None,
) -> tuple[Cache, Scheduler]:
    """Returns the cache and the scheduler of all sequences. positions: most tokens per sequence. plan: of streamed
    layers; it already counts the largest slabs. ranks: the ranks that share the model, which must all call this function.

    Raises:
        ValueError: there is not enough memory for one sequence.
    """
    slots = policy.max_sequences
    assert slots is not None, "the policy is settled"
    if model.placement.has_blocks:
        blocks, room = _block_cache(model, policy=policy, slots=slots, positions=positions), None
        if drafts is not None:
            room = room_of_drafts(drafts, slots=slots)
        places = BlockSlots(blocks, count=slots, draft_model=drafts, draft_room=room)
        return blocks, Scheduler(policy, slots=places, drafts=drafts)
    room = Room(slots=slots) if plan else room_of(model, policy=policy, slots=slots, drafts=drafts, ranks=ranks)
    cache = SlabCache(model.description, slots=slots)
    return cache, Scheduler(policy, slots=SlabSlots(cache, room=room, draft_model=drafts), drafts=drafts)


def _block_cache(model: Model, *, policy: InferencePolicy, slots: int, positions: int) -> BlockCache:
    """A cache for `slots` sequences of up to `positions` tokens each, or for as many of those tokens as fit into memory.

    Raises:
        ValueError: not one sequence fits.
    """
    of, place = model.description, model.placement
    dtype = torch.uint8 if policy.cache_dtype == "fp8" else place.dtype
    each = -(-positions // BLOCK)
    if policy.cache_tokens is not None:
        blocks = policy.cache_tokens // BLOCK
    else:
        free = free_memory() if place.device.type == "cpu" else free_device_memory(place.device)
        blocks = min(slots * each, int(free * _SHARE) // block_bytes(of, dtype=dtype))
        blocks = blocks if model.ranks is None else min(model.ranks.gather(blocks))
    if blocks < each:
        raise ValueError(
            f"the cache has {blocks * BLOCK} tokens in blocks of {BLOCK}, and one sequence may have {positions}: lower "
            "inference.max_model_len, or raise inference.cache_tokens"
        )
    swap = None
    if policy.offload is not None:
        swap = SwapFile(policy.offload, nbytes=block_bytes(of, dtype=dtype))
    cache = BlockCache(of, slots=slots, blocks=blocks, width=each, device=place.device, dtype=dtype, swap=swap)
    find_scales(model, cache=cache)
    return cache


@torch.inference_mode()
def find_scales(model: Model, *, cache: Cache) -> None:
    """Computes the scales of an empty fp8 cache from the model's weights. A collective call of the ranks that share the model."""
    if not isinstance(cache, BlockCache) or cache.dtype != torch.uint8:
        return
    of, length = model.description, min(_SCALED, model.description.max_len)
    plain = model.scratch(length)
    assert isinstance(plain, BlockCache), "the model computes over blocks"
    tokens, span = random_tokens(of.vocab_size, count=length), Span(slot=0, start=0, length=length, row=0)
    model.own_logits(tokens, spans=[span], cache=plain, rows=[])
    largest = [
        torch.stack(
            [
                part.transpose(1, 2).flatten(0, 1)[:length].abs().amax((0, 2))
                for part in (plain.keys(layer), plain.values(layer))
            ]
        )
        for layer in range(of.layers)
    ]
    exponents = torch.log2(torch.stack(largest).float() / _LARGEST).ceil()
    cache.scales = torch.where(exponents.isfinite(), exponents, 0.0).exp2()
