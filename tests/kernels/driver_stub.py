"""The calls of the driver by Triton's launch and by ztk's: `python -m tests.kernels.driver_stub [--ops adamw]`.

A libcuda.so.1 without a GPU (`driver_stub.c`, compiled by the C compiler that Triton needs anyway) takes the calls of Triton's own driver and
launchers. Ops run on tensors of the CPU, kernels are compiled for sm_90, and each launch of an op goes to the driver in these ways: by
Triton's `kernel[grid](...)`, by ztk for the first time, and by ztk's two short ways, which skip Triton's binder. The driver must get the same
each time, and parameters must be the op's arguments. Prints a JSON object. The process must not interpret.
"""

import argparse
import ctypes
import itertools
import json
import struct
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.backends.nvidia import driver as nvidia
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

import ztk.kernels
from scripts.bench_launch import cases, further_cases
from tests.kernels.aot.record import specialised
from tests.kernels.planting import planted
from ztk.kernels.launch.library import interpreting, op_names

SOURCE = Path(__file__).with_suffix(".c")
STREAM = 77
FORMATS = {"i32": "<i", "i64": "<q", "u1": "<?", "fp32": "<f"}  # of numbers, by Triton's names of their types
MAP = "<Q5Q4Q5I4B"  # of the stub's tensor maps: address, sizes, strides, box, and four small numbers
MAP_DTYPES = {torch.float16: 6, torch.bfloat16: 9}  # CUtensorMapDataType
SIZES = ("grid", "block", "cluster", "shared", "stream", "early", "cooperative", "spread", "unknown", "program")


class Received(NamedTuple):
    """A launch as the driver gets it. parameters: their bytes, in as many as the compiled kernel reads."""

    sizes: tuple[int, ...]  # three each of grid, block and cluster, then the others of `SIZES`
    parameters: tuple[bytes, ...]

    def differences(self, other: "Received") -> Iterator[str]:
        """Names the differences."""
        mine, its = self.named(), other.named()
        yield from (f"{name} {mine[name]} is {its[name]}" for name in SIZES if mine[name] != its[name])
        for number, (one, two) in enumerate(itertools.zip_longest(self.parameters, other.parameters)):
            if one != two:
                yield f"parameter {number} {one and one.hex()} is {two and two.hex()}"

    def named(self) -> dict[str, Any]:
        s = self.sizes
        return dict(zip(SIZES, (s[:3], s[3:6], s[6:9], *s[9:]), strict=True))


def sizes_of_parameters(cubin: Callable[[int, int], bytes]) -> list[int]:
    """Bytes of each parameter of a cubin's kernel. cubin: (first byte, number) -> bytes."""
    # An ELF file of 64 bits, see tests/kernels/aot/disassemble.py. A kernel's `.nv.info.NAME` is a list of attributes: format, name, and
    # either a value in the next two bytes or (format 4) their number of bytes behind. Of a parameter (name 0x17): 4 bytes, its number, its
    # place, and 4 bytes of which the upper 14 bits are its size.
    head = cubin(0, 64)
    (table,), (number, of_names) = struct.unpack_from("<Q", head, 0x28), struct.unpack_from("<HH", head, 0x3C)
    sections = [struct.unpack("<IIQQQQ", cubin(table + 64 * index, 40)) for index in range(number)]
    names = sections[of_names][4]
    (info,) = [cubin(row[4], row[5]) for row in sections if cubin(names + row[0], 9) == b".nv.info."]
    found, place = {}, 0
    while place < len(info):
        kind, name, value = struct.unpack_from("<BBH", info, place)
        if (kind, name) == (4, 0x17):
            _, ordinal, _, flags = struct.unpack_from("<IHHI", info, place + 4)
            found[ordinal] = flags >> 18
        place += 4 + (value if kind == 4 else 0)
    return [found[ordinal] for ordinal in range(len(found))]


@contextmanager
def stub() -> Iterator[list[Received]]:
    """Triton's driver works on the stub. Yields a list that grows by the launches that the stub gets."""
    received: list[Received] = []

    def note(sizes: Any, image: int, parameters: Any) -> None:
        every = sizes_of_parameters(lambda first, number: ctypes.string_at(image + first, number))
        values = tuple(ctypes.string_at(parameters[place], size) for place, size in enumerate(every))
        received.append(Received((*sizes[:15], image), values))

    pointers = ctypes.POINTER(ctypes.c_uint64), ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p)
    watch = ctypes.CFUNCTYPE(None, *pointers)(note)
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(knobs.nvidia, "libcuda_path", folder):
        library, include = Path(folder) / "libcuda.so.1", Path(nvidia.__file__).parent / "include"
        options = ["-shared", "-fPIC", f"-I{include}", "-Wl,-soname,libcuda.so.1"]
        command = ["cc", *options, str(SOURCE), "-o", str(library)]
        subprocess.run(command, check=True)
        ctypes.CDLL(str(library)).stub_watch(watch)  # later loads by name find this one
        made = nvidia.CudaDriver()
        made.get_current_device, made.get_current_stream = lambda: 0, lambda device: STREAM  # of torch's CUDA build
        made.get_device_capability = lambda device: (9, 0)
        with mock.patch.object(driver, "_active", made):
            yield received


def handed(kernel: JITFunction, args: tuple, named: dict, *, grid: tuple[int, ...]) -> list[bytes | TensorDescriptor]:
    """The value that each parameter of a kernel must hold for these arguments."""
    signature, found = specialised(kernel, args, named, grid=grid).signature, []
    for name, value in zip(kernel.arg_names, args, strict=False):
        if isinstance(value, Tensor):
            found.append(struct.pack("<Q", value.data_ptr()))
        elif isinstance(value, TensorDescriptor):
            found += [value, *(struct.pack("<i", size) for size in value.shape)]
            found += [struct.pack("<q", stride) for stride in value.strides]
        elif signature[name] != "constexpr":
            found.append(struct.pack(FORMATS[signature[name]], value))
    return [*found, bytes(8), bytes(8)]  # memory for the kernel and for a profiler, which none asks for


def holds(parameter: bytes, value: bytes | TensorDescriptor) -> bool:
    """Whether a parameter is this value, or the map of this tensor."""
    if isinstance(value, bytes):
        return parameter == value
    if len(parameter) != 128:
        return False
    *numbers, dtype, rank, _, fill = struct.unpack_from(MAP, parameter)
    address, sizes, strides, box = numbers[0], numbers[1:6], numbers[6:10], numbers[10:15]
    bytes_between = [stride * value.base.element_size() for stride in value.strides[:-1]]
    return (
        (address, dtype, rank, fill) == (value.base.data_ptr(), MAP_DTYPES[value.base.dtype], len(value.shape), 0)
        and sizes[:rank] == value.shape[::-1]
        and strides[: rank - 1] == bytes_between[::-1]
        and all(whole % part == 0 for whole, part in zip(value.block_shape[::-1], box[:rank], strict=True))
    )


class Comparison:
    """Hands each launch of a copy of ztk.kernels to the driver in all ways, and compares.

    faults: a line each. kernels: the names of those launched. counts: of launches.
    """

    def __init__(self, package: ModuleType, *, received: list[Received]) -> None:
        jit = sys.modules[f"{package.__name__}.launch.jit"]
        self.bound, self.prepared, self.received = jit.Bound, jit.Prepared, received
        self._launch, self._launch_prepared, self._run = jit.Bound.launch, jit.Prepared.launch, JITFunction.run
        self.faults, self.kernels, self.counts = [], set(), Counter()
        self._is_inside, self._binds = False, 0

    @contextmanager
    def comparing(self) -> Iterator[None]:
        """Inside, launches are compared."""

        def run(kernel: JITFunction, *args: Any, **named: Any) -> Any:
            self._binds += 1
            return self._run(kernel, *args, **named)

        def launch(bound: Any, *tensors: Tensor | None, count: int | None = None) -> None:
            args, call = bound.arguments(tensors, count=count), partial(self._launch, bound, *tensors, count=count)
            again = partial(self._launch_prepared, bound.prepared, bound.grid, *args)
            self._compare(bound.prepared, bound.grid, args, {"first": call, "kept": call, "prepared": again})

        def launch_prepared(prepared: Any, grid: tuple[int, ...], *args: Any) -> Any:
            call = partial(self._launch_prepared, prepared, grid, *args)
            return call() if self._is_inside else self._compare(prepared, grid, args, {"first": call, "prepared": call})

        with (
            mock.patch.object(JITFunction, "run", run),
            mock.patch.object(self.bound, "launch", launch),
            mock.patch.object(self.prepared, "launch", launch_prepared),
        ):
            yield

    def _compare(self, prepared: Any, grid: tuple[int, ...], args: Sequence[Any], ways: dict[str, Callable]) -> None:
        kernel, named = prepared.kernel, prepared.named
        usually = self._sent(partial(self._run, kernel, *args, grid=grid, warmup=False, **named))
        wanted = handed(kernel, tuple(args), named, grid=grid)
        self.kernels.add(kernel.__name__)
        self.counts.update(
            launches=1, early=usually.named()["early"], maps=sum(len(each) == 128 for each in usually.parameters)
        )
        if usually.named()["grid"] != (*grid, 1, 1)[:3] or len(usually.parameters) != len(wanted):
            self.faults.append(f"{kernel.__name__} by Triton: grid {grid}, {len(wanted)} parameters, and {usually}")
        for number, (parameter, value) in enumerate(zip(usually.parameters, wanted, strict=False)):
            if not holds(parameter, value):
                self.faults.append(f"{kernel.__name__} by Triton: parameter {number} is {parameter.hex()}, not {value}")
        for way, call in ways.items():
            self._binds = 0
            try:
                sent = self._sent(call)
            except RuntimeError as error:  # the driver refuses it
                self.faults.append(f"{kernel.__name__} by the {way} way: {error}")
                continue
            self.faults += (f"{kernel.__name__} by the {way} way: {each}" for each in usually.differences(sent))
            if way != "first" and self._binds:
                self.faults.append(f"{kernel.__name__} by the {way} way: through Triton's binder")

    def _sent(self, call: Callable[[], object]) -> Received:
        before, self._is_inside = len(self.received), True
        try:
            call()
        finally:
            self._is_inside = False
        (sent,) = self.received[before:]
        return sent


def work(ops: Sequence[str]) -> Iterator[tuple[str, tuple]]:
    """(op, arguments) of every op, or of these."""
    wide, ones = torch.zeros(3, 20_000, dtype=torch.bfloat16), torch.ones(3)
    more = {  # a wide norm has kernels of its own; the others' public functions use torch on a CPU
        "a wide norm": ("rms_norm", (wide, None, wide[0], 1e-5)),
        "geglu": ("geglu", (wide, wide)),
        "geglu backward": ("geglu_backward", (wide, wide, wide)),
        "scale_rows": ("scale_rows", (wide, ones)),
    }
    every = cases() | more | ({} if ops else further_cases())
    return ((op, args) for op, args in every.values() if not ops or op in ops)


def compared(package: ModuleType, *, jobs: Sequence[tuple[str, tuple]], received: list[Received]) -> Comparison:
    """The launches of the package's ops for these arguments on an H100."""
    library, machine = (sys.modules[f"{package.__name__}.launch.{name}"] for name in ("library", "machine"))
    comparison = Comparison(package, received=received)
    with machine.assume(machine.MACHINES["sm_90"]), torch.no_grad(), comparison.comparing():
        for op, args in jobs:
            library.LAUNCHERS[op](*args)
    return comparison


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", nargs="+", default=(), help="only these")
    plants = {"nargs": 3, "action": "append", "default": [], "metavar": ("FILE", "OLD", "NEW")}
    parser.add_argument(
        "--plant", **plants, help="compare a copy of ztk.kernels with this replacement; prints the faults of each"
    )
    options = parser.parse_args()
    if interpreting():
        parser.error("TRITON_INTERPRET=1 replaces the compiler; run without it")
    jobs = list(work(options.ops))
    with stub() as received:
        if options.plant:
            found = []
            for file, old, new in options.plant:
                with (
                    tempfile.TemporaryDirectory() as folder,
                    planted(Path(folder), file=file, old=old, new=new) as copy,
                ):
                    found.append(compared(copy, jobs=jobs, received=received).faults)
            print(json.dumps(found))
            return 0
        comparison = compared(ztk.kernels, jobs=jobs, received=received)
    ops = {op for op, _ in jobs}
    counts = {**comparison.counts, "ops": len(ops), "kernels": len(comparison.kernels)}
    without = sorted(set(op_names()) - ops)
    print(json.dumps({"triton": triton.__version__, **counts, "without": without, "faults": comparison.faults}))
    return int(bool(comparison.faults))


if __name__ == "__main__":
    sys.exit(main())
