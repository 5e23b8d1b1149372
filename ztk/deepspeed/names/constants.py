"""The constants of DeepSpeed's modules, one table of names and values per module. Scripts read them; ztk does not."""

import os
from datetime import timedelta


def _own(names: str) -> dict[str, object]:
    """Returns constants whose value is their name in lower case."""
    return {name.upper(): name for name in names.split()}


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
