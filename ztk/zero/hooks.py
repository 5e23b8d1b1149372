"""Stage 3: hooks that gather parameters when a unit's forward, a module's attribute or autograd's saved tensors need them.

[Note: Saved parameters]
Autograd saves views of parameters (`weight.t()`) for the backward, but the buffer under them returns to the pool after the forward. So a
saved tensor whose storage is a gathered buffer is packed as (bucket, shape, strides, offset). When the backward unpacks it, the bucket is
gathered and the tensor is rebuilt from its current buffer. This works for any module and for parameters used outside of their own module,
and needs no hooks on outputs.
Hooks on saved tensors do not stack in PyTorch: only the innermost pair is called. So tensors that are no parameters are passed on to the
outer pair, which keeps activation checkpointing around a unit working.
"""

import copy
import functools
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ztk.core.runtime.differentiable import through
from ztk.core.runtime.dispatch_modes import is_traced
from ztk.core.runtime.own_forward import replace_forward
from ztk.core.runtime.saved_tensors import PackedOutside, active_hooks
from ztk.zero.buckets.bucket import Bucket
from ztk.zero.gathering import Gathering, Unit, inside_backward
from ztk.zero.parameters.released import is_released, lacks_values

_DIFFERENTIATES = (torch._C._functorch.TransformType.Grad, torch._C._functorch.TransformType.Jvp)
_innermost_transform, _is_tracing = torch._C._functorch.peek_interpreter_stack, torch._C._is_tracing
_transforms = torch._C._functorch.get_interpreter_stack


@dataclass(frozen=True, kw_only=True, slots=True)
class _SavedParameter:
    """A saved tensor that is a view of a bucket. See [Note: Saved parameters]."""

    bucket: Bucket
    shape: torch.Size
    strides: tuple[int, ...]
    offset: int
    changes: int  # `Gathering.changes` when it was saved


class ModelHooks:
    """Wraps the forwards of `gathering.units` and the parameters of their modules, until `detach`."""

    def __init__(self, gathering: Gathering) -> None:
        self._gathering, self._units = gathering, gathering.units
        self._bucket_of = {
            parameter: bucket for unit in self._units for bucket in unit.buckets for parameter in bucket.parameters
        }
        self._forwards: dict[nn.Module, Callable] = {}  # of the wrapped modules, original or compiled
        for unit in self._units:
            self._wrap(unit.module, unit=unit, is_root=unit is self._units[-1])
        for module in self._entries():
            self._wrap(module, unit=self._units[-1], is_root=True)
        act_on_access(self._modules(), parameters=self._bucket_of, on_access=self._on_access)

    def compile(self, compiler: Callable[[Callable], Callable]) -> None:
        """Compiles the forward of every unit, inside its gathering.

        The root's own code runs between the units and is not compiled, unless the root is the only unit.
        """
        for unit in self._units[:-1] or self._units:
            self._forwards[unit.module] = compiler(self._forwards[unit.module])

    def detach(self) -> None:
        """Removes the hooks from the model. Its sharded parameters remain placeholders."""
        for module, forward in self._forwards.items():
            with suppress(AttributeError):  # a traced module keeps it elsewhere
                del module.forward
            if getattr(module, "forward", None) != forward:  # the module had a forward of its own before
                module.forward = forward
        forget_access(self._modules())

    def _modules(self) -> list[nn.Module]:
        """The model's modules, or none if nothing is sharded."""
        return list(self._units[-1].module.modules()) if self._units else []

    def _entries(self) -> Iterator[nn.Module]:
        """The modules between the root and the units, which callers may call directly.

        Generation calls the model inside its wrappers, a loss may call the head alone: such a call starts a pass.
        """
        if not self._units:
            return
        inside = {module for unit in self._units[:-1] for module in unit.module.modules()}
        needed = {parameter for bucket in self._units[-1].buckets for parameter in bucket.parameters}
        for module in self._modules()[1:]:
            if module in inside:
                continue
            has_units = any(part in inside for part in module.modules())
            if has_units or any(parameter in needed for parameter in module.parameters()):
                yield module

    # Forward

    def _wrap(self, module: nn.Module, *, unit: Unit, is_root: bool) -> None:
        """The forward of `module` opens `unit`. A module outside of the units does so only when it is called directly."""
        if module in self._forwards:  # one module under two names: both units need the same buckets
            return
        self._forwards[module] = module.forward
        is_part = module is not unit.module
        inside = (module,) if is_root else module.modules()  # the root's submodules belong to other units
        gathers_first = not is_part and any(getattr(part, "is_one_unit", False) for part in inside)

        was_inside = False  # another forward, the last time

        @functools.wraps(module.forward)
        def forward(*args, **kwargs):
            nonlocal was_inside
            if self._is_transformed(module):
                return self._forwards[module](*args, **kwargs)
            is_inside = is_part and self._gathering.open_units > 0
            if not inside_backward():
                was_inside = is_inside
            if is_inside:
                return self._forwards[module](*args, **kwargs)
            # Activation checkpointing requires the repeated forward to save as many tensors through its hooks as the first.
            saving = nullcontext() if is_part and inside_backward() and was_inside else self.saved_tensors()
            with self._gathering.open(unit, is_root=is_root), saving:
                output = self._keep_views(self._forwards[module](*args, **kwargs), is_root=is_root)
            return self._gather_before_backward(unit, output=output) if gathers_first else output

        replace_forward(module, by=forward)

    def _is_transformed(self, module: nn.Module) -> bool:
        """Whether a transform such as torch.func.grad differentiates this forward, which needs no gathering: `functional_call` has replaced
        all parameters, or GatheredParameters keeps them.

        Raises RuntimeError inside torch.jit.trace, torch.export and make_fx, and for a transform of sharded parameters, whose backward would
        run after their release.
        """
        is_full = None
        if _is_tracing() or torch.compiler.is_exporting() or (is_traced() and not (is_full := self._has_full(module))):
            raise RuntimeError(
                "torch.jit.trace, torch.export and make_fx of a model at zero stage 3 would record how weights are gathered. Trace it "
                "before initialize, or take a copy: copy.deepcopy(model) inside "
                "deepspeed.zero.GatheredParameters(list(model.parameters())), and trace that"
            )
        if is_full:
            return True
        if _innermost_transform() is None or not any(level.key() in _DIFFERENTIATES for level in _transforms()):
            return False
        if self._has_full(module):
            return True
        raise RuntimeError(
            "torch.func.grad, vjp, jvp, jacrev and hessian of a model at zero stage 3 need full weights, which are released after its forward. "
            "Pass copies of all of them by torch.func.functional_call: {name: parameter.detach().clone() for name, parameter in "
            "model.named_parameters()} inside deepspeed.zero.GatheredParameters(list(model.parameters())), or of "
            "engine.zero.full_parameters(). Or use torch.autograd.grad or torch.autograd.forward_ad on the engine's output, or stages 0 to 2. "
            "torch.vmap works"
        )

    def _has_full(self, module: nn.Module) -> bool:
        return all(self._is_full(parameter) for parameter in module.parameters())

    def _is_full(self, parameter: Tensor) -> bool:
        """Whether `parameter` (any shape) keeps its values after the forward. A transform wraps those that it differentiates."""
        while torch._C._functorch.is_functorch_wrapped_tensor(parameter):
            parameter = torch._C._functorch.get_unwrapped(parameter)
        bucket = self._bucket_of.get(parameter)
        return not lacks_values(parameter) if bucket is None else bucket.residency.pins > 0

    def _keep_views(self, output: object, *, is_root: bool) -> object:
        """Keeps a unit gathered until the model's forward ends if it returns views of its parameters. The model itself returns copies."""

        def keep(value: object) -> object:
            if isinstance(value, Tensor) and (bucket := self._gathering.bucket_under(value)) is not None:
                if is_root:
                    return value.clone()
                bucket.residency.has_returned_view = True
            return value

        return tree_map(keep, output)

    def _gather_before_backward(self, unit: Unit, *, output: object) -> object:
        """Gathers all of a unit (with `is_one_unit`) at the start of its backward.

        Inside such a unit, ranks may read different parameters or none, so they could not agree on which buckets to gather.
        """

        def gather(gradient: Tensor) -> Tensor:
            for bucket in unit.buckets:
                self._gathering.unshard(bucket)
            return gradient

        def mark(value: object) -> object:
            if not isinstance(value, Tensor) or not value.requires_grad:
                return value
            return through(value, forward=lambda x: x.view_as(x), backward=gather)

        return tree_map(mark, output)

    def _on_access(self, parameter: nn.Parameter) -> None:
        """Gathers a parameter that is read in a forward of another unit, or again by activation checkpointing in the backward."""
        if torch.compiler.is_compiling():
            return  # compiled code runs inside an open unit, and must not guard on residency
        bucket = self._bucket_of.get(parameter)
        if bucket is not None and not bucket.residency.is_used and (self._gathering.open_units or inside_backward()):
            self._gathering.unshard(bucket)

    # Saved tensors: see [Note: Saved parameters]

    @contextmanager
    def saved_tensors(self) -> Iterator[None]:
        """Context in which autograd saves the address of a parameter instead of a view of a gathered buffer."""
        outer = active_hooks()
        if not torch.is_grad_enabled() or (outer and outer[1] == self._unpack):
            yield
            return

        def pack(tensor: Tensor) -> object:
            bucket = self._gathering.bucket_under(tensor)
            if bucket is not None:
                return _SavedParameter(
                    bucket=bucket,
                    shape=tensor.shape,
                    strides=tensor.stride(),
                    offset=tensor.storage_offset(),
                    changes=self._gathering.changes,
                )
            return tensor if outer is None else PackedOutside(packed=outer[0](tensor), unpack=outer[1])

        with torch.autograd.graph.saved_tensors_hooks(pack, self._unpack):
            yield

    def _unpack(self, saved: object) -> Tensor:
        if isinstance(saved, _SavedParameter):
            if saved.changes != self._gathering.changes:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified: this is the backward of a forward from before "
                    "the optimizer's step, and the weights have changed since; run the forward again, or the backward before the step"
                )
            self._gathering.unshard(saved.bucket)
            assert saved.bucket.full is not None
            return saved.bucket.full.as_strided(saved.shape, saved.strides, saved.offset)
        return saved.restore() if isinstance(saved, PackedOutside) else saved


def act_on_access(
    modules: Iterable[nn.Module], *, parameters: Collection[nn.Parameter], on_access: Callable[[nn.Parameter], None]
) -> None:
    """Reading one of `parameters`, which are a set or a dict's keys, as an attribute of one of `modules` calls `on_access` first."""
    for module in modules:
        if any(parameter in parameters for parameter in module._parameters.values()):
            module._parameters = _GatherOnAccess(module._parameters, on_access=on_access)


def forget_access(modules: Iterable[nn.Module]) -> None:
    """Undoes `act_on_access`."""
    for module in modules:
        if isinstance(module._parameters, _GatherOnAccess):
            module._parameters = dict(module._parameters)


class _GatherOnAccess(dict):
    """A module's parameters. Reading one calls `on_access`; iterating does not. A copy is a plain dict of gathered parameters only."""

    def __init__(self, parameters: dict, *, on_access: Callable[[nn.Parameter], None]) -> None:
        super().__init__(parameters)
        self._on_access = on_access

    def __getitem__(self, name: str) -> nn.Parameter:
        parameter = super().__getitem__(name)
        if parameter is not None:
            self._on_access(parameter)
        return parameter

    def __deepcopy__(self, memo: dict) -> dict:
        return copy.deepcopy(self._gathered(), memo)

    def __reduce_ex__(self, protocol: object) -> tuple:
        return dict, (self._gathered(),)

    def _gathered(self) -> dict:
        for name, parameter in self.items():
            if parameter is not None and is_released(parameter):
                raise RuntimeError(
                    f"a module with the released parameter {name} cannot be copied or pickled: its values are not on this rank (zero stage 3). "
                    "Do it inside deepspeed.zero.GatheredParameters(list(model.parameters())); engine.save_checkpoint and "
                    "engine.save_16bit_model save without that"
                )
        return dict(self)
