"""`deepspeed.pipe.PipelineModule`: cut into stages at construction, with DeepSpeed's arguments."""

from collections.abc import Callable, Sequence

from torch import nn

from ztk.core.runtime import Process, Topology
from ztk.deepspeed.pipe.topology import PipeDataParallelTopology, PipelineParallelGrid, ProcessTopology
from ztk.deepspeed.start.process import arrange, this_process
from ztk.parallel import pipeline
from ztk.parallel.pipeline import LayerSpec, PipelinePolicy
from ztk.parallel.pipeline.stages import split


class PipelineModule(pipeline.PipelineModule):
    """Layers in stages. Every rank builds only its own layers.

    Parameters are named as in DeepSpeed: "3.weight", "tied_modules.embed.weight".

    num_stages or topology: the ranks along "pipe". The rest of the world is data-parallel.
    seed_layers: builds layer i after `seed_fn(base_seed + i)`, so that its values do not depend on the stages. Otherwise each rank
    continues with the script's random state.
    partition_method: "parameters", "uniform" or "type:PATTERN"; "best" is "parameters".
    activation_checkpoint_interval: layers. See `ztk.parallel.pipeline.PipelineModule`, also for activation_checkpoint_func.
    checkpointable_layers: accepted and ignored; all classes are recomputed in groups of the interval.
    dynamic_shape: activations may change shape independently of the micro-batches. Not needed for shapes that follow the micro-batches'.

    Raises ValueError for a negative interval, and for a number of stages that does not divide the ranks, or exceeds the number of layers.
    """

    def __init__(
        self,
        layers: Sequence[LayerSpec | nn.Module | Callable],
        num_stages: int | None = None,
        topology: ProcessTopology | None = None,
        loss_fn: Callable | None = None,
        seed_layers: bool = False,
        seed_fn: Callable[[int], object] | None = None,
        base_seed: int = 1234,
        partition_method: str = "parameters",
        activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: Callable | None = None,
        checkpointable_layers: list[str] | None = None,
        dynamic_shape: bool = False,
    ) -> None:
        del checkpointable_layers
        super().__init__(layers, loss_fn=loss_fn, base_seed=base_seed if seed_layers else None, seed_fn=seed_fn)
        process = this_process()
        self._topo = _topology(topology, num_stages=num_stages, process=process)
        self.num_stages = self._topo.get_dim("pipe")
        self.process = arrange(process, Topology(pipeline=self.num_stages))
        self.policy = PipelinePolicy(partition=_method(partition_method), dynamic_shapes=dynamic_shape)
        self.activation_checkpoint_interval = activation_checkpoint_interval
        if activation_checkpoint_func is not None:
            self.recompute = activation_checkpoint_func
        self._grid = PipelineParallelGrid(self._topo, process=process)
        if self.num_stages == 1:
            self.build()
            self.parts = [0, len(self.layers)]
        else:
            self.stages = split(self, policy=self.policy, mesh=self.process.mesh)
            self.parts = [0, *(indices.stop for indices in self.stages.boundaries)]

    @property
    def activation_checkpoint_interval(self) -> int:
        """Layers per recomputed group. Scripts also write it, from the next batch on; 0 recomputes nothing."""
        return self.recompute_interval

    @activation_checkpoint_interval.setter
    def activation_checkpoint_interval(self, interval: int) -> None:
        if interval < 0:
            raise ValueError(f"activation_checkpoint_interval={interval}: must be 0 (no recomputation) or more layers")
        self.recompute_interval = interval

    def set_checkpoint_interval(self, interval: int) -> None:
        """Sets `activation_checkpoint_interval`."""
        self.activation_checkpoint_interval = interval

    def mpu(self) -> PipelineParallelGrid:
        """Returns the grid with this rank's position."""
        return self._grid

    def topology(self) -> ProcessTopology:
        """Returns the grid of all ranks."""
        return self._topo

    def num_pipeline_stages(self) -> int:
        """The number of stages."""
        return self.num_stages

    def stage_owner(self, layer_idx: int) -> int:
        """Returns the stage that runs a layer."""
        if not 0 <= layer_idx < self.parts[-1]:
            raise ValueError(f"layer {layer_idx}: there are {self.parts[-1]}")
        return next(stage for stage, stop in enumerate(self.parts[1:]) if layer_idx < stop)


def _topology(given: ProcessTopology | None, *, num_stages: int | None, process: Process) -> ProcessTopology:
    world = process.world_size
    if given is None:
        if num_stages is None:
            raise ValueError("PipelineModule: give num_stages or topology")
        if num_stages < 1 or world % num_stages:
            raise ValueError(f"num_stages={num_stages} does not divide the {world} ranks; start a multiple of it")
        return PipeDataParallelTopology(num_pp=num_stages, num_dp=world // num_stages)
    if given.get_dim("pipe") < 1 or given.world_size() != world:
        raise ValueError(
            f"topology {given.axes} {given.dims}: needs an axis pipe and {world} ranks in all, as were started"
        )
    if given.axes != [axis for axis in ("pipe", "data", "model") if axis in given.axes]:
        raise ValueError(f"topology {given.axes}: the axes must be pipe, data, model in this order")
    if given.get_dim("model") > 1:
        raise ValueError(
            f"topology num_mp={given.get_dim('model')}: layers of a PipelineModule are not cut by this layer; use num_mp=1, or "
            "run.py topology=tp2_pp2 for the native models"
        )
    if num_stages not in (None, given.get_dim("pipe")):
        raise ValueError(f"num_stages={num_stages} and a topology of {given.get_dim('pipe')} stages: keep one of them")
    return given


def _method(given: str) -> str:
    """Translates DeepSpeed's name of a partition to ztk's."""
    method = given.lower()
    return "parameters" if method == "best" else given if method.startswith("type:") else method
