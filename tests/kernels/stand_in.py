"""A driver of Triton without a GPU: launches reach it as they would reach one. Tensors are on the CPU; their addresses are real."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from ztk.kernels.launch import library, memory


class Driver:
    """The device and its stream are 0, unless a test changes them."""

    device = stream = 0

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 77 + device + 10 * self.stream

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


class Program:
    """Replaces a compiled kernel. key: Triton's key of the compilation."""

    packed_metadata, function = "metadata", "function"

    def __init__(self, key: str, *, start: Callable[..., None]) -> None:
        self.key, self._start = key, start

    def run(self, *args: Any) -> None:
        self._start(self, *args)

    def launch_metadata(self, grid: tuple, stream: int, *args: Any) -> None: ...


@contextmanager
def launching(start: Callable[..., None]) -> Iterator[Driver]:
    """Inside, kernels are not compiled and launch on a `Driver`, and every tensor is in its memory.

    start: called with the `Program` and the arguments of Triton's launcher.
    """

    def compiled(kernel: JITFunction, key: str, *args: Any) -> Program:
        program = Program(key, start=start)
        kernel.device_caches[driver.active.get_current_device()][0][key] = program
        return program

    stand_in = Driver()
    with (
        mock.patch.object(JITFunction, "_do_compile", compiled),
        mock.patch.object(driver, "_active", stand_in),
        mock.patch.object(library, "is_on_current_gpu", lambda tensor: True),
        mock.patch.dict(memory._FAST, {False: torch._C._dynamo.guards._empty_strided_cpu}),
    ):
        yield stand_in
