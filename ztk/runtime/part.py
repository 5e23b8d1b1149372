"""Which part of a parameter of the whole model this rank's model holds.

Techniques that cut parameters (tensor and expert parallelism) leave a `Part` per parameter they cut or copy; ZeRO then shards
what the rank holds over the ranks that hold the same, and checkpoints write it under the whole parameter's name and shape.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn

from ztk.runtime.comm import Comm

# (name=, start=, stop=) -> fp32 [stop - start]: a stretch of a parameter's first values, the same on all ranks
InitialValues = Callable[..., Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """The box [start, start + shape) of a parameter of shape `whole`.

    axis: "data" or "expert_data", the ranks that hold the same box and train it on different data.
    replica: this rank's number among ranks on other axes that hold the same box and compute the same gradient; number 0 counts it in the
        gradient norm and writes it to checkpoints.
    holders: pipeline ranks that hold copies and compute different gradients of it, whose sum all use; none: it is on one stage alone.
    """

    whole: tuple[int, ...]
    start: tuple[int, ...]
    shape: tuple[int, ...]
    axis: str = "data"
    replica: int = 0
    holders: tuple[int, ...] = ()

    @staticmethod
    def everything(shape: tuple[int, ...], *, axis: str = "data", replica: int = 0) -> "Part":
        """The whole parameter."""
        return Part(whole=shape, start=(0,) * len(shape), shape=shape, axis=axis, replica=replica)

    @staticmethod
    def cut(whole: tuple[int, ...], *, dim: int, start: int, stop: int, axis: str = "data", replica: int = 0) -> "Part":
        """[start, stop) along `dim`."""
        starts, shape = [0] * len(whole), list(whole)
        starts[dim], shape[dim] = start, stop - start
        return Part(whole=whole, start=tuple(starts), shape=tuple(shape), axis=axis, replica=replica)

    @property
    def is_full(self) -> bool:
        return self.shape == self.whole

    def of(self, tensor: Tensor) -> Tensor:
        """The box of a tensor that has the whole shape: a view."""
        return tensor[tuple(slice(start, start + size) for start, size in zip(self.start, self.shape, strict=True))]

    def positions(self, start: int, *, stop: int) -> Tensor:
        """int64 [stop - start]: where the box's flat elements [start, stop) lie in the flattened whole."""
        rest = torch.arange(start, stop)
        position, stride = torch.zeros_like(rest), 1
        for whole, first, size in zip(reversed(self.whole), reversed(self.start), reversed(self.shape), strict=True):
            position += (rest % size + first) * stride
            rest = rest // size
            stride *= whole
        return position

    @property
    def numel(self) -> int:
        """Elements in the box."""
        return prod(self.shape)


def values_of_parts(whole: InitialValues, *, parts: Mapping[str, Part]) -> InitialValues:
    """First values of what this rank holds, from those of the whole parameters: the same as one rank would have."""

    def values(*, name: str, start: int, stop: int) -> Tensor:
        part = parts.get(name)
        if part is None or part.is_full or start == stop:
            return whole(name=name, start=start, stop=stop)
        positions = part.positions(start, stop=stop)
        first = int(positions[0])
        return whole(name=name, start=first, stop=int(positions[-1]) + 1)[positions - first]

    return values


def share_first_values(parameter: nn.Parameter, *, comm: Comm, name: str, key: str) -> None:
    """Before it is cut: the values of `comm`'s first rank become everybody's. Parameters on the meta device have values by name.

    key: the option that cuts it, for the ValueError that a parameter without values of its own raises.
    """
    if parameter.is_meta:
        return
    if parameter.numel() > 1 and 0 in parameter.stride():  # a placeholder: the values lie sharded elsewhere
        raise ValueError(
            f"{key}={comm.size}: {name} has no values of its own (zero.Init?), so it cannot be cut; build the model on the meta "
            f"device or outside of zero.Init, or use {key}=1"
        )
    value = parameter.data.to(comm.device).contiguous()
    comm.broadcast(value, source=0, label=name).wait()
    parameter.data.copy_(value)
