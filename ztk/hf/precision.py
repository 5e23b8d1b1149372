"""`TrainingArguments(bf16=True)` on ranks without a GPU.

transformers asks for a GPU that knows bf16, or for use_cpu=True, which would switch DeepSpeed off. Ranks on CPUs compute in bf16.
"""

import functools
import os
from types import ModuleType

import torch


def complete(training_args: ModuleType) -> None:
    """training_args: transformers.training_args."""
    original = training_args.is_torch_bf16_gpu_available

    @functools.wraps(original)
    def is_torch_bf16_gpu_available() -> bool:
        on_cpu = not torch.cuda.is_available() and int(os.environ.get("LOCAL_RANK", -1)) != -1
        return on_cpu or original()

    training_args.is_torch_bf16_gpu_available = is_torch_bf16_gpu_available
