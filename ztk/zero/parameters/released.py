"""A released parameter: it has its own shape, reads as NaN, takes no memory, and refuses writes.

Its values are on other ranks, in main memory or on a disk, so a write by a script would be lost. Its memory therefore refuses writes, and
its class, while it is released, turns the refusal into an error with instructions. Reading stays possible, for a log on one rank, and
warns once. Four uses of the NaN are errors:
- writing it into another tensor (averages of weights, target networks);
- the backward of a loss that read it;
- a bool or an integer computed from it (comparisons, masks, argmax), or floats that hide it (`nan_to_num`);
- a copy, also of an entry of a state dict, because its reader expects weights.
`torch.save` of such an entry warns and writes a file that cannot be loaded, and the next step raises, unless the script gathers parameters
first: DeepSpeed-Chat saves the module on rank 0 at every stage, and the full one afterwards.
A placeholder has the dtype of its parameter.
"""

import copy
import functools
import sys
import warnings
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

_REFUSALS = ("data pointer of Tensor", "more than one element of the written-to tensor")
_REPLACE = {"set_", "swap_", "resize_", "resize_as_"}
_VALUES = {
    *("numpy", "tolist", "item", "data_ptr", "untyped_storage", "storage", "__array__", "__dlpack__", "copy_", "set_"),
}
_INSTEAD = (
    "save by engine.save_16bit_model (with stage3_gather_16bit_weights_on_model_save: true in the configuration), by engine.save_checkpoint, "
    "or inside deepspeed.zero.GatheredParameters(model.parameters()) on every rank; accelerator.get_state_dict(model) gathers, too"
)
_SAVED = (
    "a state dict was saved in which a parameter of shape {shape} is released: its values are not on this rank (zero stage 3), so the file "
    f"cannot be loaded; {_INSTEAD}"
)
_IN_PLACE_OPERATORS = {"__iadd__", "__isub__", "__imul__", "__itruediv__", "__setitem__"}
# Functions whose results have a parameter's shape or dtype, or are its gradient, and do not depend on its values.
_WITHOUT_VALUES = {
    *("__get__", "grad", "backward"),
    *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like"),
    *("new_empty", "new_zeros", "new_ones", "new_full", "new_tensor", "new"),
}
# Functions whose bools and integers describe the tensor, not its values.
_WITHOUT_READING = {"is_same_size", "is_set_to", "result_type", "broadcast_tensors", "size", "__len__"}
# Functions that return Python numbers computed from a tensor's values; "float()" calls `__float__`, "if" `__bool__`.
_DECISIONS = {"__bool__", "__int__", "__index__", "__contains__", "is_nonzero", "equal", "allclose"}
_NUMBERS = {"__float__", "__complex__", "item", "tolist", "numpy", "__array__", "__dlpack__"}
# `module.to()` computes these and drops them.
_CONVERSIONS = {"to", "half", "bfloat16", "float", "double", "cpu", "cuda"}
_MAKES_PARAMETER = nn.Parameter.__new__.__code__
_IN_STATE_DICT = nn.Module._save_to_state_dict.__code__
_saved: list[tuple[int, ...]] = []  # shapes of entries saved since parameters were last gathered
_read: list[tuple[int, ...]] = []  # shapes of parameters that were read while released


def placeholder(shape: torch.Size | tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of `shape` without memory: NaN, so that accidental reads are detected at once (0 for integers). It cannot be written."""
    value = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
    element = torch.full((), value, dtype=dtype, device=device)
    torch._C._set_throw_on_mutable_data_ptr(element)
    return element.expand(shape)


def release(parameter: nn.Parameter, *, value: Tensor) -> None:
    """Makes `parameter` show `value`, a `placeholder` of its shape, until `restore`."""
    # pyrefly: ignore[missing-attribute]  # a descriptor of the class at run time
    torch.Tensor.data.__set__(_unguarded(parameter), value)
    parameter.__class__ = _released(type(parameter))


def restore(parameter: nn.Parameter, *, value: Tensor) -> None:
    """Sets `parameter` to `value` again, of any shape."""
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
    """Whether `parameter` (any shape) has no values on this rank."""
    return isinstance(parameter, _Released)


def lacks_values(tensor: Tensor) -> bool:
    """Whether `tensor` (any shape) is a released parameter, a view of one, or computed from one."""
    return isinstance(tensor, _Guard)


class _Guard:
    """Mixed into the classes of released parameters and of their views."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if _replaces(function, args):
                # pyrefly: ignore[bad-index]  # _replaces has looked at args[0]
                raise RuntimeError(_message(args[0]))
            if _writes_elsewhere(function, args=args, kwargs=kwargs):
                raise RuntimeError(
                    _was_read(_first_guarded(args, kwargs), effect="it would write NaN into another tensor")
                )
            if function is Tensor.detach:
                check_not_made_parameter(_first_guarded(args, kwargs), caller=sys._getframe(1))
            try:
                result = function(*args, **kwargs)
            except RuntimeError as error:
                if not any(refusal in str(error) for refusal in _REFUSALS):
                    raise
                raise RuntimeError(_message(_first_guarded(args, kwargs))) from error
            _refuse_values(function, args=args, kwargs=kwargs, result=result)
            is_view = type(result) is Tensor and any(
                _share(result, value) for value in args if isinstance(value, _Guard)
            )
            if not is_view:
                _note_reading(function, args=args, kwargs=kwargs, result=result)
            if is_view and function is Tensor.detach and _is_for_state_dict():
                return result.as_subclass(_Entry)
            if is_view and not all(isinstance(value, _Computed) for value in args if isinstance(value, _Guard)):
                return result.as_subclass(_View)
            return _computed(result, source=_first_guarded(args, kwargs), name=getattr(function, "__name__", ""))


# pyrefly: ignore[inconsistent-inheritance]  # the guard comes first
class _View(_Guard, Tensor):
    """A view of a released parameter."""

    def __reduce_ex__(self, protocol: int) -> Any:
        """Writes a file that cannot be loaded, see the module docstring."""
        if not _saved:
            warnings.warn(_SAVED.format(shape=tuple(self.shape)), stacklevel=2)
            _saved.append(tuple(self.shape))
        return saved_outside_of_gathered_parameters, (tuple(self.shape),)


# pyrefly: ignore[inconsistent-inheritance]  # the guard comes first
class _Computed(_Guard, Tensor):
    """Floats computed from a released parameter: NaN, which may be logged but not used for decisions."""

    _source_shape: tuple[int, ...] = ()

    def __format__(self, spec: str) -> str:
        return format(self.as_subclass(Tensor), spec)

    def __reduce_ex__(self, protocol: int) -> Any:
        """Raises RuntimeError: a file would keep NaN."""
        raise RuntimeError(_was_read(self, effect="a file would have NaN"))


class _Entry(_View):
    """The entry of a released parameter in a state dict: it has shape, dtype and device, and refuses reads of its values."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            entry = next((value for value in (*args, *(kwargs or {}).values()) if isinstance(value, _Entry)), None)
            if entry is None:  # in a list, as in torch.cat
                raise RuntimeError(_kept(None))
            if function.__name__ in _VALUES:
                raise RuntimeError(_kept(entry))
        result = super().__torch_function__(function, types, args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            if isinstance(result, Tensor):
                if not _share(result, entry):
                    raise RuntimeError(_kept(entry))
                return result.as_subclass(_Entry)
        return result

    def __deepcopy__(self, memo: dict) -> Tensor:
        """Raises RuntimeError: a copy has no values."""
        raise RuntimeError(_kept(self))


def saved_outside_of_gathered_parameters(shape: tuple[int, ...]) -> Tensor:
    """Stands for a released parameter (any shape) in a file. Raises RuntimeError: the file has no values for it."""
    raise RuntimeError(_SAVED.format(shape=shape))


def check_saved() -> None:
    """Raises RuntimeError if released parameters were saved and no parameter has been gathered by the script since."""
    if _saved:
        message = _SAVED.format(shape=_saved[0])
        forget_saved()
        raise RuntimeError(message)


def was_read() -> bool:
    """Whether a script has read a released parameter, which returned NaN."""
    return bool(_read)


def forget_saved() -> None:
    """Clears the record of saved entries, because the script gathers parameters."""
    _saved.clear()


class _Released(_Guard):
    """Mixed into the class of a parameter while it is released."""

    _gathered_class: type

    def __deepcopy__(self, memo: dict) -> nn.Parameter:
        """Raises RuntimeError: a copy has no values."""
        # pyrefly: ignore[missing-attribute]  # mixed into a Tensor
        self.data  # noqa: B018  # while a model is built under zero.Init, this makes the parameter full
        if isinstance(self, _Released):
            raise RuntimeError(_not_copied(self))
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: int) -> Any:
        """Raises RuntimeError: a file would have no values."""
        raise RuntimeError(_not_copied(self))


@functools.cache
def _released(cls: type) -> type:
    return type(f"Released{cls.__name__}", (_Released, cls), {"__module__": __name__, "_gathered_class": cls})


def _unguarded(parameter: nn.Parameter) -> nn.Parameter:
    if isinstance(parameter, _Released):
        parameter.__class__ = parameter._gathered_class
    return parameter


def _replaces(function: Any, args: tuple) -> bool:
    """Whether `function` would give a released parameter other memory."""
    if not args or not isinstance(args[0], _Guard):
        return False
    name = function.__name__
    if name == "__set__" and args[1] is args[0]:
        return False  # `module.to(...)` where it is already
    return name in _REPLACE or (name == "__set__" and function.__self__.__name__ == "data")


def _first_guarded(args: tuple, kwargs: dict) -> Tensor | None:
    """The first guarded tensor among the arguments and in lists among them."""
    for value in (*args, *kwargs.values()):
        for item in value if isinstance(value, list | tuple) else (value,):
            if isinstance(item, _Guard):
                # pyrefly: ignore[bad-return]  # mixed into tensors alone
                return item
    return None


def _writes_elsewhere(function: Any, *, args: tuple, kwargs: dict) -> bool:
    """Whether `function` copies a released parameter into another tensor: `average.lerp_(p, 0.1)`, `target.copy_(p)`, `out=`,
    `_foreach_add_`."""
    name = getattr(function, "__name__", "")
    is_in_place = (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE_OPERATORS
    written = kwargs.get("out", args[0] if is_in_place and args else None)
    if isinstance(written, list | tuple):
        written = written[0] if written else None
    if not isinstance(written, Tensor) or isinstance(written, _Guard) or not written.is_floating_point():
        return False
    guarded = _first_guarded(args, {key: value for key, value in kwargs.items() if key != "out"})
    return guarded is not None and name not in _REPLACE and guarded.numel() > 0


def _note_reading(function: Any, *, args: tuple, kwargs: dict, result: Any) -> None:
    """Handles `result`, which `function` computed from a released parameter: warns once, and makes the backward of a loss with it an
    error."""
    name = getattr(function, "__name__", "")
    if name in _WITHOUT_VALUES:
        return
    guarded = _first_guarded(args, kwargs)
    if guarded is None or guarded.numel() == 0:
        return
    for made in result if isinstance(result, list | tuple) else (result,):
        if not isinstance(made, Tensor) or isinstance(made, _Guard) or not made.is_floating_point():
            continue
        if not _read and name not in _CONVERSIONS:
            warnings.warn(_was_read(guarded, effect="it reads as NaN"), stacklevel=4)
            _read.append(tuple(guarded.shape))
        if made.requires_grad:
            made.register_hook(functools.partial(_refuse, message=_was_read(guarded, effect="the loss has it as NaN")))


def _refuse_values(function: Any, *, args: tuple, kwargs: dict, result: Any) -> None:
    """Raises RuntimeError if `result` hides that a released parameter has no values: a bool, an integer, an element as a Python number, or
    floats without a NaN (`nan_to_num`, `nansum`, `norm(p, 0)`)."""
    name = getattr(function, "__name__", "")
    if name in _WITHOUT_VALUES or name in _WITHOUT_READING:
        return
    guarded = _first_guarded(args, kwargs)
    if guarded is None or guarded.numel() == 0:
        return
    is_hidden = name in _DECISIONS or (name in _NUMBERS and not isinstance(guarded, _Computed))
    for made in result if isinstance(result, list | tuple) else (result,):
        if isinstance(made, Tensor) and not isinstance(made, _Guard) and made.numel() and not _is_part(made, guarded):
            is_hidden |= not (made.is_floating_point() or made.is_complex()) or not _has_nan(made)
        if isinstance(made, Tensor) and not isinstance(made, _Guard) and torch._C._current_graph_task_id() != -1:
            raise RuntimeError(_read_in_backward(guarded))
    if is_hidden:
        raise RuntimeError(_was_read(guarded, effect=f"the result of {name} would not depend on the weights"))


def _computed(result: Any, *, source: Tensor | None, name: str) -> Any:
    """Marks floats in `result` as computed from `source`, a released parameter or a value computed from one."""
    if source is None or name in _WITHOUT_VALUES:
        return result
    if isinstance(result, list | tuple) and not isinstance(result, torch.Size):
        return type(result)([_computed(made, source=source, name=name) for made in result])
    if type(result) is not Tensor or not result.is_floating_point() or source.numel() == 0:
        return result
    made = result.as_subclass(_Computed)
    made._source_shape = _shape_of(source)
    return made


def _shape_of(tensor: Tensor) -> tuple[int, ...]:
    return tensor._source_shape if isinstance(tensor, _Computed) else tuple(tensor.shape)


def _is_part(made: Tensor, guarded: Tensor) -> bool:
    return made.layout is torch.strided and not made.is_meta and _share(made, guarded)


def _has_nan(values: Tensor) -> bool:
    return values.is_meta or not values.is_floating_point() or bool(values.detach().isnan().any())


def _refuse(gradient: Tensor, *, message: str) -> None:
    raise RuntimeError(message)


def check_not_made_parameter(parameter: Tensor | None, *, caller: FrameType | None) -> None:
    """Raises RuntimeError for `nn.Parameter(p)` of an engine's or a released parameter (any shape), which torch would refuse with class
    names.

    caller: frame that calls `detach`.
    """
    if parameter is not None and caller is not None and caller.f_code is _MAKES_PARAMETER:
        raise RuntimeError(
            f"nn.Parameter(p) of an engine's parameter of shape {_shape_of(parameter)}: two parameters cannot share its memory. Make it of a "
            "copy, nn.Parameter(p.detach().clone()), at zero stage 3 inside deepspeed.zero.GatheredParameters(p); use p itself to share it"
        )


def _is_for_state_dict() -> bool:
    """Whether the caller is `Module.state_dict`, which detaches the parameter, perhaps through the `detach` of its class."""
    frame = sys._getframe(2)
    return is_for_state_dict(frame) or is_for_state_dict(frame.f_back)


def is_for_state_dict(caller: FrameType | None) -> bool:
    """Whether `caller`, the caller of `detach`, is `Module.state_dict`, which detaches every entry."""
    return caller is not None and caller.f_code is _IN_STATE_DICT


def _share(view: Tensor, tensor: Tensor) -> bool:
    is_strided = view.layout is torch.strided and view.device == tensor.device
    return is_strided and view.untyped_storage()._cdata == tensor.untyped_storage()._cdata


def _named(tensor: Tensor | None) -> str:
    return "a released parameter" if tensor is None else f"a released parameter of shape {_shape_of(tensor)}"


def _read_in_backward(tensor: Tensor) -> str:
    return (
        f"{_named(tensor)} was read inside a backward: its values are not on this rank (zero stage 3). A torch.autograd.Function that needs a "
        "weight in its backward must keep it by ctx.save_for_backward(weight), which gathers it again, not as ctx.weight; a hook reads weights "
        "before the backward, inside deepspeed.zero.GatheredParameters"
    )


def _not_copied(tensor: Any) -> str:
    return (
        f"{_named(tensor)} cannot be copied or pickled: its values are not on this rank (built inside zero.Init, or zero stage 3). Do it "
        "inside deepspeed.zero.GatheredParameters(list(model.parameters())) on every rank, where it is full; or build the second model "
        "inside zero.Init, too, and load the same weights"
    )


def _kept(tensor: Tensor | None) -> str:
    return f"a state dict has {_named(tensor)}: its values are not on this rank (zero stage 3), and a copy would be NaN; {_INSTEAD}"


def _was_read(tensor: Tensor | None, *, effect: str) -> str:
    return (
        f"{_named(tensor)} was read where it is not gathered: its values are not on this rank (zero stage 3), so {effect}. Read it "
        "inside deepspeed.zero.GatheredParameters(list(model.parameters())) on every rank, also for a term of the loss. A forward gathers "
        "parameters that modules read by name (self.layer.weight), not those from self.parameters()"
    )


def _message(tensor: Tensor | None) -> str:
    return (
        f"{_named(tensor)}: its values are not on this rank (zero stage 3), so it cannot be written here, and nothing may take "
        "its address. Write it inside deepspeed.zero.GatheredParameters(parameter, modifier_rank=0), where it is full; load a state dict "
        "by engine.load_checkpoint, or inside GatheredParameters(model.parameters(), modifier_rank=0)"
    )
