"""Chooses the stores of ZeRO's shards, and the size of an NVMe store's pool."""

from dataclasses import replace

from ztk.core.policies.offload import MIN_BUFFER_COUNT, PAGE_BYTES
from ztk.core.runtime import Tier
from ztk.core.runtime.planned import is_planned
from ztk.core.runtime.store import DeviceStore, Store, Stores
from ztk.optim.states import ROW_ALIGNMENT, StateFormat
from ztk.parallel.parallel_plan import Plan
from ztk.zero.buckets.layout import PARAMETER_ALIGNMENT, SHARD_ALIGNMENT
from ztk.zero.buckets.units import plan_units
from ztk.zero.offload import HostStore, NvmeStore, OffloadPolicy
from ztk.zero.offload.planned import PlannedHostStore, PlannedNvmeStore


def make_stores(plan: Plan, *, policy: OffloadPolicy) -> Stores:
    """One store per tier in use. Reduced gradients are stored on the tier where the optimizer runs."""
    made: dict[Tier, Store] = {}
    planned = is_planned(plan.process.device)
    average = plan.ema.offload if plan.ema is not None and plan.has_average_apart else None
    if average is Tier.nvme and not policy.uses_nvme:
        policy = _for_average(policy)

    def store(tier: Tier) -> Store:
        if tier not in made:
            match tier:
                case Tier.none:
                    made[tier] = DeviceStore(device=plan.process.device, ledger=plan.memory)
                case Tier.cpu:
                    made[tier] = (PlannedHostStore if planned else HostStore)(policy, ledger=plan.memory)
                case Tier.nvme:
                    options = {"rank": plan.process.rank, "ledger": plan.memory, "counters": plan.io}
                    made[tier] = PlannedNvmeStore(policy, **options) if planned else NvmeStore(policy, **options)
        return made[tier]

    return Stores(
        optimizer=store(policy.optimizer),
        gradients=store(policy.optimizer if plan.zero.shards_gradients else Tier.none),
        parameters=store(policy.parameters),
        average=None if average is None else store(average),
    )


def _for_average(policy: OffloadPolicy) -> OffloadPolicy:
    """The policy of a store for the average only, which passes through the blocks of its threads. Raises ValueError without a folder."""
    if not policy.nvme_path:
        raise ValueError("ema.offload=nvme needs a folder: set offload.nvme_path=FOLDER")
    return replace(policy, buffer_count=MIN_BUFFER_COUNT, buffer_bytes=min(policy.buffer_bytes, policy.block_bytes))


def fit_pool(plan: Plan) -> OffloadPolicy:
    """`plan.offload` with pool buffers no larger than the largest unit's shard: a small model reserves less than a large one."""
    policy = plan.offload
    if policy.optimizer is not Tier.nvme:
        return policy

    def shard_size(name: str, *, numel: int) -> int:
        axis = plan.parts[name].axis if name in plan.parts else "data"
        return -(-numel // plan.mesh.comm(axis).size)

    sizes = {name: shard_size(name, numel=parameter.numel()) for name, parameter in plan.model.named_parameters()}
    largest = max(sum(sizes[name] for name in unit.owned) for unit in plan_units(plan.model))
    elements = largest + SHARD_ALIGNMENT * PARAMETER_ALIGNMENT  # with room for padding
    block, spare = _block_bytes(plan.state_format)
    needed = -(-(-(-elements * block // SHARD_ALIGNMENT) + spare) // PAGE_BYTES) * PAGE_BYTES
    return replace(policy, buffer_bytes=min(policy.buffer_bytes, needed))


def piece_size(policy: OffloadPolicy, *, states: StateFormat) -> int | None:
    """Elements whose master weights and states fit into a pool buffer, or None if there is no limit.

    Raises ValueError for a buffer that holds too few.
    """
    if policy.optimizer is not Tier.nvme:
        return None  # parameter shards of any size stream through the store's blocks
    block, spare = _block_bytes(states)
    size = max(0, policy.buffer_bytes - spare) // block * SHARD_ALIGNMENT
    if size == 0:
        raise ValueError(
            f"offload.buffer_bytes={policy.buffer_bytes} cannot hold the states of {SHARD_ALIGNMENT} parameters; "
            f"set offload.buffer_bytes={block + spare} or more"
        )
    return size


def _block_bytes(states: StateFormat) -> tuple[int, int]:
    """(bytes of `SHARD_ALIGNMENT` elements' master weights and states, maximum bytes of padding between rows)."""
    rows = states.all_rows(has_master=True)
    spare = 0 if states.is_plain else ROW_ALIGNMENT * len(rows)
    return sum(row.nbytes(SHARD_ALIGNMENT) for row in rows), spare
