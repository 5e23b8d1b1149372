"""Detects parameters that a script changes after a generator has read them.

A generator on a CPU shares embeddings and norms with its module and has copies of linear layers, so it would compute with a mixture of both.
"""

from typing import Any

import torch
from torch import Tensor, nn


class ReadParameters:
    """The parameters of a module at the time of the call. Writes through `.data`, which torch does not count, are found in the smallest one."""

    def __init__(self, source: Any) -> None:
        """source: without parameters of its own (a training engine, packed weights, None) nothing changes, because weights are copied."""
        named = source.named_parameters() if isinstance(source, nn.Module) else ()
        self._found = [(name, one, _version(one), one.data_ptr()) for name, one in named]
        on_cpu = (one for _, one, _, _ in self._found if one.device.type == "cpu")
        self._smallest = min(on_cpu, key=Tensor.numel, default=torch.empty(0))
        self._values = self._smallest.detach().clone()

    def changed(self) -> str | None:
        """Returns the name of a parameter that was written, or has other memory; None if there is none."""
        for name, one, version, address in self._found:
            is_written = one is self._smallest and not torch.equal(one, self._values)
            if is_written or _version(one) != version or one.data_ptr() != address:
                return name
        return None

    def check(self) -> None:
        """Raises ValueError for a parameter that has changed."""
        if (name := self.changed()) is not None:
            raise ValueError(
                f"the parameter {name} has changed since the generator read the weights, some of which are copies: call load(model) after you "
                "change them"
            )


def _version(parameter: Tensor) -> int:
    return 0 if parameter.is_inference() else parameter._version
