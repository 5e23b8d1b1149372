"""accelerate on ranks without a GPU.

With DeepSpeed and no accelerator, accelerate chooses no backend for torch.distributed and then assumes a single process: every rank would
train on all data without communication. CPU ranks therefore use gloo.
"""

import functools
import os
from types import ModuleType


def complete(state: ModuleType) -> None:
    """Uses gloo on launched ranks for which accelerate would choose no backend. state: the module accelerate.state."""
    original = state.PartialState._prepare_backend

    @functools.wraps(original)
    def _prepare_backend(self, *args, **kwargs):
        backend, kind = original(self, *args, **kwargs)
        started = int(os.environ.get("LOCAL_RANK", -1)) != -1 and int(os.environ.get("WORLD_SIZE", 1)) > 1
        deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"
        return ("gloo" if backend is None and started and deepspeed else backend), kind

    state.PartialState._prepare_backend = _prepare_backend
