"""Kernels that are launched in little host time: what Triton compiled for a kind of arguments is found again without Triton's binder.

[Note: What a launch costs]
`kernel[grid](...)` of Triton binds arguments by name, prints the options into a string, and looks the program up by that string: 8 to 10
microseconds for a kernel of a dozen arguments, and small kernels run for less. Here the key is a tuple: for each argument that is no constexpr
what Triton's own C function says of it (type, multiple of 16, value of one, on AMD GPUs whether it is smaller than 2 GiB), and the constexprs
and options themselves. So two calls share a program exactly if Triton would share it, and what is new goes to Triton. Arguments that the key
could not tell apart (constexprs by position, floats among constexprs, of which 0.0 and -0.0 are equal), hooks of profilers, debugging and the
interpreter take Triton's way every time.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any, overload

import triton
from triton import knobs
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction, native_specialize_impl

_EXACT = frozenset(
    {bool, int, str, type(None), triton.language.dtype}
)  # of constexprs and options: equal ones are the same
_REST = ((), (1, 1), (1,), ())  # of a grid's three axes, by the number of those that are given


class LaunchedKernel(JITFunction):
    """A kernel as `triton.jit` makes it, with a shorter way to a program that it has launched before."""

    def __init__(self, fn: Callable, **options: Any) -> None:
        """fn, options: as for `triton.jit`."""
        super().__init__(fn, **options)
        runtime = [parameter for parameter in self.params if not parameter.is_constexpr]
        self._num_runtime = len(runtime)
        is_first = all(parameter.num < len(runtime) for parameter in runtime)
        self._is_simple = is_first and not any(parameter.has_default for parameter in runtime)
        self._marks = (  # columns of arguments of Triton's function: is_const, specialises the value, and its alignment
            tuple(parameter.is_const for parameter in runtime),
            tuple(not parameter.do_not_specialize for parameter in runtime),
            tuple(not parameter.do_not_specialize_on_alignment for parameter in runtime),
        )
        # By device and kind of call: what starts the program, what it is started with, the constexprs in order, and the program.
        self._programs: dict[tuple, tuple[Callable, tuple, tuple, Any]] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable:
        return functools.partial(self.launch, grid)

    def launch(self, grid: tuple[int, ...], *args: Any, **named: Any) -> Any:
        """Launches a program per element of `grid` on the current device's current stream; `args`, `named`: as of the kernel."""
        if not self._is_simple or len(args) != self._num_runtime or _is_observed() or self.pre_run_hooks:
            return self.run(*args, grid=grid, warmup=False, **named)
        active = driver.active
        device = active.get_current_device()
        values = tuple(named.values())
        kinds = tuple(map(type, values))
        backend = self.device_caches[device][3]
        arguments = map(native_specialize_impl, itertools.repeat(backend), args, *self._marks)
        key = (device, *arguments, *named, *values, *kinds)
        found = self._programs.get(key)
        if found is None:
            return self._launch_first(key, kinds=kinds, args=args, grid=grid, named=named)
        start, of_program, constexprs, program = found
        start(*grid, *_REST[len(grid)], active.get_current_stream(device), *of_program, *args, *constexprs)
        return program

    def _launch_first(self, key: tuple, *, kinds: tuple[type, ...], args: tuple, grid: tuple, named: dict) -> Any:
        """Triton's launch, which compiles what is not compiled; the next one with this key takes the short way."""
        program = self.run(*args, grid=grid, warmup=False, **named)
        is_ready = program is not None and not hasattr(program, "result")  # which one has that is being compiled
        if is_ready and _EXACT.issuperset(kinds):
            constexprs = self.params[self._num_runtime :]
            in_order = tuple(named.get(parameter.name, parameter.default) for parameter in constexprs)
            no_hooks = (None, None, None)
            self._programs[key] = program.run, (program.function, program.packed_metadata, *no_hooks), in_order, program
        return program


def _is_observed() -> bool:
    """Something is set that Triton's launch looks at in every call."""
    runtime = knobs.runtime
    return (
        _calls(runtime.launch_enter_hook)
        or _calls(runtime.launch_exit_hook)
        or bool(runtime.debug)
        or bool(knobs.compilation.instrumentation_mode)
    )


def _calls(hook: Any) -> bool:
    """`hook` is a function, or a chain of hooks with one in it."""
    return hook is not None and bool(getattr(hook, "calls", True))


@overload
def jit(fn: Callable) -> LaunchedKernel: ...


@overload
def jit(*, do_not_specialize: list[str]) -> Callable[[Callable], LaunchedKernel]: ...


def jit(fn: Callable | None = None, **options: Any) -> Any:
    """`triton.jit` for kernels that launchers start, options included; under TRITON_INTERPRET=1 it is `triton.jit`."""
    if fn is None:
        return functools.partial(jit, **options)
    return triton.jit(fn, **options) if knobs.runtime.interpret else LaunchedKernel(fn, **options)
