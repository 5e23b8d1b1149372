"""Arithmetic of memory: the number of resident layers and of sequences, and the resulting tokens per second.

[Note: Tokens per second of streamed weights]
A pass reads S = layers - resident layers of W bytes each in R = S W / link seconds, and computes for C = c0 + c1 B seconds for B sequences.
It takes max(R, C) + s min(R, C): s is 0 if the reading threads have a core of their own, and is measured. It gives B tokens, and more
with accepted drafts. Memory holds the resident layers, a ring of buffers, the head, B caches of keys and values, and a step's working
memory.
A byte for the cache lets one pass serve more sequences; a byte for a layer saves reading it. The search over B takes the fewest
sequences within 2 % of the most tokens per second. Keys and values stay in main memory: offloading them would pay only if fewer than
S W / (cache of a sequence) sequences fit (FlexGen, https://arxiv.org/abs/2303.06865, section 4).

[Note: Bytes of blocks]
A cache has a block for every 64 tokens of as many sequences as may run, or as many as fit. Memory also holds a step's activations and
logits, and on a CPU attention's working memory, which depends on the longest sequence. Where there is no room
for all sequences at their longest, blocks of preempted ones are copied out, to main memory: on a CPU the same memory has to have room for
the copies. A preempted sequence continues before any new one begins, so there are never more copies than blocks. On a GPU a fifth of the
free memory stays for a step.
A sequence that is too long for all blocks together is refused before it waits.
"""

from dataclasses import dataclass, replace

import torch
from torch import nn

from ztk.core.policies.inference import InferencePolicy
from ztk.core.runtime.system_memory import available_memory
from ztk.inference.base import Model
from ztk.inference.cache import block_bytes
from ztk.inference.describe import Description
from ztk.inference.parts import Item
from ztk.inference.placement import Placement
from ztk.inference.ranks import Ranks
from ztk.inference.stream import BUFFERS
from ztk.kernels.shared.cached_attention import BLOCK, attention_bytes

USUAL_SEQUENCES, USUAL_STEP_TOKENS = 32, 512  # where nothing is streamed
MOST_SEQUENCES, MOST_STEP_TOKENS = 1024, 4096
_NEAR = 0.98  # of the most tokens per second
_BESIDE_BLOCKS = 0.2  # of the free memory
_SHARE = 0.8  # of the free memory: the rest is for uncounted allocations, and on a GPU for a step
_PACKED_BYTES = {"int8": 1.0, "fp8": 1.0, "int4": 0.625}  # of a weight; int4 has 32 bits of scale and zero per 32
_INNER_COPIES, _WIDTH_COPIES = (
    3,
    8,
)  # activations of a block that exist at one time: gate, up and their product; x, norms, q, k, v, out


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Bytes of a model. layer: size in memory, padding included. fixed: head, norms, tables, blocks of the I/O threads. sequence: keys and
    values. row: activations of a step, per row. logits: bytes per row whose token is drawn."""

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
    """link: bytes per second of reading layers. pass_seconds: duration of a pass without reads, plus row_seconds for each row. serial:
    fraction of the shorter of reading and computing that does not overlap with the longer, 0 to 1, with two buffers or more."""

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


def sizes_of(
    description: Description,
    *,
    items: list[Item],
    layer_bytes: int,
    fixed: int,
    positions: int,
    sequences: int,
    dtype: torch.dtype = torch.float32,
    on_cpu: bool = True,
) -> Sizes:
    """The bytes that a model takes for up to `sequences` sequences of `positions` tokens. fixed: bytes without layers, cache, activations.
    dtype: dtype of keys and values. on_cpu: attention needs working memory."""
    of = description
    outputs = {item.path: item.shape[0] for item in items}
    inner = max([count for path, count in outputs.items() if path.endswith("up")] or outputs.values())
    blocks = -(-positions // BLOCK)
    token, batched = _attention_bytes(of, sequences=sequences) if on_cpu else (0, 0)
    return Sizes(
        layers=of.layers,
        layer=layer_bytes,
        fixed=fixed + token * blocks * BLOCK + batched,
        sequence=block_bytes(of, dtype=dtype) * blocks,
        row=row_bytes(of, inner=inner),
        logits=row_logits_bytes(of),
    )


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


def usual_device_memory(device: torch.device) -> int:
    """Default number of bytes of a GPU for weights, cache and a step: 80 % of its free memory."""
    return int(_SHARE * free_device_memory(device))


def weight_bytes(module: nn.Module, *, placement: Placement) -> int:
    """Estimated bytes of a model's weights in the placement's format, from the shapes of its parameters; embeddings stay in the dtype."""
    tables = {id(part.weight) for part in module.modules() if isinstance(part, nn.Embedding)}
    each = placement.dtype.itemsize
    packed = each if placement.kind == "stored" else _PACKED_BYTES[placement.kind]
    return sum(int(own.numel() * (each if id(own) in tables else packed)) for own in module.parameters())


def weight_room(budget: int) -> int:
    """Bytes of `budget` that weights may take without being streamed; the rest is for the cache and a step."""
    return int((1 - _BESIDE_BLOCKS) * budget)


def free_memory() -> int:
    """Default number of bytes for a plan: 80 % of the memory that is available to this process."""
    return int(_SHARE * available_memory())


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


def cache_blocks(model: Model, *, policy: InferencePolicy, slots: int, positions: int, ranks: Ranks | None) -> int:
    """Blocks of the cache of `slots` sequences of up to `positions` tokens: see [Note: Bytes of blocks]. All ranks that share the model
    make the call and get the minimum.

    Raises:
        ValueError: the memory is too small for the shortest sequence, or for `policy.cache_tokens`.
    """
    of, on_cpu = model.description, model.placement.device.type == "cpu"
    wanted = slots * -(-positions // BLOCK)
    block = block_bytes(of, dtype=cache_dtype(policy, model=model))
    shared, working, copies = 0, 0, 1
    if on_cpu:
        shared, batched = _attention_bytes(of, sequences=slots)
        working = _working(model, rows=policy.max_step_tokens or 0) + slots * row_logits_bytes(of) + batched
        free, copies = free_memory(), 2
    else:
        free = usual_device_memory(model.placement.device)
    if ranks is not None and on_cpu:
        free //= ranks.comm.size
    if policy.memory_bytes is not None:  # of layers that could stream, and fit
        held = sum(product.nbytes for product in model.products())
        held += of.vocab_size * of.dim * model.placement.dtype.itemsize  # the embedding
        step = _working(model, rows=policy.max_step_tokens or 0) + slots * row_logits_bytes(of)
        free = min(free, policy.memory_bytes - held - (0 if on_cpu else step))
    room = free - working
    if policy.cache_tokens is not None:
        blocks = min(wanted, policy.cache_tokens // BLOCK)
        held = blocks * block * (1 if blocks == wanted else copies)
        needed = held + shared * min(positions, blocks * BLOCK) + working
        if needed > free:
            raise ValueError(
                f"inference.cache_tokens={policy.cache_tokens} need {needed} bytes with the working memory of a step, attention and "
                f"copies of preempted sequences, and {free} are free: lower it, inference.max_model_len or inference.max_step_tokens"
            )
        room = policy.cache_tokens * block // BLOCK
    else:
        blocks = _fitting(wanted, positions=positions, free=room, block=block, shared=shared, copies=copies)
    if ranks is not None:  # whose heads, and so blocks, may differ in number
        blocks = min(ranks.gather(blocks))
    if blocks < 1:
        raise ValueError(
            f"the cache may take {max(0, room)} bytes, and the shortest sequence needs {copies * block + BLOCK * shared}: raise "
            "inference.cache_tokens, or free memory"
        )
    return blocks


def _fitting(wanted: int, *, positions: int, free: int, block: int, shared: int, copies: int) -> int:
    """Blocks in `free` bytes: `wanted` ones, or fewer with room for copies. block: bytes of one. shared: bytes per position of the longest
    sequence."""
    if wanted * block + positions * shared <= free:
        return wanted
    return max(0, free // (copies * block + BLOCK * shared))


def cache_dtype(policy: InferencePolicy, *, model: Model) -> torch.dtype:
    """Of keys and values."""
    return torch.uint8 if policy.cache_dtype == "fp8" else model.placement.dtype


def _attention_bytes(of: Description, *, sequences: int) -> tuple[int, int]:
    return attention_bytes(heads=of.heads, kv_heads=of.kv_heads, head_dim=of.head_dim, sequences=sequences)


def _working(model: Model, *, rows: int) -> int:
    """Working memory of a step of `rows` rows. The head counts as a layer, because prompts may be scored."""
    return rows * row_bytes(model.description, inner=max(product.shape[0] for product in model.products()))
