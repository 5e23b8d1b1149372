"""The part of a full model's parameter that a rank holds.

Techniques that shard parameters (tensor and expert parallelism) record a `Part` per parameter that they shard or replicate. ZeRO shards
that part again over the ranks that hold the same part, and checkpoints write it under the full parameter's name and shape.
Views have the dtype of their tensor.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn

from ztk.core.runtime.comm import Comm

# (name=, start=, stop=) -> fp32 [stop - start]: a range of a parameter's initial values, the same on all ranks
InitialValues = Callable[..., Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """The box [start, start + shape) of a parameter of shape `full_shape`.

    axis: "data" or "expert_data", the ranks that hold the same box and train it on different data.
    replica: this rank's number among the ranks on other axes that hold the same box and compute the same gradient. Only number 0 counts the
        box in the gradient norm and writes it to checkpoints.
    holders: pipeline ranks that hold copies and compute different gradients; all use the sum. Empty if the parameter is on one stage only.
    """

    full_shape: tuple[int, ...]
    start: tuple[int, ...]
    shape: tuple[int, ...]
    axis: str = "data"
    replica: int = 0
    holders: tuple[int, ...] = ()

    @staticmethod
    def everything(shape: tuple[int, ...], *, axis: str = "data", replica: int = 0) -> "Part":
        """The full parameter."""
        return Part(full_shape=shape, start=(0,) * len(shape), shape=shape, axis=axis, replica=replica)

    @staticmethod
    def cut(
        full_shape: tuple[int, ...], *, dim: int, start: int, stop: int, axis: str = "data", replica: int = 0
    ) -> "Part":
        """[start, stop) along `dim`."""
        starts, shape = [0] * len(full_shape), list(full_shape)
        starts[dim], shape[dim] = start, stop - start
        return Part(full_shape=full_shape, start=tuple(starts), shape=tuple(shape), axis=axis, replica=replica)

    @property
    def is_full(self) -> bool:
        """Whether this is the full parameter."""
        return self.shape == self.full_shape

    def of(self, tensor: Tensor) -> Tensor:
        """The box of a tensor that has the full shape: a view."""
        return tensor[tuple(slice(start, start + size) for start, size in zip(self.start, self.shape, strict=True))]

    def positions(self, start: int, *, stop: int) -> Tensor:
        """int64 [stop - start]: the positions of the box's flat elements [start, stop) in the flattened full parameter."""
        rest = torch.arange(start, stop)
        position, stride = torch.zeros_like(rest), 1
        for extent, first, size in zip(
            reversed(self.full_shape), reversed(self.start), reversed(self.shape), strict=True
        ):
            position += (rest % size + first) * stride
            rest = rest // size
            stride *= extent
        return position

    @property
    def numel(self) -> int:
        """Elements in the box."""
        return prod(self.shape)


def values_of_parts(full: InitialValues, *, parts: Mapping[str, Part]) -> InitialValues:
    """Initial values of this rank's parts, sliced from the full parameters' values: the same values as on one rank."""

    def values(*, name: str, start: int, stop: int) -> Tensor:
        part = parts.get(name)
        if part is None or part.is_full or start == stop:
            return full(name=name, start=start, stop=stop)
        positions = part.positions(start, stop=stop)
        first = int(positions[0])
        return full(name=name, start=first, stop=int(positions[-1]) + 1)[positions - first]

    return values


def share_first_values(parameter: nn.Parameter, *, comm: Comm, name: str, key: str) -> None:
    """Broadcasts the values of `comm`'s first rank before the parameter is sharded. Does nothing on the meta device.

    key: name of the option that shards the parameter, for the error.

    Raises:
        ValueError: the parameter has no values of its own.
    """
    if parameter.is_meta:
        return
    if parameter.numel() > 1 and 0 in parameter.stride():  # a placeholder: its values are sharded elsewhere
        raise ValueError(
            f"{key}={comm.size}: {name} has no values of its own (zero.Init?), so it cannot be cut; build the model on the meta "
            f"device or outside of zero.Init, or use {key}=1"
        )
    value = parameter.data.to(comm.device).contiguous()
    comm.broadcast(value, source=0, label=name).wait()
    parameter.data.copy_(value)
