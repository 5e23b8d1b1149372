"""The memory of a rollout: sharded parameters gathered once or one unit at a time, and states of the update in main memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ztk.core.policies.rollout import RolloutWeights
from ztk.inference.capacity import free_device_memory, free_memory
from ztk.train.engine import Engine
from ztk.zero.state.offload import StateKind

_KINDS = (StateKind.optim_states, StateKind.hp_params)


@dataclass(frozen=True, kw_only=True, slots=True)
class SettledWeights:
    """weights: whole or streamed. reason: a sentence with the reason."""

    weights: RolloutWeights
    reason: str


@contextmanager
def rollout_weights(engine: Engine, *, weights: RolloutWeights) -> Iterator[None]:
    """Prepares the engine's module for forwards without gradients, in eval mode. weights: whole or streamed. A collective call."""
    with engine.evaluating():
        if weights is RolloutWeights.streamed:
            yield
        else:
            with engine.zero.gathering.keep_unsharded():
                yield


@contextmanager
def states_away(*engines: Engine) -> Iterator[None]:
    """Moves optimizer states and master weights of `engines` to main memory inside the context. A collective call.

    No engine may step or save inside. Nothing is copied if the device is the CPU, and offloaded tensors stay in their tier.
    """
    for engine in engines:
        engine.zero.offloader.offload(_KINDS, pin_memory=True, non_blocking=False)
    try:
        yield
    finally:
        for engine in engines:
            engine.zero.offloader.reload(non_blocking=True)


def settle_weights(engine: Engine, *, free_bytes: int | None = None) -> SettledWeights:
    """Decides `auto` for this engine, the same on all ranks. A collective call.

    free_bytes: where a rank computes. Defaults to the free memory there; on the CPU, to the rank's part of it.
    """
    buckets = {bucket for unit in engine.zero.gathering.units for bucket in unit.buckets}
    elements = sum(bucket.size for bucket in buckets)
    nbytes = sum(bucket.size * bucket.traits.dtype.itemsize for bucket in buckets)
    own = _free_bytes(engine) if free_bytes is None else free_bytes
    numbers = torch.tensor([float(own)], dtype=torch.float64, device=engine.process.device)
    least = engine.process.comm.gather_scalars(numbers, label="free memory").min().item()
    limit = engine.zero.policy.max_kept_parameters
    if elements > limit:
        return SettledWeights(
            weights=RolloutWeights.streamed,
            reason=f"{elements:,} parameters are more than zero.max_live_parameters={limit:,}",
        )
    fits = nbytes <= least
    return SettledWeights(
        weights=RolloutWeights.whole if fits else RolloutWeights.streamed,
        reason=(
            f"all parameters take {nbytes / 2**20:,.1f} MiB, and {least / 2**20:,.0f} MiB are free "
            f"{'on every rank' if fits else 'on a rank'}"
        ),
    )


def _free_bytes(engine: Engine) -> int:
    """Returns the free memory: on the device, less a tenth for activations; on the CPU, this rank's part of main memory."""
    if engine.process.device.type != "cuda":
        return free_memory() // engine.process.local_world_size
    return free_device_memory(engine.process.device) * 9 // 10
