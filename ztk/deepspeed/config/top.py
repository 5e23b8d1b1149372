"""The top level of the configuration, but for its sections."""

import math

from ztk.deepspeed.config import absent, batch, watching
from ztk.deepspeed.config.keys import (
    Key,
    anything,
    at_least,
    boolean,
    fixed,
    hint,
    number,
    one_of,
    optional,
    takes,
    whole_number,
)
from ztk.deepspeed.config.precision import dtype_word

_NOT_YET = "not offered by ztk yet; leave it out"
LEVELS = ("debug", "info", "warning", "error", "critical")


def _steps(value: object) -> int | None:
    """Accelerate writes infinity for "never"."""
    try:
        if number(value) == math.inf:
            return None
        return whole_number(1)(value)
    except ValueError as error:
        raise ValueError(f"{error}; or null for never") from None


def _positive(value: object) -> float:
    if at_least(0)(value) == 0:
        raise ValueError("must be above 0")
    return number(value)


_SECTIONS = (
    *("zero_optimization", "fp16", "bf16", "bfloat16", "torch_autocast", "data_types"),
    *("optimizer", "scheduler", "aio", "checkpoint", "activation_checkpointing", "pipeline"),
    *("tensor_parallel", "expert_parallel", "moe", "hybrid_engine"),
    *absent.SECTIONS,
    *watching.SECTIONS,
)
KEYS: dict[str, Key] = {
    **{name: takes(anything) for name in _SECTIONS},
    **batch.KEYS,
    "moe_expert_parallel_size": takes(whole_number(1)),
    "steps_per_print": takes(optional(_steps)),
    "gradient_clipping": takes(at_least(0), null="stands for the default, which clips at 1.0; write 0 for no clipping"),
    "communication_data_type": takes(optional(dtype_word)),
    "wall_clock_breakdown": takes(boolean),
    "memory_breakdown": takes(boolean),
    "dataloader_drop_last": takes(boolean),
    "log_level": takes(optional(one_of(*LEVELS))),
    "zero_allow_untested_optimizer": hint(
        boolean, "every class of optimizer is tried when it is passed, and refused if shards cannot run it"
    ),
    "skip_unused": takes(boolean),
    "zero_force_ds_cpu_optimizer": hint(boolean, "there is one optimizer, for every place"),
    "managed_gradient_accumulation": takes(boolean),
    **dict.fromkeys(
        (
            "zero_optimization.reduce_bucket_size",
            "zero_optimization.stage3_param_persistence_threshold",
            "zero_optimization.stage3_prefetch_bucket_size",
        ),
        hint(anything, "TRL writes it so for its reference models; a key with a dot is not read, by DeepSpeed neither"),
    ),
    "prescale_gradients": takes(boolean),
    "gradient_predivide_factor": takes(_positive),
    "gradient_allreduce_op": takes(one_of("mean", "sum")),
    "seq_parallel_communication_data_type": fixed("fp32", None, why=_NOT_YET),
    "sequence_parallel_size": takes(whole_number(1)),  # both: `initialize` makes the mesh before it reads the rest
    "data_parallel_size": takes(whole_number(1)),
    "disable_allgather": fixed(False, why=_NOT_YET),
    "disable_python_gc": fixed(False, why=_NOT_YET),
    "dump_state": takes(boolean),
    "vocabulary_size": fixed(None, why=_NOT_YET),
    "use_data_before_expert_parallelism": fixed(False, why=_NOT_YET),
}
ELSEWHERE = {
    **dict.fromkeys(absent.REMOVED, "was removed from DeepSpeed in 0.19.8; leave it out"),
    "stage": "belongs into the section zero_optimization; move it there",
    "train_micro_batch_size": "there is no such key; did you mean train_micro_batch_size_per_gpu?",
    "lr": "belongs into optimizer.params; move it there",
    "offload_optimizer": "belongs into the section zero_optimization; move it there",
    "offload_param": "belongs into the section zero_optimization; move it there",
}
