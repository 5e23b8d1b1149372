"""From a policy to a model over a cache of blocks: where it computes, in which formats, and how many blocks there are."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ztk.inference.attention import BLOCK
from ztk.inference.block_cache import BlockCache, block_bytes
from ztk.inference.block_model import BlockModel
from ztk.inference.block_swap import SwapFile
from ztk.inference.block_weights import Placement, collect_blocks
from ztk.inference.describe import Description, Subject
from ztk.inference.plan import free_memory
from ztk.inference.policy import InferencePolicy
from ztk.inference.probe import random_rows
from ztk.inference.steps import Span
from ztk.policies.inference import cache_faults, cache_of

_SHARE = 0.8  # of the free memory that the cache may take
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


def open_blocks(
    state: Mapping[str, Tensor], *, subject: Subject, placement: Placement, policy: InferencePolicy
) -> BlockModel:
    """The model with its weights, from parameters of any shape; with `policy.exact` it has been probed.

    Raises:
        ValueError: as `collect_blocks` and `check_block_rows`.
    """
    weights = collect_blocks(state, description=subject.description, placement=placement)
    model = BlockModel(subject, weights=weights, exact=policy.exact)
    if policy.exact:
        check_block_rows(model)
    return model


def block_cache(
    model: BlockModel, *, policy: InferencePolicy, slots: int, positions: int, is_scratch: bool = False
) -> BlockCache:
    """A cache for `slots` sequences of up to `positions` tokens each, or for as many of those tokens as fit into memory.

    is_scratch: exactly so many, of which the first slot has all.

    Raises:
        ValueError: not one sequence fits.
    """
    of = model.description
    dtype = torch.uint8 if policy.cache_dtype == "fp8" else model.dtype
    each = -(-positions // BLOCK)
    blocks = slots * each
    if policy.cache_tokens is not None and not is_scratch:
        blocks = policy.cache_tokens // BLOCK
    elif not is_scratch:
        free = free_memory() if model.device.type == "cpu" else torch.cuda.mem_get_info(model.device)[0]
        blocks = min(blocks, int(free * _SHARE) // block_bytes(of, dtype=dtype))
    if blocks < each:
        raise ValueError(
            f"the cache has {blocks * BLOCK} tokens in blocks of {BLOCK}, and one sequence may have {positions}: lower "
            "inference.max_model_len, or raise inference.cache_tokens"
        )
    swap = None
    if policy.offload is not None and not is_scratch:
        pin = model.device.type == "cuda"
        swap = SwapFile(policy.offload, nbytes=block_bytes(of, dtype=dtype), pin=pin)
    cache = BlockCache(of, slots=slots, blocks=blocks, device=model.device, dtype=dtype, swap=swap)
    if is_scratch:
        cache.tables[0] = list(range(blocks))
    return cache


def check_block_rows(model: BlockModel) -> None:
    """Computes one text in one piece, and in pieces of other numbers of rows: the bits must be the same.

    Raises:
        ValueError: they differ; then answers would depend on what is computed beside them.
    """
    of: Description = model.description
    length = min(sum(_PIECES), of.max_len)
    tokens = (random_rows(1, columns=length)[0].abs() * 1e4).long() % of.vocab_size
    policy = InferencePolicy(cache="blocks")
    with torch.inference_mode():
        cache = block_cache(model, policy=policy, slots=1, positions=length, is_scratch=True)
        full = model.forward(tokens, spans=[Span(slot=0, start=0, length=length, row=0)], cache=cache)
        logits, start = model.logits(full), 0
        cache = block_cache(model, policy=policy, slots=1, positions=length, is_scratch=True)
        for piece in _PIECES:
            count = min(piece, length - start)
            if not count:
                return
            span = Span(slot=0, start=start, length=count, row=0)
            own = model.forward(tokens[start : start + count], spans=[span], cache=cache)
            expected = full[start : start + count]
            if not torch.equal(own, expected) or not torch.equal(model.logits(own), logits[start : start + count]):
                raise ValueError(
                    f"steps of {count} and {length} rows differ on this processor, so answers would depend on each other: use another "
                    "build of torch or triton, or inference.exact=false"
                )
            start += count
