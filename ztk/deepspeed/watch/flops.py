"""The FLOPs profiler: floating-point operations, multiply-accumulates and seconds of every module's forward.

Operations are counted as torch executes them, below autograd: matrix products, convolutions and attention by the formulas of
torch.utils.flop_counter, and the usual elementwise operations and norms. A multiply-accumulate is two operations of a product. Custom
kernels are not counted.
"""

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import sdpa_flop_count

from ztk.core.runtime.flop_formulas import flop_registry
from ztk.deepspeed.tools.timers import now
from ztk.deepspeed.watch.flops_text import (
    ProfileHead,
    StageProfile,
    duration_to_string,
    macs_to_string,
    module_table,
    number_to_string,
    params_to_string,
    pipeline_text,
    profile_text,
)
from ztk.nn.linear import Linear

_FLASH_ON_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
# Operations per input element. A norm computes the mean and the variance, and then scales.
_PER_INPUT = {
    "native_layer_norm": 5,
    "native_group_norm": 5,
    "native_batch_norm": 5,
    "_native_batch_norm_legit": 5,
    "_fused_rms_norm": 4,
    **dict.fromkeys(("_softmax", "_log_softmax", "mean", "sum", "var", "cumsum"), 1),
}
_PER_OUTPUT = (
    *("add", "sub", "rsub", "mul", "div", "neg", "reciprocal", "pow", "sqrt", "rsqrt", "exp", "log", "sin", "cos"),
    *("addcmul", "addcdiv", "maximum", "minimum", "clamp", "abs", "square"),
    *("relu", "leaky_relu", "prelu", "_prelu_kernel", "elu", "gelu", "silu", "sigmoid", "tanh", "hardtanh", "softplus"),
)


@dataclass(slots=True)
class ModuleCost:
    """Cost of a module's forwards: its own operations, without submodules, and the seconds including submodules."""

    flops: int = 0
    macs: int = 0
    seconds: float = 0.0


class FlopsProfiler:
    """Profiles the forwards between `start_profile` and `stop_profile`. `end_profile` clears the results.

    ds_engine: a DeepSpeedEngine whose sizes and phase times are printed too. recompute_fwd_factor: number of forwards that a backward
    repeats.
    """

    def __init__(self, model: nn.Module, ds_engine: Any = None, recompute_fwd_factor: float = 0.0) -> None:
        self.model, self.ds_engine, self.recompute_fwd_factor = model, ds_engine, recompute_fwd_factor
        self.started = False
        self.costs: dict[nn.Module, ModuleCost] = {}
        self._handles: list = []
        self._counter: _Counter | None = None

    def start_profile(self, ignore_list: Sequence[type] | None = None, *, once: bool = False) -> None:
        """ignore_list: classes of modules without their own row. once: stops at the end of the model's first forward."""
        self.stop_profile()
        self.reset_profile()
        self._counter = _Counter(self.costs)
        ignored = set(ignore_list or ())
        if nn.Linear in ignored:
            ignored.add(Linear)  # an engine on the CPU replaces linear layers by these
        for module in self.model.modules():
            if type(module) not in ignored:
                self._handles.append(module.register_forward_pre_hook(self._counter.enter))
                self._handles.append(module.register_forward_hook(self._counter.leave, always_call=True))
        if once:
            self._handles.append(self.model.register_forward_hook(lambda *_: self.stop_profile(), always_call=True))
        self._counter.__enter__()
        torch.zeros(1).neg()  # run the mode's first operation now, because it takes seconds
        self.started = True

    def stop_profile(self) -> None:
        """Stops counting and keeps the costs."""
        if self._counter is None:
            return
        self._counter.__exit__(None, None, None)
        for handle in self._handles:
            handle.remove()
        self._handles, self._counter = [], None

    def reset_profile(self) -> None:
        """Sets all costs to zero."""
        self.costs.clear()
        self.costs.update((module, ModuleCost()) for module in self.model.modules())

    def end_profile(self) -> None:
        """Stops counting and clears the costs."""
        self.stop_profile()
        self.costs.clear()
        self.started = False

    def get_total_flops(self, as_string: bool = False) -> int | str:
        """Returns the operations of the model's forward."""
        return _shown(self.of(self.model).flops, as_string and number_to_string)

    def get_total_macs(self, as_string: bool = False) -> int | str:
        """Returns the multiply-accumulates of the model's forward."""
        return _shown(self.of(self.model).macs, as_string and macs_to_string)

    def get_total_duration(self, as_string: bool = False) -> float | str:
        """Returns the seconds of the model's forward."""
        return _shown(self.of(self.model).seconds, as_string and duration_to_string)

    def get_total_params(self, as_string: bool = False) -> int | str:
        """Returns the number of elements of the model's parameters."""
        return _shown(parameters_of(self.model), as_string and params_to_string)

    def of(self, module: nn.Module) -> ModuleCost:
        """Returns a module's costs including its submodules. The time of a pure container is the sum over its children."""
        own = [self.costs.get(part, ModuleCost()) for part in module.modules()]
        seconds = self.costs.get(module, ModuleCost()).seconds or sum(
            self.of(child).seconds for child in module.children()
        )
        return ModuleCost(flops=sum(f.flops for f in own), macs=sum(f.macs for f in own), seconds=seconds)

    def print_model_profile(
        self,
        profile_step: int = 1,
        module_depth: int = -1,
        top_modules: int = 1,
        detailed: bool = True,
        output_file: str | None = None,
    ) -> None:
        """Prints a summary and a table: of every module if detailed, else of the most expensive ones at every depth.

        output_file: defaults to the terminal.
        """
        if not self.started:
            return
        rows = self._table(module_depth=module_depth, top_modules=top_modules, detailed=detailed)
        text = profile_text(self.model, of=self.of, parameters=parameters_of, head=self._head(profile_step), rows=rows)
        _write(text, output_file=output_file)

    def stage_profile(self, *, layers: range, module_depth: int, top_modules: int, detailed: bool) -> StageProfile:
        """Returns a pipeline rank's profile of its layers, for one micro-batch."""
        total = self.of(self.model)
        return StageProfile(
            layers=layers,
            params=self.get_total_params(),
            flops=total.flops,
            macs=total.macs,
            seconds=total.seconds,
            lines=tuple(self._table(module_depth=module_depth, top_modules=top_modules, detailed=detailed)),
        )

    def print_pipeline_profile(
        self, stages: Sequence[StageProfile], *, profile_step: int, output_file: str | None = None
    ) -> None:
        """Prints the sums over all stages, and each stage's profile. output_file: defaults to the terminal."""
        _write(pipeline_text(stages, head=self._head(profile_step)), output_file=output_file)

    def print_model_aggregated_profile(self, module_depth: int = -1, top_modules: int = 1) -> None:
        """Prints the most expensive modules at every depth."""
        print("\n".join(self._table(module_depth=module_depth, top_modules=top_modules, detailed=False)), flush=True)

    def _table(self, *, module_depth: int, top_modules: int, detailed: bool) -> list[str]:
        return module_table(
            self.model,
            of=self.of,
            parameters=parameters_of,
            module_depth=module_depth,
            top_modules=top_modules,
            detailed=detailed,
        )

    def _head(self, step: int) -> ProfileHead:
        engine = self.ds_engine
        if engine is None:
            return ProfileHead(step=step)
        accumulation, times = engine.gradient_accumulation_steps(), engine.get_wall_clock_timers()
        return ProfileHead(
            step=step,
            world_size=engine.world_size,
            data_parallel=engine.dp_world_size,
            model_parallel=engine.mp_world_size,
            micro_batch=engine.train_micro_batch_size_per_gpu(),
            accumulation=accumulation,
            milliseconds={
                name: times[name] / (1 if name == "step" else accumulation)
                for name in ("fwd", "bwd", "step")
                if name in times
            },
            backward_factor=2 + self.recompute_fwd_factor,
        )


def get_model_profile(
    model: nn.Module,
    input_shape: tuple[int, ...] | None = None,
    args: Sequence = (),
    kwargs: Mapping[str, object] | None = None,
    print_profile: bool = True,
    detailed: bool = True,
    module_depth: int = -1,
    top_modules: int = 1,
    warm_up: int = 1,
    as_string: bool = True,
    output_file: str | None = None,
    ignore_modules: Sequence[type] | None = None,
    mode: str = "forward",
) -> tuple:
    """Returns (flops, macs, params) of one forward of the model in eval mode, as numbers or texts.

    input_shape: of one tensor in the model's dtype. Alternatively, args and kwargs are the model's arguments. mode: forward or generate.

    Raises ValueError without any arguments for the model.
    """
    kwargs = dict(kwargs or {})
    if mode not in ("forward", "generate"):
        raise ValueError(f"mode={mode!r}: must be forward or generate")
    if input_shape is not None:
        like = next(model.parameters(), torch.empty(()))
        args = [torch.ones(tuple(input_shape), dtype=like.dtype, device=like.device)]
    if not args and not kwargs:
        raise ValueError("input_shape, args and kwargs: give one of them, the model is called with it")
    call = model if mode == "forward" else model.generate
    model.eval()
    for _ in range(warm_up):
        # pyrefly: ignore[not-callable]  # nn.Module types every attribute as Tensor or Module
        call(*args, **kwargs)
    profiler = FlopsProfiler(model)
    profiler.start_profile(ignore_list=ignore_modules)
    # pyrefly: ignore[not-callable]  # nn.Module types every attribute as Tensor or Module
    call(*args, **kwargs)
    profiler.stop_profile()
    found = (
        profiler.get_total_flops(as_string),
        profiler.get_total_macs(as_string),
        profiler.get_total_params(as_string),
    )
    if print_profile:
        profiler.print_model_profile(
            profile_step=warm_up,
            module_depth=module_depth,
            top_modules=top_modules,
            detailed=detailed,
            output_file=output_file,
        )
    profiler.end_profile()
    return found


def parameters_of(module: nn.Module) -> int:
    """Returns the number of elements of the full parameters, sharded or not."""
    return sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in module.parameters())


def _shown(value: float, text: Callable | Literal[False]) -> Any:
    return text(value) if text else value


def _write(text: str, *, output_file: str | None) -> None:
    if output_file:
        path = Path(output_file)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    else:
        print(text, flush=True)


class _Counter(TorchDispatchMode):
    """Attributes every operation to the module whose forward is running. Operations outside, for example in a backward, do not
    count.
    """

    def __init__(self, costs: dict[nn.Module, ModuleCost]) -> None:
        super().__init__()
        self._costs = costs
        self._open: list[tuple[nn.Module, float]] = []
        self._own_seconds = 0.0  # spent on counting; not part of any module's time

    def enter(self, module: nn.Module, inputs: tuple) -> None:
        self._open.append((module, now() - self._own_seconds))

    def leave(self, module: nn.Module, inputs: tuple, output: object) -> None:
        if not self._open or self._open[-1][0] is not module:
            return  # a forward of a parent raised
        _, start = self._open.pop()
        self._costs[module].seconds += now() - self._own_seconds - start

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        began = time.perf_counter()
        kwargs = kwargs or {}
        if self._open and _is_made_of_parts(func):
            with self:
                return func.decompose(*args, **kwargs)
        called = time.perf_counter()
        out = func(*args, **kwargs)
        done = time.perf_counter()
        if self._open:
            costs, operations = self._costs[self._open[-1][0]], _count(func, args=args, kwargs=kwargs, out=out)
            costs.flops += operations
            costs.macs += operations // 2 if _is_product(func) else 0
        self._own_seconds += (called - began) + (time.perf_counter() - done)
        return out


@functools.cache
def _is_made_of_parts(func: torch._ops.OpOverload) -> bool:
    """Returns whether the function decomposes. In inference mode such a function arrives undecomposed, otherwise as its parts."""
    if _is_product(func) or _name(func) in (*_PER_INPUT, *_PER_OUTPUT):
        return False
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


def _is_product(func: torch._ops.OpOverload) -> bool:
    return func._overloadpacket in flop_registry or func._overloadpacket is _FLASH_ON_CPU


def _name(func: torch._ops.OpOverload) -> str:
    """Returns the name without the suffix of in-place operations."""
    return func._overloadpacket.__name__.removesuffix("_")


def _count(func: torch._ops.OpOverload, *, args: tuple, kwargs: dict, out: object) -> int:
    """Returns the operations of one call."""
    if func._overloadpacket is _FLASH_ON_CPU:
        return sdpa_flop_count(*(tensor.shape for tensor in args[:3]))
    if _is_product(func):
        return flop_registry[func._overloadpacket](*args, **kwargs, out_val=out)
    name = _name(func)
    tensor, each = (args[0], _PER_INPUT[name]) if name in _PER_INPUT else (out, int(name in _PER_OUTPUT))
    return each * tensor.numel() if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() else 0
