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


_SECTIONS = (
    *("zero_optimization", "fp16", "bf16", "bfloat16", "torch_autocast", "data_types"),
    *("optimizer", "scheduler", "aio", "checkpoint", "activation_checkpointing", "pipeline"),
    *("tensor_parallel", "expert_parallel", "moe"),
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
    "managed_gradient_accumulation": fixed(
        True, why=f"{_NOT_YET}; engine.set_gradient_accumulation_boundary(bool) says where a step ends"
    ),
    **dict.fromkeys(
        (
            "zero_optimization.reduce_bucket_size",
            "zero_optimization.stage3_param_persistence_threshold",
            "zero_optimization.stage3_prefetch_bucket_size",
        ),
        hint(anything, "TRL writes it so for its reference models; a key with a dot is not read, by DeepSpeed neither"),
    ),
    "prescale_gradients": fixed(False, why=_NOT_YET),
    "gradient_predivide_factor": fixed(1, 1.0, why=_NOT_YET),
    "gradient_allreduce_op": fixed("mean", why=f"{_NOT_YET}; for a sum multiply the learning rate"),
    "seq_parallel_communication_data_type": fixed("fp32", None, why=_NOT_YET),
    "sequence_parallel_size": fixed(1, why=_NOT_YET),
    "data_parallel_size": fixed(None, why="is the number of ranks that were started; leave it out"),
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
