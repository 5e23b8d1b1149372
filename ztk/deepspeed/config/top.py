"""The top level of the configuration: keys, unsupported sections, and keys that DeepSpeed has removed.

A disabled unsupported section is accepted, but its keys are checked: a misspelt key would not enable it later either.
"""

import math

from ztk.core.policies.suggest import did_you_mean
from ztk.deepspeed.config import batch, watching
from ztk.deepspeed.config.keys import (
    Findings,
    Key,
    anything,
    at_least,
    boolean,
    fixed,
    hint,
    nearest,
    number,
    one_of,
    optional,
    read_section,
    shown,
    takes,
    whole_number,
)
from ztk.deepspeed.config.precision import dtype_word

# Section -> its keys. `enabled` switches it on; without such a key, any value that is not in `_OFF` does.
SECTIONS = {
    "data_efficiency": ("enabled", "seed", "data_sampling", "data_routing"),
    "weight_quantization": (
        *("enabled", "num_bits", "q_type", "q_groups", "quantized_initialization", "post_init_quant"),
    ),
    "autotuning": (
        *("enabled", "fast", "results_dir", "exps_dir", "overwrite", "start_profile_step", "end_profile_step"),
        *("metric", "tuner_type", "tuner_early_stopping", "tuner_num_trials", "arg_mappings", "mp_size"),
        *("max_train_batch_size", "min_train_batch_size", "max_train_micro_batch_size_per_gpu"),
        *("min_train_micro_batch_size_per_gpu", "num_tuning_micro_batch_sizes", "model_info"),
    ),
    "compile": (
        *("deepcompile", "autoep_non_moe", "free_activation", "free_activation_threshold", "offload_activation"),
        *("offload_activation_pin_memory", "offload_opt_states", "double_buffer", "symmetric_memory", "debug_log"),
        *("offload_parameters", "sync_before_reduce", "sync_after_reduce", "sync_before_allgather"),
        *("sync_after_allgather", "keep_int_input_tensors", "keep_all_input_tensors", "passes"),
    ),
    "datastates_ckpt": ("host_cache_size",),
}
_INSTEAD = {"compile": "compile the model with torch.compile before"}
REMOVED = (
    *("nebula", "compression_training", "amp", "quantize_training", "sparse_gradients", "eigenvalue"),
    *("sparse_attention", "elasticity", "graph_harvesting", "curriculum_learning", "progressive_layer_drop"),
)
_OFF = (False, None, 0, 1, "auto", "none")  # values with which a key without `enabled` has no effect

CHECKPOINT = {
    "tag_validation": takes(
        lambda value: one_of("ignore", "warn", "fail")(value.lower() if isinstance(value, str) else value)
    ),
    "load_universal": hint(boolean, "every checkpoint loads at every number of ranks and stage", usual=(False,)),
    "use_node_local_storage": fixed(False, why="not offered: all ranks write into one folder; leave it out"),
    "parallel_write": hint(lambda value: value, "every rank always writes its own part"),
    "checkpoint_serialization": hint(boolean, "a checkpoint is never a pickle"),
    "writer": fixed(None, why="not offered by ztk yet; leave it out"),
}


def read_checkpoint(given: object, *, findings: Findings) -> str:
    """Returns `checkpoint.tag_validation`."""
    values = read_section(given, path="checkpoint.", keys=CHECKPOINT, findings=findings)
    return values.get("tag_validation", "warn")


def check_absent(given: dict, *, findings: Findings) -> None:
    """Adds faults for enabled unsupported sections and for misspelt keys."""
    for name, keys in SECTIONS.items():
        section = given.get(name)
        if section is None:
            continue
        if not isinstance(section, dict):
            findings.faults.append(f"{name}: must be an object {{...}}, not {section!r}")
            continue
        wrong = [key for key in section if key not in keys]
        for key in wrong:
            findings.faults.append(f"{name}.{key}: there is no such key{did_you_mean(nearest(key, known=keys))}")
        if not wrong and (active := _active(section, keys=keys)):
            instead = f", or {_INSTEAD[name]}" if name in _INSTEAD else ""
            key = active if active == "enabled" else f"{active}={shown(section[active])}"
            findings.faults.append(f"{name}.{key}: not offered by ztk's DeepSpeed layer yet; leave it out{instead}")


def _active(section: dict, *, keys: tuple[str, ...]) -> str | None:
    """Returns the key that enables the section, or None."""
    if "enabled" in keys:
        return "enabled" if section.get("enabled", False) not in (False, None) else None
    # True equals 1, which is neutral as a degree of parallelism but enables a feature.
    return next((key for key, value in section.items() if value is True or value not in _OFF), None)


_NOT_YET = "not offered by ztk yet; leave it out"
LEVELS = ("debug", "info", "warning", "error", "critical")


def _steps(value: object) -> int | None:
    """Converts a number of steps. Accelerate writes infinity for "never"."""
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
    *SECTIONS,
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
    "sequence_parallel_size": takes(
        whole_number(1)
    ),  # also here, because `initialize` builds the mesh before it reads the rest
    "data_parallel_size": takes(whole_number(1)),
    "disable_allgather": fixed(False, why=_NOT_YET),
    "disable_python_gc": fixed(False, why=_NOT_YET),
    "dump_state": takes(boolean),
    "vocabulary_size": fixed(None, why=_NOT_YET),
    "use_data_before_expert_parallelism": fixed(False, why=_NOT_YET),
}
ELSEWHERE = {
    **dict.fromkeys(REMOVED, "was removed from DeepSpeed in 0.19.8; leave it out"),
    "stage": "belongs into the section zero_optimization; move it there",
    "train_micro_batch_size": "there is no such key; did you mean train_micro_batch_size_per_gpu?",
    "lr": "belongs into optimizer.params; move it there",
    "offload_optimizer": "belongs into the section zero_optimization; move it there",
    "offload_param": "belongs into the section zero_optimization; move it there",
}
