"""DeepSpeed's attributes of a parameter at stage 3: `ds_id`, `ds_shape`, `ds_status` and the like.

[Note: Shape]
A released parameter keeps its shape and reads as NaN; DeepSpeed's has no elements. `numel()` and `shape` always refer to
the full parameter, like `ds_numel` and `ds_shape`.
"""

import functools
import itertools
from collections.abc import Iterable
from enum import Enum
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ztk.deepspeed.engine.owners import owner_of
from ztk.deepspeed.zero.gathered import pin, unpin, unpin_unchanged
from ztk.deepspeed.zero.states import weights_of
from ztk.zero.buckets.residency import ParameterState
from ztk.zero.parameters.partitioned import partitioned_of
from ztk.zero.parameters.released import change_class

_numbers = itertools.count()


class ZeroParamType(Enum):
    """Kinds of parameters."""

    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3  # never in ztk


class ZeroParamStatus(Enum):
    """Whether a parameter can be read."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


_STATUS = {
    ParameterState.gathered: ZeroParamStatus.AVAILABLE,
    ParameterState.gathering: ZeroParamStatus.INFLIGHT,
    ParameterState.sharded: ZeroParamStatus.NOT_AVAILABLE,
}

# The base class of ZeroNames for type checkers. At run time, a base would order the bases of subclasses.
_Parameter = nn.Parameter if TYPE_CHECKING else object


class ZeroNames(_Parameter):
    """Mixed into the class of every parameter under stage 3."""

    ds_param_type = ZeroParamType.PARTITIONED
    ds_id: int

    @property
    def ds_shape(self) -> torch.Size:
        """The full shape."""
        return torch.Size(self.shape)

    @property
    def ds_numel(self) -> int:
        """Number of elements of the full parameter."""
        return self.numel()

    @property
    def ds_status(self) -> ZeroParamStatus:
        """Whether the parameter can be read now."""
        if (partitioned := partitioned_of(self)) is not None:
            return ZeroParamStatus.AVAILABLE if partitioned.is_full else ZeroParamStatus.NOT_AVAILABLE
        owner = owner_of(self)
        return ZeroParamStatus.AVAILABLE if owner is None else _STATUS[owner.bucket.state]

    @property
    def ds_persist(self) -> bool:
        """Whether the parameter is never sharded, because of its size."""
        return (owner := owner_of(self)) is not None and not owner.bucket.traits.shards_parameters

    @property
    def ds_tensor(self) -> Tensor:
        """A copy of this rank's elements, flat, in the parameter's dtype. An engine may store none or all of them on a rank."""
        if (partitioned := partitioned_of(self)) is not None:
            return partitioned.own
        owner = owner_of(self)
        if owner is None:
            raise AttributeError("ds_tensor: the parameter belongs to no engine any more")
        kind = weights_of(owner)
        own = owner.engine.zero.named_state.read_local(owner.bucket, name=owner.name, kind=kind)
        assert own is not None, "None is for gradients alone"
        return own.to(self.dtype)

    @property
    def ds_active_sub_modules(self) -> set:
        """The modules that keep the parameter gathered. Always empty, because ztk counts the users of a bucket, not of a parameter."""
        return set()

    def ds_summary(self) -> dict:
        """Returns the attributes above, for printing."""
        return {
            "id": self.ds_id,
            "status": self.ds_status.name,
            "numel": self.ds_numel,
            "ds_numel": self.ds_numel,
            "shape": tuple(self.shape),
            "ds_shape": tuple(self.ds_shape),
            "requires_grad": self.requires_grad,
            "grad_shape": None if self.grad is None else tuple(self.grad.shape),
            "persist": self.ds_persist,
        }

    def all_gather(self, param_list: Iterable[nn.Parameter] | None = None) -> None:
        """Unshards the parameters until `partition`. A collective call. param_list: defaults to this parameter."""
        pin(list(param_list or [self]))

    def partition(self, param_list: Iterable[nn.Parameter] | None = None, has_been_updated: bool = False) -> None:
        """Undoes `all_gather`. has_been_updated: keeps values that were changed in the same way on all ranks."""
        if has_been_updated:
            unpin(list(param_list or [self]), source=0)
        else:
            unpin_unchanged(list(param_list or [self]))


def name_parameter(parameter: nn.Parameter) -> None:
    """Adds these attributes to the parameter. Every rank must call it in the same order, so that `ds_id` is the same on all."""
    if not isinstance(parameter, ZeroNames):
        change_class(parameter, make=_with_names)
    if not hasattr(parameter, "ds_id"):  # a copy of a parameter has the class but no number
        # pyrefly: ignore[missing-attribute]  # its class has it now
        parameter.ds_id = next(_numbers)


def is_zero_param(parameter: object) -> bool:
    """Returns whether the object is a parameter of stage 3, or built under `zero.Init`."""
    return isinstance(parameter, torch.Tensor) and hasattr(parameter, "ds_id")


@functools.cache
def _with_names(cls: type) -> type:
    return type(f"Zero{cls.__name__}", (ZeroNames, cls), {"__module__": __name__})
