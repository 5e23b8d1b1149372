"""`TrainingArguments(bf16=True)` on ranks without a GPU.

transformers requires a GPU with bf16, or use_cpu=True, which would disable DeepSpeed. ztk also computes in bf16 on CPUs.
"""

import functools
import os
from types import ModuleType

import torch


def complete(training_args: ModuleType) -> None:
    """Accepts `TrainingArguments(bf16=True)` on CPU ranks. training_args: the module transformers.training_args."""
    original = training_args.is_torch_bf16_gpu_available

    @functools.wraps(original)
    def is_torch_bf16_gpu_available() -> bool:
        on_cpu = not torch.cuda.is_available() and int(os.environ.get("LOCAL_RANK", -1)) != -1
        return on_cpu or original()

    # pyrefly: ignore[missing-attribute]  # replaces a function of the module
    training_args.is_torch_bf16_gpu_available = is_torch_bf16_gpu_available
