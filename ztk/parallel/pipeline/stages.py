"""Splits a model into stages and keeps this rank's."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor, nn

from ztk.core.policies.pipeline import PARTITION_METHODS, PipelinePolicy
from ztk.core.runtime import Comm, Mesh
from ztk.core.runtime.part import Part
from ztk.nn import Decoder
from ztk.nn.staged import argument
from ztk.parallel.pipeline.layers import BuiltLayers, Carry, Layer, LayeredModel, MicroBatch
from ztk.parallel.pipeline.module import PipelineModule
from ztk.parallel.pipeline.partition import balanced, by_type, check_enough, uniform


class DecoderLayers(BuiltLayers):
    """See `LayeredModel`. A tied embedding stays on the head's stage too, under the embedding's name."""

    module: Decoder

    def __init__(self, model: Decoder) -> None:
        self.module = model
        finish = ("norm", "head", "embedding") if model.config.tie_embeddings else ("norm", "head")
        self.layers = [
            self.layer("embedding", modules=("embedding",), run=self._embed),
            *(self._block(f"blocks.{name}", block=block) for name, block in model.blocks.named_children()),
            self.layer("head", modules=finish, run=self._finish, named_by=1),
        ]

    def _block(self, name: str, *, block: nn.Module) -> Layer:
        def run(x: Tensor, batch: MicroBatch) -> Tensor:
            documents = argument(batch, index=2, name="documents")
            return self.module.through(block, x=x, documents=documents)

        return self.layer(name, modules=(name,), run=run)

    def _embed(self, _: Carry, batch: MicroBatch) -> Tensor:
        return self.module.embed(argument(batch, index=0, name="tokens"))

    def _finish(self, x: Tensor, batch: MicroBatch) -> Tensor:
        return self.module.finish(x, targets=argument(batch, index=1, name="targets"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Stages:
    """This pipeline rank's part of a model. `module(stage, carry, micro_batch)` runs one of its stages.

    boundaries: the layers of each stage of the full model. own: this rank's stages. stage_of: parameter name -> the first of this rank's
    stages that uses it. holders: parameter name -> the pipeline ranks that have a copy, ascending, if there are several.
    """

    module: nn.Module
    boundaries: tuple[range, ...]
    own: tuple[int, ...]
    stage_of: dict[str, int]
    holders: dict[str, tuple[int, ...]]

    @property
    def num_stages(self) -> int:
        """Stages of the full model."""
        return len(self.boundaries)


def layered(model: nn.Module) -> LayeredModel:
    """`model` as layers. Raises ValueError for a model that cannot be cut."""
    if isinstance(model, PipelineModule):
        return model
    if isinstance(model, Decoder):
        return DecoderLayers(model)
    if callable(layers := getattr(model, "pipeline_layers", None)):
        return layers()
    raise ValueError(
        f"topology.pipeline: {type(model).__name__} cannot be cut into stages; write it as a ztk.parallel.pipeline.PipelineModule of layers, "
        "or use topology.pipeline=1"
    )


def split(model: LayeredModel, *, policy: PipelinePolicy, mesh: Mesh) -> Stages:
    """Cuts `model` for the pipeline axis of `mesh` and keeps this rank's stages.

    Raises ValueError for a policy that does not fit the model.
    """
    comm = mesh.comm("pp")
    boundaries = plan(model, method=policy.partition, num_stages=comm.size * policy.virtual_stages)
    return cut(model, boundaries=boundaries, rank=comm.rank, num_ranks=comm.size)


def plan(model: LayeredModel, *, method: str, num_stages: int) -> tuple[range, ...]:
    """The layers of each stage, by `method`: see `PARTITION_METHODS`.

    Raises:
        ValueError: for an unknown method, and for fewer layers than stages.
    """
    layers = model.layers
    check_enough(len(layers), num_stages=num_stages)
    if method == "uniform":
        return uniform(len(layers), num_stages=num_stages)
    if method == "parameters":
        return balanced([layer.num_parameters for layer in layers], num_stages=num_stages)
    if method == "products":
        return balanced([layer.num_multiplied for layer in layers], num_stages=num_stages)
    if method.startswith("type:"):
        kinds = [layer.kind for layer in layers]
        return by_type(kinds, pattern=method.removeprefix("type:"), num_stages=num_stages)
    raise ValueError(f"topology.partition={method}: must be {PARTITION_METHODS}")


def cut(model: LayeredModel, *, boundaries: tuple[range, ...], rank: int, num_ranks: int) -> Stages:
    """Leaves in `model.module` the stages of pipeline rank `rank` (stage s is on rank s modulo `num_ranks`) and makes it run them.

    Raises ValueError for layers on different ranks that share a parameter and are no `TiedLayerSpec`.
    """
    own = tuple(range(rank, len(boundaries), num_ranks))
    ranks_of: dict[str, set[int]] = {}  # module -> ranks that need it
    for stage, indices in enumerate(boundaries):
        for index in indices:
            for path in model.layers[index].modules:
                ranks_of.setdefault(path, set()).add(stage % num_ranks)
    if isinstance(model, PipelineModule):
        _check_nothing_shared(model, boundaries=boundaries, num_ranks=num_ranks)
    model.keep([index for stage in own for index in boundaries[stage]])
    stage_of: dict[str, int] = {}
    holders: dict[str, tuple[int, ...]] = {}
    canonical = {parameter: name for name, parameter in model.module.named_parameters()}
    for stage in own:
        for index in boundaries[stage]:
            for path in model.layers[index].modules:
                for parameter in model.module.get_submodule(path).parameters():
                    name = canonical[parameter]
                    stage_of.setdefault(name, stage)
                    if name.startswith(f"{path}.") and len(ranks_of[path]) > 1:
                        holders[name] = tuple(sorted(ranks_of[path]))
    module = model.module
    module.forward = _StageForward(model, boundaries=boundaries)
    return Stages(module=module, boundaries=boundaries, own=own, stage_of=stage_of, holders=holders)


def _check_nothing_shared(model: PipelineModule, *, boundaries: tuple[range, ...], num_ranks: int) -> None:
    """Raises ValueError for modules on different ranks that share a parameter, because each rank would train its own copy."""
    first: dict[nn.Parameter, tuple[int, int]] = {}
    for stage, indices in enumerate(boundaries):
        for index in indices:
            spec = model.specs[index]
            if not isinstance(spec, nn.Module):
                continue
            for name, parameter in spec.named_parameters():
                other, rank = first.setdefault(parameter, (index, stage % num_ranks))
                if rank != stage % num_ranks:
                    raise ValueError(
                        f"layers {other} and {index} share {name} and lie on different pipeline ranks, which would train two copies: "
                        "write both as TiedLayerSpec with the same key"
                    )


def mark_copies(parts: Mapping[str, Part], *, stages: Stages, comm: Comm) -> dict[str, Part]:
    """`parts`, with marks on parameters that other pipeline ranks have copies of."""
    marked = dict(parts)
    for name, holders in stages.holders.items():
        part = parts.get(name) or Part.everything(tuple(stages.module.get_parameter(name).shape))
        replica = part.replica + (
            comm.rank != holders[0]
        )  # a copy of the first holder's, for any position on other axes
        marked[name] = replace(part, holders=holders, replica=replica)
    return marked


def share_values(stages: Stages, *, comm: Comm) -> None:
    """Gives all copies the values of their first holder. Parameters on the meta device get equal values by name."""
    for name, holders in sorted(stages.holders.items()):
        parameter = stages.module.get_parameter(name)
        if parameter.is_meta:
            continue
        value = parameter.data.to(comm.device).contiguous()
        label = f"first values of {name}"
        if comm.rank == holders[0]:
            for work in [comm.send(value, to=other, label=label, kind="tied") for other in holders[1:]]:
                work.wait()
        else:
            comm.recv(value, source=holders[0], label=label).wait()
            parameter.data.copy_(value)


class _StageForward:
    """Runs the layers of one stage, in place of the module's forward: `(stage, carry, batch)`.

    num_stages: techniques that are applied later recognise a pipeline stage by this attribute.
    """

    def __init__(self, model: LayeredModel, *, boundaries: tuple[range, ...]) -> None:
        self._model, self._boundaries = model, boundaries
        self.num_stages = len(boundaries)

    def __call__(self, stage: int, carry: Carry, batch: MicroBatch) -> Carry:
        indices = self._boundaries[stage]
        if callable(run_layers := getattr(self._model, "run_layers", None)):
            return run_layers(indices, carry=carry, batch=batch)
        for index in indices:
            carry = self._model.layers[index].run(carry, batch)
        return carry
