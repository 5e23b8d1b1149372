"""A model cut into stages, of which this rank keeps its own."""

from dataclasses import dataclass

from torch import nn

from ztk.nn import Decoder
from ztk.pipeline.decoder import DecoderLayers
from ztk.pipeline.layers import Carry, LayeredModel, MicroBatch
from ztk.pipeline.module import PipelineModule
from ztk.pipeline.partition import METHODS, balanced, by_type, check_enough, uniform


@dataclass(frozen=True, kw_only=True, slots=True)
class Stages:
    """What a pipeline rank holds. `module(stage, carry, micro_batch)` runs one of its stages.

    boundaries: per stage of the whole model, its layers. stage_of: parameter name -> the first of this rank's stages that uses it.
    holders: names of parameters that several ranks hold copies of -> those pipeline ranks, ascending.
    """

    module: nn.Module
    boundaries: tuple[range, ...]
    own: tuple[int, ...]
    stage_of: dict[str, int]
    holders: dict[str, tuple[int, ...]]

    @property
    def num_stages(self) -> int:
        return len(self.boundaries)


def layered(model: nn.Module) -> LayeredModel:
    """`model` as layers. Raises ValueError for a model that nobody knows how to cut."""
    if isinstance(model, PipelineModule):
        return model
    if isinstance(model, Decoder):
        return DecoderLayers(model)
    raise ValueError(
        f"topology.pipeline: {type(model).__name__} cannot be cut into stages; write it as a "
        "ztk.pipeline.PipelineModule of layers, or use topology.pipeline=1"
    )


def plan(model: LayeredModel, *, method: str, num_stages: int, costs: list[float] | None = None) -> tuple[range, ...]:
    """The layers of each stage, by `method`: see `METHODS`. costs: measured, for "profile"."""
    layers = model.layers
    check_enough(len(layers), num_stages=num_stages)
    if method == "uniform":
        return uniform(len(layers), num_stages=num_stages)
    if method == "parameters":
        return balanced([layer.num_parameters for layer in layers], num_stages=num_stages)
    if method.startswith("type:"):
        kinds = [layer.kind for layer in layers]
        return by_type(kinds, pattern=method.removeprefix("type:"), num_stages=num_stages)
    if method == "profile":
        assert costs is not None, "measured by ztk.pipeline.profile"
        return balanced(costs, num_stages=num_stages)
    raise ValueError(f"topology.partition={method}: must be {METHODS}")


def cut(model: LayeredModel, *, boundaries: tuple[range, ...], rank: int, num_ranks: int) -> Stages:
    """Leaves in `model.module` the stages of pipeline rank `rank` (stage s is on rank s modulo `num_ranks`) and makes it run them."""
    own = tuple(range(rank, len(boundaries), num_ranks))
    ranks_of: dict[str, set[int]] = {}  # module -> ranks that need it
    for stage, indices in enumerate(boundaries):
        for index in indices:
            for path in model.layers[index].modules:
                ranks_of.setdefault(path, set()).add(stage % num_ranks)
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


class _StageForward:
    """Runs the layers of one stage, in place of the module's forward."""

    def __init__(self, model: LayeredModel, *, boundaries: tuple[range, ...]) -> None:
        self._model, self._boundaries = model, boundaries

    def __call__(self, stage: int, carry: Carry, batch: MicroBatch) -> Carry:
        for index in self._boundaries[stage]:
            carry = self._model.layers[index].run(carry, batch)
        return carry
