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
        """Its name: "cuda", "cuda:1" or "cpu"."""
        return self._name if device_index is None or not self._gpu else f"{self._name}:{device_index}"

    def device(self, device_index: int | None = None):
        """A context in which tensors are made on that GPU; on a CPU nothing changes."""
        return torch.cuda.device(device_index) if self._gpu else contextlib.nullcontext()

    def set_device(self, device_index: int) -> None:
        """Makes that GPU this process's; on a CPU it is remembered as LOCAL_RANK."""
        if self._gpu:
            torch.cuda.set_device(device_index)
        else:
            os.environ["LOCAL_RANK"] = str(device_index)

    def current_device(self) -> int:
        """The number of the GPU in use; on a CPU LOCAL_RANK."""
        return torch.cuda.current_device() if self._gpu else int(os.environ.get("LOCAL_RANK", 0))

    def current_device_name(self) -> str:
        """What `tensor.to` takes: "cuda:1" or "cpu"."""
        return f"cuda:{torch.cuda.current_device()}" if self._gpu else "cpu"

    def device_count(self) -> int:
        """GPUs that this process sees; on a CPU the ranks of this machine, 1 without a launcher."""
        return torch.cuda.device_count() if self._gpu else int(os.environ.get("LOCAL_WORLD_SIZE", 1))

    def is_available(self) -> bool:
        """Always: there is a GPU, or else a CPU."""
        return True

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor of any shape is on this kind of device."""
        return tensor.device.type == self._name

    def is_synchronized_device(self) -> bool:
        """Whether a call returns only when its result is there."""
        return not self._gpu

    use_host_timers = resolves_data_dependency = handles_memory_backpressure = is_synchronized_device

    def synchronize(self, device_index: int | None = None) -> None:
        """Waits for the work of a GPU; on a CPU there is none to wait for."""
        if self._gpu:
            torch.cuda.synchronize(device_index)

    # What it can

    def communication_backend_name(self) -> str:
        """The backend of process groups: "nccl" for GPUs, "gloo" for CPUs."""
        return self._communication_backend_name

    def is_bf16_supported(self) -> bool:
        """Whether the device computes in bfloat16."""
        return torch.cuda.is_bf16_supported() if self._gpu else True

    def is_fp16_supported(self) -> bool:
        """Always: GPUs and CPUs compute in float16."""
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        """The dtypes that a model may have."""
        bf16 = [torch.bfloat16] if self.is_bf16_supported() else []
        return [torch.float, torch.half, *bf16]

    def is_triton_supported(self) -> bool:
        """Whether Triton compiles for the device: a GPU from compute capability 8.0 on."""
        return self._gpu and torch.cuda.get_device_capability()[0] >= 8

    def get_compile_backend(self) -> str:
        """The backend of `torch.compile`."""
        return "inductor"

    def visible_devices_envs(self) -> list[str]:
        """The environment variables that say which GPUs a process sees."""
        return ["CUDA_VISIBLE_DEVICES"]

    def pin_memory(self, tensor: torch.Tensor, make_copy: bool = True, match_shape: bool = True) -> torch.Tensor:
        """A tensor of any shape, page-locked for faster copies to a GPU; on a CPU the tensor itself."""
        return tensor.pin_memory() if self._gpu else tensor

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor of any shape is page-locked; on a CPU none is."""
        return tensor.is_pinned() if self._gpu else False

    # Random numbers

    def random(self):
        """torch's module of random numbers."""
        return torch.random

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

    def manual_seed(self, seed: int) -> None:
        """Seeds the generator of the GPU in use, or of the CPU."""
        if self._gpu:
            torch.cuda.manual_seed(seed)
        else:
            torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        """Seeds the generators of all GPUs, or of the CPU."""
        if self._gpu:
            torch.cuda.manual_seed_all(seed)
        else:
            torch.manual_seed(seed)

    def initial_seed(self) -> int:
        """The seed that the generator started from."""
        return torch.cuda.initial_seed() if self._gpu else torch.initial_seed()

    def default_generator(self, device_index: int) -> torch.Generator:
        """The generator of a GPU, or of the CPU."""
        return torch.cuda.default_generators[device_index] if self._gpu else torch.default_generator

    # Streams

    @property
    def Stream(self):
        """The class of streams; None on a CPU."""
        return torch.cuda.Stream if self._gpu else None

    @property
    def Event(self):
        """The class of events; None on a CPU."""
        return torch.cuda.Event if self._gpu else None

    def stream(self, stream: object):
        """A context in which a GPU's work goes to `stream`; on a CPU nothing changes."""
        return torch.cuda.stream(stream) if self._gpu else contextlib.nullcontext()

    def current_stream(self, device_index: int | None = None) -> object | None:
        """The stream in use; None on a CPU."""
        return torch.cuda.current_stream(device_index) if self._gpu else None

    def default_stream(self, device_index: int | None = None) -> object | None:
        """The stream of the beginning; None on a CPU."""
        return torch.cuda.default_stream(device_index) if self._gpu else None

    def range_push(self, msg: str) -> None:
        """Opens a range that a profiler shows."""
        if self._gpu:
            torch.cuda.nvtx.range_push(msg)

    def range_pop(self) -> None:
        """Closes the range that was opened last."""
        if self._gpu:
            torch.cuda.nvtx.range_pop()

    # Memory, in bytes. On a CPU: of this process, and of the machine.

    def empty_cache(self) -> None:
        """Gives memory that torch has cached back to the GPU; nothing on a CPU."""
        if self._gpu:
            torch.cuda.empty_cache()

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Bytes of tensors; on a CPU of the process."""
        return torch.cuda.memory_allocated(device_index) if self._gpu else host_memory().process

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """The most so far; on a CPU since the process began, whatever was reset."""
        return torch.cuda.max_memory_allocated(device_index) if self._gpu else host_memory().most

    def memory_reserved(self, device_index: int | None = None) -> int:
        """Bytes that torch has taken, cached ones included; on a CPU of the process."""
        return torch.cuda.memory_reserved(device_index) if self._gpu else host_memory().process

    def max_memory_reserved(self, device_index: int | None = None) -> int:
        """The most of `memory_reserved` so far; on a CPU as `max_memory_allocated`."""
        return torch.cuda.max_memory_reserved(device_index) if self._gpu else self.max_memory_allocated()

    memory_cached, max_memory_cached = memory_reserved, max_memory_reserved

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        """The maxima count from now on; nothing on a CPU."""
        if self._gpu:
            torch.cuda.reset_peak_memory_stats(device_index)

    reset_max_memory_allocated = reset_max_memory_cached = reset_peak_memory_stats

    def memory_stats(self, device_index: int | None = None) -> dict:
        """torch's statistics of the GPU; empty on a CPU."""
        return torch.cuda.memory_stats(device_index) if self._gpu else {}

    def total_memory(self, device_index: int | None = None) -> int:
        """Bytes of the GPU, or of the machine."""
        return torch.cuda.mem_get_info(device_index)[1] if self._gpu else host_memory().total

    def available_memory(self, device_index: int | None = None) -> int:
        """Free bytes of the GPU, or of the machine."""
        return torch.cuda.mem_get_info(device_index)[0] if self._gpu else host_memory().available

    # Tensor types

    @property
    def FloatTensor(self):
        """Makes float32 tensors on the device, of any shape, as `torch.tensor` does."""
        return functools.partial(torch.tensor, dtype=torch.float, device=self.current_device_name())

    @property
    def HalfTensor(self):
        """As `FloatTensor`, float16."""
        return functools.partial(torch.tensor, dtype=torch.half, device=self.current_device_name())

    @property
    def BFloat16Tensor(self):
        """As `FloatTensor`, bfloat16."""
        return functools.partial(torch.tensor, dtype=torch.bfloat16, device=self.current_device_name())

    @property
    def LongTensor(self):
        """As `FloatTensor`, int64."""
        return functools.partial(torch.tensor, dtype=torch.long, device=self.current_device_name())

    @property
    def IntTensor(self):
        """As `FloatTensor`, int32."""
        return functools.partial(torch.tensor, dtype=torch.int, device=self.current_device_name())

    @property
    def DoubleTensor(self):
        """As `FloatTensor`, float64."""
        return functools.partial(torch.tensor, dtype=torch.double, device=self.current_device_name())

    @property
    def ByteTensor(self):
        """As `FloatTensor`, uint8."""
        return functools.partial(torch.tensor, dtype=torch.uint8, device=self.current_device_name())


@functools.cache
def get_accelerator() -> Accelerator:
    """The same object for all calls of a process."""
    return Accelerator("cuda" if torch.cuda.is_available() else "cpu")
