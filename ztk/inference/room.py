"""Number of sequences of a length that fit into the slabs' memory.

[Note: Bytes of slabs]
All slots of a cache of slabs are equally long, the longest sequence's length rounded up to P positions. S slots take

    S P token + P shared

bytes. `token`: keys and values of one position in every layer, plus one slab whose old and new memory coexist while slabs are laid out
anew; including a draft model's. `shared`: working memory of attention, which depends on the longest sequence and not on their number. So a
long sequence leaves fewer slots, and sequences without a slot wait. Nothing is allocated beyond `nbytes`, and a sequence that is too long
for a cache of its own is refused before it waits. With `policy.cache_tokens` keys and values take that many tokens; when the model is
opened they must fit into the free memory, together with the rest.
"""

from dataclasses import dataclass

from ztk.inference.draft import PROMPT_TOKENS, DraftModel
from ztk.inference.model import InferenceModel
from ztk.inference.module_model import ModuleModel
from ztk.inference.plan import Drafting, attention_bytes, free_memory, row_bytes, row_logits_bytes, token_bytes
from ztk.inference.policy import InferencePolicy
from ztk.inference.ranks import Ranks
from ztk.inference.slab_cache import rounded

_BESIDE_BLOCKS = 0.2  # of the free memory


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """slots: maximum number of sequences of any length. nbytes: of all slots, or None if a plan has counted all of them at their longest.
    token,
    shared: see [Note: Bytes of slabs]."""

    slots: int
    nbytes: int | None = None
    token: int = 0
    shared: int = 0

    def needed(self, positions: int) -> int:
        """Bytes for one sequence of `positions` tokens, alone."""
        return rounded(positions) * (self.token + self.shared)

    def most(self, positions: int) -> int:
        """Number of sequences of up to `positions` tokens that fit together."""
        if self.nbytes is None or positions == 0:
            return self.slots
        return max(0, min(self.slots, (self.nbytes // rounded(positions) - self.shared) // self.token))

    def longest(self, positions: int) -> int:
        """Tokens of the longest sequence that fits alone, at most `positions`."""
        if self.nbytes is None or self.most(positions):
            return positions
        whole = rounded(1)
        return self.nbytes // (self.token + self.shared) // whole * whole

    def check(self, *, prompt: int, limit: int) -> None:
        """Raises ValueError for a prompt of so many tokens with an answer of up to `limit` that could never be computed."""
        if self.most(prompt + limit):
            return
        raise ValueError(
            f"a prompt of {prompt} tokens and an answer of up to {limit} need {self.needed(prompt + limit)} bytes of memory, and the cache may "
            f"take {self.nbytes}: shorten the prompt, lower max_tokens, or allow more with inference.cache_tokens"
        )


def room_of(
    model: InferenceModel | ModuleModel,
    *,
    policy: InferencePolicy,
    slots: int,
    drafts: DraftModel | None,
    ranks: Ranks | None,
) -> Room:
    """Memory for slabs in addition to current allocations: `policy.cache_tokens`, or the free memory. All ranks that share the model make
    the call and get the minimum.

    Raises:
        ValueError: the memory is too small for the shortest sequence, or for `policy.cache_tokens`.
    """
    of = model.description
    token, shared = token_bytes(of), attention_bytes(of, positions=1)
    working = _working(model, rows=policy.max_step_tokens or 0) + slots * row_logits_bytes(of)
    if drafts is not None:
        token += token_bytes(drafts.model.description)
        shared += attention_bytes(drafts.model.description, positions=1)
        working += _working(drafts.model, rows=PROMPT_TOKENS)
    free = free_memory() if ranks is None else min(ranks.gather(free_memory() // ranks.comm.size))
    room = Room(slots=slots, nbytes=max(0, free - working), token=token, shared=shared)
    if policy.cache_tokens is not None:
        longest = min(policy.cache_tokens, rounded(min(policy.max_model_len or of.max_len, of.max_len)))
        needed = policy.cache_tokens * token + longest * shared + working
        if needed > free:
            raise ValueError(
                f"inference.cache_tokens={policy.cache_tokens} need {needed} bytes with the working memory of a step, attention and "
                f"a draft model, and {free} are free: lower it, inference.max_model_len or inference.max_step_tokens"
            )
        own = 2 * of.layers * of.kv_heads * of.head_dim * 4
        room = Room(slots=slots, nbytes=policy.cache_tokens * own, token=own)
    if not room.most(1):
        raise ValueError(
            f"the cache may take {room.nbytes} bytes, and the shortest sequence needs {room.needed(1)}: raise inference.cache_tokens, or free "
            "memory"
        )
    return room


def room_of_drafts(drafts: DraftModel, *, slots: int) -> Room:
    """Room of a draft model's slabs next to a cache of blocks, which takes `memory._SHARE` of the free memory."""
    of = drafts.model.description
    nbytes = int(_BESIDE_BLOCKS * free_memory())
    return Room(slots=slots, nbytes=nbytes, token=token_bytes(of), shared=attention_bytes(of, positions=1))


def drafting_of(model: InferenceModel | ModuleModel) -> Drafting:
    """Memory of a draft model used with streamed layers."""
    nbytes = sum(product.nbytes for product in model.products())
    return Drafting(description=model.description, nbytes=nbytes, working=_working(model, rows=PROMPT_TOKENS))


def _working(model: InferenceModel | ModuleModel, *, rows: int) -> int:
    """Working memory of a step of `rows` rows. The head counts as a layer, because prompts may be scored."""
    return rows * row_bytes(model.description, inner=max(product.shape[0] for product in model.products()))
