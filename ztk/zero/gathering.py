"""Stage 3: parameters are whole while they are used, and only then.

[Note: Saved parameters]
Autograd saves views of parameters (`weight.t()`) for the backward. The buffer under them is given away after the forward, so a
saved tensor whose storage is a gathered buffer is packed as (bucket, shape, strides, offset) and rebuilt from the
buffer of the moment when the backward asks for it. That request is also what gathers a bucket in the backward: it works for any
module, for parameters used outside their own module, and needs no hooks on outputs.
Hooks on saved tensors do not stack in PyTorch: only the innermost pair is called. So tensors that are no parameters are handed on
to the pair that was active outside, which is how activation checkpointing around a unit keeps working.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ztk.runtime import PhaseClock
from ztk.runtime.differentiable import through
from ztk.zero.bucket import Bucket, ParameterState
from ztk.zero.dispatch_modes import without_dispatch_modes
from ztk.zero.policy import ZeroPolicy
from ztk.zero.trace import UseTrace


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Unit:
    """A module and the sharded buckets it needs."""

    name: str
    module: nn.Module
    buckets: tuple[Bucket, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _SavedParameter:
    """A saved tensor that is a view of a bucket. See [Note: Saved parameters]."""

    bucket: Bucket
    shape: torch.Size
    strides: tuple[int, ...]
    offset: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _HandedOn:
    """A saved tensor that the outer hooks packed."""

    packed: object
    unpack: object


class Gathering:
    """Gathers buckets before use, releases them after, and looks ahead."""

    def __init__(self, units: list[Unit], *, policy: ZeroPolicy, clock: PhaseClock) -> None:
        self._units, self._policy, self._clock = units, policy, clock
        self._buckets = list(dict.fromkeys(bucket for unit in units for bucket in unit.buckets))
        self._bucket_of = {parameter: bucket for bucket in self._buckets for parameter in bucket.parameters}
        self._by_storage: dict[int, Bucket] = {}  # address of a gathered buffer -> its bucket
        self._users: dict[Bucket, int] = dict.fromkeys(self._buckets, 0)  # open units that need it
        self._touched: set[Bucket] = set()  # used since it was gathered
        self._lent: set[Bucket] = set()  # a unit returned a view of it: it stays till the model's forward ends
        self._pins: dict[Bucket, int] = {}  # contexts that keep it gathered whatever passes come in between
        self._pinned_first: set[Bucket] = set()  # it was such a context that gathered it
        self._kept: set[Bucket] = set()  # once gathered they stay, see `keep_unsharded`
        self._live = 0  # gathered elements
        self._open_units = 0
        self._traces = {True: UseTrace(), False: UseTrace()}  # with gradients, without
        self._trace = self._traces[True]
        self._placeholders: dict[tuple, Tensor] = {}
        self._forwards: dict[nn.Module, Callable] = {}  # of the wrapped modules, as they were or compiled
        for unit in units:
            self._wrap(unit.module, unit=unit, is_root=unit is units[-1])
        for module in _entries(units):
            self._wrap(module, unit=units[-1], is_root=True)
        for module in units[-1].module.modules() if units else ():
            if any(parameter in self._bucket_of for parameter in module._parameters.values()):
                module._parameters = _GatherOnAccess(module._parameters, on_access=self._on_access)

    # Use and release

    def unshard(self, bucket: Bucket) -> None:
        """Makes `bucket`'s parameters usable now and starts on what comes next."""
        if bucket in self._touched:
            return
        if _inside_backward():
            self._release_passed()
        self._trace.use(bucket)
        self.unshard_untraced(bucket)
        self._prefetch()

    @without_dispatch_modes
    def unshard_untraced(self, bucket: Bucket) -> None:
        """Gathers `bucket` outside of the model's own passes: nothing is recorded, nothing prefetched."""
        self._start(bucket)
        with self._clock.phase("communication"):
            bucket.finish_gather()
        self._by_storage[bucket.full.data_ptr()] = bucket
        self._touched.add(bucket)

    def pin(self, bucket: Bucket) -> None:
        """Gathers `bucket` and keeps it so until `unpin`, also when passes of the model come in between."""
        if bucket not in self._pins and bucket not in self._touched:
            self._pinned_first.add(bucket)
        self.unshard_untraced(bucket)
        self._pins[bucket] = self._pins.get(bucket, 0) + 1

    def unpin(self, bucket: Bucket) -> None:
        """The last holder releases what it gathered, unless a unit that runs needs it."""
        self._pins[bucket] -= 1
        if self._pins[bucket]:
            return
        del self._pins[bucket]
        if bucket in self._pinned_first:
            self._pinned_first.discard(bucket)
            if not self._users[bucket] and bucket not in self._lent:
                self.reshard(bucket)

    @contextmanager
    def keep_unsharded(self) -> Iterator[None]:
        """Many passes come inside: as many buckets as `max_live_parameters` allows are gathered once, at their first use, and stay.

        The rest is gathered for every pass; room for its largest unit, and for one prefetched as large, is kept free.
        """
        total = sum(bucket.size for bucket in self._buckets)
        largest = max((sum(bucket.size for bucket in unit.buckets) for unit in self._units), default=0)
        room = self._policy.max_live_parameters - (0 if total <= self._policy.max_live_parameters else 2 * largest)
        for bucket in self._buckets:
            room -= bucket.size
            if room >= 0:
                self._kept.add(bucket)
        try:
            yield
        finally:
            self._kept.clear()
            self.reshard_all()

    @without_dispatch_modes
    def reshard(self, bucket: Bucket) -> None:
        """Nobody needs `bucket` for now. A bucket that is never sharded stays, and one that is held."""
        if not bucket.traits.shards_parameters or bucket.state is ParameterState.sharded:
            return
        if bucket in self._pins or bucket in self._kept:
            return
        self._by_storage.pop(bucket.full.data_ptr(), None)
        self._touched.discard(bucket)
        self._live -= bucket.size
        bucket.release(placeholder=self._placeholder(bucket))

    def reshard_all(self) -> None:
        """A pass is over: whatever is still gathered goes, prefetched or used, but for what is held."""
        for bucket in self._buckets:
            self.reshard(bucket)

    def reshard_before_change(self) -> None:
        """The parameters are about to change. Raises RuntimeError if somebody holds some."""
        if self._pins:
            names = ", ".join(bucket.traits.name for bucket in self._pins)
            raise RuntimeError(
                f"parameters of {names} are held whole, and a step or a load would leave them with old values: leave "
                "GatheredParameters before"
            )
        self.reshard_all()

    def _release_passed(self) -> None:
        """Frozen buckets never complete, so in the backward they go when another one is used and the forecast has no more use of them."""
        for bucket in list(self._touched):
            if not bucket.traits.trainable and not self._users[bucket] and self._trace.distance_to(bucket) is None:
                self.reshard(bucket)

    @without_dispatch_modes
    def _start(self, bucket: Bucket) -> None:
        if bucket.state is ParameterState.sharded:
            bucket.start_gather()
            self._live += bucket.size

    def _prefetch(self) -> None:
        budget = self._policy.prefetch_bucket_size
        for bucket in self._trace.ahead():
            if bucket in self._touched:
                continue
            if budget <= 0 or self._live + bucket.size > self._policy.max_live_parameters:
                return
            self._start(bucket)
            budget -= bucket.size  # after the start: a budget smaller than a bucket still looks one bucket ahead

    def _placeholder(self, bucket: Bucket) -> Tensor:
        """One NaN: reading a released parameter by mistake shows at once."""
        key = bucket.traits.dtype, bucket.full.device
        if key not in self._placeholders:
            with torch.inference_mode(False):
                self._placeholders[key] = torch.full((), float("nan"), dtype=key[0], device=key[1])
        return self._placeholders[key]

    # Hooks into the model

    def _wrap(self, module: nn.Module, *, unit: Unit, is_root: bool) -> None:
        """`module`'s forward opens `unit`. A part of the model outside of the units does so only when it is called by itself."""
        if module in self._forwards:  # one module by two names: both units need the same
            return
        self._forwards[module] = module.forward
        is_part = module is not unit.module
        gathers_first = not is_root and any(getattr(part, "is_one_unit", False) for part in module.modules())

        @functools.wraps(module.forward)
        def forward(*args, **kwargs):
            if is_part and self._open_units:
                return self._forwards[module](*args, **kwargs)
            with self._open(unit, is_root=is_root):
                output = self._keep_views(self._forwards[module](*args, **kwargs), is_root=is_root)
            return self._gather_before_backward(unit, output) if gathers_first else output

        module.forward = forward

    def compile(self, compiler: Callable[[Callable], Callable]) -> None:
        """Compiles the forward of every unit, inside the gathering; the root's own code runs between theirs and stays as it is, unless
        it is the only unit."""
        for unit in self._units[:-1] or self._units:
            self._forwards[unit.module] = compiler(self._forwards[unit.module])

    def detach(self) -> None:
        """Takes the hooks off the model again; its parameters are placeholders."""
        for module, forward in self._forwards.items():
            del module.forward
            if module.forward != forward:  # it had one of its own before
                module.forward = forward
        for module in self._units[-1].module.modules() if self._units else ():
            if isinstance(module._parameters, _GatherOnAccess):
                module._parameters = dict(module._parameters)

    def _keep_views(self, output: object, *, is_root: bool) -> object:
        """What a unit returns may be a view of its parameters: then its bucket stays till the model's forward ends; the model itself
        returns a copy."""

        def keep(value: object) -> object:
            if isinstance(value, Tensor) and (bucket := self._bucket_under(value)) is not None:
                if is_root:
                    return value.clone()
                self._lent.add(bucket)
            return value

        return tree_map(keep, output)

    def _gather_before_backward(self, unit: Unit, output: object) -> object:
        """Inside a unit that is gathered as one, ranks may read different parameters, or none, in the backward; so all gather all of it
        before."""

        def mark(value: object) -> object:
            if not isinstance(value, Tensor) or not value.requires_grad:
                return value
            return through(value, forward=lambda x: x.view_as(x), backward=functools.partial(self._gather_for, unit))

        return tree_map(mark, output)

    def _gather_for(self, unit: Unit, gradient: Tensor) -> Tensor:
        """The first of a unit's backward."""
        for bucket in unit.buckets:
            self.unshard(bucket)
        return gradient

    def _bucket_under(self, tensor: Tensor) -> Bucket | None:
        """The gathered bucket that `tensor` is a view of."""
        if not self._by_storage or tensor.layout is not torch.strided:
            return None
        return self._by_storage.get(tensor.untyped_storage().data_ptr())

    @contextmanager
    def _open(self, unit: Unit, *, is_root: bool) -> Iterator[None]:
        recomputing = _inside_backward()
        if is_root and not recomputing:
            self._trace = self._traces[torch.is_grad_enabled()]
            self._trace.restart()
        for bucket in unit.buckets:
            self._users[bucket] += 1
            self._start(bucket)
        for bucket in unit.buckets:
            self.unshard(bucket)
        self._open_units += 1
        try:
            with self.saved_tensors():
                yield
        finally:
            self._open_units -= 1
            for bucket in unit.buckets:
                self._users[bucket] -= 1
            if not recomputing:  # a recomputed forward is followed at once by its backward
                self._after_forward(unit, is_root=is_root)

    def _after_forward(self, unit: Unit, *, is_root: bool) -> None:
        if is_root:
            self._lent.clear()
        for bucket in self._buckets if is_root else unit.buckets:
            if bucket in self._touched and not self._users[bucket] and bucket not in self._lent:
                if self._is_reused_soon(bucket):
                    self._touched.discard(bucket)  # so that the next use is recorded
                else:
                    self.reshard(bucket)
        if is_root and not torch.is_grad_enabled():  # no backward follows
            self.reshard_all()

    def _is_reused_soon(self, bucket: Bucket) -> bool:
        distance = self._trace.distance_to(bucket)
        within = distance is not None and 0 < self._policy.max_reuse_distance >= distance
        return within and self._live <= self._policy.max_live_parameters

    def _on_access(self, parameter: nn.Parameter) -> None:
        """A module's attribute is a parameter of a unit that is not open: gathered till the model's forward ends. In the backward it is
        activation checkpointing inside a unit that reads it again."""
        if torch.compiler.is_compiling():
            return  # compiled code runs inside an open unit, and must not guard on what happens to be gathered
        bucket = self._bucket_of.get(parameter)
        if bucket is not None and bucket not in self._touched and (self._open_units or _inside_backward()):
            self.unshard(bucket)

    # See [Note: Saved parameters]

    @contextmanager
    def saved_tensors(self) -> Iterator[None]:
        """What autograd saves inside for the backward is no gathered buffer, but the way to it."""
        outer = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if not torch.is_grad_enabled() or (outer and outer[1] == self._unpack):
            yield
            return

        def pack(tensor: Tensor) -> object:
            bucket = self._bucket_under(tensor)
            if bucket is not None:
                return _SavedParameter(
                    bucket=bucket, shape=tensor.shape, strides=tensor.stride(), offset=tensor.storage_offset()
                )
            return tensor if outer is None else _HandedOn(packed=outer[0](tensor), unpack=outer[1])

        with torch.autograd.graph.saved_tensors_hooks(pack, self._unpack):
            yield

    def _unpack(self, saved: object) -> Tensor:
        if isinstance(saved, _SavedParameter):
            self.unshard(saved.bucket)
            return saved.bucket.full.as_strided(saved.shape, saved.strides, saved.offset)
        return saved.unpack(saved.packed) if isinstance(saved, _HandedOn) else saved


class _GatherOnAccess(dict):
    """A module's parameters; reading one says so. Iteration does not."""

    def __init__(self, parameters: dict, *, on_access) -> None:
        super().__init__(parameters)
        self._on_access = on_access

    def __getitem__(self, name: str) -> nn.Parameter:
        parameter = super().__getitem__(name)
        if parameter is not None:
            self._on_access(parameter)
        return parameter


def _entries(units: list[Unit]) -> Iterator[nn.Module]:
    """The modules between the root and the units: who calls one by itself (generation calls the model inside its wrappers, a loss the head
    alone) starts a pass there."""
    if not units:
        return
    inside = {module for unit in units[:-1] for module in unit.module.modules()}
    needed = {parameter for bucket in units[-1].buckets for parameter in bucket.parameters}
    for module in units[-1].module.modules():
        if module is units[-1].module or module in inside:
            continue
        holds_units = any(part in inside for part in module.modules())
        if holds_units or any(parameter in needed for parameter in module.parameters()):
            yield module


def _inside_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
