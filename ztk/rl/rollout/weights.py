"""Settings of a rollout, and its memory: sharded parameters gathered once or one unit at a time, and states of the update in main memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ztk.core.policies.rollout import RolloutWeights
from ztk.core.policies.tier import StateKind
from ztk.inference.capacity import free_device_memory, free_memory
from ztk.inference.sample import KEEPS_ALL, Cut
from ztk.train.engine import Engine

_KINDS = (StateKind.optim_states, StateKind.hp_params)


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutPolicy:
    """length: tokens of a row (prompt, answer and padding), as in training. micro_batch: texts per forward, as in training. packs:
    forwards take texts without padding; see `ztk.rl.rollout.layout`. The result is bitwise independent of the pack only if the engine's
    module supports it.

    max_tokens: limit of an answer. stops, pad: token numbers; an answer ends with one of `stops`. temperature: divides the logits, for sampling
    and for log-probabilities. cut: restricts sampling and log-probabilities to the kept tokens. keeps_experts: the inference engine keeps
    the experts of each token.

    Raises:
        ValueError: a number out of its range.
    """

    length: int
    micro_batch: int
    max_tokens: int
    stops: tuple[int, ...]
    pad: int
    temperature: float = 1.0
    seed: int = 0
    weights: RolloutWeights = RolloutWeights.whole
    packs: bool = False
    cut: Cut = KEEPS_ALL
    keeps_experts: bool = False

    def __post_init__(self) -> None:
        for name in ("length", "micro_batch", "max_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"rollout {name}={getattr(self, name)}: must be 1 or more")
        if not self.temperature > 0:
            raise ValueError(f"rollout.temperature={self.temperature}: must be above 0; a policy gradient needs draws")


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
