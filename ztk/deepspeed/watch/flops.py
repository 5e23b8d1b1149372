"""The FLOPs profiler: operations of a model's matrix products, by torch.utils.flop_counter.

A multiply-accumulate is two operations of a product. Elementwise operations, norms and custom kernels are not counted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

import ztk.core.runtime.flop_formulas  # noqa: F401  # registers formulas that torch lacks
from ztk.deepspeed.tools.timers import now

_SCALES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "K"), (1, ""))


def _flash_on_cpu(query: torch.Size, key: torch.Size, value: torch.Size, *_: object, **__: object) -> int:
    return sdpa_flop_count(query, key, value)


_FORMULAS = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _flash_on_cpu}


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """A forward of a model or of a pipeline stage, for one micro-batch. table: operations of each module."""

    params: int
    flops: int
    seconds: float
    table: str


class FlopsProfiler:
    """Profiles the forwards between `start_profile` and `stop_profile`. `end_profile` clears the results.

    ds_engine, recompute_fwd_factor: accepted as in DeepSpeed's class, and unused: the engine's phase times are `wall_clock_breakdown`'s.
    """

    def __init__(self, model: nn.Module, ds_engine: Any = None, recompute_fwd_factor: float = 0.0) -> None:
        del ds_engine, recompute_fwd_factor
        self.model, self.started = model, False
        self._counter: FlopCounterMode | None = None
        self._handle: Any = None
        self._since, self._seconds, self._runs = 0.0, 0.0, False

    def start_profile(self, ignore_list: Sequence[type] | None = None, *, once: bool = False) -> None:
        """Starts counting. once: stops at the end of the model's first forward. ignore_list: accepted, and unused."""
        del ignore_list
        self.stop_profile()
        self._counter = FlopCounterMode(display=False, depth=10**3, custom_mapping=_FORMULAS)
        self._counter.__enter__()
        torch.zeros(1).neg()  # the mode's first operation takes seconds, so it runs before the clock
        if once:
            self._handle = self.model.register_forward_hook(lambda *_: self.stop_profile(), always_call=True)
        self.started, self._runs, self._since = True, True, now()

    def stop_profile(self) -> None:
        """Stops counting and keeps the counts."""
        if self._counter is None or not self._runs:
            return
        self._seconds, self._runs = now() - self._since, False
        self._counter.__exit__(None, None, None)
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def end_profile(self) -> None:
        """Stops counting and clears the counts."""
        self.stop_profile()
        self._counter, self._seconds, self.started = None, 0.0, False

    def profile(self, *, depth: int = -1) -> Profile:
        """Returns the counts so far. depth: depth of the modules in the table, -1 for all."""
        return Profile(
            params=parameters_of(self.model),
            flops=0 if self._counter is None else self._counter.get_total_flops(),
            seconds=self._seconds,
            table="" if self._counter is None else _table(self._counter, depth=depth),
        )

    def get_total_flops(self, as_string: bool = False) -> int | str:
        """Returns the operations of the model's products."""
        return _shown(self.profile().flops, as_string=as_string)

    def get_total_macs(self, as_string: bool = False) -> int | str:
        """Returns the multiply-accumulates of the model's products."""
        return _shown(self.profile().flops // 2, as_string=as_string, unit="MACs")

    def get_total_params(self, as_string: bool = False) -> int | str:
        """Returns the number of elements of the model's parameters."""
        return _shown(parameters_of(self.model), as_string=as_string)

    def get_total_duration(self, as_string: bool = False) -> float | str:
        """Returns the seconds between start and stop."""
        return f"{1e3 * self._seconds:.4g} ms" if as_string else self._seconds

    def print_model_profile(
        self,
        profile_step: int = 1,
        module_depth: int = -1,
        top_modules: int = 1,
        detailed: bool = True,
        output_file: str | None = None,
    ) -> None:
        """Prints the counts, and those of each module. output_file: defaults to the terminal. top_modules: accepted, and unused."""
        del top_modules
        if self.started:
            depth = module_depth if detailed else max(module_depth, 1)
            print_profiles([self.profile(depth=depth)], step=profile_step, output_file=output_file)


def print_profiles(stages: Sequence[Profile], *, step: int, output_file: str | None = None) -> None:
    """Prints the sums over all pipeline stages and the table of each. step: the number of the profiled step."""
    flops, seconds = sum(stage.flops for stage in stages), sum(stage.seconds for stage in stages)
    lines = [
        f"FLOPs profile of step {step}: one micro-batch, {len(stages)} pipeline stage{'s' * (len(stages) > 1)}",
        f"params: {number_to_string(sum(stage.params for stage in stages))}",
        f"fwd MACs: {number_to_string(flops // 2)}MACs",
        f"fwd FLOPs: {number_to_string(flops)}",
        f"fwd latency: {1e3 * seconds:.4g} ms",
        f"fwd FLOPS: {number_to_string(flops / seconds if seconds else 0)}FLOPS",
    ]
    for number, stage in enumerate(stages):
        lines += ["", *([f"Stage {number}:"] if len(stages) > 1 else []), stage.table]
    text = "\n".join(lines)
    if output_file:
        path = Path(output_file)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    else:
        print(text, flush=True)


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

    input_shape: shape of one tensor in the model's dtype. Alternatively, args and kwargs are the model's arguments. mode: forward or generate.

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
    call: Any = model if mode == "forward" else model.generate
    model.eval()
    for _ in range(warm_up):
        call(*args, **kwargs)
    profiler = FlopsProfiler(model)
    profiler.start_profile(ignore_list=ignore_modules)
    try:
        call(*args, **kwargs)
    finally:
        profiler.stop_profile()
    found = (
        profiler.get_total_flops(as_string),
        profiler.get_total_macs(as_string),
        profiler.get_total_params(as_string),
    )
    if print_profile:
        profiler.print_model_profile(warm_up, module_depth, top_modules, detailed, output_file)
    profiler.end_profile()
    return found


def _table(counter: FlopCounterMode, *, depth: int) -> str:
    """One row per module with products, down to `depth` (-1 for all): its operations and their share."""
    counts = {name: sum(ops.values()) for name, ops in counter.get_flop_counts().items()}
    total = counts.pop("Global", 0)
    shown = {name: flops for name, flops in counts.items() if depth < 0 or name.count(".") <= depth}
    width = max(map(len, shown), default=0)
    share = 100 / total if total else 0.0
    return "\n".join(f"{name:<{width}}  {number_to_string(n):>10}  {n * share:6.2f}%" for name, n in shown.items())


def parameters_of(module: nn.Module) -> int:
    """Returns the number of elements of the full parameters, sharded or not."""
    return sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in module.parameters())


def number_to_string(value: float) -> str:
    """Returns the number with the largest fitting prefix: `1.54 K`."""
    scale, prefix = next((each for each in _SCALES if value >= each[0]), (1, ""))
    return f"{value / scale:.2f} {prefix}" if prefix else f"{value:g} "


def _shown(value: int, *, as_string: bool, unit: str = "") -> int | str:
    return (number_to_string(value) + unit).rstrip() if as_string else value
