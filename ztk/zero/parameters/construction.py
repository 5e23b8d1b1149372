"""Builds a model that is too large for a rank: parameters are sharded as soon as the constructor of their module ends.

[Note: End of a constructor]
PyTorch has no hook at the end of `__init__`, so while a model is built the constructors of all module classes are wrapped. A class and its
bases construct the same object: only the outermost constructor counts. Until it ends the module's parameters are full, so it can
initialise them freely.

[Note: Touched parameters]
A parent often changes its children's parameters (`self.apply(init)`, `self.head.weight.data.mul_(0.5)`), which are already sharded. While a
model is built, every torch function that receives such a parameter makes it full first. The parameter is sharded again, with rank 0's
values, when the next one is touched or a constructor ends, unless another object refers to its memory: the parent may still
write to a view of it. So the model gets the same values as in an ordinary construction, and only a small part of it is full at a time.
"""

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ztk.zero.parameters.partitioned import PartitionedParameter, ZeroInitContext, is_taken, partitioned_of

# Calls on a parameter that need no values.
_PASSIVE = {
    *("size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "element_size", "get_device"),
    *("is_contiguous", "is_floating_point", "is_complex", "is_same_size", "is_tensor", "is_nonzero_static"),
    *("requires_grad_", "register_hook", "register_post_accumulate_grad_hook", "__hash__", "__len__", "__repr__"),
    *("data_ptr", "untyped_storage", "has_names", "_is_view", "is_pinned"),
}


@contextmanager
def construction(init_context: ZeroInitContext) -> Iterator[None]:
    """Context in which the parameters of every module are sharded when its constructor ends; see the notes above.

    Every rank must build the same modules in the same order. Parameters on the meta device stay there. Nested constructions have no
    effect. Raises ValueError for a parameter that is a view of a sharded one.
    """
    if _Construction.current is not None:
        yield
        return
    _Construction.current = current = _Construction(init_context)
    try:
        with current.wrapped_constructors(), _TouchMode(current):
            yield
        current.finish()
    finally:
        _Construction.current = None


@contextmanager
def construction_suspended() -> Iterator[None]:
    """Context in which modules are built as usual, while an engine takes over the modules built so far. Settles first; a collective
    call."""
    current = _Construction.current
    if current is None or current.is_suspended:
        yield
        return
    current.finish()
    current.is_suspended = True
    try:
        yield
    finally:
        current.is_suspended = False


def shard_module(module: nn.Module, *, init_context: ZeroInitContext) -> None:
    """Shards the parameters of a module that was built in full. A collective call."""
    for parameter in module.parameters():
        if _can_be_sharded(parameter):
            PartitionedParameter(parameter, init_context=init_context)


class _Construction:
    """A model that is being built."""

    current: "_Construction | None" = None

    def __init__(self, init_context: ZeroInitContext) -> None:
        self._init_context = init_context
        self._unfinished: list[nn.Module] = []  # outermost first
        # Ordered, unlike a set: every parameter takes a collective call, so all ranks must visit the modules in the same order.
        self._built: weakref.WeakKeyDictionary[nn.Module, None] = weakref.WeakKeyDictionary()
        self._touched: list[PartitionedParameter] = []
        self.is_suspended = False

    def finish(self) -> None:
        """Shards parameters that are still full after the last constructor."""
        self._settle(all_of_them=True)
        built, self._built = list(self._built), weakref.WeakKeyDictionary()
        for module in built:  # parameters that were replaced after their module's constructor
            shard_module(module, init_context=self._init_context)

    # See [Note: End of a constructor]

    @contextmanager
    def wrapped_constructors(self) -> Iterator[None]:
        wrapped: dict[type, Callable] = {}

        def wrap(cls: type) -> None:
            if "__init__" in cls.__dict__ and cls not in wrapped:
                wrapped[cls] = cls.__init__
                cls.__init__ = self._wrap(cls.__init__)

        def init_subclass(cls: type, **kwargs) -> None:
            # pyrefly: ignore[invalid-argument]  # cls is a subclass of nn.Module
            super(nn.Module, cls).__init_subclass__(**kwargs)
            wrap(cls)

        for cls in _subclasses(nn.Module):
            wrap(cls)
        # pyrefly: ignore[bad-assignment]  # torch's methods, wrapped
        nn.Module.__init_subclass__ = classmethod(init_subclass)
        make_parameter = nn.Parameter.__new__
        # pyrefly: ignore[bad-assignment]  # as above
        nn.Parameter.__new__ = staticmethod(functools.partial(self._make_parameter, make_parameter))
        try:
            yield
        finally:
            nn.Parameter.__new__ = staticmethod(make_parameter)
            del nn.Module.__init_subclass__
            for cls, constructor in wrapped.items():
                if getattr(cls.__init__, "__wrapped__", None) is constructor:
                    cls.__init__ = constructor

    def _wrap(self, constructor: Callable) -> Callable:
        @functools.wraps(constructor)
        def __init__(module: nn.Module, *args, **kwargs) -> None:
            is_base = any(
                module is other for other in self._unfinished
            )  # a base class's constructor of the same object
            if is_base or self.is_suspended:
                constructor(module, *args, **kwargs)
                return
            self._unfinished.append(module)
            try:
                constructor(module, *args, **kwargs)
            finally:
                self._unfinished.pop()
            self._settle(all_of_them=not self._unfinished)
            shard_module(module, init_context=self._init_context)
            self._built[module] = None

        return __init__

    def _make_parameter(
        self, make: Callable, cls: type, data: torch.Tensor | None = None, requires_grad: bool = True
    ) -> nn.Parameter:
        """`nn.Parameter(data)` for sharded parameters, which nn.Parameter refuses because of their class. weight_norm makes such a
        parameter."""
        partitioned = partitioned_of(data)
        if data is not None and partitioned is not None and not self.is_suspended:
            self.touch([partitioned])
            with torch._C.DisableTorchFunction():
                data = data.data
        return make(cls, data, requires_grad)

    # See [Note: Touched parameters]

    def touch(self, parameters: list[PartitionedParameter]) -> None:
        """Makes `parameters` full. Raises RuntimeError inside torch.jit.trace."""
        if torch.jit.is_tracing():
            raise RuntimeError(
                "torch.jit.trace inside zero.Init would record how weights are gathered: trace the module outside of zero.Init, before it"
            )
        self._settle(but=parameters)
        for parameter in parameters:
            parameter.make_full(device=parameter.built_on)
            if parameter not in self._touched:
                self._touched.append(parameter)

    def _settle(self, *, but: Sequence[PartitionedParameter] = (), all_of_them: bool = False) -> None:
        kept = []
        for touched in self._touched:
            if touched.parameter is None:  # replaced or deleted meanwhile
                continue
            if touched in but or (not all_of_them and _is_shared(touched.parameter)):
                kept.append(touched)
            elif not touched.pins:
                touched.shard(source=0)
        self._touched = kept


class _TouchMode(TorchFunctionMode):
    """Intercepts every torch function while a model is built."""

    def __init__(self, construction: _Construction) -> None:
        super().__init__()
        self._construction = construction

    def __torch_function__(self, function: Callable, types: tuple, args: tuple = (), kwargs: dict | None = None):
        kwargs = kwargs or {}
        if not self._construction.is_suspended and not _is_passive(function):
            found = [
                partitioned
                for value in (*args, *kwargs.values())
                for partitioned in _partitioned_in(value)
                if not partitioned.is_full
            ]
            if found:
                self._construction.touch(found)
        return function(*args, **kwargs)


def _is_passive(function: Any) -> bool:
    name = function.__name__
    if name == "__get__":  # of an attribute
        return function.__self__.__name__ not in ("data", "T", "mT", "H", "mH", "real", "imag")
    return name in _PASSIVE or (name == "__set__" and function.__self__.__name__ != "data")


def _partitioned_in(value: object) -> Iterator[PartitionedParameter]:
    if isinstance(value, nn.Parameter):
        if (partitioned := partitioned_of(value)) is not None:
            yield partitioned
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _partitioned_in(item)


def _is_shared(parameter: nn.Parameter) -> bool:
    """Whether another tensor refers to the parameter's memory."""
    with torch._C.DisableTorchFunction():
        storage = parameter.untyped_storage()
        return torch._C._storage_Use_Count(storage._cdata) > 2  # the parameter's and `storage`'s


def _can_be_sharded(parameter: nn.Parameter) -> bool:
    known = partitioned_of(parameter) is not None or is_taken(parameter)
    if known or parameter.is_meta or nn.parameter.is_lazy(parameter):
        return False
    with torch._C.DisableTorchFunction():
        if parameter.untyped_storage().nbytes() < parameter.numel() * parameter.element_size():
            raise ValueError(
                f"a parameter of shape {tuple(parameter.shape)} is made of a sharded one, which has no values here: make it "
                "inside GatheredParameters"
            )
    return True


def _subclasses(cls: type) -> Iterator[type]:
    for subclass in cls.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)
