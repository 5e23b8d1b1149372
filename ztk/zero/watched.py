"""The class of an engine's parameters: it notes that a script took hold of `.data`, through which writes leave no other trace."""

import functools

import torch
from torch import Tensor, nn

from ztk.zero.released import change_class


class _Watched:
    """Mixed into the class of every parameter of an engine."""

    _own_class: type
    _data_was_read: bool

    @property
    def data(self) -> Tensor:
        self._data_was_read = True
        # pyrefly: ignore[missing-attribute]  # a descriptor of the class at run time
        return torch.Tensor.data.__get__(self)

    @data.setter
    def data(self, value: Tensor) -> None:
        # pyrefly: ignore[missing-attribute]  # a descriptor of the class at run time
        torch.Tensor.data.__set__(self, value)


def watch(parameter: nn.Parameter) -> None:
    """From now on `take_data_mark` knows of reads of `parameter.data`. Idempotent."""
    if not isinstance(parameter, _Watched):
        change_class(parameter, make=_watched)


def take_data_mark(parameter: nn.Parameter) -> bool:
    """Whether `.data` was read since the last call."""
    return parameter.__dict__.pop("_data_was_read", False)


@functools.cache
def _watched(cls: type) -> type:
    return type(f"Watched{cls.__name__}", (_Watched, cls), {"__module__": __name__})
