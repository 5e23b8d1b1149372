"""Tracks the memory and the operations of a step, operation by operation.

The mode counts the storages that operations return: every byte of a device that a tensor keeps alive. Some of these bytes are booked in the
ledger; the rest are activations, gradients on their way through autograd and workspaces that an operation returns. It works alike on
planned tensors and on real ones, so a plan's count is checked against a real run's (`tests/slow/test_plans.py`).
"""

import bisect
import functools
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from ztk.core.runtime import MemoryLedger, Tier
from ztk.core.runtime.flop_formulas import flop_registry
from ztk.core.runtime.planned import is_host_memory
from ztk.kernels import op_names
from ztk.planner.attention_costs import FLOPS
from ztk.planner.grouped import RESULTS
from ztk.planner.kinds import ATTENTION, ELEMENTWISE, GROUPED_PRODUCT, INDEXED, PRODUCT, TORCH_ATTENTION

Computed = Callable[..., None]  # see `ztk.planner.lanes.Lanes.compute`
_aten = torch.ops.aten
_WITHOUT_WORK = {
    *(_aten.detach, _aten._unsafe_view, _aten._reshape_alias, _aten.alias, _aten.set_, _aten.resize_),
    *(_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided),
}
_INDEXED = {
    *(_aten.index, _aten.index_put, _aten.index_put_, _aten._index_put_impl_, _aten.index_select, _aten.index_add),
    *(_aten.index_add_, _aten.masked_fill, _aten.masked_fill_, _aten.gather, _aten.scatter, _aten.scatter_add),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Peak:
    """The moment with the most bytes. booked: bytes by category of the ledger. where: the module, and whether in its backward."""

    nbytes: int = 0
    booked: dict[str, int] = field(default_factory=dict)
    where: str = "construction"

    @property
    def activations(self) -> int:
        """Bytes that the ledger does not book."""
        return self.nbytes - sum(self.booked.values())


class StepTracker(TorchDispatchMode):
    """Counts inside its context. alive: bytes now. flops: operations of matrix products and attention by torch's registry, in `count_flops`."""

    sees_everything = True  # also operations that ZeRO hides from modes, see `ztk.core.runtime.dispatch_modes`

    def __init__(self, *, device: str, computed: Computed | None = None) -> None:
        """device: the type whose bytes count, "meta" or "cpu". computed: called for every operation."""
        super().__init__()
        self.alive, self.flops = 0, 0
        self.peak = Peak()
        self.ledger: MemoryLedger | None = None
        self._device, self._computed = device, computed
        self._sizes: dict[int, int] = {}  # storage -> bytes
        self._names: dict[nn.Module, str] = {}
        self._running: list[str] = []  # modules whose forward runs, the outermost first
        self._starts: list[
            int
        ] = []  # autograd's sequence number from which on the module of the same place in `_ran` ran
        self._ran: list[str] = []
        self._hooks = ExitStack()

    def watch(self, model: nn.Module) -> None:
        """Names the modules of `model` in `peak.where`, until `unwatch`."""
        self._names = {module: name or "model" for name, module in model.named_modules()}
        entered = register_module_forward_pre_hook(self._enter)
        left = register_module_forward_hook(self._leave, always_call=True)  # a repeated block ends by an exception
        for handle in (entered, left):
            self._hooks.callback(handle.remove)

    def unwatch(self) -> None:
        """Removes the hooks and the references to the model: finalizers of its storages keep this object alive."""
        self._hooks.close()
        self._names = {}

    def leave_out(self, tensor: Tensor) -> None:
        """Excludes the storage of `tensor` (any shape), because it is not on the device."""
        storage = tensor.untyped_storage()
        self.alive -= self._sizes.get(storage._cdata, 0)
        self._sizes[storage._cdata] = 0

    def restart(self) -> None:
        """Resets peak and operations; live bytes stay counted."""
        self.flops, self.peak = 0, Peak()
        self._starts, self._ran = [], []
        self._note()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = RESULTS.get(func, func)(*args, **kwargs)
        results = tensors_in(out)
        for tensor in results:
            self._see(tensor)
        flops = flops_of(func, args=args, kwargs=kwargs, out=out)
        self.flops += flops
        if self._computed is not None and is_work(func):
            used = [*tensors_in(*args, *kwargs.values()), *(results or written(func, args=args))]
            self._report(func, flops=flops, tensors=used)
        return out

    def _report(self, func: torch._ops.OpOverload, *, flops: int, tensors: list[Tensor]) -> None:
        """Calls `computed` with the bytes that an operation reads and writes."""
        moved = {True: 0, False: 0}  # in memory of the host: bytes
        used = [tensor for tensor in tensors if tensor.device.type == self._device]
        for tensor in used:
            moved[is_host_memory(tensor.untyped_storage())] += tensor.nbytes
        assert self._computed is not None
        if used:
            copies = func is torch.ops.aten.copy_.default
            to_host = is_host_memory(used[0].untyped_storage())
            if copies:  # its result is its first argument
                moved[to_host] -= used[0].nbytes
            dtype = used[0 if func in FLOPS else -1].dtype  # attention returns its log-sum-exp last, in fp32
            self._computed(
                kind=_kind(func, flops=flops),
                flops=flops,
                device_bytes=moved[False],
                host_bytes=moved[True],
                dtype=dtype,
                copies=copies,
                to_host=copies and to_host,
                operand=tensors[0].dtype,
                shape=_shape(func, flops=flops, tensors=tensors),
            )

    def _see(self, tensor: Tensor) -> None:
        if tensor.device.type != self._device or tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        if storage._cdata in self._sizes or is_host_memory(storage):
            return
        self._sizes[storage._cdata] = storage.nbytes()
        self.alive += storage.nbytes()
        # pyrefly: ignore[missing-attribute]  # a property, which typeshed leaves out of __slots__
        weakref.finalize(storage, self._gone, storage._cdata).atexit = False
        if self.alive > self.peak.nbytes:
            self._note()

    def _gone(self, storage: int) -> None:
        self.alive -= self._sizes.pop(storage, 0)

    def _note(self) -> None:
        booked = {} if self.ledger is None else self.ledger.by_category(Tier.device)
        self.peak = Peak(nbytes=self.alive, booked=booked, where=self._where())

    # Where

    def _enter(self, module: nn.Module, args: object) -> None:
        self._running.append(self._names.get(module, type(module).__name__))
        self._mark()

    def _leave(self, module: nn.Module, args: object, output: object) -> None:
        if self._running:
            self._running.pop()
        self._mark()

    def _mark(self) -> None:
        self._starts.append(torch._C._autograd._get_sequence_nr())
        self._ran.append(self._running[-1] if self._running else "loss")

    def _where(self) -> str:
        if torch._C._current_graph_task_id() == -1:
            return f"forward of {self._running[-1]}" if self._running else "step"
        if self._running:
            return f"backward of {self._running[-1]}, computed again"
        node = torch._C._current_autograd_node()
        index = -1 if node is None else bisect.bisect_right(self._starts, node._sequence_nr()) - 1
        return f"backward of {self._ran[index]}" if index >= 0 else "backward"


def flops_of(func: torch._ops.OpOverload, *, args: tuple, kwargs: dict, out: object) -> int:
    """Operations of a matrix product or of attention, by torch's formulas; 0 for others."""
    count = FLOPS.get(func) or flop_registry.get(func._overloadpacket)
    return 0 if count is None else count(*args, **kwargs, out_val=out)


def _shape(func: torch._ops.OpOverload, *, flops: int, tensors: list[Tensor]) -> tuple[int, ...]:
    """Rows, columns and inner size of a product; length and head size of attention, whose backward has five products per two of its
    forward."""
    if not flops:
        return ()
    if func in FLOPS or "attention" in func.name():
        query = tensors[0]
        products = 5 if "backward" in func.name() else 2
        return flops // (2 * products * query.numel()), query.shape[-1]
    result = tensors[-1]
    columns = result.shape[-1] if result.ndim else 1
    return result.numel() // columns, columns, flops // (2 * max(1, result.numel()))


def _kind(func: torch._ops.OpOverload, *, flops: int) -> str:
    """The kind, see `ztk.planner.kinds`, or the name of an operation of ztk."""
    if func in FLOPS:
        return ATTENTION
    if flops:
        grouped = func._overloadpacket is _aten._grouped_mm
        return TORCH_ATTENTION if "attention" in func.name() else GROUPED_PRODUCT if grouped else PRODUCT
    if func._overloadpacket in _INDEXED:
        return INDEXED
    own = func.name().removeprefix("ztk::")
    return own if own in op_names() else ELEMENTWISE


def tensors_in(*values: object) -> list[Tensor]:
    """The tensors (any shapes) among an operation's arguments or results and in their lists. Operations have no deeper nesting."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found.extend(element for element in value if isinstance(element, Tensor))
    return found


@functools.cache
def is_work(func: torch._ops.OpOverload) -> bool:
    """Whether the operation reads and writes memory, rather than making a view or a tensor without values."""
    return not func.is_view and func._overloadpacket not in _WITHOUT_WORK


def written(func: torch._ops.OpOverload, *, args: tuple) -> list[Tensor]:
    """The tensors (any shapes) that an operation without results writes, and also reads."""
    return [args[place] for place in _places_written(func) if place < len(args) and isinstance(args[place], Tensor)]


@functools.cache
def _places_written(func: torch._ops.OpOverload) -> tuple[int, ...]:
    aliases = enumerate(argument.alias_info for argument in func._schema.arguments)
    return tuple(place for place, alias in aliases if alias is not None and alias.is_write)
