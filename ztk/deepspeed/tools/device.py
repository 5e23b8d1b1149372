"""`get_accelerator()`: the device under DeepSpeed's names, so that a script need not say whether it is a GPU or a CPU.

Names that DeepSpeed shares with `torch.cuda` are those of `torch.get_device_module`. For a CPU that module has few of them, so `_Host` answers
with what is true there: no streams, ranks in the place of GPUs, the memory of the process and of the machine.
"""

import contextlib
import functools
import os
from types import ModuleType
from typing import Any

import torch

from ztk.core.runtime.system_memory import machine_memory, process_memory
from ztk.deepspeed.tools.answers import always, method

# DeepSpeed's name -> that of `torch.get_device_module("cuda")`. Memory is in bytes, a device is its number, None is the one in use.
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
    """A CPU under the names of `_OF_TORCH`. Maxima count from the start of the process, whatever was reset."""

    Stream = Event = None
    manual_seed = manual_seed_all = staticmethod(torch.manual_seed)
    initial_seed = staticmethod(torch.initial_seed)

    def current_device(self) -> int:
        return int(os.environ.get("LOCAL_RANK", 0))

    def device_count(self) -> int:
        """The ranks of this machine, 1 without a launcher."""
        return int(os.environ.get("LOCAL_WORLD_SIZE", 1))

    def set_device(self, device_index: int) -> None:
        os.environ["LOCAL_RANK"] = str(device_index)

    def is_bf16_supported(self) -> bool:
        return True

    def stream(self, stream: object) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext()

    def _nothing(self, device_index: int | None = None) -> None:
        """There is no queue to wait for, no stream, no cache and no counter."""

    synchronize = current_stream = default_stream = empty_cache = reset_peak_memory_stats = _nothing

    def memory_stats(self, device_index: int | None = None) -> dict:
        return {}

    def memory_allocated(self, device_index: int | None = None) -> int:
        return process_memory()["VmRSS"]

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        return process_memory()["VmHWM"]

    memory_reserved, max_memory_reserved = memory_allocated, max_memory_allocated


class Accelerator:
    """The kind of device this process computes on: "cuda" where torch sees a GPU, else "cpu"."""

    def __init__(self, kind: str) -> None:
        self._name = kind
        self._gpu = kind == "cuda"
        self._module: ModuleType | _Host = torch.get_device_module(kind) if self._gpu else _Host()
        self._communication_backend_name = "nccl" if self._gpu else "gloo"

    def __getattr__(self, name: str) -> Any:
        if name in _OF_TORCH:
            return getattr(self._module, _OF_TORCH[name])
        if name in _DTYPE_OF_CLASS:  # makes tensors on the device as `torch.tensor` does
            return functools.partial(torch.tensor, dtype=_DTYPE_OF_CLASS[name], device=self.current_device_name())
        raise AttributeError(f"get_accelerator().{name}: not offered by ztk; docs/deepspeed.md says what is")

    # Which device

    def device_name(self, device_index: int | None = None) -> str:
        """Its name: "cuda", "cuda:1" or "cpu"."""
        return self._name if device_index is None or not self._gpu else f"{self._name}:{device_index}"

    def device(self, device_index: int | None = None):
        """A context in which tensors are made on that GPU; on a CPU nothing changes."""
        return torch.cuda.device(device_index) if self._gpu else contextlib.nullcontext()

    def current_device_name(self) -> str:
        """What `tensor.to` takes: "cuda:1" or "cpu"."""
        return self.device_name(self.current_device())

    is_available = always(True, "Always: there is a GPU, or else a CPU.")
    is_fp16_supported = always(True, "Always: GPUs and CPUs compute in float16.")
    get_compile_backend = always("inductor", "The backend of `torch.compile`.")
    visible_devices_envs = always(
        ["CUDA_VISIBLE_DEVICES"], "The environment variables that say which GPUs a process sees."
    )
    random = always(torch.random, "torch's module of random numbers.")
    communication_backend_name = method(
        "_communication_backend_name", "Of process groups: nccl for GPUs, gloo for CPUs."
    )

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor of any shape is on this kind of device."""
        return tensor.device.type == self._name

    def is_synchronized_device(self) -> bool:
        """Whether a call returns only when its result is there."""
        return not self._gpu

    use_host_timers = resolves_data_dependency = handles_memory_backpressure = is_synchronized_device

    # What it can

    def supported_dtypes(self) -> list[torch.dtype]:
        """The dtypes that a model may have."""
        bf16 = [torch.bfloat16] if self.is_bf16_supported() else []
        return [torch.float, torch.half, *bf16]

    def is_triton_supported(self) -> bool:
        """Whether Triton compiles for the device: a GPU from compute capability 8.0 on."""
        return self._gpu and torch.cuda.get_device_capability()[0] >= 8

    def pin_memory(self, tensor: torch.Tensor, make_copy: bool = True, match_shape: bool = True) -> torch.Tensor:
        """A tensor of any shape, page-locked for faster copies to a GPU; on a CPU the tensor itself."""
        return tensor.pin_memory() if self._gpu else tensor

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor of any shape is page-locked; on a CPU none is."""
        return tensor.is_pinned() if self._gpu else False

    # Random numbers

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        """Sets the generator's state, uint8 [n] on the CPU."""
        if self._gpu:
            torch.cuda.set_rng_state(new_state, "cuda" if device_index is None else device_index)
        else:
            torch.set_rng_state(new_state)

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        """The generator's state, uint8 [n] on the CPU."""
        if self._gpu:
            return torch.cuda.get_rng_state("cuda" if device_index is None else device_index)
        return torch.get_rng_state()

    def default_generator(self, device_index: int) -> torch.Generator:
        """The generator of a GPU, or of the CPU."""
        return torch.cuda.default_generators[device_index] if self._gpu else torch.default_generator

    # Ranges that a profiler shows

    def range_push(self, msg: str) -> None:
        """Opens a range."""
        if self._gpu:
            torch.cuda.nvtx.range_push(msg)

    def range_pop(self) -> None:
        """Closes the range that was opened last."""
        if self._gpu:
            torch.cuda.nvtx.range_pop()

    # Bytes of the GPU, or of the machine

    def total_memory(self, device_index: int | None = None) -> int:
        """All of them."""
        return torch.cuda.mem_get_info(device_index)[1] if self._gpu else machine_memory()["MemTotal"]

    def available_memory(self, device_index: int | None = None) -> int:
        """Free bytes."""
        return torch.cuda.mem_get_info(device_index)[0] if self._gpu else machine_memory()["MemAvailable"]


@functools.cache
def get_accelerator() -> Accelerator:
    """The same object for all calls of a process."""
    return Accelerator("cuda" if torch.cuda.is_available() else "cpu")


def is_current_accelerator_supported() -> bool:
    """Whether ztk runs on it: always."""
    return True
