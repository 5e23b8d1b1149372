"""`get_accelerator()`: the device under DeepSpeed's names, so that a script need not say whether it is a GPU or a CPU.

What torch offers for GPUs alone (streams, events, memory statistics) answers on a CPU with what is true there: no streams, the memory of the
process and the machine.
"""

import contextlib
import functools
import os

import torch

from ztk.deepspeed.memory import host_memory


class Accelerator:
    """The kind of device this process computes on: "cuda" where torch sees a GPU, else "cpu"."""

    def __init__(self, kind: str) -> None:
        self._name = kind
        self._gpu = kind == "cuda"
        self._communication_backend_name = "nccl" if self._gpu else "gloo"

    # Which device

    def device_name(self, device_index: int | None = None) -> str:
        """ "cuda", "cuda:1" or "cpu"."""
        return self._name if device_index is None or not self._gpu else f"{self._name}:{device_index}"

    def device(self, device_index: int | None = None):
        """A context in which tensors are made on that GPU; on a CPU nothing changes."""
        return torch.cuda.device(device_index) if self._gpu else contextlib.nullcontext()

    def set_device(self, device_index: int) -> None:
        if self._gpu:
            torch.cuda.set_device(device_index)
        else:
            os.environ["LOCAL_RANK"] = str(device_index)

    def current_device(self) -> int:
        return torch.cuda.current_device() if self._gpu else int(os.environ.get("LOCAL_RANK", 0))

    def current_device_name(self) -> str:
        """What `tensor.to` takes: "cuda:1" or "cpu"."""
        return f"cuda:{torch.cuda.current_device()}" if self._gpu else "cpu"

    def device_count(self) -> int:
        """GPUs that this process sees; on a CPU the ranks of this machine, 1 without a launcher."""
        return torch.cuda.device_count() if self._gpu else int(os.environ.get("LOCAL_WORLD_SIZE", 1))

    def is_available(self) -> bool:
        return True

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self._name

    def is_synchronized_device(self) -> bool:
        """Whether a call returns only when its result is there."""
        return not self._gpu

    use_host_timers = resolves_data_dependency = handles_memory_backpressure = is_synchronized_device

    def synchronize(self, device_index: int | None = None) -> None:
        if self._gpu:
            torch.cuda.synchronize(device_index)

    # What it can

    def communication_backend_name(self) -> str:
        return self._communication_backend_name

    def is_bf16_supported(self) -> bool:
        return torch.cuda.is_bf16_supported() if self._gpu else True

    def is_fp16_supported(self) -> bool:
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        bf16 = [torch.bfloat16] if self.is_bf16_supported() else []
        return [torch.float, torch.half, *bf16]

    def is_triton_supported(self) -> bool:
        return self._gpu and torch.cuda.get_device_capability()[0] >= 8

    def get_compile_backend(self) -> str:
        return "inductor"

    def visible_devices_envs(self) -> list[str]:
        return ["CUDA_VISIBLE_DEVICES"]

    def pin_memory(self, tensor: torch.Tensor, make_copy: bool = True, match_shape: bool = True) -> torch.Tensor:
        """Page-locked, for faster copies to a GPU; on a CPU the tensor itself."""
        return tensor.pin_memory() if self._gpu else tensor

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.is_pinned() if self._gpu else False

    # Random numbers

    def random(self):
        return torch.random

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        if self._gpu:
            torch.cuda.set_rng_state(new_state, "cuda" if device_index is None else device_index)
        else:
            torch.set_rng_state(new_state)

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        if self._gpu:
            return torch.cuda.get_rng_state("cuda" if device_index is None else device_index)
        return torch.get_rng_state()

    def manual_seed(self, seed: int) -> None:
        if self._gpu:
            torch.cuda.manual_seed(seed)
        else:
            torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        if self._gpu:
            torch.cuda.manual_seed_all(seed)
        else:
            torch.manual_seed(seed)

    def initial_seed(self) -> int:
        return torch.cuda.initial_seed() if self._gpu else torch.initial_seed()

    def default_generator(self, device_index: int) -> torch.Generator:
        return torch.cuda.default_generators[device_index] if self._gpu else torch.default_generator

    # Streams

    @property
    def Stream(self):
        return torch.cuda.Stream if self._gpu else None

    @property
    def Event(self):
        return torch.cuda.Event if self._gpu else None

    def stream(self, stream: object):
        return torch.cuda.stream(stream) if self._gpu else contextlib.nullcontext()

    def current_stream(self, device_index: int | None = None) -> object | None:
        return torch.cuda.current_stream(device_index) if self._gpu else None

    def default_stream(self, device_index: int | None = None) -> object | None:
        return torch.cuda.default_stream(device_index) if self._gpu else None

    def range_push(self, msg: str) -> None:
        """Opens a range that a profiler shows."""
        if self._gpu:
            torch.cuda.nvtx.range_push(msg)

    def range_pop(self) -> None:
        if self._gpu:
            torch.cuda.nvtx.range_pop()

    # Memory, in bytes. On a CPU: of this process, and of the machine.

    def empty_cache(self) -> None:
        if self._gpu:
            torch.cuda.empty_cache()

    def memory_allocated(self, device_index: int | None = None) -> int:
        return torch.cuda.memory_allocated(device_index) if self._gpu else host_memory().process

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """The most so far; on a CPU since the process began, whatever was reset."""
        return torch.cuda.max_memory_allocated(device_index) if self._gpu else host_memory().most

    def memory_reserved(self, device_index: int | None = None) -> int:
        return torch.cuda.memory_reserved(device_index) if self._gpu else host_memory().process

    def max_memory_reserved(self, device_index: int | None = None) -> int:
        return torch.cuda.max_memory_reserved(device_index) if self._gpu else self.max_memory_allocated()

    memory_cached, max_memory_cached = memory_reserved, max_memory_reserved

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        if self._gpu:
            torch.cuda.reset_peak_memory_stats(device_index)

    reset_max_memory_allocated = reset_max_memory_cached = reset_peak_memory_stats

    def memory_stats(self, device_index: int | None = None) -> dict:
        return torch.cuda.memory_stats(device_index) if self._gpu else {}

    def total_memory(self, device_index: int | None = None) -> int:
        return torch.cuda.mem_get_info(device_index)[1] if self._gpu else host_memory().total

    def available_memory(self, device_index: int | None = None) -> int:
        return torch.cuda.mem_get_info(device_index)[0] if self._gpu else host_memory().available

    # Tensor types

    @property
    def FloatTensor(self):
        return functools.partial(torch.tensor, dtype=torch.float, device=self.current_device_name())

    @property
    def HalfTensor(self):
        return functools.partial(torch.tensor, dtype=torch.half, device=self.current_device_name())

    @property
    def BFloat16Tensor(self):
        return functools.partial(torch.tensor, dtype=torch.bfloat16, device=self.current_device_name())

    @property
    def LongTensor(self):
        return functools.partial(torch.tensor, dtype=torch.long, device=self.current_device_name())

    @property
    def IntTensor(self):
        return functools.partial(torch.tensor, dtype=torch.int, device=self.current_device_name())

    @property
    def DoubleTensor(self):
        return functools.partial(torch.tensor, dtype=torch.double, device=self.current_device_name())

    @property
    def ByteTensor(self):
        return functools.partial(torch.tensor, dtype=torch.uint8, device=self.current_device_name())


@functools.cache
def get_accelerator() -> Accelerator:
    """The same object for all calls of a process."""
    return Accelerator("cuda" if torch.cuda.is_available() else "cpu")
