"""The memory that an engine's sequences share: the cache and its slots.

[Note: Scales of an fp8 cache]
e4m3 has numbers up to 448, and above 2^-6 eight steps per power of two. So a head with larger keys (biases of some models give hundreds)
would be cut off, and one with small keys would lose its smaller elements. Each head of each layer has a scale for its keys and one for its
values: the power of two with which the largest element of a fixed text is between 28 and 56. Other texts may have elements eight times
as large, and one 1,800 times smaller than the largest still has three bits after its first. A power of two changes no number that fits,
and scales follow from the weights alone, so answers are as exact as without.
"""

import torch

from ztk.core.policies.inference import InferencePolicy
from ztk.inference.base import Model
from ztk.inference.block_swap import SwapFile
from ztk.inference.cache import Cache, Span, block_bytes
from ztk.inference.capacity import StreamPlan, cache_blocks, cache_dtype
from ztk.inference.probe import random_tokens
from ztk.inference.ranks import Ranks
from ztk.inference.schedule import Scheduler
from ztk.inference.slots import Slots
from ztk.kernels.shared.cached_attention import BLOCK

_SCALED = 256  # tokens of the text that scales are found by
_LARGEST = 56  # at most, of its elements divided by their scale


def shared_memory(
    model: Model,
    *,
    policy: InferencePolicy,
    positions: int,
    plan: StreamPlan | None,
    ranks: Ranks | None,
) -> tuple[Cache, Scheduler]:
    """Returns the cache and the scheduler of all sequences. positions: most tokens per sequence. plan: places streamed
    layers; it already counts all sequences at their longest. ranks: the ranks that share the model, which must all call this function.

    Raises:
        ValueError: there is not enough memory for one sequence.
    """
    slots, each = policy.max_sequences, -(-positions // BLOCK)
    assert slots is not None, "the policy is settled"
    blocks = slots * each
    if plan is None:
        blocks = cache_blocks(model, policy=policy, slots=slots, positions=positions, ranks=ranks)
    of, dtype = model.description, cache_dtype(policy, model=model)
    swap = None
    if policy.offload is not None and policy.offload.uses_nvme and plan is None:
        swap = SwapFile(policy.offload, nbytes=block_bytes(of, dtype=dtype))
    device = model.placement.device
    cache = Cache(of, blocks=blocks, device=device, dtype=dtype, swap=swap, slots=slots, width=each)
    find_scales(model, cache=cache)
    return cache, Scheduler(policy, slots=Slots(cache, count=slots))


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
