"""Arithmetic of memory: the number of resident layers and of sequences, and the resulting tokens per second.

[Note: Tokens per second of streamed weights]
A pass reads S = layers - resident layers of W bytes each in R = S W / link seconds, and computes for C = c0 + c1 B seconds for B sequences.
It takes max(R, C) + s min(R, C): s is 0 if the reading threads have a core of their own, and is measured. It gives B tokens, and more
with accepted drafts. Memory holds the resident layers, a ring of buffers, the head, B caches of keys and values, and a step's working
memory.
A byte for the cache lets one pass serve more sequences; a byte for a layer saves reading it. The search over B takes the fewest
sequences within 2 % of the most tokens per second. Keys and values stay in main memory: offloading them would pay only if fewer than
S W / (cache of a sequence) sequences fit (FlexGen, https://arxiv.org/abs/2303.06865, section 4).

[Note: Bytes of slabs]
All slots of a cache of slabs are equally long, the longest sequence's length rounded up to P positions. S slots take

    S P token + P shared

bytes. `token`: keys and values of one position in every layer, plus one slab whose old and new memory coexist while slabs are laid out
anew; including a draft model's. `shared`: working memory of attention, which depends on the longest sequence and not on their number. So a
long sequence leaves fewer slots, and sequences without a slot wait. Nothing is allocated beyond `nbytes`, and a sequence that is too long
for a cache of its own is refused before it waits. With `policy.cache_tokens` keys and values take that many tokens; when the model is
opened they must fit into the free memory, together with the rest.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ztk.core.runtime.system_memory import machine_memory
from ztk.inference.base import Model
from ztk.inference.describe import Description
from ztk.inference.draft import PROMPT_TOKENS, DraftModel
from ztk.inference.parts import Item
from ztk.inference.policy import InferencePolicy
from ztk.inference.ranks import Ranks
from ztk.inference.slab_cache import rounded
from ztk.inference.steps import attention_bytes
from ztk.inference.stream import BUFFERS

USUAL_SEQUENCES, USUAL_STEP_TOKENS = 32, 512  # where nothing is streamed
MOST_SEQUENCES, MOST_STEP_TOKENS = 1024, 4096
_NEAR = 0.98  # of the most tokens per second
_BESIDE_BLOCKS = 0.2  # of the free memory
_GROUP = Path("/sys/fs/cgroup")
_SHARE = 0.8  # of the free memory: the rest is for uncounted allocations
_INNER_COPIES, _WIDTH_COPIES = (
    3,
    8,
)  # activations of a block that exist at one time: gate, up and their product; x, norms, q, k, v, out


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Bytes of a model. layer: in memory, padding included. fixed: head, norms, tables, blocks of the I/O threads. sequence: keys and values.
    row: of a step's activations, per row. logits: per row whose token is drawn."""

    layers: int
    layer: int
    fixed: int
    sequence: int
    row: int
    logits: int

    def working(self, *, sequences: int, rows: int) -> int:
        """Bytes of a step's working memory."""
        return rows * self.row + sequences * self.logits


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """link: bytes per second of reading layers. pass_seconds: of a pass without reads, plus row_seconds for each row. serial: fraction of
    the shorter of reading and computing that does not overlap with the longer, 0 to 1, with two buffers or more."""

    link: float
    pass_seconds: float
    row_seconds: float
    serial: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamPlan:
    """The planned use of memory. budget: allowed bytes. positions: tokens of a sequence that the cache has room for."""

    sizes: Sizes
    rates: Rates
    budget: int
    positions: int
    resident: int
    buffers: int
    sequences: int
    step_tokens: int

    @property
    def pass_bytes(self) -> int:
        """Bytes that a pass reads."""
        return (self.sizes.layers - self.resident) * self.sizes.layer

    @property
    def memory_bytes(self) -> int:
        """Bytes in main memory when all sequences are as long as they may be."""
        held = (self.resident + self.buffers) * self.sizes.layer + self.sequences * self.sizes.sequence
        return held + self.sizes.fixed + self.sizes.working(sequences=self.sequences, rows=self.step_tokens)

    @property
    def read_seconds(self) -> float:
        """Of one pass."""
        return self.pass_bytes / self.rates.link

    @property
    def compute_seconds(self) -> float:
        """Seconds of one pass in which every sequence has one row."""
        return self.rates.pass_seconds + self.sequences * self.rates.row_seconds

    @property
    def serial(self) -> float:
        """Fraction of the shorter of reading and computing that does not overlap with the longer. All of it if the ring has one buffer,
        which is in use before the next layer is read into it."""
        return 1.0 if self.buffers == 1 else self.rates.serial

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second when all sequences draw tokens."""
        both = self.read_seconds, self.compute_seconds
        return self.sequences / (max(both) + self.serial * min(both))

    def __str__(self) -> str:
        read = (
            "nothing is read"
            if not self.pass_bytes
            else f"{_gib(self.pass_bytes)} read per pass at {self.rates.link / 1e9:.2f} GB/s"
        )
        return (
            f"plan: {self.resident} of {self.sizes.layers} layers reside in memory, {read} ({self.read_seconds:.3g} s, compute "
            f"{self.compute_seconds:.3g} s, {1 - self.serial:.0%} of the shorter overlaps); {self.sequences} sequences of up to "
            f"{self.positions} tokens, their keys and values in memory ({_gib(self.sequences * self.sizes.sequence)}); "
            f"{_gib(self.memory_bytes)} of {_gib(self.budget)} used; expected: {self.tokens_per_second:.3g} tokens/s"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Drafting:
    """A draft model. nbytes: of its linear layers and head. working: working memory of a step, for a prompt."""

    description: Description
    nbytes: int
    working: int


def sizes_of(
    description: Description,
    *,
    items: list[Item],
    layer_bytes: int,
    fixed: int,
    positions: int,
    sequences: int,
    drafting: Drafting | None = None,
) -> Sizes:
    """The bytes that a model takes for up to `sequences` sequences of `positions` tokens, with the draft model's. fixed: bytes without
    layers, cache, activations."""
    of, drafted = description, 0
    outputs = {item.path: item.shape[0] for item in items}
    inner = max([count for path, count in outputs.items() if path.endswith("up")] or outputs.values())
    longest = rounded(positions)
    if drafting is not None:
        drafted = token_bytes(drafting.description)
        token, batched = attention_bytes(drafting.description, sequences=sequences)
        fixed += drafting.nbytes + drafting.working + token * longest + batched
    token, batched = attention_bytes(of, sequences=sequences)
    return Sizes(
        layers=of.layers,
        layer=layer_bytes,
        fixed=fixed + token * longest + batched,
        sequence=(token_bytes(of) + drafted) * longest,
        row=row_bytes(of, inner=inner),
        logits=row_logits_bytes(of),
    )


def token_bytes(of: Description) -> int:
    """Bytes of a position's keys and values, in fp32: in all slabs and one more, whose old and new memory coexist while it grows."""
    return (2 * of.layers + 1) * of.kv_heads * of.head_dim * 4


def row_bytes(of: Description, *, inner: int) -> int:
    """Activations of a row. inner: outputs of the widest linear layer."""
    return 4 * (_WIDTH_COPIES * max(of.dim, of.heads * of.head_dim) + _INNER_COPIES * inner)


def row_logits_bytes(of: Description) -> int:
    """Bytes of a row whose token is drawn: logits in fp32, and log-probabilities in fp64."""
    return of.vocab_size * (4 + 2 * 8)


def largest(each: list[Sizes]) -> Sizes:
    """The largest sizes of several ranks."""
    return Sizes(**{name: max(getattr(one, name) for one in each) for name in Sizes.__slots__})


def slowest(each: list[Rates]) -> Rates:
    """The slowest rates of several ranks."""
    found = {name: max(getattr(one, name) for one in each) for name in Rates.__slots__}
    return Rates(**found | {"link": min(one.link for one in each)})


def plan_stream(
    sizes: Sizes, *, rates: Rates, budget: int, positions: int, sequences: int | None, step_tokens: int | None
) -> StreamPlan:
    """The plan with the most tokens per second in `budget` bytes. sequences, step_tokens: the user's choices, or None to let the plan
    choose.

    Raises:
        ValueError: not one sequence fits, or not as many as requested.
    """
    counts = [sequences] if sequences is not None else range(1, MOST_SEQUENCES + 1)
    found = []
    for count in counts:
        rows = step_tokens or max(USUAL_STEP_TOKENS, count)
        split = _split(sizes, budget=budget, count=count, rows=rows)
        if split is not None:
            resident, buffers = split
            plan = StreamPlan(
                sizes=sizes,
                rates=rates,
                budget=budget,
                positions=positions,
                resident=resident,
                buffers=buffers,
                sequences=count,
                step_tokens=rows,
            )
            found.append(plan)
    if not found:
        raise _does_not_fit(sizes, budget=budget, positions=positions, sequences=sequences, rows=step_tokens)
    most = max(plan.tokens_per_second for plan in found)
    best = next(plan for plan in found if plan.tokens_per_second >= _NEAR * most)
    return best if step_tokens is not None else _longer_steps(best)


def first_buffers(sizes: Sizes, *, budget: int, positions: int, sequences: int | None, step_tokens: int | None) -> int:
    """Buffers of the ring that fit in any case: rates are measured with them, before there is a plan.

    budget: bytes. Raises ValueError as `plan_stream`.
    """
    count = sequences or 1
    split = _split(sizes, budget=budget, count=count, rows=step_tokens or max(USUAL_STEP_TOKENS, count))
    if split is None:
        raise _does_not_fit(sizes, budget=budget, positions=positions, sequences=sequences, rows=step_tokens)
    return split[1] or min(BUFFERS, sizes.layers)


def free_device_memory(device: torch.device) -> int:
    """Bytes of a GPU that a tensor may take: free memory and the unused part of torch's cache."""
    held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + held


def free_memory() -> int:
    """Default number of bytes for a plan: 80 % of the free memory, or of the rest up to the control group's limit.

    The page cache counts as free in both: a model that was just read or packed fills it.
    """
    free = machine_memory()["MemAvailable"]
    try:
        limit = (_GROUP / "memory.max").read_text().strip()
        if limit != "max":
            held = dict(line.split() for line in (_GROUP / "memory.stat").read_text().splitlines())
            cached = int(held["inactive_file"]) + int(held["active_file"])
            free = min(free, int(limit) - int((_GROUP / "memory.current").read_text()) + cached)
    except OSError:
        pass  # no control group, or one of the first version: use the machine's own number
    return int(_SHARE * free)


def _split(sizes: Sizes, *, budget: int, count: int, rows: int) -> tuple[int, int] | None:
    """(resident layers, buffers of the ring) with `count` sequences and steps of `rows` rows; None if not even one buffer fits."""
    room = budget - sizes.fixed - count * sizes.sequence - sizes.working(sequences=count, rows=rows)
    if room >= sizes.layers * sizes.layer:
        return sizes.layers, 0
    buffers = min(BUFFERS, sizes.layers - 1, room // sizes.layer)
    if buffers < 1:
        return None
    # More layers are read than there are buffers: otherwise the ring itself could keep them.
    return max(0, min(room // sizes.layer - buffers, sizes.layers - buffers - 1)), buffers


def _longer_steps(plan: StreamPlan) -> StreamPlan:
    """Extends steps for prompts: as many rows per pass as are computed while it reads, if memory is left for them."""
    sizes, rates = plan.sizes, plan.rates
    behind = int((plan.read_seconds - rates.pass_seconds) / rates.row_seconds)
    left = max(0, plan.budget - plan.memory_bytes) // sizes.row
    rows = min(MOST_STEP_TOKENS, max(plan.step_tokens, min(behind, plan.step_tokens + left)))
    return replace(plan, step_tokens=rows)


def _does_not_fit(sizes: Sizes, *, budget: int, positions: int, sequences: int | None, rows: int | None) -> ValueError:
    count = sequences or 1
    needed = (
        sizes.fixed
        + sizes.layer
        + count * sizes.sequence
        + sizes.working(sequences=count, rows=rows or USUAL_STEP_TOKENS)
    )
    fewer = "lower inference.max_sequences or " if count > 1 else ""
    return ValueError(
        f"inference.memory_bytes={budget}: {count} sequence{'s' * (count > 1)} of {positions} tokens need {needed} bytes with one layer of "
        f"{sizes.layer} bytes in memory; allow more, {fewer}lower inference.max_model_len (task=eval: eval.seq_len), or use weights=int4"
    )


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB"


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
    model: Model,
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
    token, (shared, batched) = token_bytes(of), attention_bytes(of, sequences=slots)
    working = _working(model, rows=policy.max_step_tokens or 0) + slots * row_logits_bytes(of) + batched
    if drafts is not None:
        token += token_bytes(drafts.model.description)
        attention, batched = attention_bytes(drafts.model.description, sequences=slots)
        shared += attention
        working += _working(drafts.model, rows=PROMPT_TOKENS) + batched
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
    shared, batched = attention_bytes(of, sequences=slots)
    nbytes = max(0, int(_BESIDE_BLOCKS * free_memory()) - batched)
    return Room(slots=slots, nbytes=nbytes, token=token_bytes(of), shared=shared)


def drafting_of(model: Model) -> Drafting:
    """Memory of a draft model used with streamed layers."""
    nbytes = sum(product.nbytes for product in model.products())
    return Drafting(description=model.description, nbytes=nbytes, working=_working(model, rows=PROMPT_TOKENS))


def _working(model: Model, *, rows: int) -> int:
    """Working memory of a step of `rows` rows. The head counts as a layer, because prompts may be scored."""
    return rows * row_bytes(model.description, inner=max(product.shape[0] for product in model.products()))
