"""Parameters that are sharded before an engine exists: every rank has a slice of each, and no rank has the full model.

Rank r of n has the flat elements [r * k, (r + 1) * k) of a parameter, k = ceil(numel / n). The parameter itself is a placeholder of its
own shape that reads as NaN. `construction` makes such parameters while a model is built; `ztk.zero.build` takes them over, one at a
time. Values have the dtype of their parameter.
"""

import functools
import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from ztk.core.runtime import Comm
from ztk.core.runtime.store import Slot, Store
from ztk.zero.parameters.bits import same_bits
from ztk.zero.parameters.released import placeholder, release, restore

_numbers = itertools.count()
_partitioned: WeakIdKeyDictionary = WeakIdKeyDictionary()
_taken: WeakIdKeyDictionary = WeakIdKeyDictionary()  # parameters of engines


@dataclass(kw_only=True, eq=False)
class ZeroInitContext:
    """The store of slices until an engine takes them over, and the ranks that share them.

    dtype: dtype of the slices. Defaults to the parameter's. on_partition: called with every parameter that is sharded.
    """

    comm: Comm
    store: Store
    dtype: torch.dtype | None = None
    on_partition: Callable[[nn.Parameter], None] | None = None
    num_slices: int = 0
    is_open: bool = True  # more parameters may be partitioned

    def close(self) -> None:
        """Ends partitioning. The store closes when the last slice has been taken over."""
        self.is_open = False
        self.remove(0)

    def remove(self, count: int) -> None:
        """Records that `count` slices have been taken over or dropped."""
        self.num_slices -= count
        if not self.is_open and self.num_slices == 0:
            self.store.flush()
            self.store.close()


def _without_hooks(method: Callable) -> Callable:
    """Runs `method` with plain tensors: without torch functions and outside of inference mode."""

    @functools.wraps(method)
    def plain(*args, **kwargs):
        with torch._C.DisableTorchFunction(), torch.inference_mode(False):
            return method(*args, **kwargs)

    return plain


class PartitionedParameter:
    """One parameter, sharded over the ranks of its init_context. All methods except `fill` and the properties are collective calls.

    built_on: the device on which it was built. pins: number of contexts in which it is full. is_full: it has its values.
    """

    def __init__(self, parameter: nn.Parameter, *, init_context: ZeroInitContext) -> None:
        """Shards rank 0's values and frees the parameter's own memory."""
        self.init_context, self.number = init_context, next(_numbers)
        self.built_on, self.pins, self.is_full = parameter.device, 0, True
        self._parameter = weakref.ref(parameter)
        self._stored: Slot | None = None
        init_context.num_slices += 1
        self._remove = weakref.finalize(parameter, init_context.remove, 1)  # it may die before an engine takes it over
        # pyrefly: ignore[missing-attribute]  # a property, which typeshed leaves out of __slots__
        self._remove.atexit = False
        _partitioned[parameter] = self
        self.shard(source=0)
        if init_context.on_partition is not None:
            init_context.on_partition(parameter)

    @property
    def parameter(self) -> nn.Parameter | None:
        """The parameter, or None if it was freed."""
        return self._parameter()

    @property
    def _slot(self) -> Slot:
        assert self._stored is not None, "an engine has taken it over"
        return self._stored

    @property
    def own(self) -> Tensor:
        """A copy of this rank's slice, flat, without padding."""
        comm, size = self.init_context.comm, self._slot.shape[0]
        used = max(0, min(size, self._numel - comm.rank * size))
        own = torch.empty(size, dtype=self._slot.dtype, device=comm.device)
        return self.init_context.store.fetch_into(self._slot, out=own).wait()[:used]

    def gather(self) -> Tensor:
        """The full values, flat [numel], on the compute device. The parameter does not change."""
        comm, size = self.init_context.comm, self._slot.shape[0]
        full = torch.empty(size * comm.size, dtype=self._slot.dtype, device=comm.device)
        self.init_context.store.fetch_into(self._slot, out=full[comm.rank * size :][:size]).wait()
        comm.all_gather(full, label=self._label).wait()
        return full[: self._numel]

    @_without_hooks
    def make_full(self, *, device: torch.device | None = None) -> None:
        """Gives the parameter its values, on `device`. Defaults to the compute device."""
        if not self.is_full:
            full = self.gather().view(self._shape)
            restore(self.parameter, value=full if device is None else full.to(device))
            self.is_full = True

    @_without_hooks
    def shard(self, *, source: int | None) -> None:
        """Makes the parameter a placeholder. source: the rank whose values are kept, or None if they are unchanged."""
        if not self.is_full:
            return
        if source is not None:
            assert self.parameter is not None
            self._keep(self.parameter.data, source=source)
        self.is_full = False
        device = self.init_context.comm.device
        empty = placeholder(self._shape, dtype=self._slot.dtype, device=device)
        release(self.parameter, value=empty)

    def pin(self) -> None:
        """Makes the parameter full until the matching call of `unpin`."""
        if self.pins == 0 and self.is_full:  # a parent changed it while the model is built: keep the change
            self.shard(source=0)
        self.pins += 1
        self.make_full()

    def unpin(self, *, source: int | None) -> None:
        """Undoes one `pin`; the last one shards the parameter. source: the rank whose changes are kept, or None if there are none."""
        self.pins -= 1
        if self.pins == 0:
            self.shard(source=source)
        elif source is not None:
            self._keep_pinned(source=source)

    @_without_hooks
    def fill(self, read: Callable[[int, int], Tensor]) -> None:
        """Sets this rank's slice without the other ranks. read(start, stop): returns the parameter's flat elements, on any device.

        Raises:
            RuntimeError: while the parameter is pinned.
        """
        if self.pins:
            raise RuntimeError(
                f"a parameter of shape {tuple(self._shape)} is filled inside GatheredParameters, whose end would undo it: leave "
                "GatheredParameters before"
            )
        self.shard(source=None)  # a parent may have made it full: its old values must not come back
        comm, size = self.init_context.comm, self._slot.shape[0]
        start, stop = (min(self._numel, size * rank) for rank in (comm.rank, comm.rank + 1))
        own = torch.zeros(size, dtype=self._slot.dtype, device=comm.device)
        if start < stop:
            own[: stop - start] = read(start, stop)
        self.init_context.store.put(self._slot, value=own).wait()

    def take(self) -> Tensor:
        """Returns the same as `gather`, flat [numel], and frees the slice. The parameter then belongs to the caller."""
        full = self.gather()
        _partitioned.pop(self.parameter, None)
        self._stored = None
        self._remove()
        return full

    @property
    def is_changed(self) -> bool:
        """Whether this rank's slice of the full parameter differs from the stored one."""
        with torch._C.DisableTorchFunction(), torch.inference_mode(False):
            if not self.is_full:
                return False
            assert self.parameter is not None
            own, value = self.own, self.parameter.data.detach().reshape(-1)
            start = self.init_context.comm.rank * self._slot.shape[0]
            return not same_bits(own.to(value.device), second=value[start : start + own.numel()])

    @property
    def _label(self) -> str:
        return f"parameter {self.number} built sharded"

    @_without_hooks
    def _keep_pinned(self, *, source: int) -> None:
        assert self.parameter is not None
        self._keep(self.parameter.data, source=source)
        assert self.parameter is not None
        self.parameter.data.copy_(self.gather().view(self._shape))

    def _keep(self, value: Tensor, *, source: int) -> None:
        """Stores this rank's slice of rank `source`'s `value`."""
        comm, store = self.init_context.comm, self.init_context.store
        self._shape, self._numel = value.shape, value.numel()
        dtype = value.dtype
        if self.init_context.dtype is not None and value.is_floating_point():
            dtype = self.init_context.dtype
        value = value.to(comm.device, dtype).contiguous()
        comm.broadcast(value, source=source, label=self._label).wait()
        size = max(1, -(-self._numel // comm.size))
        own = value.view(-1)[comm.rank * size :][:size]
        if own.numel() < size:
            own = torch.cat([own, own.new_zeros(size - own.numel())])
        if self._stored is None or (self._stored.shape, self._stored.dtype) != ((size,), dtype):
            self._stored = store.allocate(name=self._label, shape=(size,), dtype=dtype, category="parameters")
        store.put(self._slot, value=own).wait()


def partitioned_of(parameter: object) -> PartitionedParameter | None:
    """The sharded state of `parameter`, or None if it was not built sharded or an engine has taken it over."""
    return _partitioned.get(parameter) if isinstance(parameter, nn.Parameter) else None


def take(parameter: nn.Parameter) -> None:
    """Marks `parameter` as owned by an engine: it cannot be sharded otherwise until `give_back`."""
    _taken[parameter] = True


def give_back(parameter: nn.Parameter) -> None:
    """Undoes `take`."""
    _taken.pop(parameter, None)


def is_taken(parameter: nn.Parameter) -> bool:
    """Whether `parameter` belongs to an engine."""
    return parameter in _taken
