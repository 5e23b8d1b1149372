"""Launches kernels with little host time: compiled programs are found without Triton's binder.

[Note: Cost of a launch]
`kernel[grid](...)` of Triton binds arguments by name, prints the options into a string, and looks the program up by that string: 7 to 9
microseconds for a kernel of a dozen arguments, and small kernels run for less. Here constexprs and options are looked up once per call, or
once in total (`Prepared`). The other arguments are looked up by the specialisation that Triton's own C function computes: type, multiple of
16, value of one, and on AMD GPUs whether it is smaller than 2 GiB. So two calls share a program exactly if Triton would share it, and new
combinations go to Triton. Arguments that the key cannot distinguish (constexprs by position, floats among constexprs, of which 0.0 and -0.0
are equal), hooks of profilers, debugging and the interpreter always use Triton's launch.

[Note: Cost of a repeated launch]
A layer's launches repeat: sizes are the same as in the step before, and so are grid, numbers, constexprs and options. The launcher of a
small op computes these in a function of the sizes alone, which is `kept`, and binds the kernel to them. Such a function cannot miss a size,
because it gets no tensor. Only tensors remain for a launch. Their dtypes and device are looked up, and all addresses are tested to be
multiples of 16, in half the time of Triton's function. Other addresses, AMD devices, where sizes of memory matter, and all exceptions above
go to `Prepared`.

[Note: Sizes that change]
Triton compiles a kernel again for a number that is one, or a multiple of 16. The rows of a serving step, the tokens of its router and the
blocks of its longest sequence are any numbers, and a compilation takes seconds. The kernels of such a step do not specialise these sizes.
"""

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, overload

import triton
from torch import Tensor
from triton import JITFunction, knobs

from ztk.kernels.launch.descriptors import ALIGNMENT, Layout
from ztk.kernels.launch.private import IS_SHORT, driver, native_specialize_impl

_EXACT = frozenset(
    {bool, int, str, type(None), triton.language.dtype}
)  # of constexprs and options: equal ones are the same
MOST_PROGRAMS, MOST_PROGRAMS_ACROSS = 2**31, 2**16 - 1  # of a launch; along its second and third axis
_REST = ((), (1, 1), (1,), ())  # of a grid's three axes, by the number of those that are given
_NO_HOOKS = (None, None, None)  # their metadata, enter hook and exit hook
_WIDE = 1 << 31  # numbers from here on have 64 bits
_NO_LAYOUTS: Mapping[int, Layout] = {}
KEPT = 1024  # sizes of a kernel's launches; of more the ones that were not used for longest are computed again

# Of a function of a launch's sizes, machine and other values that returns it. By position, because names would double the time of a
# look-up (0.26 to 0.52 us). Equal values are one: of 0.0 and -0.0, which an eps or a scale has no use for, the first.
kept = functools.lru_cache(maxsize=KEPT)


class LaunchedKernel(JITFunction):
    """A kernel as `triton.jit` makes it, with a shorter way to a program that it has launched before."""

    def __init__(self, fn: Callable, **options: Any) -> None:
        """fn, options: as for `triton.jit`."""
        super().__init__(fn, **options)
        runtime = [parameter for parameter in self.params if not parameter.is_constexpr]
        self.num_runtime = len(runtime)
        is_first = all(parameter.num < len(runtime) for parameter in runtime)
        self.is_simple = is_first and not any(parameter.has_default for parameter in runtime)
        self.marks = (  # columns of arguments of Triton's function: is_const, specialises the value, and its alignment
            tuple(parameter.is_const for parameter in runtime),
            tuple(not parameter.do_not_specialize for parameter in runtime),
            tuple(not parameter.do_not_specialize_on_alignment for parameter in runtime),
        )
        self._prepared: dict[tuple, Prepared] = {}  # by constexprs and options, and their types

    def __getitem__(self, grid: tuple[int, ...]) -> Callable:
        return functools.partial(self.launch, grid)

    def launch(self, grid: tuple[int, ...], *args: Any, **named: Any) -> Any:
        """Launches a program per element of `grid` on the current device's current stream. args, named: the kernel's arguments."""
        return self.prepared(**named).launch(grid, *args)

    def prepared(self, **named: Any) -> "Prepared":
        """The kernel with its constexprs and options. Returns the same object for the same values, if they can be distinguished."""
        values = tuple(named.values())
        key = (*named, *values, *map(type, values))
        prepared = self._prepared.get(key)
        if prepared is None:
            prepared = Prepared(self, **named)
            if prepared.is_short:
                self._prepared[key] = prepared
        return prepared


class Prepared:
    """A kernel with its constexprs and options: `prepared.launch(grid, *args)` is `kernel[grid](*args, **named)`."""

    def __init__(self, kernel: Any, **named: Any) -> None:
        """kernel: a result of `jit`. named: its constexprs and options."""
        self.kernel, self.named = kernel, named
        self.is_short = (
            isinstance(kernel, LaunchedKernel) and kernel.is_simple and _EXACT.issuperset(map(type, named.values()))
        )
        if self.is_short:
            constexprs = kernel.params[kernel.num_runtime :]
            self.constexprs = tuple(named.get(parameter.name, parameter.default) for parameter in constexprs)
            # By device and kind of arguments: the function that starts the program, its leading arguments, and the program.
            self._programs: dict[tuple, tuple[Callable, tuple, Any]] = {}

    def launch(self, grid: tuple[int, ...], *args: Any) -> Any:
        """Launches the kernel and returns the program."""
        kernel = self.kernel
        if not self.is_short or len(args) != kernel.num_runtime or kernel.pre_run_hooks or _is_observed():
            return self._launch_usually(grid, args)
        active = driver.active
        device = active.get_current_device()
        backend = kernel.device_caches[device][3]
        key = (device, *map(native_specialize_impl, itertools.repeat(backend), args, *kernel.marks))
        found = self._programs.get(key)
        if found is None:
            program = self._launch_usually(grid, args)
            if _is_compiled(program):
                self._programs[key] = program.run, (program.function, program.packed_metadata, *_NO_HOOKS), program
            return program
        start, of_program, program = found
        start(*grid, *_REST[len(grid)], active.get_current_stream(device), *of_program, *args, *self.constexprs)
        return program

    def _launch_usually(self, grid: tuple[int, ...], args: tuple) -> Any:
        """Triton's launch, which compiles new programs."""
        if isinstance(self.kernel, LaunchedKernel):
            return self.kernel.run(*args, grid=grid, warmup=False, **self.named)
        return self.kernel[grid](*args, **self.named)


class Bound:
    """A kernel with all arguments except its tensors: `bound.launch(*tensors)` is `kernel[grid](*tensors, *numbers, **named)`. See
    [Note: Cost of a repeated launch].
    """

    def __init__(
        self, prepared: Prepared, *, grid: tuple[int, ...], numbers: tuple[float, ...], layouts: Mapping[int, Layout]
    ) -> None:
        """Takes the parameters of `bind`."""
        self.prepared, self.grid, self.numbers, self.layouts = prepared, grid, numbers, layouts
        self._axes = *grid, *_REST[len(grid)]
        self._describe = [(place, layout.describe_aligned) for place, layout in layouts.items()]
        # Device and dtypes of aligned tensors, the function that starts the program, and its arguments before and after the tensors.
        # Usually one or two entries: comparing a key takes 0.05 us, a lookup by its hash 0.15.
        self._programs: list[tuple[list, Callable, tuple, tuple]] = []

    def launch(self, *tensors: Tensor | None, count: int | None = None) -> None:
        """tensors: the kernel's first arguments, of any dtype. count: a number after them that changes from launch to launch and that the
        kernel does not specialise."""
        prepared = self.prepared
        if not prepared.is_short or prepared.kernel.pre_run_hooks or _is_observed():
            prepared.launch(self.grid, *self.arguments(tensors, count=count))
            return
        active = driver.active
        device = active.get_current_device()
        key, addresses = [device], 0
        for tensor in tensors:
            if tensor is None:
                key.append(None)
            else:
                key.append(tensor.dtype)
                addresses |= tensor.data_ptr()
        is_usual = not addresses % ALIGNMENT and (count is None or count < _WIDE)
        if is_usual:
            for known, start, of_program, behind in self._programs:
                if known == key:
                    handed = list(tensors) if count is None else [*tensors, count]
                    for place, describe in self._describe:
                        if (tensor := handed[place]) is not None:
                            handed[place] = describe(tensor)
                    start(*self._axes, active.get_current_stream(device), *of_program, *handed, *behind)
                    return
        program = prepared.launch(self.grid, *self.arguments(tensors, count=count))
        if is_usual:
            self._keep(program, key=key, has_count=count is not None)

    def arguments(self, tensors: Sequence[Tensor | None], *, count: int | None) -> list[Any]:
        """All arguments of the kernel except constexprs: tensors (any shape), or descriptors of tensors with a layout, and numbers. Takes
        the arguments of `launch`.

        Raises AssertionError for a tensor with a layout whose address is not a multiple of 16.
        """
        arguments: list[Any] = [*tensors, *(() if count is None else (count,)), *self.numbers]
        for place, layout in self.layouts.items():
            if (tensor := tensors[place]) is not None:
                arguments[place] = layout.describe(tensor)
        return arguments

    def _keep(self, program: Any, *, key: list, has_count: bool) -> None:
        """For tensors of this key."""
        prepared, (device, *dtypes) = self.prepared, key
        num_args, target = len(dtypes) + has_count + len(self.numbers), prepared.kernel.device_caches[device][2]
        if target.backend == "cuda" and num_args == prepared.kernel.num_runtime and _is_compiled(program):
            behind = (*self.numbers, *prepared.constexprs)
            self._programs.append((key, program.run, (program.function, program.packed_metadata, *_NO_HOOKS), behind))


def bind(
    kernel: Any, *numbers: float, grid: tuple[int, ...], layouts: Mapping[int, Layout] = _NO_LAYOUTS, **named: Any
) -> Bound:
    """Binds `kernel`, made by `jit`, to `numbers` (its arguments after the tensors), its grid, constexprs and options.

    layouts: layouts of the tensors that are passed as descriptors, by index. Raises ValueError for a grid outside of CUDA's limits:
    Triton's launcher skips a launch of more than 2^31 programs without an error.
    """
    if math.prod(grid) >= MOST_PROGRAMS or max(grid[1:], default=1) > MOST_PROGRAMS_ACROSS:
        raise ValueError(
            f"{kernel.__name__}: a launch of {' x '.join(map(str, grid))} programs is outside of CUDA's limits; use smaller tensors"
        )
    prepared = kernel.prepared(**named) if isinstance(kernel, LaunchedKernel) else Prepared(kernel, **named)
    return Bound(prepared, grid=grid, numbers=numbers, layouts=layouts)


def _is_compiled(program: Any) -> bool:
    """Whether the program that a launch returned can be launched again. Kernels with a pending `result` are still compiling."""
    return program is not None and not hasattr(program, "result")


def _is_observed() -> object:
    """Whether something is set that Triton's launch looks at in every call."""
    runtime = knobs.runtime
    enter, leave = (
        runtime.launch_enter_hook,
        runtime.launch_exit_hook,
    )  # functions, or chains of hooks that may be empty
    return (
        (enter is not None and getattr(enter, "calls", True))
        or (leave is not None and getattr(leave, "calls", True))
        or runtime.debug
        or knobs.compilation.instrumentation_mode
    )


@overload
def jit(fn: Callable) -> LaunchedKernel: ...


@overload
def jit(*, do_not_specialize: list[str]) -> Callable[[Callable], LaunchedKernel]: ...


def jit(fn: Callable | None = None, **options: Any) -> Any:
    """`triton.jit` with a shorter launch; `triton.jit` itself under TRITON_INTERPRET=1 and without the short path."""
    if fn is None:
        return functools.partial(jit, **options)
    return triton.jit(fn, **options) if knobs.runtime.interpret or not IS_SHORT else LaunchedKernel(fn, **options)
