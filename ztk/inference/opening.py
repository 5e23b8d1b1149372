"""From weights to a model that computes: all of them in memory, or layers streamed by a plan."""

import shutil
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from ztk.inference.block_model import BlockModel
from ztk.inference.describe import Subject
from ztk.inference.model import InferenceModel
from ztk.inference.packed import Packed, pack
from ztk.inference.plan import (
    USUAL_SEQUENCES,
    USUAL_STEP_TOKENS,
    StreamPlan,
    first_buffers,
    free_memory,
    plan_stream,
    sizes_of,
)
from ztk.inference.policy import InferencePolicy
from ztk.inference.rates import measure
from ztk.inference.stream import StreamedLayers
from ztk.inference.weights import ResidentLayers
from ztk.policies.offload import OffloadPolicy
from ztk.runtime.host_memory import return_freed_memory


@dataclass(frozen=True, kw_only=True, slots=True)
class Opened:
    """A model that computes, over slabs or over blocks. plan, streamed: None where all weights are in memory and were not planned.
    packed_bytes: of the layers and the head of a packed folder."""

    model: InferenceModel | BlockModel
    subject: Subject
    plan: StreamPlan | None = None
    streamed: StreamedLayers | None = None
    packed_bytes: int | None = None


def from_packed(packed: Packed, *, policy: InferencePolicy) -> Opened:
    """The model of a packed folder; with `policy.offload` by a plan, which is measured here.

    Raises:
        ValueError: `policy.weights` is another format, a cache of blocks, or not one sequence fits into memory.
    """
    if policy.cache == "blocks" or policy.device not in (None, "cpu"):
        raise ValueError(
            f"{packed.path}: packed weights are in the processor's own layout, over slabs; open the model that was packed"
        )
    if policy.weights != packed.weights:
        raise ValueError(
            f"inference.weights={policy.weights}: {packed.path} was packed with weights={packed.weights}; use that, or pack "
            "the model again"
        )
    if policy.offload is None:
        weights, subject = packed.read_rest()
        weights.layers = ResidentLayers(packed.read_layer(number).layer for number in range(packed.description.layers))
        model = InferenceModel(subject, weights=weights)
        return Opened(model=model, subject=subject, packed_bytes=packed.weight_bytes)
    return _streamed(packed, policy=policy, offload=policy.offload)


def from_state(
    state: Mapping[str, Tensor], *, subject: Subject, policy: InferencePolicy, offload: OffloadPolicy
) -> Opened:
    """Packs parameters of any shape into `offload.nvme_path` and streams them. The files have no name afterwards and end with the model."""
    assert offload.nvme_path is not None, "the policy has a folder"
    folder = Path(offload.nvme_path) / f"packed-{uuid.uuid4().hex}"
    try:
        packed = pack(folder, subject=subject, state=state, weights=policy.weights)
        return _streamed(packed, policy=policy, offload=offload)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def settled(policy: InferencePolicy, *, plan: StreamPlan | None) -> InferencePolicy:
    """The policy with numbers for what the caller left to the plan."""
    return replace(
        policy,
        max_sequences=policy.max_sequences or (USUAL_SEQUENCES if plan is None else plan.sequences),
        max_step_tokens=policy.max_step_tokens or (USUAL_STEP_TOKENS if plan is None else plan.step_tokens),
    )


def _streamed(packed: Packed, *, policy: InferencePolicy, offload: OffloadPolicy) -> Opened:
    of = packed.description
    positions = min(policy.max_model_len or of.max_len, of.max_len)
    fixed = packed.rest_bytes + offload.threads * offload.block_bytes
    sizes = sizes_of(of, items=packed.items, layer_bytes=packed.layer_bytes, fixed=fixed, positions=positions)
    budget = policy.memory_bytes or free_memory()
    chosen = {
        "budget": budget,
        "positions": positions,
        "sequences": policy.max_sequences,
        "step_tokens": policy.max_step_tokens,
    }
    buffers = first_buffers(sizes, **chosen)
    weights, subject = packed.read_rest()
    layers = StreamedLayers(packed, policy=offload, buffers=buffers)
    try:
        weights.layers = layers
        model = InferenceModel(subject, weights=weights)
        plan = plan_stream(sizes, rates=measure(model, layers=layers, positions=positions), **chosen)
        layers.keep(plan.resident, buffers=plan.buffers)
        return_freed_memory()  # what was measured with, and what layers of zeros were built from
    except BaseException:
        layers.close()
        raise
    return Opened(model=model, subject=subject, plan=plan, streamed=layers, packed_bytes=packed.weight_bytes)
