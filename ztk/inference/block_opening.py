"""From a policy to a model over a cache of blocks: where it computes, in which formats, and how many blocks there are.

[Note: Scales of an fp8 cache]
e4m3 has numbers up to 448, and above 2^-6 eight steps per power of two. So a head whose keys are larger (biases of some models give hundreds)
would be cut off, and one whose keys are small would lose its smaller elements. Each head of each layer has a scale for its keys and one for its
values: the power of two with which the largest element of a fixed text lies between 28 and 56. Other texts may have elements eight times
as large, and one 1,800 times smaller than the largest still has three bits behind its first. A power of two changes no number that fits,
and scales follow from the weights alone, so answers are as exact as without.
"""

import logging

import torch
from torch import Tensor, nn

from ztk.core.policies.inference import cache_faults, cache_of
from ztk.inference.attention import BLOCK
from ztk.inference.block_cache import BlockCache, block_bytes
from ztk.inference.block_swap import SwapFile
from ztk.inference.block_weights import Placement
from ztk.inference.cache import Cache
from ztk.inference.describe import Description
from ztk.inference.over_blocks import OverBlocks
from ztk.inference.over_slabs import OverSlabs
from ztk.inference.plan import free_memory
from ztk.inference.policy import InferencePolicy
from ztk.inference.probe import random_rows, random_tokens
from ztk.inference.steps import Span

_log = logging.getLogger(__name__)

_SHARE = 0.8  # of the free memory that the cache may take
_SCALED = 256  # tokens of the text that scales are found by
_LARGEST = 56  # at most, of its elements divided by their scale
_PIECES = (1, 2, 5, 8, 17, 33, 64)  # rows of steps whose bits are compared


def placement_of(policy: InferencePolicy, *, module: nn.Module) -> Placement | None:
    """Where the engine computes `module` over blocks; None: over slabs, on the CPU.

    Raises:
        ValueError: something of the policy goes with the other kind of cache.
    """
    parameter = next(module.parameters())
    device = torch.device(policy.device) if policy.device else parameter.device
    if device.type == "meta":  # a module without values beside a training engine
        device = torch.device("cpu")
    for fault in cache_faults(policy, device=device.type, streams=policy.offload is not None):
        raise ValueError(fault)
    if cache_of(policy.cache, device=device.type) == "slabs":
        return None
    if policy.weights == "bf16":
        return Placement(device=device, dtype=torch.bfloat16, kind="stored")
    dtype = torch.float32 if device.type == "cpu" else parameter.dtype
    return Placement(device=device, dtype=dtype, kind=policy.weights)


def block_cache(model: OverBlocks, *, policy: InferencePolicy, slots: int, positions: int) -> BlockCache:
    """A cache for `slots` sequences of up to `positions` tokens each, or for as many of those tokens as fit into memory.

    Raises:
        ValueError: not one sequence fits.
    """
    of = model.description
    dtype = torch.uint8 if policy.cache_dtype == "fp8" else model.dtype
    each = -(-positions // BLOCK)
    if policy.cache_tokens is not None:
        blocks = policy.cache_tokens // BLOCK
    else:
        free = free_memory() if model.device.type == "cpu" else torch.cuda.mem_get_info(model.device)[0]
        blocks = min(slots * each, int(free * _SHARE) // block_bytes(of, dtype=dtype))
        blocks = blocks if model.ranks is None else min(model.ranks.gather(blocks))
    if blocks < each:
        raise ValueError(
            f"the cache has {blocks * BLOCK} tokens in blocks of {BLOCK}, and one sequence may have {positions}: lower "
            "inference.max_model_len, or raise inference.cache_tokens"
        )
    swap = None
    if policy.offload is not None:
        pin = model.device.type == "cuda"
        swap = SwapFile(policy.offload, nbytes=block_bytes(of, dtype=dtype), pin=pin)
    cache = model.new_cache(slots=slots, blocks=blocks, dtype=dtype, swap=swap)
    find_scales(model, cache=cache)
    return cache


@torch.inference_mode()
def find_scales(model: OverSlabs | OverBlocks, *, cache: Cache | BlockCache) -> None:
    """Gives an fp8 cache, in which nothing is kept, the scales of the model's weights; every rank that shares the model makes the call."""
    if not isinstance(model, OverBlocks) or not isinstance(cache, BlockCache) or cache.dtype != torch.uint8:
        return
    of, length = model.description, min(_SCALED, model.description.max_len)
    plain = model.scratch(length)
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


@torch.inference_mode()
def check_block_rows(model: OverBlocks) -> None:
    """Computes one text in one piece, and in pieces of other numbers of rows, and compares the bits.

    Logs a warning where they differ: the model still answers, as with `exact=False`, but an answer then depends on the sequences of its batch.
    """
    of: Description = model.description
    length = min(sum(_PIECES), of.max_len)
    tokens = (random_rows(1, columns=length)[0].abs() * 1e4).long() % of.vocab_size

    def logits(start: int, *, count: int, cache: BlockCache) -> Tensor:
        span = Span(slot=0, start=start, length=count, row=0)
        return model.own_logits(tokens[start : start + count], spans=[span], cache=cache, rows=list(range(count)))

    full, start = logits(0, count=length, cache=model.scratch(length)), 0
    cache = model.scratch(length)
    for piece in _PIECES:
        count = min(piece, length - start)
        if not count:
            return
        if not torch.equal(logits(start, count=count, cache=cache), full[start : start + count]):
            _log.warning(
                "steps of %d and %d rows differ on this device: an answer depends on the sequences of its batch, as with inference.exact=false",
                count,
                length,
            )
            return
        start += count
