"""The class of an engine's parameters.

It records reads of `.data`, through which writes leave no other trace. It also runs a script's hooks on a parameter before the engine's
hook, which takes the gradient away. Memory has the dtype of its parameter.
"""

import functools
import sys
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from ztk.zero.parameters.released import change_class, check_not_made_parameter, is_for_state_dict

TAKES_GRADIENT = "ztk_takes_gradient"  # an attribute of the engine's hook, which stays the last
_returned: WeakIdKeyDictionary = WeakIdKeyDictionary()  # parameter -> references to tensors returned by `.data`


class _Watched:
    """Mixed into the class of every parameter of an engine."""

    _own_class: type
    _data_was_read: bool

    @property
    def data(self) -> Tensor:
        # pyrefly: ignore[missing-attribute]  # a descriptor of the class at run time
        return self._note(torch.Tensor.data.__get__(self))

    @data.setter
    def data(self, value: Tensor) -> None:
        # pyrefly: ignore[missing-attribute]  # a descriptor of the class at run time
        torch.Tensor.data.__set__(self, value)

    def detach(self) -> Tensor:
        """Returns the same as `Tensor.detach`. A write through a numpy array of the result leaves no trace, so the call counts as a read of
        `.data`.

        Calls from torch itself do not count, except for entries of a state dict: recomputation detaches every weight that it saves, and
        never writes to it.
        """
        caller = sys._getframe(1)
        # pyrefly: ignore[bad-argument-type]  # mixed into nn.Parameter
        check_not_made_parameter(self, caller=caller)
        # pyrefly: ignore[bad-argument-type]  # mixed into nn.Parameter
        value = Tensor.detach(self)
        is_torchs = caller.f_globals.get("__name__", "").startswith("torch.") and not is_for_state_dict(caller)
        return value if is_torchs else self._note(value)

    def _note(self, value: Tensor) -> Tensor:
        self._data_was_read = True
        # pyrefly: ignore[bad-argument-type]  # mixed into nn.Parameter
        _returned[self] = [*_alive(self), weakref.ref(value)]
        return value

    def register_post_accumulate_grad_hook(self, hook: Callable) -> RemovableHandle:
        # pyrefly: ignore[bad-argument-type]  # mixed into nn.Parameter
        handle = Tensor.register_post_accumulate_grad_hook(self, hook)
        # pyrefly: ignore[missing-attribute]  # mixed into nn.Parameter
        hooks = self._post_accumulate_grad_hooks
        for key in [key for key, other in hooks.items() if hasattr(other, TAKES_GRADIENT)]:
            hooks[key] = hooks.pop(key)  # autograd reads the underlying dict, which move_to_end does not change
        return handle


def watch(parameter: nn.Parameter) -> None:
    """Starts to record reads of `parameter.data` for `take_data_mark`. Idempotent."""
    if not isinstance(parameter, _Watched):
        change_class(parameter, make=_watched)


def is_watched(parameter: Tensor) -> bool:
    """Whether `parameter` (any shape) is or was an engine's."""
    return isinstance(parameter, _Watched)


def take_data_mark(parameter: nn.Parameter, *, is_viewed: Callable[[], bool]) -> bool:
    """Whether `.data` may have been used to write: it was read since the last call, or a script still has its result or a view of it.

    is_viewed: whether other objects than parameters, such as a numpy array, refer to their memory.
    """
    was_read = parameter.__dict__.pop("_data_was_read", False)
    if was_read and (_alive(parameter) or is_viewed()):
        parameter.__dict__["_data_was_read"] = True
    return was_read


def part_from(parameter: nn.Parameter, *, memory: Tensor) -> bool:
    """Copies the tensors that `.data` returned and a script still holds out of `memory` [n], so that they keep their values when it
    changes.
    This mimics `p.data = x`, which leaves the old memory unchanged. Returns False if one of them has views, which cannot follow."""
    for reference in _alive(parameter):
        kept = reference()
        if kept is not None and kept.untyped_storage()._cdata == memory.untyped_storage()._cdata:
            if kept._use_count() > 1:
                return False
            kept.data = kept.clone()
    return True


def viewers(parameters: Sequence[nn.Parameter], *, memory: Tensor) -> int | None:
    """Counts the tensors returned by `.data` that a script still has in the storage of `memory` [n]. None if one of them has views."""
    kept = [reference() for parameter in parameters for reference in _alive(parameter)]
    storage = memory.untyped_storage()._cdata
    showing = [tensor for tensor in kept if tensor is not None and tensor.untyped_storage()._cdata == storage]
    return None if any(tensor._use_count() > 1 for tensor in showing) else len(showing)


def _alive(parameter: nn.Parameter) -> list[weakref.ref]:
    """Live references to tensors that `parameter.data` returned. A view such as `p.data.view(-1)` keeps its base alive, so it counts."""
    return [reference for reference in _returned.get(parameter, ()) if reference() is not None]


@functools.cache
def _watched(cls: type) -> type:
    return type(f"Watched{cls.__name__}", (_Watched, cls), {"__module__": __name__})
