"""The constants of DeepSpeed's modules, one table of names and values per module. Scripts read them; ztk does not."""

import os
from datetime import timedelta


def _own(names: str) -> dict[str, object]:
    """Returns constants whose value is their name in lower case."""
    return {name.upper(): name for name in names.split()}


def _defaults(value: object, names: str) -> dict[str, object]:
    """Returns NAME_DEFAULT for each name."""
    return {f"{name.upper()}_DEFAULT": value for name in names.split()}


RUNTIME = {  # deepspeed.runtime.constants: keys of a configuration and their defaults in DeepSpeed
    **_own(
        "train_batch_size optimizer type legacy_fusion scheduler max_grad_norm zero_allow_untested_optimizer "
        "zero_force_ds_cpu_optimizer steps_per_print train_micro_batch_size_per_gpu gradient_accumulation_steps "
        "managed_gradient_accumulation check_overflow fp16 fp16_master_weights_and_grads torch_autocast "
        "gradient_clipping communication_data_type seq_parallel_communication_data_type prescale_gradients "
        "gradient_predivide_factor gradient_allreduce_op disable_allgather dump_state disable_python_gc "
        "vocabulary_size wall_clock_breakdown memory_breakdown checkpoint data_types grad_accum_dtype param_dtype "
        "buffer_dtype keep_in_fp32_modules dataloader_drop_last data_parallel_group global_rank log_level"
    ),
    **_defaults(
        None,
        "train_batch_size optimizer_type scheduler_type steps_per_print train_micro_batch_size_per_gpu "
        "gradient_accumulation_steps communication_data_type vocabulary_size grad_accum_dtype param_dtype "
        "buffer_dtype log_level",
    ),
    **_defaults(
        False,
        "legacy_fusion zero_allow_untested_optimizer bfloat16_enabled bfloat16_check_overflow "
        "bfloat16_master_weights_and_grads bfloat16_optimizer_states fp16_enabled fp16_auto_cast "
        "fp16_consecutive_hysteresis fp16_master_weights_and_grads torch_autocast_enabled prescale_gradients "
        "disable_allgather dump_state disable_python_gc wall_clock_breakdown memory_breakdown "
        "load_universal_checkpoint use_node_local_storage_checkpoint checkpoint_parallel_write_pipeline_stage "
        "dataloader_drop_last use_data_before_expert_parallel",
    ),
    **_defaults(
        True,
        "zero_force_ds_cpu_optimizer managed_gradient_accumulation bfloat16_immediate_grad_update",
    ),
    **_defaults(
        1.0,
        "gradient_clipping gradient_predivide_factor",
    ),
    "ROUTE_TRAIN": "train",
    "ROUTE_EVAL": "eval",
    "ROUTE_PREDICT": "predict",
    "ROUTE_ENCODE": "encode",
    "OPTIMIZER_PARAMS": "params",
    "SCHEDULER_PARAMS": "params",
    "BFLOAT16": "bf16",
    "BFLOAT16_OLD": "bfloat16",
    "BFLOAT16_ENABLED": "enabled",
    "BFLOAT16_IMMEDIATE_GRAD_UPDATE": "immediate_grad_update",
    "BFLOAT16_MASTER_WEIGHTS_AND_GRADS": "bf16_master_weights_and_grads",
    "BFLOAT16_OPTIMIZER_STATES": "bf16_optimizer_states",
    "DDP_BFLOAT16": "ddp_bf16",
    "FP16_ENABLED": "enabled",
    "FP16_LOSS_SCALE": "loss_scale",
    "FP16_AUTO_CAST": "auto_cast",
    "FP16_INITIAL_SCALE_POWER": "initial_scale_power",
    "FP16_LOSS_SCALE_WINDOW": "loss_scale_window",
    "FP16_HYSTERESIS": "hysteresis",
    "FP16_CONSECUTIVE_HYSTERESIS": "consecutive_hysteresis",
    "FP16_MIN_LOSS_SCALE": "min_loss_scale",
    "TORCH_AUTOCAST_ENABLED": "enabled",
    "TORCH_AUTOCAST_DTYPE": "dtype",
    "TORCH_AUTOCAST_LOWER_PRECISION_SAFE_MODULES": "lower_precision_safe_modules",
    "GRADIENT_ALLREDUCE_OP_MEAN": "mean",
    "GRADIENT_ALLREDUCE_OP_SUM": "sum",
    "GRADIENT_ALLREDUCE_OP_SUPPORTED": ("mean", "sum"),
    "CHECKPOINT_TAG_VALIDATION": "tag_validation",
    "LOAD_UNIVERSAL_CHECKPOINT": "load_universal",
    "USE_NODE_LOCAL_STORAGE_CHECKPOINT": "use_node_local_storage",
    "CHECKPOINT_PARALLEL_WRITE": "parallel_write",
    "CHECKPOINT_PARALLEL_WRITE_PIPELINE_STAGE": "pipeline_stage",
    "PIPE_REPLICATED": "ds_pipe_replicated",
    "USE_DATA_BEFORE_EXPERT_PARALLEL": "use_data_before_expert_parallelism",
    "CHECKPOINT_TAG_VALIDATION_MODES": ["Warn", "Ignore", "Fail"],
    "FP16_LOSS_SCALE_DEFAULT": 0,
    "FP16_INITIAL_SCALE_POWER_DEFAULT": 16,
    "FP16_LOSS_SCALE_WINDOW_DEFAULT": 1000,
    "FP16_HYSTERESIS_DEFAULT": 2,
    "FP16_MIN_LOSS_SCALE_DEFAULT": 1,
    "SEQ_PARALLEL_COMMUNICATION_DATA_TYPE_DEFAULT": "fp32",
    "GRADIENT_ALLREDUCE_OP_DEFAULT": "mean",
    "KEEP_IN_FP32_MODULES_DEFAULT": "auto",
    "CHECKPOINT_TAG_VALIDATION_DEFAULT": "Warn",
}
CHECKPOINT = {  # deepspeed.checkpoint.constants: keys and names in the files of DeepSpeed's checkpoints
    **_own(
        "optimizer_state_dict fp32_groups fp32_flat_groups base_optimizer_state base_optimizer_state_step "
        "single_partition_of_fp32_groups param_groups group_paddings param_alignment_paddings partition_count "
        "zero_stage clip_grad loss_scaler param param_shapes buffer_names frozen_param_shapes frozen_param_fragments "
        "ds_version universal_checkpoint_info autotp_unsupported_parameter_patterns affine_map vocab_tensor "
        "padded_vocab_size original_vocab_size param_slice_mappings cat_dim param_n_sub_params sub_param_shape "
        "vocabulary_parameter_patterns pipeline_replicated_parameter_patterns parameter_to_average_patterns "
        "parameter_with_row_parallelism_patterns tp_replicated_parameter_patterns "
        "parameter_with_2_sub_params_cat_dim_0 parameter_with_sub_params sub_param_shard_widths sub_params_shape"
    ),
    "FP32_WEIGHT_KEY": "fp32",
    "MODEL_FILE_PREFIX": "mp_rank_",
    "ZERO_FILE_PREFIX": "zero_pp_rank_",
    "OPTIM_FILE_SUFFIX": "_optim_states.pt",
    "MODEL_FILE_SUFFIX": "_model_states.pt",
    "LAYER_FILE_PREFIX": "layer_",
    "BF16_ZERO_FILE_PREFIX": "bf16_zero_pp_rank_",
    "FP16_ZERO_FILE_PREFIX": "fp16_zero_pp_rank_",
    "CHECKPOINT_PARALLEL_DIMS": "checkpoint_parallel_dimensions",
    "CHECKPOINT_PP_DEGREE": "pp_degree",
    "CHECKPOINT_TP_DEGREE": "tp_degree",
    "UNIVERSAL_CHECKPOINT_VERSION_KEY": "universal_checkpoint_version",
    "UNIVERSAL_CHECKPOINT_VERSION_VALUE": 0.4,
    "DS_AUTOTP_UC_META": "ds_autotp_universal_checkpoint_meta",
    "AFFINE_MAP_VERSION": "version",
    "AFFINE_MAP_PARAMS": "params",
}
SCHEDULES = {  # deepspeed.runtime.lr_schedules: names of schedules and keys of their section
    **_own(
        "lr_schedule lr_range_test_min_lr lr_range_test_step_rate lr_range_test_step_size lr_range_test_staircase "
        "edge_value mid_value cycle_first_step_size cycle_first_stair_count cycle_second_step_size "
        "cycle_second_stair_count decay_step_size cycle_min_lr cycle_max_lr decay_lr_rate cycle_min_mom "
        "cycle_max_mom decay_mom_rate warmup_min_lr warmup_max_lr warmup_num_steps warmup_type warmup_min_ratio "
        "cos_min_ratio total_num_steps"
    ),
    "LR_RANGE_TEST": "LRRangeTest",
    "ONE_CYCLE": "OneCycle",
    "WARMUP_LR": "WarmupLR",
    "WARMUP_DECAY_LR": "WarmupDecayLR",
    "WARMUP_COSINE_LR": "WarmupCosineLR",
    "WARMUP_LOG_RATE": "log",
    "WARMUP_LINEAR_RATE": "linear",
}
TOP = {  # deepspeed.constants: names of environment variables and defaults
    "TORCH_DISTRIBUTED_DEFAULT_PORT": 29500,
    "INFERENCE_GENERIC_MODE": "generic",
    "INFERENCE_SPECIALIZED_MODE": "specialized",
    **{name: name for name in ("CROSS_RANK", "CROSS_SIZE", "LOCAL_RANK")},
    "default_pg_timeout": timedelta(minutes=int(os.environ.get("DEEPSPEED_TIMEOUT", 10))),
}
BUILD = {  # nothing is compiled in advance, and 0.0 makes readers query torch itself
    "installed_ops": {},
    "accelerator_name": "",
    "torch_info": dict.fromkeys(("version", "cuda_version", "nccl_version", "hip_version"), "0.0"),
}
LOSS_SCALE = {  # deepspeed.runtime.fp16.loss_scaler
    "INITIAL_LOSS_SCALE": "init_scale",
    "MIN_LOSS_SCALE": "min_scale",
    **_own("scale_window delayed_shift consecutive_hysteresis"),
}
TIMERS = {  # deepspeed.utils.timer
    f"{name}_{kind}_TIMER": word + end
    for name, word in {
        "FORWARD": "fwd",
        "BACKWARD": "bwd",
        "BACKWARD_INNER": "bwd_inner",
        "BACKWARD_REDUCE": "bwd_allreduce",
        "STEP": "step",
    }.items()
    for kind, end in (("MICRO", "_microstep"), ("GLOBAL", ""))
}
