"""A released parameter: it has its own shape, reads as NaN, takes no memory, and refuses to be written.

Its values are on other ranks, in main memory or on a disk, so what a script writes into it would be lost. Its memory therefore refuses
writes, and while it is released its class turns that refusal into an error that says what to do. Reading stays possible.
"""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

_REFUSALS = ("data pointer of Tensor", "more than one element of the written-to tensor")
_REPLACE = {"set_", "swap_", "resize_", "resize_as_"}


def placeholder(shape: torch.Size | tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`shape` without memory: NaN, so that reading a sharded parameter by mistake shows at once (0 for integers). It cannot be written."""
    value = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
    element = torch.full((), value, dtype=dtype, device=device)
    torch._C._set_throw_on_mutable_data_ptr(element)
    return element.expand(shape)


def release(parameter: nn.Parameter, *, value: Tensor) -> None:
    """`parameter` shows `value`, a `placeholder` of its shape, until `restore`."""
    # pyrefly: ignore[missing-attribute]  # a descriptor of the class at run time
    torch.Tensor.data.__set__(_unguarded(parameter), value)
    parameter.__class__ = _released(type(parameter))


def restore(parameter: nn.Parameter, *, value: Tensor) -> None:
    """`parameter` is `value` again, of any shape."""
    # pyrefly: ignore[missing-attribute]  # a descriptor of the class at run time
    torch.Tensor.data.__set__(_unguarded(parameter), value)


def change_class(parameter: nn.Parameter, *, make: Callable[[type], type]) -> None:
    """Gives `parameter` the class `make(its class)`, gathered or not."""
    was_released = is_released(parameter)
    _unguarded(parameter)
    parameter.__class__ = make(type(parameter))
    if was_released:
        parameter.__class__ = _released(type(parameter))


def is_released(parameter: Tensor) -> bool:
    """`parameter`, of any shape, has no values on this rank."""
    return isinstance(parameter, _Released)


class _Guard:
    """Mixed into the classes of released parameters and of their views."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if _replaces(function, args):
                # pyrefly: ignore[bad-index]  # _replaces has looked at args[0]
                raise RuntimeError(_message(args[0]))
            try:
                result = function(*args, **kwargs)
            except RuntimeError as error:
                if not any(refusal in str(error) for refusal in _REFUSALS):
                    raise
                guarded = next((value for value in (*args, *kwargs.values()) if isinstance(value, _Guard)), None)
                raise RuntimeError(_message(guarded)) from error
            is_view = type(result) is Tensor and any(
                _share(result, value) for value in args if isinstance(value, _Guard)
            )
            return result.as_subclass(_View) if is_view else result


# pyrefly: ignore[inconsistent-inheritance]  # the guard comes first
class _View(_Guard, Tensor):
    """A view of a released parameter."""

    def __reduce_ex__(self, protocol: int) -> Any:
        """A file has one element of it, and whoever loads it NaN in this shape."""
        warnings.warn(
            f"a released parameter of shape {tuple(self.shape)} was saved: its values are not on this rank (zero stage 3), so the file has "
            "NaN for it. Save inside deepspeed.zero.GatheredParameters, or by engine.save_16bit_model",
            stacklevel=2,
        )
        with torch._C.DisableTorchFunctionSubclass():
            value = float("nan") if self.dtype.is_floating_point or self.dtype.is_complex else 0
            element = torch.full((), value, dtype=self.dtype, device=self.device)
            return element.expand(self.shape).__reduce_ex__(protocol)


class _Released(_Guard):
    """Mixed into the class of a parameter while it is released."""

    _gathered_class: type

    def __deepcopy__(self, memo: dict) -> nn.Parameter:
        # pyrefly: ignore[missing-attribute]  # mixed into a Tensor
        copied = super().__deepcopy__(memo)
        if isinstance(copied, _Released):  # a copy is nobody's: it may be written
            copied.__class__ = copied._gathered_class
        return copied


@functools.cache
def _released(cls: type) -> type:
    return type(f"Released{cls.__name__}", (_Released, cls), {"__module__": __name__, "_gathered_class": cls})


def _unguarded(parameter: nn.Parameter) -> nn.Parameter:
    if isinstance(parameter, _Released):
        parameter.__class__ = parameter._gathered_class
    return parameter


def _replaces(function: Any, args: tuple) -> bool:
    """`function` would give a released parameter other memory."""
    if not args or not isinstance(args[0], _Guard):
        return False
    name = function.__name__
    if name == "__set__" and args[1] is args[0]:
        return False  # `module.to(...)` where it is already
    return name in _REPLACE or (name == "__set__" and function.__self__.__name__ == "data")


def _share(view: Tensor, tensor: Tensor) -> bool:
    is_strided = view.layout is torch.strided and view.device == tensor.device
    return is_strided and view.untyped_storage()._cdata == tensor.untyped_storage()._cdata


def _message(tensor: Tensor | None) -> str:
    shape = "" if tensor is None else f" of shape {tuple(tensor.shape)}"
    return (
        f"a released parameter{shape}: its values are not on this rank (zero stage 3), so it cannot be written here, and nothing may take "
        "its address. Write it inside deepspeed.zero.GatheredParameters(parameter, modifier_rank=0), where it is full; load a state dict "
        "by engine.load_checkpoint, or inside GatheredParameters(model.parameters(), modifier_rank=0)"
    )
