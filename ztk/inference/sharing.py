"""What the sequences of an engine share: the cache, who has which part of it, and a model that drafts."""

from torch import nn

from ztk.inference.block_cache import BlockCache
from ztk.inference.block_opening import block_cache
from ztk.inference.block_schedule import BlockScheduler
from ztk.inference.cache import Cache
from ztk.inference.draft import DraftModel
from ztk.inference.model import InferenceModel
from ztk.inference.module_model import ModuleModel
from ztk.inference.opening import from_module
from ztk.inference.over_blocks import OverBlocks
from ztk.inference.plan import StreamPlan
from ztk.inference.policy import InferencePolicy
from ztk.inference.probe import check_model, settle_products
from ztk.inference.ranks import Ranks
from ztk.inference.room import Room, room_of, room_of_drafts
from ztk.inference.schedule import Scheduler


def open_draft(
    module: nn.Module | None, *, policy: InferencePolicy, follows: bool
) -> InferenceModel | ModuleModel | None:
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
            "the draft model is computed on the CPU, with weights as stored, int8 or int4: pass one that is there"
        )
    own = InferencePolicy(weights=policy.weights, cache="slabs", device="cpu")
    model = from_module(module, policy=own).model
    assert not isinstance(model, OverBlocks), "it has slabs"
    settle_products(model, exact=check_model(model))
    return model


def drafts_of(
    model: InferenceModel | ModuleModel | None, *, policy: InferencePolicy, vocabulary: int
) -> DraftModel | None:
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
    model: InferenceModel | ModuleModel | OverBlocks,
    *,
    policy: InferencePolicy,
    positions: int,
    plan: StreamPlan | None,
    drafts: DraftModel | None,
    ranks: Ranks | None,
) -> tuple[Cache | BlockCache, Scheduler]:
    """The cache of all sequences, and who shares it. positions: tokens of a sequence at most. plan: of streamed layers, which has counted the
    slabs at their longest. ranks: those that share the model, all of which make the call.

    Raises:
        ValueError: there is not enough memory for one sequence.
    """
    slots = policy.max_sequences
    assert slots is not None, "the policy is settled"
    if isinstance(model, OverBlocks):
        blocks, room = block_cache(model, policy=policy, slots=slots, positions=positions), None
        if drafts is not None:
            room = room_of_drafts(drafts, slots=slots)
        return blocks, BlockScheduler(policy, cache=blocks, drafts=drafts, draft_room=room)
    room = Room(slots=slots) if plan else room_of(model, policy=policy, slots=slots, drafts=drafts, ranks=ranks)
    cache = model.new_cache(slots=slots)
    return cache, Scheduler(policy, cache=cache, room=room, drafts=drafts)
