"""The top level of the configuration: keys, batch sizes, averaging of gradients, unsupported sections, and keys that DeepSpeed has removed.

A disabled unsupported section is accepted, but its keys are checked: a misspelt key would not enable it later either.
"""

import math
from dataclasses import dataclass
from typing import Annotated

from ztk.deepspeed.config import watching
from ztk.deepspeed.config.keys import (
    Findings,
    Key,
    anything,
    at_least,
    boolean,
    fixed,
    hint,
    keys_of,
    number,
    one_of,
    optional,
    read_section,
    takes,
    whole_number,
)
from ztk.deepspeed.config.precision import dtype_word

_BATCH_KEYS = {
    "train_batch_size": takes(whole_number(1)),
    "train_micro_batch_size_per_gpu": takes(whole_number(1)),
    "gradient_accumulation_steps": takes(whole_number(1)),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSizes:
    """train = micro * accumulation * ranks, in samples."""

    train: int
    micro: int
    accumulation: int


def solve_batch(values: dict, *, world_size: int, findings: Findings) -> BatchSizes | None:
    """Returns the three sizes, or None and adds a fault. world_size: number of ranks with different data."""
    train, micro, accumulation = (values.get(name) for name in _BATCH_KEYS)
    given = ", ".join(f"{name}={values[name]}" for name in _BATCH_KEYS if name in values)
    if train is None and micro is None:
        extra = f" ({given} alone is not enough)" if given else ""
        findings.faults.append(
            f"train_batch_size: give it or train_micro_batch_size_per_gpu{extra}; the third of the triple follows"
        )
        return None
    if train is None:
        accumulation = accumulation or 1
        return BatchSizes(train=micro * accumulation * world_size, micro=micro, accumulation=accumulation)
    if micro is None:
        accumulation = accumulation or 1
        micro = train // (world_size * accumulation)
    elif accumulation is None:
        accumulation = train // (world_size * micro)
    if not micro or not accumulation or train != micro * accumulation * world_size:
        unit = world_size * (values.get("train_micro_batch_size_per_gpu") or 1)
        unit *= values.get("gradient_accumulation_steps") or 1
        all_given = all(name in values for name in _BATCH_KEYS)
        near = unit if all_given else max(unit, round(train / unit) * unit)
        findings.faults.append(
            f"{given} on {world_size} rank{'s' if world_size > 1 else ''}: train_batch_size must be "
            f"train_micro_batch_size_per_gpu * gradient_accumulation_steps * ranks; train_batch_size={near} would fit"
        )
        return None
    return BatchSizes(train=train, micro=micro, accumulation=accumulation)


@dataclass(frozen=True, kw_only=True, slots=True)
class Averaging:
    """mean: averages over the ranks instead of adding up.
    prescales: divides by the number of ranks before the reduction, in the gradients' dtype, in which a sum might overflow. Otherwise
    divides by predivide before and by the rest after the reduction.
    """

    mean: bool = True
    prescales: bool = False
    predivide: float = 1.0

    def factor(self, ranks: int) -> float:
        """Returns the factor on each rank's gradients before the reduction."""
        return 1.0 / ranks if self.prescales else 1.0 / self.predivide

    def divisor(self, ranks: int) -> float:
        """Returns the divisor of the sum of the scaled gradients."""
        return (ranks if self.mean else 1) * self.factor(ranks)


def read_averaging(top: dict, *, findings: Findings) -> Averaging:
    """Reads the averaging keys. top: the effective top-level values."""
    mean = top.get("gradient_allreduce_op", "mean") == "mean"
    prescales, predivide = top.get("prescale_gradients", False), top.get("gradient_predivide_factor", 1.0)
    if not mean and (prescales or predivide != 1.0):
        findings.notes.append(
            "prescale_gradients, gradient_predivide_factor: have no effect with gradient_allreduce_op=sum, as in DeepSpeed"
        )
        prescales, predivide = False, 1.0
    elif prescales and predivide != 1.0:
        findings.notes.append("gradient_predivide_factor: has no effect with prescale_gradients, as in DeepSpeed")
    return Averaging(mean=mean, prescales=prescales, predivide=predivide)


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
_OR_ELSE = {"compile": ", or compile the model with torch.compile before"}
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
    for name, names in SECTIONS.items():
        if given.get(name) is None:
            continue
        why = f"not offered by ztk's DeepSpeed layer yet; leave it out{_OR_ELSE.get(name, '')}"
        keys = dict.fromkeys(names, fixed(*_OFF, why=why))
        if "enabled" in names:
            ignored = dict.fromkeys(names, takes(anything, auto=True, null=None))
            keys = ignored | {"enabled": fixed(False, None, why=why)}
        read_section(given[name], path=f"{name}.", keys=keys, findings=findings)


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


def _level(value: object) -> str:
    """Converts a level of the log, in upper or lower case."""
    return one_of(*LEVELS)(value.lower() if isinstance(value, str) else value)


def _positive(value: object) -> float:
    if at_least(0)(value) == 0:
        raise ValueError("must be above 0")
    return number(value)


@dataclass(frozen=True, kw_only=True, slots=True)
class TopLevel:
    """The keys of the top level that no other key affects.

    managed_gradient_accumulation: the engine counts micro-batches. Otherwise every `step()` is an optimizer step.
    steps_per_print: None for never.
    """

    managed_gradient_accumulation: bool = True
    skip_unused: bool = False
    dataloader_drop_last: bool = False
    steps_per_print: Annotated[int | None, optional(_steps)] = None
    wall_clock_breakdown: bool = False
    memory_breakdown: bool = False
    dump_state: bool = False
    log_level: Annotated[str | None, optional(_level)] = None


_SECTIONS = (
    *("zero_optimization", "fp16", "bf16", "bfloat16", "torch_autocast", "data_types"),
    *("optimizer", "scheduler", "aio", "checkpoint", "activation_checkpointing", "pipeline"),
    *("tensor_parallel", "expert_parallel", "moe", "hybrid_engine"),
    *SECTIONS,
    *watching.SECTIONS,
)
KEYS: dict[str, Key] = {
    **{name: takes(anything) for name in _SECTIONS},
    **_BATCH_KEYS,
    **keys_of(TopLevel),
    "moe_expert_parallel_size": takes(whole_number(1)),
    "gradient_clipping": takes(at_least(0), null="stands for the default, which clips at 1.0; write 0 for no clipping"),
    "communication_data_type": takes(optional(dtype_word)),
    "zero_allow_untested_optimizer": hint(
        boolean, "every class of optimizer is tried when it is passed, and refused if shards cannot run it"
    ),
    "zero_force_ds_cpu_optimizer": hint(boolean, "there is one optimizer, for every place"),
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
