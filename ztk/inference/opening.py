"""From weights to a model that computes: all of them in memory, or layers streamed by a plan."""

import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from ztk.core.policies.inference import adapter_faults, calibration_faults
from ztk.core.policies.offload import OffloadPolicy
from ztk.core.runtime.host_memory import return_freed_memory
from ztk.inference.adapters import Adapters, Merged, adapted_layers
from ztk.inference.calibration import Calibration
from ztk.inference.cut import Cut
from ztk.inference.describe import FAMILIES, Description, Subject, describe
from ztk.inference.layer_file import LayerFile
from ztk.inference.model import InferenceModel
from ztk.inference.module_model import ModuleModel, is_own_family
from ztk.inference.module_stream import StreamedModuleModel
from ztk.inference.packed import Packed, pack
from ztk.inference.parts import Built, Values
from ztk.inference.placement import Placement, placement_of
from ztk.inference.plan import (
    USUAL_SEQUENCES,
    USUAL_STEP_TOKENS,
    Drafting,
    Rates,
    StreamPlan,
    first_buffers,
    free_memory,
    largest,
    plan_stream,
    sizes_of,
    slowest,
)
from ztk.inference.policy import InferencePolicy
from ztk.inference.probe import check_module
from ztk.inference.ranks import Ranks
from ztk.inference.rates import measure, measure_modules
from ztk.inference.stream import StreamedLayers
from ztk.inference.weights import Layer, ResidentLayers, WeightReader, collect
from ztk.nn import Decoder
from ztk.nn.low_rank import Adapter


class TrainingEngine(Protocol):
    """The part of a training engine that the generator reads, implemented by `ztk.Engine`."""

    @property
    def module(self) -> nn.Module:
        """The model."""
        ...

    @property
    def zero(self) -> "FullParameters":
        """Where its parameters are."""
        ...


class FullParameters(Protocol):
    """The parameters by name, in their full shapes, one after the other; a collective call."""

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """In their own dtypes."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class UnreadModel:
    """A model whose parameters are read one by one. module: without memory. state: by name, in their full shapes and any dtype.

    The caller has compared the engine with transformers' own forward.
    """

    module: nn.Module
    state: Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Opened:
    """A model that computes. plan, streamed: None where all weights are in memory and were not planned.
    packed_bytes: of the layers and the head of a packed folder."""

    model: InferenceModel | ModuleModel
    subject: Subject
    plan: StreamPlan | None = None
    streamed: StreamedLayers | None = None
    packed_bytes: int | None = None


def open_weights(
    model: nn.Module | TrainingEngine | UnreadModel | Packed,
    *,
    policy: InferencePolicy,
    ranks: Ranks | None,
    drafting: Drafting | None,
    adapters: Mapping[str, Adapter],
) -> Opened:
    """As `from_packed` or `from_module`. Raises ValueError as they do, and for packed weights that ranks would share."""
    options = {"policy": policy, "drafting": drafting, "adapters": adapters}
    if not isinstance(model, Packed):
        return from_module(model, ranks=ranks, **options)
    if ranks is not None:
        raise ValueError(
            f"topology.tensor above 1 with {model.path}, which has full layers: name the model that was packed; each rank packs its part"
        )
    return from_packed(model, **options)


def from_module(
    model: nn.Module | TrainingEngine | UnreadModel,
    *,
    policy: InferencePolicy,
    ranks: Ranks | None = None,
    drafting: Drafting | None = None,
    adapters: Mapping[str, Adapter] | None = None,
) -> Opened:
    """The model over the weights of a module, or of a training engine, whose ranks all make the call; with `policy.offload` packed and
    streamed. A module of transformers is compared with the engine. ranks: those that share the layers. drafting: counted in a plan. adapters:
    by name.

    Raises:
        ValueError: a model that the engine does not support, or not with these options, or an adapter of another model.
    """
    module, state = _source(model)
    is_checked, own = isinstance(model, nn.Module) and not isinstance(model, Decoder), is_own_family(module)
    placement = placement_of(policy, module=module)
    streams = policy.offload is not None and not placement.has_blocks
    faults = list(adapter_faults(adapters, cache_dtype=policy.cache_dtype, streams=streams))
    if policy.calibration:
        faults += calibration_faults(policy.weights, adapters=adapters)
    if not own:
        faults += _own_module_faults(module, policy=policy, placement=placement, ranks=ranks, adapters=adapters)
    for fault in faults:
        raise ValueError(fault)
    subject = describe(module) if own else None
    plain = Placement()
    # In fp32, where a difference means that the engine misread the model, not that weights were rounded.
    is_plain = placement == plain and (ranks is None or not own) and (policy.offload is None or not own)
    if is_checked and not is_plain:
        options = {"placement": plain, "ranks": None if own else ranks}
        check_module(_built(module, subject=subject, state=state, **options), module=module, eager=not own)
    if policy.offload is None or placement.has_blocks:
        options = {"ranks": ranks, "adapters": adapters, "calibration": policy.calibration}
        built = _built(module, subject=subject, state=state, placement=placement, **options)
        opened = Opened(model=built, subject=subject or Subject(description=built.description, tables=[]))
    elif subject is not None:
        opened = _from_state(
            state, subject=subject, policy=policy, offload=policy.offload, ranks=ranks, drafting=drafting
        )
    else:
        opened = _streamed_modules(
            module, state=state, policy=policy, offload=policy.offload, ranks=ranks, drafting=drafting
        )
    if is_checked and is_plain:
        check_module(opened.model, module=module, eager=not own)
    return_freed_memory()  # weights between their format in the file and the engine's
    return opened


def _own_module_faults(
    module: nn.Module,
    *,
    policy: InferencePolicy,
    placement: Placement,
    ranks: Ranks | None,
    adapters: Mapping[str, Adapter] | None,
) -> Iterator[str]:
    """One line with its fix per option that a model outside of the engine's families excludes."""
    kind, families = getattr(module.config, "model_type", ""), ", ".join(sorted(FAMILIES))
    if placement.has_blocks and ranks is not None:
        yield f"model_type={kind}: topology.tensor above 1 with a cache of blocks is for {families}; leave it out"
    if adapters:
        yield (
            f"inference.adapters={{{', '.join(adapters)}}} with model_type={kind}: adapters by request are for {families}; "
            "merge the adapter into its base"
        )
    if policy.calibration:
        yield f"inference.calibration with model_type={kind}, which runs its own modules: it is for {families}; leave it out"


def _source(model: nn.Module | TrainingEngine | UnreadModel) -> tuple[nn.Module, Mapping[str, Tensor]]:
    """The module, and its parameters by name. A collective call of an engine's ranks."""
    if isinstance(model, nn.Module):
        return model, dict(model.named_parameters())
    if isinstance(model, UnreadModel):
        return model.module, model.state
    copies = model.zero.full_parameters()
    return model.module, {name: own.detach().to("cpu", torch.float32, copy=True) for name, own in copies}


def reopened(
    source: nn.Module | TrainingEngine,
    *,
    model: InferenceModel | ModuleModel,
    subject: Subject,
    ranks: Ranks | None,
    adapters: Mapping[str, Adapter],
    calibration: Sequence[int],
) -> InferenceModel | ModuleModel:
    """The same `model` with the weights that a module or a training engine has now. A collective call of an engine's ranks."""
    module, state = _source(source)
    options = {"placement": model.placement, "ranks": ranks, "adapters": adapters, "calibration": calibration}
    return _built(module, subject=subject if is_own_family(module) else None, state=state, **options)


def _streamed_modules(
    module: nn.Module,
    *,
    state: Mapping[str, Tensor],
    policy: InferencePolicy,
    offload: OffloadPolicy,
    ranks: Ranks | None,
    drafting: Drafting | None,
) -> Opened:
    """By its own modules, whose blocks' linear layers are read in every pass. The file has no name afterwards and ends with the model."""
    assert offload.nvme_path is not None, "the policy has a folder"
    folder = Path(offload.nvme_path) / f"packed-{uuid.uuid4().hex}"
    folder.mkdir(parents=True)
    try:
        placement = Placement(kind=policy.weights)
        model = StreamedModuleModel(module, state=state, placement=placement, folder=folder, ranks=ranks)

        def measured(layers: StreamedLayers[Values], positions: int) -> Rates:
            model.stream(layers)
            return measure_modules(model, layers=layers, positions=positions)

        layers, plan = _planned(
            model.file,
            of=model.description,
            fixed=model.resident_bytes,
            policy=policy,
            offload=offload,
            ranks=ranks,
            drafting=drafting,
            measured=measured,
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    subject = Subject(description=model.description, tables=[])
    return Opened(model=model, subject=subject, plan=plan, streamed=layers, packed_bytes=model.packed_bytes)


def _built(
    module: nn.Module,
    *,
    subject: Subject | None,
    state: Mapping[str, Tensor],
    placement: Placement,
    ranks: Ranks | None,
    adapters: Mapping[str, Adapter] | None = None,
    calibration: Sequence[int] = (),
) -> InferenceModel | ModuleModel:
    """The model over a state in memory, or this rank's part of it. subject: None, where the model runs its own modules. calibration: tokens."""
    if subject is None:
        return ModuleModel(module, state=state, placement=placement, ranks=ranks)
    cut, inputs = (
        _cut(subject, ranks=ranks),
        Calibration(calibration, subject=subject, state=state) if calibration else None,
    )
    weights = collect(state, description=subject.description, placement=placement, cut=cut, inputs=inputs)
    layers = {}
    for name, adapter in (adapters or {}).items():
        try:
            merged = Merged(state, module=module, adapter=adapter)
            reader = WeightReader(merged, description=subject.description, placement=placement, cut=cut)
            layers[name] = adapted_layers(weights, reader=reader, changed=merged.changed)
        except ValueError as error:
            raise ValueError(f"inference.adapters.{name}: {error}") from error
    found = Adapters(layers, base=weights.layers.held) if layers else None
    return InferenceModel(subject, weights=weights, placement=placement, ranks=ranks, adapters=found)


def _cut(subject: Subject, *, ranks: Ranks | None) -> Cut | None:
    """The cut for these ranks. Raises ValueError for a model that cannot be divided."""
    if ranks is None:
        return None
    ranks.cut.own(subject.description)
    return ranks.cut


def from_packed(
    packed: Packed,
    *,
    policy: InferencePolicy,
    drafting: Drafting | None = None,
    adapters: Mapping[str, Adapter] | None = None,
) -> Opened:
    """The model of a packed folder; with `policy.offload` by a plan, which is measured here and counts `drafting`.

    Raises:
        ValueError: `policy.weights` is another format, a cache of blocks, adapters, or not one sequence fits into memory.
    """
    if adapters:
        raise ValueError(
            f"inference.adapters={{{', '.join(adapters)}}} with {packed.path}, whose packed weights are final: name the model that was packed"
        )
    if policy.cache == "blocks" or policy.device not in (None, "cpu"):
        raise ValueError(
            f"{packed.path}: packed weights are in the processor's own layout, over slabs; open the model that was packed, or use "
            "launch.device=cpu and no inference.cache"
        )
    if policy.calibration:
        raise ValueError(
            f"inference.calibration with {packed.path}, whose packed weights are final: pack the model with python -m ztk.serve pack "
            "--calibration FILE, or name the model that was packed"
        )
    if policy.weights != packed.weights:
        raise ValueError(
            f"inference.weights={policy.weights}: {packed.path} was packed with weights={packed.weights}; use that, or pack "
            "the model again"
        )
    if policy.offload is None:
        weights, subject = packed.read_rest()
        weights.layers = ResidentLayers(packed.read_layer(number).layer for number in range(packed.description.layers))
        model = InferenceModel(subject, weights=weights, placement=Placement(kind=policy.weights))
        return Opened(model=model, subject=subject, packed_bytes=packed.weight_bytes)
    return _streamed(packed, policy=policy, offload=policy.offload, ranks=None, drafting=drafting)


def _from_state(
    state: Mapping[str, Tensor],
    *,
    subject: Subject,
    policy: InferencePolicy,
    offload: OffloadPolicy,
    ranks: Ranks | None,
    drafting: Drafting | None,
) -> Opened:
    """Packs parameters of any shape into `offload.nvme_path` and streams them, each of `ranks` its part. The files have no name afterwards
    and end with the model."""
    assert offload.nvme_path is not None, "the policy has a folder"
    folder = Path(offload.nvme_path) / f"packed-{uuid.uuid4().hex}"
    try:
        options = {"weights": policy.weights, "cut": _cut(subject, ranks=ranks), "calibration": policy.calibration}
        packed = pack(folder, subject=subject, state=state, **options)
        return _streamed(packed, policy=policy, offload=offload, ranks=ranks, drafting=drafting)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def settled(policy: InferencePolicy, *, plan: StreamPlan | None) -> InferencePolicy:
    """The policy with the plan's numbers for options that the caller did not set."""
    return replace(
        policy,
        max_sequences=policy.max_sequences or (USUAL_SEQUENCES if plan is None else plan.sequences),
        max_step_tokens=policy.max_step_tokens or (USUAL_STEP_TOKENS if plan is None else plan.step_tokens),
    )


def _streamed(
    packed: Packed,
    *,
    policy: InferencePolicy,
    offload: OffloadPolicy,
    ranks: Ranks | None,
    drafting: Drafting | None,
) -> Opened:
    """Plans for all ranks that share the model: with the largest part, the least memory and the slowest rank."""
    weights, subject = packed.read_rest()

    def measured(layers: StreamedLayers[Layer], positions: int) -> Rates:
        weights.layers = layers
        placement = Placement(kind=packed.weights)
        models.append(InferenceModel(subject, weights=weights, placement=placement, ranks=ranks))
        return measure(models[0], layers=layers, positions=positions)

    models: list[InferenceModel] = []
    layers, plan = _planned(
        packed.file,
        of=packed.description if ranks is None else ranks.cut.own(packed.description),
        fixed=packed.rest_bytes,
        policy=policy,
        offload=offload,
        ranks=ranks,
        drafting=drafting,
        measured=measured,
    )
    return Opened(model=models[0], subject=subject, plan=plan, streamed=layers, packed_bytes=packed.weight_bytes)


def _planned(
    file: LayerFile[Built],
    *,
    of: Description,
    fixed: int,
    policy: InferencePolicy,
    offload: OffloadPolicy,
    ranks: Ranks | None,
    drafting: Drafting | None,
    measured: Callable[[StreamedLayers[Built], int], Rates],
) -> tuple[StreamedLayers[Built], StreamPlan]:
    """The file's layers as planned. of: this rank's heads. fixed: bytes that stay in memory in addition to layers and threads. measured:
    returns the rates of a model over layers, for a number of positions."""
    positions = min(policy.max_model_len or of.max_len, of.max_len)
    fixed += offload.threads * offload.block_bytes
    if drafting is not None and policy.memory_bytes is None:
        drafting = replace(drafting, nbytes=0)  # its memory is already excluded from the free memory
    sizes = sizes_of(of, items=file.items, layer_bytes=file.nbytes, fixed=fixed, positions=positions, drafting=drafting)
    budget = policy.memory_bytes or free_memory()
    if ranks is not None:
        share = budget if policy.memory_bytes else budget // ranks.comm.size
        budget, sizes = min(ranks.gather(share)), largest(ranks.gather(sizes))
    chosen = {
        "budget": budget,
        "positions": positions,
        "sequences": policy.max_sequences,
        "step_tokens": policy.max_step_tokens,
    }
    buffers = first_buffers(sizes, **chosen)
    layers = StreamedLayers(file, policy=offload, buffers=buffers)
    try:
        rates = measured(layers, positions)
        plan = plan_stream(sizes, rates=rates if ranks is None else slowest(ranks.gather(rates)), **chosen)
        layers.keep(plan.resident, buffers=plan.buffers)
        return_freed_memory()  # memory of the measurement and of layers of zeros
    except BaseException:
        layers.close()
        raise
    return layers, plan
