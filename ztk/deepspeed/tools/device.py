"""`get_accelerator()`: the device with DeepSpeed's names, so that scripts work on GPUs and CPUs.

Names that DeepSpeed shares with `torch.cuda` come from `torch.get_device_module`. That module has few of them for a CPU, so `_Host`
implements
them: without streams, with ranks in place of GPUs, and with the memory of the process and the machine.
"""

import contextlib
import functools
import os
from types import ModuleType
from typing import Any

import torch

from ztk.core.runtime.system_memory import machine_memory, process_memory
from ztk.deepspeed.tools.answers import always, method

# DeepSpeed's name -> name in `torch.get_device_module("cuda")`. Memory is in bytes; a device is given by its number, or None for the
# current.
_OF_TORCH = {
    name: name
    for name in (
        *("current_device", "device_count", "set_device", "synchronize", "is_bf16_supported"),
        *("manual_seed", "manual_seed_all", "initial_seed"),
        *("Stream", "Event", "stream", "current_stream", "default_stream"),
        *("empty_cache", "memory_stats", "reset_peak_memory_stats"),
        *("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"),
    )
} | {
    "memory_cached": "memory_reserved",
    "max_memory_cached": "max_memory_reserved",
    "reset_max_memory_allocated": "reset_peak_memory_stats",
    "reset_max_memory_cached": "reset_peak_memory_stats",
}
DTYPES = {  # by the names that users write
    **dict.fromkeys(("fp32", "float32", "float"), torch.float32),
    **dict.fromkeys(("fp16", "float16", "half"), torch.float16),
    **dict.fromkeys(("bf16", "bfloat16"), torch.bfloat16),
}
_DTYPE_OF_CLASS = {
    "FloatTensor": torch.float,
    "HalfTensor": torch.half,
    "BFloat16Tensor": torch.bfloat16,
    "LongTensor": torch.long,
    "IntTensor": torch.int,
    "DoubleTensor": torch.double,
    "ByteTensor": torch.uint8,
}


class _Host:
    """A CPU with the names of `_OF_TORCH`. Peaks count from the start of the process, regardless of resets."""

    Stream = Event = None
    manual_seed = manual_seed_all = staticmethod(torch.manual_seed)
    initial_seed = staticmethod(torch.initial_seed)

    def current_device(self) -> int:
        return int(os.environ.get("LOCAL_RANK", 0))

    def device_count(self) -> int:
        """Returns the number of ranks on this machine, 1 without a launcher."""
        return int(os.environ.get("LOCAL_WORLD_SIZE", 1))

    def set_device(self, device_index: int) -> None:
        os.environ["LOCAL_RANK"] = str(device_index)

    def is_bf16_supported(self) -> bool:
        return True

    def stream(self, stream: object) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext()

    def _nothing(self, device_index: int | None = None) -> None:
        """Does nothing: a CPU has no queue, stream, cache or counter."""

    synchronize = current_stream = default_stream = empty_cache = reset_peak_memory_stats = _nothing

    def memory_stats(self, device_index: int | None = None) -> dict:
        return {}

    def memory_allocated(self, device_index: int | None = None) -> int:
        return process_memory()["VmRSS"]

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        return process_memory()["VmHWM"]

    memory_reserved, max_memory_reserved = memory_allocated, max_memory_allocated


class Accelerator:
    """The kind of device that this process computes on: "cuda" if torch finds a GPU, else "cpu"."""

    def __init__(self, kind: str) -> None:
        self._name = kind
        self._gpu = kind == "cuda"
        self._module: ModuleType | _Host = torch.get_device_module(kind) if self._gpu else _Host()
        self._communication_backend_name = "nccl" if self._gpu else "gloo"

    def __getattr__(self, name: str) -> Any:
        if name in _OF_TORCH:
            return getattr(self._module, _OF_TORCH[name])
        if name in _DTYPE_OF_CLASS:  # creates tensors on the device like `torch.tensor`
            return functools.partial(torch.tensor, dtype=_DTYPE_OF_CLASS[name], device=self.current_device_name())
        raise AttributeError(
            f"get_accelerator().{name}: not offered by ztk; docs/deepspeed.md lists the supported names"
        )

    # Which device

    def device_name(self, device_index: int | None = None) -> str:
        """Returns its name: "cuda", "cuda:1" or "cpu"."""
        return self._name if device_index is None or not self._gpu else f"{self._name}:{device_index}"

    def device(self, device_index: int | None = None):
        """Returns a context that creates tensors on that GPU; no effect on a CPU."""
        return torch.cuda.device(device_index) if self._gpu else contextlib.nullcontext()

    def current_device_name(self) -> str:
        """Returns the argument for `tensor.to`: "cuda:1" or "cpu"."""
        return self.device_name(self.current_device())

    is_available = always(True, "Always: there is a GPU, or else a CPU.")
    is_fp16_supported = always(True, "Always: GPUs and CPUs compute in float16.")
    get_compile_backend = always("inductor", "The backend of `torch.compile`.")
    visible_devices_envs = always(["CUDA_VISIBLE_DEVICES"], "The environment variables that select a process's GPUs.")
    random = always(torch.random, "torch's module of random numbers.")
    communication_backend_name = method(
        "_communication_backend_name", "Of process groups: nccl for GPUs, gloo for CPUs."
    )

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Returns whether a tensor of any shape is on this kind of device."""
        return tensor.device.type == self._name

    def is_synchronized_device(self) -> bool:
        """Returns whether calls are synchronous."""
        return not self._gpu

    use_host_timers = resolves_data_dependency = handles_memory_backpressure = is_synchronized_device

    # Capabilities

    def supported_dtypes(self) -> list[torch.dtype]:
        """Returns the dtypes that a model may have."""
        bf16 = [torch.bfloat16] if self.is_bf16_supported() else []
        return [torch.float, torch.half, *bf16]

    def is_triton_supported(self) -> bool:
        """Returns whether Triton compiles for the device: a GPU from compute capability 8.0 on."""
        return self._gpu and torch.cuda.get_device_capability()[0] >= 8

    def pin_memory(self, tensor: torch.Tensor, make_copy: bool = True, match_shape: bool = True) -> torch.Tensor:
        """Page-locks a tensor of any shape for faster copies to a GPU. On a CPU returns the tensor itself."""
        return tensor.pin_memory() if self._gpu else tensor

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Returns whether a tensor of any shape is page-locked; False on a CPU."""
        return tensor.is_pinned() if self._gpu else False

    # Random numbers

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        """Sets the generator's state, uint8 [n] on the CPU."""
        if self._gpu:
            torch.cuda.set_rng_state(new_state, "cuda" if device_index is None else device_index)
        else:
            torch.set_rng_state(new_state)

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        """Returns the generator's state, uint8 [n] on the CPU."""
        if self._gpu:
            return torch.cuda.get_rng_state("cuda" if device_index is None else device_index)
        return torch.get_rng_state()

    def default_generator(self, device_index: int) -> torch.Generator:
        """Returns the generator of a GPU, or of the CPU."""
        return torch.cuda.default_generators[device_index] if self._gpu else torch.default_generator

    # Ranges for a profiler

    def range_push(self, msg: str) -> None:
        """Opens a range."""
        if self._gpu:
            torch.cuda.nvtx.range_push(msg)

    def range_pop(self) -> None:
        """Closes the range that was opened last."""
        if self._gpu:
            torch.cuda.nvtx.range_pop()

    # Memory of the GPU, or of the machine, in bytes

    def total_memory(self, device_index: int | None = None) -> int:
        """Returns the total number of bytes."""
        return torch.cuda.mem_get_info(device_index)[1] if self._gpu else machine_memory()["MemTotal"]

    def available_memory(self, device_index: int | None = None) -> int:
        """Returns the number of free bytes."""
        return torch.cuda.mem_get_info(device_index)[0] if self._gpu else machine_memory()["MemAvailable"]


@functools.cache
def get_accelerator() -> Accelerator:
    """Returns the accelerator of this process, always the same object."""
    return Accelerator("cuda" if torch.cuda.is_available() else "cpu")


def is_current_accelerator_supported() -> bool:
    """Returns True: ztk supports all of its devices."""
    return True
