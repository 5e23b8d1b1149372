"""accelerate on ranks without a GPU.

With DeepSpeed and no accelerator, accelerate names no backend for torch.distributed and then assumes one process: every rank would train
on all the data and gather from nobody. Ranks on CPUs use gloo.
"""

import functools
import os
from types import ModuleType


def complete(state: ModuleType) -> None:
    """state: accelerate.state. A rank that a launcher started gets gloo where accelerate would name no backend."""
    original = state.PartialState._prepare_backend

    @functools.wraps(original)
    def _prepare_backend(self, *args, **kwargs):
        backend, kind = original(self, *args, **kwargs)
        started = int(os.environ.get("LOCAL_RANK", -1)) != -1 and int(os.environ.get("WORLD_SIZE", 1)) > 1
        deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"
        return ("gloo" if backend is None and started and deepspeed else backend), kind

    state.PartialState._prepare_backend = _prepare_backend
