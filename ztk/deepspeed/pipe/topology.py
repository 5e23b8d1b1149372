"""Ranks as points of a grid with named axes. The last axis varies fastest."""

from collections import namedtuple
from itertools import product
from math import prod

import torch.distributed as dist

from ztk.core.runtime import Process
from ztk.deepspeed.start.process import this_process
from ztk.deepspeed.tools.answers import method


class ProcessTopology:
    """`ProcessTopology(axes=["pipe", "data"], dims=[2, 4])`: rank 5 is at pipe=1, data=1.

    Raises ValueError unless names are unique and each has a size of at least 1.
    """

    def __init__(self, axes: list[str], dims: list[int]) -> None:
        if len(axes) != len(dims) or len(set(axes)) != len(axes) or min(dims, default=1) < 1:
            raise ValueError(f"axes={axes}, dims={dims}: one size of at least 1 for each of different names")
        self.axes, self.dims = list(axes), list(dims)
        # pyrefly: ignore[bad-class-definition]  # the axes are known when it is built
        self.ProcessCoord = namedtuple("ProcessCoord", axes)
        self.mapping = {
            self.ProcessCoord(*point): rank for rank, point in enumerate(product(*(range(size) for size in dims)))
        }

    def get_rank(self, **coord_kwargs: int) -> int:
        """Returns the rank at a point. Raises ValueError unless every axis is named."""
        if set(coord_kwargs) != set(self.axes):
            raise ValueError(f"get_rank({coord_kwargs}): name each of {self.axes}; filter_match finds several ranks")
        return self.mapping[self.ProcessCoord(**coord_kwargs)]

    get_axis_names = method("axes", "The names of the axes, the fastest last.")

    def get_rank_repr(
        self, rank: int, omit_axes: tuple[str, ...] = ("data", "pipe"), inner_sep: str = "_", outer_sep: str = "-"
    ) -> str:
        """Returns coordinates as in file names: "model_00". Omits axes in `omit_axes`."""
        coord = self.get_coord(rank)
        shown = [axis for axis in self.axes if axis not in omit_axes]
        return outer_sep.join(f"{axis}{inner_sep}{getattr(coord, axis):02d}" for axis in shown)

    def get_dim(self, axis: str) -> int:
        """Returns the size of an axis; 0 if it does not exist."""
        return self.dims[self.axes.index(axis)] if axis in self.axes else 0

    def get_coord(self, rank: int) -> tuple:
        """Returns the point of a rank, a named tuple. Raises ValueError for a rank outside the grid."""
        for coord, other in self.mapping.items():
            if other == rank:
                return coord
        raise ValueError(f"rank {rank} is not in a topology of {self.world_size()} ranks")

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """Returns the groups of ranks that differ only along `axis`; empty if the axis does not exist."""
        if axis not in self.axes:
            return []
        others = [name for name in self.axes if name != axis]
        return [
            [self.get_rank(**dict(zip(others, point, strict=True)), **{axis: i}) for i in range(self.get_dim(axis))]
            for point in product(*(range(self.get_dim(name)) for name in others))
        ]

    def filter_match(self, **filter_kwargs: int) -> list[int]:
        """Returns all ranks with these coordinates."""
        return [
            rank
            for coord, rank in self.mapping.items()
            if all(getattr(coord, axis) == index for axis, index in filter_kwargs.items())
        ]

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        """Returns all ranks with coordinate `idx` along `axis`."""
        return self.filter_match(**{axis: idx})

    def world_size(self) -> int:
        """Returns the number of ranks."""
        return prod(self.dims)

    def __str__(self) -> str:
        return str(self.mapping)


class PipeDataParallelTopology(ProcessTopology):
    """Stages and replicas."""

    def __init__(self, num_pp: int, num_dp: int) -> None:
        super().__init__(axes=["pipe", "data"], dims=[num_pp, num_dp])


class PipeModelDataParallelTopology(ProcessTopology):
    """Stages, replicas, and layers cut over `num_mp` ranks."""

    def __init__(self, num_pp: int, num_mp: int, num_dp: int) -> None:
        super().__init__(axes=["pipe", "data", "model"], dims=[num_pp, num_dp, num_mp])


class PipelineParallelGrid:
    """This rank's position, as `engine.grid` and `model.mpu()`."""

    def __init__(
        self,
        topology: ProcessTopology | None = None,
        process_group: dist.ProcessGroup | None = None,
        *,
        process: Process | None = None,
    ) -> None:
        """topology: defaults to one stage of all ranks, as in DeepSpeed. process_group: accepted and ignored; see `utils.groups`.

        process: defaults to the process of `init_distributed`. Raises ValueError for a topology of another number of ranks.
        """
        del process_group
        process = process or this_process()
        topology = topology or PipeDataParallelTopology(num_pp=1, num_dp=process.world_size)
        if topology.world_size() != process.world_size:
            raise ValueError(
                f"topology: has {topology.world_size()} ranks, and {process.world_size} were started; give dimensions whose product "
                f"is {process.world_size}"
            )
        self._topo, self.global_rank, self.world_size = topology, process.rank, process.world_size
        self.pipe_parallel_size = max(1, topology.get_dim("pipe"))
        self.data_parallel_size = max(1, topology.get_dim("data"))
        self.model_parallel_size = max(1, topology.get_dim("model"))
        coord = topology.get_coord(process.rank)
        self.stage_id, self.data_parallel_id = getattr(coord, "pipe", 0), getattr(coord, "data", 0)
        self._model_id = getattr(coord, "model", 0)

    topology = method("_topo", "The grid of all ranks.")
    get_stage_id = get_pipe_parallel_rank = method("stage_id", "The stage of this rank.")
    get_data_parallel_id = get_data_parallel_rank = method("data_parallel_id", "The replica of this rank.")
    get_global_rank = method("global_rank", "This rank among all.")
    get_pipe_parallel_world_size = method("pipe_parallel_size", "The number of stages.")
    get_data_parallel_world_size = method("data_parallel_size", "The number of replicas.")
    get_model_parallel_rank = method("_model_id", "This rank's place among those that share its stage's layers.")
    get_model_parallel_world_size = method("model_parallel_size", "Ranks that share the layers of a stage.")

    def is_first_stage(self) -> bool:
        return self.stage_id == 0

    def is_last_stage(self) -> bool:
        return self.stage_id == self.pipe_parallel_size - 1

    def stage_to_global(self, stage_id: int, **kwargs: int) -> int:
        """Returns the rank of another stage with this rank's other coordinates, or with the coordinates in `kwargs`."""
        # pyrefly: ignore[missing-attribute]  # the axes are known when it is built
        coord = self._topo.get_coord(self.global_rank)._asdict() | {"pipe": stage_id} | kwargs
        return self._topo.get_rank(**coord)
