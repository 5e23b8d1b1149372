"""From weights to a model that computes: all of them in memory, or layers streamed by a plan."""

import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from ztk.core.policies.inference import InferencePolicy, adapter_faults, calibration_faults, stream_faults
from ztk.core.runtime.host_memory import return_freed_memory
from ztk.inference.adapters import Adapters, Merged, adapted_layers
from ztk.inference.base import Model
from ztk.inference.calibration import Calibration
from ztk.inference.capacity import (
    MOST_SEQUENCES,
    USUAL_SEQUENCES,
    USUAL_STEP_TOKENS,
    StreamPlan,
    cache_dtype,
    first_buffers,
    free_memory,
    largest,
    plan_stream,
    sizes_of,
    slowest,
    usual_device_memory,
    weight_bytes,
    weight_room,
)
from ztk.inference.cut import Cut
from ztk.inference.describe import FAMILIES, Subject, describe
from ztk.inference.device_stream import DeviceLayers, HeldLayers
from ztk.inference.model import InferenceModel
from ztk.inference.module_model import ModuleModel, is_own_family
from ztk.inference.module_stream import StreamedModuleModel
from ztk.inference.packed import Packed, pack
from ztk.inference.parts import LayerFile, LayerWriter, assemble
from ztk.inference.placement import Placement, placement_of
from ztk.inference.probe import check_module
from ztk.inference.ranks import Ranks
from ztk.inference.rates import measure
from ztk.inference.stream import BUFFERS, StreamedLayers
from ztk.inference.weights import WeightReader, collect, values_of
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
    packed_bytes: bytes of the layers and the head of a packed folder."""

    model: Model
    subject: Subject
    plan: StreamPlan | None = None
    streamed: StreamedLayers | DeviceLayers | None = None
    packed_bytes: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Opening:
    """How models are opened. ranks: that share the layers. adapters: by name.

    The ranks of a training engine, and ranks that share the layers, all make the calls.
    """

    policy: InferencePolicy
    ranks: Ranks | None = None
    adapters: Mapping[str, Adapter] = field(default_factory=dict)

    def open(self, model: "nn.Module | TrainingEngine | UnreadModel | Packed") -> Opened:
        """The model over the weights of a module, of a training engine or of a packed folder; with `policy.offload` packed and streamed by
        a plan, which is measured here. A module of transformers is compared with the engine.

        Raises:
            ValueError: a model that the engine does not support, or not with these options, an adapter of another model, or not one
                sequence fits into memory.
        """
        return self._packed(model) if isinstance(model, Packed) else self._module(model)

    def reopened(self, source: nn.Module | TrainingEngine | UnreadModel, *, like: Model, subject: Subject) -> Model:
        """The model `like` with the weights that `source` has now."""
        module, state = _source(source)
        own = subject if is_own_family(module) else None
        return self._built(module, subject=own, state=state, placement=like.placement)

    def _module(self, model: nn.Module | TrainingEngine | UnreadModel) -> Opened:
        (module, state), policy = _source(model), self.policy
        is_checked, own = isinstance(model, nn.Module) and not isinstance(model, Decoder), is_own_family(module)
        placement = placement_of(policy, module=module)
        for fault in self._faults(module, placement=placement, own=own):
            raise ValueError(fault)
        subject = describe(module) if own else None
        plain = Placement()
        # In fp32, where a difference means that the engine misread the model, not that weights were rounded.
        is_plain = placement == plain and (self.ranks is None or not own) and (policy.offload is None or not own)
        if is_checked and not is_plain:
            checking = Opening(policy=InferencePolicy(), ranks=None if own else self.ranks)
            check_module(
                checking._built(module, subject=subject, state=state, placement=plain), module=module, eager=not own
            )
        if policy.offload is None or (placement.by_kernels and self._fits(module, placement=placement)):
            built = self._built(module, subject=subject, state=state, placement=placement)
            opened = Opened(model=built, subject=subject or Subject(description=built.description, tables=[]))
        else:
            opened = self._streamed(module, subject=subject, state=state, placement=placement)
        if is_checked and is_plain:
            check_module(opened.model, module=module, eager=not own)
        return_freed_memory()  # weights between their format in the file and the engine's
        return opened

    def _faults(self, module: nn.Module, *, placement: Placement, own: bool) -> Iterator[str]:
        """One line with its fix per option that the model excludes. own: it has one of the engine's families."""
        policy, adapters = self.policy, self.adapters
        streams = policy.offload is not None and not placement.by_kernels
        yield from adapter_faults(adapters, cache_dtype=policy.cache_dtype, streams=streams)
        if policy.calibration:
            yield from calibration_faults(policy.weights, adapters=adapters)
        if own:
            return
        kind, families = getattr(module.config, "model_type", ""), ", ".join(sorted(FAMILIES))
        if placement.by_kernels and self.ranks is not None:
            yield f"model_type={kind}: topology.tensor above 1 on a GPU is for {families}; leave it out, or use launch.device=cpu"
        if adapters:
            yield (
                f"inference.adapters={{{', '.join(adapters)}}} with model_type={kind}: adapters by request are for {families}; "
                "merge the adapter into its base"
            )
        if policy.calibration:
            yield f"inference.calibration with model_type={kind}, which runs its own modules: it is for {families}; leave it out"

    def _built(
        self, module: nn.Module, *, subject: Subject | None, state: Mapping[str, Tensor], placement: Placement
    ) -> Model:
        """The model over a state in memory, or this rank's part of it. subject: None, where the model runs its own modules."""
        if subject is None:
            return ModuleModel(module, state=state, placement=placement, ranks=self.ranks)
        of, cut, tokens = subject.description, self._cut(subject), self.policy.calibration
        inputs = Calibration(tokens, subject=subject, state=state) if tokens else None
        weights = collect(state, description=of, placement=placement, cut=cut, inputs=inputs)
        layers = {}
        for name, adapter in self.adapters.items():
            try:
                merged = Merged(state, module=module, adapter=adapter)
                reader = WeightReader(merged, description=of, placement=placement, cut=cut)
                layers[name] = adapted_layers(weights, reader=reader, changed=merged.changed)
            except ValueError as error:
                raise ValueError(f"inference.adapters.{name}: {error}") from error
        found = Adapters(layers, base=weights.held) if layers else None
        return InferenceModel(subject, weights=weights, placement=placement, ranks=self.ranks, adapters=found)

    def _cut(self, subject: Subject) -> Cut | None:
        """The cut for these ranks. Raises ValueError for a model that cannot be divided."""
        if self.ranks is None:
            return None
        self.ranks.cut.own(subject.description)
        return self.ranks.cut

    def _packed(self, packed: Packed) -> Opened:
        policy, adapters = self.policy, self.adapters
        if self.ranks is not None:
            raise ValueError(
                f"topology.tensor above 1 with {packed.path}, which has full layers: name the model that was packed; each rank packs its part"
            )
        if adapters:
            raise ValueError(
                f"inference.adapters={{{', '.join(adapters)}}} with {packed.path}, whose packed weights are final: name the model that was "
                "packed"
            )
        if policy.kernels or policy.device not in (None, "cpu"):
            raise ValueError(
                f"{packed.path}: packed weights are in the processor's own layout; open the model that was packed, or use launch.device=cpu"
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
        if policy.offload is not None:
            return self._over_packed(packed)
        weights, subject = packed.read_rest()
        weights.layers = [packed.read_layer(number).layer for number in range(packed.description.layers)]
        model = InferenceModel(subject, weights=weights, placement=Placement(kind=policy.weights))
        return Opened(model=model, subject=subject, packed_bytes=packed.weight_bytes)

    # Streamed layers

    def _streamed(
        self, module: nn.Module, *, subject: Subject | None, state: Mapping[str, Tensor], placement: Placement
    ) -> Opened:
        """Layers that are read in every pass, each of `ranks` its part: from files below `offload.nvme_path`, and on a GPU with offload=cpu
        from main memory. state: parameters of any shape. subject: None, where the model runs its own modules; then its blocks' linear layers
        stream."""
        policy, offload = self.policy, self.policy.offload
        assert offload is not None, "layers are streamed"
        if placement.by_kernels:
            for fault in stream_faults(policy, adapters=self.adapters):
                raise ValueError(fault)
        pin = offload.pin_memory and placement.device.type != "cpu"
        with self._folder() if offload.uses_nvme else nullcontext() as folder:
            if subject is not None and not placement.by_kernels:
                assert folder is not None, "a CPU streams from files"
                options = {"weights": policy.weights, "cut": self._cut(subject), "calibration": policy.calibration}
                return self._over_packed(pack(folder, subject=subject, state=state, **options))
            if folder is not None:
                folder.mkdir(parents=True)
            if subject is None:
                options = {"placement": placement, "folder": folder, "pin": pin, "ranks": self.ranks}
                model = StreamedModuleModel(module, state=state, **options)
                own, sizes = (
                    Subject(description=model.description, tables=[]),
                    (model.resident_bytes, model.packed_bytes),
                )
                return self._planned(model, subject=own, file=model.file, fixed=sizes[0], packed_bytes=sizes[1])
            of, tokens = subject.description, policy.calibration
            inputs = Calibration(tokens, subject=subject, state=state) if tokens else None
            reader = WeightReader(state, description=of, placement=placement, cut=self._cut(subject), inputs=inputs)
            with LayerWriter(folder, count=of.layers, pin=pin) as writer:
                for number in range(of.layers):
                    writer.write(values_of(reader.layer(number)))
            weights, file = reader.rest(), writer.file(assemble)
            model = InferenceModel(subject, weights=weights, placement=placement, ranks=self.ranks)
            held = (weights.embedding, weights.positions, *weights.head.tensors().values())
            fixed, nbytes = sum(part.nbytes for part in held if part is not None), file.count * file.nbytes
            total = nbytes + weights.head.nbytes
            return self._planned(model, subject=subject, file=file, fixed=fixed, packed_bytes=total)

    def _fits(self, module: nn.Module, *, placement: Placement) -> bool:
        """Whether the weights fit into the memory that the kernels compute in, with some left for the cache; on all ranks."""
        size = 1 if self.ranks is None else self.ranks.comm.size
        fits = weight_bytes(module, placement=placement) // size <= weight_room(self._budget(placement.device))
        return fits if self.ranks is None else all(self.ranks.gather(fits))

    def _budget(self, device: torch.device) -> int:
        """Bytes that weights, cache and activations of this rank may take on the device."""
        if self.policy.memory_bytes:
            return self.policy.memory_bytes
        if device.type != "cpu":
            return usual_device_memory(device)
        return free_memory() // (1 if self.ranks is None else self.ranks.comm.size)

    def _over_packed(self, packed: Packed) -> Opened:
        weights, subject = packed.read_rest()
        placement = Placement(kind=packed.weights)
        model = InferenceModel(subject, weights=weights, placement=placement, ranks=self.ranks)
        fixed, nbytes = packed.rest_bytes, packed.weight_bytes
        return self._planned(model, subject=subject, file=packed.file, fixed=fixed, packed_bytes=nbytes)

    @contextmanager
    def _folder(self) -> Iterator[Path]:
        """A folder below `offload.nvme_path`. Its files have no name afterwards and end with the model."""
        offload = self.policy.offload
        assert offload is not None and offload.nvme_path is not None, "the policy has a folder"
        folder = Path(offload.nvme_path) / f"packed-{uuid.uuid4().hex}"
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _planned(
        self,
        model: InferenceModel | StreamedModuleModel,
        *,
        subject: Subject,
        file: LayerFile,
        fixed: int,
        packed_bytes: int,
    ) -> Opened:
        """The model over the file's layers, as planned for all ranks that share it: with the largest part, the least memory and the slowest
        rank. fixed: bytes that stay in the memory of the device in addition to layers and threads."""
        policy, ranks, of, placement = self.policy, self.ranks, model.description, model.placement
        assert policy.offload is not None, "layers are streamed"
        positions = min(policy.max_model_len or of.max_len, of.max_len)
        on_cpu = placement.device.type == "cpu"
        if on_cpu:
            fixed += policy.offload.threads * policy.offload.block_bytes
        sizes = sizes_of(
            of,
            items=file.items,
            layer_bytes=file.nbytes,
            fixed=fixed,
            positions=positions,
            sequences=policy.max_sequences or MOST_SEQUENCES,
            dtype=cache_dtype(policy, model=model),
            on_cpu=on_cpu,
        )
        budget = self._budget(placement.device)
        if ranks is not None:
            budget, sizes = min(ranks.gather(budget)), largest(ranks.gather(sizes))
        chosen = {
            "budget": budget,
            "positions": positions,
            "sequences": policy.max_sequences,
            "step_tokens": policy.max_step_tokens,
        }
        layers = self._layers(file, placement=placement, buffers=first_buffers(sizes, **chosen))
        try:
            rates = measure(model, layers=layers, positions=positions)
            plan = plan_stream(sizes, rates=rates if ranks is None else slowest(ranks.gather(rates)), **chosen)
            layers.keep(plan.resident, buffers=plan.buffers)
            return_freed_memory()  # memory of the measurement and of layers of zeros
        except BaseException:
            layers.close()
            raise
        return Opened(model=model, subject=subject, plan=plan, streamed=layers, packed_bytes=packed_bytes)

    def _layers(self, file: LayerFile, *, placement: Placement, buffers: int) -> StreamedLayers | DeviceLayers:
        """The layers of the file in the memory that computes. buffers: size of its ring.

        On a GPU main memory keeps as many of a file's layers as fit into this rank's part of it.
        """
        offload, size = self.policy.offload, 1 if self.ranks is None else self.ranks.comm.size
        assert offload is not None, "layers are streamed"
        if not placement.by_kernels:
            return StreamedLayers(file, policy=offload, buffers=buffers)
        if not offload.uses_nvme:
            return DeviceLayers(HeldLayers(file), device=placement.device, buffers=buffers)
        pin = offload.pin_memory and placement.device.type != "cpu"
        source = StreamedLayers(file, policy=offload, buffers=min(BUFFERS, file.count), pin=pin)
        room = free_memory() // size // file.nbytes if pin else 0
        return DeviceLayers(source, device=placement.device, buffers=buffers, host_layers=room)


def _source(model: nn.Module | TrainingEngine | UnreadModel) -> tuple[nn.Module, Mapping[str, Tensor]]:
    """The module, and its parameters by name. A collective call of an engine's ranks."""
    if isinstance(model, nn.Module):
        return model, dict(model.named_parameters())
    if isinstance(model, UnreadModel):
        return model.module, model.state
    copies = model.zero.full_parameters()
    return model.module, {name: own.detach().to("cpu", torch.float32, copy=True) for name, own in copies}


def settled(policy: InferencePolicy, *, plan: StreamPlan | None) -> InferencePolicy:
    """The policy with the plan's numbers for options that the caller did not set."""
    return replace(
        policy,
        max_sequences=policy.max_sequences or (USUAL_SEQUENCES if plan is None else plan.sequences),
        max_step_tokens=policy.max_step_tokens or (USUAL_STEP_TOKENS if plan is None else plan.step_tokens),
    )


class ReadParameters:
    """The parameters of a module at the time of the call, to detect that a script changes them after a generator has read them: on a CPU it
    shares embeddings and norms with its module and has copies of linear layers, so it would compute with a mixture of both.

    Writes through `.data`, which torch does not count, are found in the smallest one.
    """

    def __init__(self, source: object) -> None:
        """source: without parameters of its own (a training engine, packed weights, None) nothing changes, because weights are copied."""
        named = source.named_parameters() if isinstance(source, nn.Module) else ()
        self._found = [(name, one, _version(one), one.data_ptr()) for name, one in named]
        on_cpu = (one for _, one, _, _ in self._found if one.device.type == "cpu")
        self._smallest = min(on_cpu, key=Tensor.numel, default=torch.empty(0))
        self._values = self._smallest.detach().clone()

    def check(self) -> None:
        """Raises ValueError for a parameter that was written, or has other memory."""
        for name, one, version, address in self._found:
            is_written = one is self._smallest and not torch.equal(one, self._values)
            if is_written or _version(one) != version or one.data_ptr() != address:
                raise ValueError(
                    f"the parameter {name} has changed since the generator read the weights, some of which are copies: call load(model) "
                    "after you change them"
                )


def _version(parameter: Tensor) -> int:
    return 0 if parameter.is_inference() else parameter._version
