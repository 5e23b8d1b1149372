"""Parameters that are sharded before there is an engine: every rank keeps a slice of each, and none keeps the model.

Rank r of n keeps the flat elements [r * k, (r + 1) * k) of a parameter, k = ceil(numel / n). The parameter itself is a placeholder with its
own shape that reads as NaN. `construction` makes parameters so while a model is built; `ztk.zero.build` takes them over, one at a
time.
"""

import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from ztk.runtime import Comm
from ztk.zero.store import Store

_numbers = itertools.count()
_partitioned: WeakIdKeyDictionary = WeakIdKeyDictionary()


@dataclass(kw_only=True, eq=False)
class ZeroInitContext:
    """Where slices sleep till an engine takes them, and who shares them.

    dtype: of the slices; None: as the parameter was made. on_partition: told of every parameter that is sharded.
    """

    comm: Comm
    store: Store
    dtype: torch.dtype | None = None
    on_partition: Callable[[nn.Parameter], None] | None = None
    residents: int = 0
    is_open: bool = True  # more parameters may be partitioned

    def close(self) -> None:
        """No more parameters are partitioned; the store closes when the last slice has been taken over."""
        self.is_open = False
        self.leave(0)

    def leave(self, count: int) -> None:
        self.residents -= count
        if not self.is_open and self.residents == 0:
            self.store.flush()
            self.store.close()


class PartitionedParameter:
    """One parameter, sharded over the ranks of its init_context. All methods but the properties are collective calls."""

    def __init__(self, parameter: nn.Parameter, *, init_context: ZeroInitContext) -> None:
        """Rank 0's values are everybody's. The parameter's own memory is given back."""
        self.init_context, self.number = init_context, next(_numbers)
        self.built_on = parameter.device
        self.pins = 0  # contexts inside which the parameter is whole
        self.is_full = True
        self._parameter = weakref.ref(parameter)
        self._slot = None
        init_context.residents += 1
        self._leave = weakref.finalize(
            parameter, init_context.leave, 1
        )  # a parameter may die before an engine takes it
        self._leave.atexit = False
        _partitioned[parameter] = self
        self.shard(source=0)
        if init_context.on_partition is not None:
            init_context.on_partition(parameter)

    @property
    def parameter(self) -> nn.Parameter:
        return self._parameter()

    @property
    def own(self) -> Tensor:
        """This rank's slice without padding, flat."""
        rank, size = self.init_context.comm.rank, self._slot.shape[0]
        used = max(0, min(size, self._numel - rank * size))
        slice_ = torch.empty(size, dtype=self._slot.dtype, device=self.init_context.comm.device)
        return self.init_context.store.fetch_into(self._slot, out=slice_).wait()[:used]

    def gather(self) -> Tensor:
        """The whole values, flat [numel], on the device that computes; the parameter stays as it is."""
        comm = self.init_context.comm
        size = self._slot.shape[0]
        full = torch.empty(size * comm.size, dtype=self._slot.dtype, device=comm.device)
        self.init_context.store.fetch_into(self._slot, out=full[comm.rank * size :][:size]).wait()
        comm.all_gather(full, label=self._label).wait()
        return full[: self._numel]

    def make_full(self, *, device: torch.device | None = None) -> None:
        """The parameter has its values, on `device` (None: the one that computes)."""
        with torch._C.DisableTorchFunction(), torch.inference_mode(False):
            if not self.is_full:
                whole = self.gather().view(self._shape)
                self.parameter.data = whole if device is None else whole.to(device)
                self.is_full = True

    def shard(self, *, source: int | None) -> None:
        """The parameter becomes a placeholder. source: the rank whose values are kept; None: nobody changed them."""
        with torch._C.DisableTorchFunction(), torch.inference_mode(False):
            if not self.is_full:
                return
            if source is not None:
                self._keep(self.parameter.data, source=source)
            self._show_placeholder()

    def pin(self) -> None:
        """The parameter is whole until as many calls of `let_go`."""
        self.pins += 1
        self.make_full()

    def unpin(self, *, source: int | None) -> None:
        """The last holder shards it. source: the rank whose changes are everybody's; None: nobody changed anything."""
        self.pins -= 1
        if self.pins == 0:
            self.shard(source=source)
        elif source is not None:
            with torch._C.DisableTorchFunction(), torch.inference_mode(False):
                self._keep(self.parameter.data, source=source)
                self.parameter.data.copy_(self.gather().view(self._shape))

    def fill(self, read: Callable[[int, int], Tensor]) -> None:
        """Sets this rank's slice, without the other ranks. read(start, stop): the parameter's flat elements, on any device."""
        with torch._C.DisableTorchFunction(), torch.inference_mode(False):
            comm, size = self.init_context.comm, self._slot.shape[0]
            start, stop = (min(self._numel, size * rank) for rank in (comm.rank, comm.rank + 1))
            own = torch.zeros(size, dtype=self._slot.dtype, device=comm.device)
            if start < stop:
                own[: stop - start] = read(start, stop)
            self.init_context.store.put(self._slot, value=own).wait()

    def take(self) -> Tensor:
        """As `gather`, and the slice is given back: the sharded parameter is the caller's."""
        whole = self.gather()
        _partitioned.pop(self.parameter, None)
        self._slot = None
        self._leave()
        return whole

    @property
    def _label(self) -> str:
        return f"parameter {self.number} built sharded"

    def _keep(self, value: Tensor, *, source: int) -> None:
        comm, store = self.init_context.comm, self.init_context.store
        self._shape, self._numel = value.shape, value.numel()
        dtype = (
            self.init_context.dtype
            if self.init_context.dtype is not None and value.is_floating_point()
            else value.dtype
        )
        value = value.to(comm.device, dtype).contiguous()
        comm.broadcast(value, source=source, label=self._label).wait()
        size = max(1, -(-self._numel // comm.size))
        own = value.view(-1)[comm.rank * size :][:size]
        if own.numel() < size:
            own = torch.cat([own, own.new_zeros(size - own.numel())])
        if self._slot is None or (self._slot.shape, self._slot.dtype) != ((size,), dtype):
            self._slot = store.allocate(name=self._label, shape=(size,), dtype=dtype, category="parameters")
        store.put(self._slot, value=own).wait()

    def _show_placeholder(self) -> None:
        self.is_full = False
        self.parameter.data = placeholder(self._shape, dtype=self._slot.dtype, device=self.init_context.comm.device)


def partitioned_of(parameter: object) -> PartitionedParameter | None:
    """None for a parameter that was not built sharded, or that an engine has taken over."""
    return _partitioned.get(parameter) if isinstance(parameter, nn.Parameter) else None


def placeholder(shape: torch.Size, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`shape` without memory: NaN, so that reading a sharded parameter by mistake shows at once (0 for integers)."""
    value = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
    return torch.full((), value, dtype=dtype, device=device).expand(shape)
