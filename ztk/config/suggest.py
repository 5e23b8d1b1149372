"""Suggestions for misspelled names."""

import difflib
from collections.abc import Iterable

# Names of the same settings in other tools.
_ELSEWHERE = {
    "batch_size": "train.micro_batch_size",
    "train_micro_batch_size_per_gpu": "train.micro_batch_size",
    "per_device_train_batch_size": "train.micro_batch_size",
    "gradient_accumulation_steps": "train.accumulation_steps",
    "accumulation": "train.accumulation_steps",
    "max_steps": "train.steps",
    "learning_rate": "optimizer.lr",
    "gradient_clipping": "optimizer.clip_grad_norm",
    "max_grad_norm": "optimizer.clip_grad_norm",
    "world_size": "launch.ranks",
    "nproc": "launch.ranks",
    "nproc_per_node": "launch.ranks",
    "reduce_bucket_size": "zero.bucket_size",
    "offload_param": "offload.parameters",
    "offload_optimizer": "offload.optimizer",
    "offload.param": "offload.parameters",
    "gradient_checkpointing": "recompute=full",
    "activation_checkpointing": "recompute=full",
    "fp8": "precision=fp8",
    "fp16": "precision=fp16",
    "bf16": "precision=bf16",
    "fp32": "precision=fp32",
    "dtype": "precision",
    "stage": "zero",
    "device": "launch.device",
    "wandb": "logger",
}


def near_keys(key: str, *, keys: Iterable[str]) -> list[str]:
    """Returns up to three keys like `key`: by another tool's name, by the last part, or by spelling."""
    keys = list(keys)
    if key in _ELSEWHERE:
        return [_ELSEWHERE[key]]
    last = key.rsplit(".", 1)[-1]
    same_end = [known for known in keys if known.rsplit(".", 1)[-1] == last]
    close = difflib.get_close_matches(key, keys, n=3, cutoff=0.7)
    close_end = [known for known in keys if difflib.SequenceMatcher(a=last, b=known.rsplit(".", 1)[-1]).ratio() >= 0.8]
    if not (same_end or close or close_end) and last in _ELSEWHERE:
        return [_ELSEWHERE[last]]
    return list(dict.fromkeys(same_end + close + close_end))[:3]


def near_options(value: str, *, group: str, options: dict[str, list[str]]) -> list[str]:
    """Returns up to three `group=option` like `group=value`: of the group, or of another group that has this option."""
    mine = options[group]
    close = difflib.get_close_matches(value, mine, n=2, cutoff=0.6)
    ending = [option for option in mine if value and option.endswith(value)]
    found = [f"{group}={option}" for option in dict.fromkeys(close + ending)]
    if not found:
        found = [f"{other}={value}" for other, names in options.items() if value in names]
    return found[:3]
