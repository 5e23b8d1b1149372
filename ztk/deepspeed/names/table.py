"""Maps modules of DeepSpeed and `deepspeed_chat` to modules of ztk.

A row is `"deepspeed.x": "ztk.y"`, the module itself, or `"deepspeed.x": {"ztk.y": "name name"}`, a module that contains those names.
`"*"` stands for all public names of `ztk.y`. A module with submodules must not be ztk's module itself, which does not have these
submodules; without a row it has nothing but them. This layer must not have a module of
that name either, because Python would import it instead. Nothing is imported before it is used. Importing any other module raises
ModuleNotFoundError.
"""

Row = str | dict[str, str]

_PARAMETER_STATES = {
    "ztk.deepspeed.zero.states": (
        "safe_get_full_fp32_param safe_get_full_grad safe_get_full_optimizer_state safe_set_full_fp32_param safe_set_full_grad "
        "safe_set_full_optimizer_state safe_update_full_grad_vectorized safe_get_local_fp32_param safe_get_local_grad "
        "safe_get_local_optimizer_state safe_set_local_fp32_param safe_set_local_grad safe_set_local_optimizer_state"
    ),
}
_LEAF_MODULES = {
    "ztk.deepspeed.zero.leaf": (
        "get_z3_leaf_modules set_z3_leaf_module set_z3_leaf_modules set_z3_leaf_modules_by_name set_z3_leaf_modules_by_suffix "
        "unset_z3_leaf_modules z3_leaf_module z3_leaf_parameter"
    ),
}

ZERO: dict[str, str] = {  # names in `deepspeed.zero`
    "ztk.deepspeed.zero.gathered": (
        "DeepSpeedZeRoOffload GatheredParameters register_external_parameter unregister_external_parameter "
        "unwrap_model_for_generation"
    ),
    "ztk.deepspeed.zero.init": "DeepSpeedTensorOverride Init",
    "ztk.deepspeed.zero.parameter": "ZeroParamStatus ZeroParamType",
    **_PARAMETER_STATES,
}
TOP: dict[str, str] = {  # names in `deepspeed`
    "ztk.deepspeed.start.process": "add_config_arguments init_distributed",
    "ztk.deepspeed.start.mesh": "tp_model_init",
    "ztk.deepspeed.config": "DeepSpeedConfigError",
    "ztk.deepspeed.engine.deepspeed_engine": "DeepSpeedEngine",
    "ztk.deepspeed.tools.helpers": "OnDevice",
    "ztk.deepspeed.generation.hybrid": "DeepSpeedHybridEngine",
    "ztk.deepspeed.config.settings": "DeepSpeedConfig",
    "ztk.deepspeed.start.entry": "initialize",
    "ztk.deepspeed.tools.log": "log_dist logger",
    "ztk.deepspeed.names": "install",
    "ztk.deepspeed.pipe.pipeline_engine": "PipelineEngine",
    "ztk.deepspeed.pipe": "PipelineModule",
    "ztk.deepspeed.tools.device": "get_accelerator",
    "ztk.deepspeed.optimizers.schedules": "VALID_LR_SCHEDULES",
    "ztk.deepspeed.serving.config": "DeepSpeedInferenceConfig default_inference_config",
    "ztk.deepspeed.serving.inference_engine": "InferenceEngine",
    "ztk.deepspeed.serving.entry": "init_inference",
    "ztk.deepspeed.version": (
        "__version__ __version_major__ __version_minor__ __version_patch__ __git_hash__ __git_branch__"
    ),
    "ztk.deepspeed.start.loader": "RepeatingLoader",
    **_PARAMETER_STATES,
}

PACKAGES = {"deepspeed": TOP, "deepspeed.zero": ZERO}  # packages that are ztk's own modules
MODULES: dict[str, Row] = {
    "deepspeed": "ztk.deepspeed",
    "deepspeed.accelerator": {
        "ztk.deepspeed.tools.device": "get_accelerator is_current_accelerator_supported Accelerator",
    },
    "deepspeed.accelerator.real_accelerator": {
        "ztk.deepspeed.tools.device": "get_accelerator is_current_accelerator_supported",
    },
    "deepspeed.checkpoint.ds_to_universal": "ztk.deepspeed.saved.ds_to_universal",
    "deepspeed.checkpoint.utils": {"ztk.deepspeed.saved.checkpoints": "clone_tensors_for_torch_save"},
    "deepspeed.checkpointing": "ztk.deepspeed.recompute.checkpointing",
    "deepspeed.comm": "ztk.deepspeed.collectives.comm",
    "deepspeed.compression.helper": {"ztk.deepspeed.tools.helpers": "recursive_getattr recursive_setattr"},
    "deepspeed.env_report": {"ztk.report.__main__": "main"},
    "deepspeed.git_version_info": {
        "ztk.deepspeed.version": "version git_hash git_branch installed_ops accelerator_name torch_info",
    },
    "deepspeed.inference": {
        "ztk.deepspeed.serving.config": "DeepSpeedInferenceConfig",
        "ztk.deepspeed.serving.inference_engine": "InferenceEngine",
    },
    "deepspeed.inference.config": {"ztk.deepspeed.serving.config": "DeepSpeedInferenceConfig"},
    "deepspeed.inference.engine": {"ztk.deepspeed.serving.inference_engine": "InferenceEngine"},
    "deepspeed.launcher.runner": {
        "ztk.deepspeed.runner.main": "main",
        "ztk.deepspeed.runner.remote": "DEEPSPEED_ENVIRONMENT_NAME EXPORT_ENVS",
    },
    "deepspeed.module_inject.layers": {"ztk.deepspeed.zero.gathered": "GatherReplacedLayerParams"},
    "deepspeed.monitor.config": {"ztk.deepspeed.watch.monitors": "get_monitor_config"},
    "deepspeed.monitor.monitor": {"ztk.deepspeed.watch.monitors": "MonitorMaster"},
    "deepspeed.ops": {"ztk.deepspeed.tools.op_builders": "__compatible_ops__"},
    "deepspeed.ops.adagrad": {"ztk.deepspeed.optimizers.own": "DeepSpeedCPUAdagrad"},
    "deepspeed.ops.aio": {"ztk.deepspeed.tools.op_builders": "AsyncIOBuilder"},
    "deepspeed.ops.adam": {"ztk.deepspeed.optimizers.own": "DeepSpeedCPUAdam FusedAdam"},
    "deepspeed.ops.adam.cpu_adam": {"ztk.deepspeed.optimizers.own": "DeepSpeedCPUAdam"},
    "deepspeed.ops.adam.fused_adam": {"ztk.deepspeed.optimizers.own": "FusedAdam"},
    "deepspeed.ops.lamb": {"ztk.deepspeed.optimizers.own": "FusedLamb"},
    "deepspeed.ops.lion": {"ztk.deepspeed.optimizers.own": "DeepSpeedCPULion FusedLion"},
    "deepspeed.ops.op_builder": {"ztk.deepspeed.tools.op_builders": "*"},
    "deepspeed.ops.op_builder.all_ops": {"ztk.deepspeed.tools.op_builders": "ALL_OPS"},
    "deepspeed.ops.op_builder.builder": {"ztk.deepspeed.tools.op_builders": "OpBuilder"},
    "deepspeed.pipe": "ztk.deepspeed.pipe",
    "deepspeed.version": "ztk.deepspeed.version",
    "deepspeed.zero": "ztk.deepspeed.zero",
    # deepspeed.moe
    "deepspeed.moe.layer": {"ztk.parallel.moe": "MoE"},
    "deepspeed.moe.utils": {
        "ztk.parallel.moe": (
            "configure_moe_param_groups has_moe_layers is_moe_param is_moe_param_group "
            "split_params_into_different_moe_groups_for_optimizer split_params_into_shared_and_expert_params"
        ),
    },
    # deepspeed.runtime
    "deepspeed.runtime.activation_checkpointing.checkpointing": "ztk.deepspeed.recompute.checkpointing",
    "deepspeed.runtime.checkpoint_engine": {
        "ztk.deepspeed.saved.files": "CheckpointCommitInfo TorchCheckpointEngine",
    },
    "deepspeed.runtime.checkpoint_engine.checkpoint_engine": {
        "ztk.deepspeed.saved.files": "CheckpointCommitInfo CheckpointEngine",
    },
    "deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine": {
        "ztk.deepspeed.saved.files": "TorchCheckpointEngine",
    },
    "deepspeed.runtime.dataloader": {"ztk.deepspeed.start.loader": "DeepSpeedDataLoader RepeatingLoader"},
    "deepspeed.runtime.base_optimizer": {"ztk.deepspeed.optimizers.sharded": "DeepSpeedOptimizer ZeROOptimizer"},
    "deepspeed.runtime.bf16_optimizer": {"ztk.deepspeed.optimizers.sharded": "BF16_Optimizer"},
    "deepspeed.runtime.config": {
        "ztk.deepspeed.config": "DeepSpeedConfigError",
        "ztk.deepspeed.config.settings": "DeepSpeedConfig",
    },
    "deepspeed.runtime.engine": {
        "ztk.deepspeed.engine.deepspeed_engine": (
            "DeepSpeedEngine DeepSpeedOptimizerCallable DeepSpeedSchedulerCallable autocast_if_enabled"
        ),
        "ztk.parallel.moe": "MoE",
    },
    "deepspeed.runtime.fp16.fused_optimizer": {"ztk.deepspeed.optimizers.sharded": "FP16_Optimizer"},
    "deepspeed.runtime.fp16.unfused_optimizer": {"ztk.deepspeed.optimizers.sharded": "FP16_UnfusedOptimizer"},
    "deepspeed.runtime.fp16.loss_scaler": {
        "ztk.deepspeed.optimizers.loss_scaler": "DynamicLossScaler LossScaler",
    },
    "deepspeed.runtime.hybrid_engine": {"ztk.deepspeed.generation.hybrid": "DeepSpeedHybridEngine"},
    "deepspeed.runtime.lr_schedules": {
        "ztk.deepspeed.optimizers.schedules": "LRRangeTest OneCycle VALID_LR_SCHEDULES WarmupCosineLR WarmupDecayLR WarmupLR",
    },
    "deepspeed.runtime.pipe": {"ztk.deepspeed.pipe": "PipelineModule LayerSpec TiedLayerSpec ProcessTopology"},
    "deepspeed.runtime.pipe.engine": {"ztk.deepspeed.pipe.pipeline_engine": "PipelineEngine PipelineError"},
    "deepspeed.runtime.pipe.module": {"ztk.deepspeed.pipe": "PipelineModule LayerSpec TiedLayerSpec"},
    "deepspeed.runtime.pipe.topology": {
        "ztk.deepspeed.pipe": (
            "PipeDataParallelTopology PipeModelDataParallelTopology PipelineParallelGrid ProcessTopology"
        ),
    },
    "deepspeed.runtime.sequence_parallel.parallel_state_sp": {"ztk.deepspeed.ulysses.state": "*"},
    "deepspeed.runtime.sequence_parallel.ulysses_sp": {
        "ztk.deepspeed.ulysses.hf": "UlyssesSPAttentionHF UlyssesSPDataLoaderAdapter",
        "ztk.deepspeed.ulysses.tiles": "TiledFusedLogitsLoss TiledMLP sequence_tiled_compute",
    },
    "deepspeed.runtime.utils": {
        "ztk.deepspeed.tools.helpers": "clip_grad_norm_ empty_cache move_to_device see_memory_usage set_random_seed",
    },
    "deepspeed.runtime.zero": ZERO,
    "deepspeed.runtime.zero.config": {"ztk.deepspeed.saved.types": "ZeroStageEnum"},
    "deepspeed.runtime.zero.offload_config": {
        "ztk.deepspeed.engine.offloading": "OffloadDeviceEnum OffloadStateTypeEnum",
    },
    "deepspeed.runtime.zero.parameter_offload": {"ztk.deepspeed.zero.gathered": "DeepSpeedZeRoOffload"},
    "deepspeed.runtime.zero.utils": {"ztk.deepspeed.zero.parameter": "is_zero_param"},
    "deepspeed.runtime.zero.partition_parameters": {
        "ztk.deepspeed.tools.device": "get_accelerator",
        "ztk.deepspeed.zero.gathered": "GatheredParameters register_external_parameter unregister_external_parameter",
        "ztk.deepspeed.zero.init": (
            "DeepSpeedTensorOverride Init _orig_torch_arange zero_wrapper_for_fp_tensor_constructor"
        ),
        "ztk.deepspeed.zero.parameter": "ZeroParamStatus ZeroParamType is_zero_param",
    },
    "deepspeed.runtime.zero.stage3": {
        "ztk.deepspeed.optimizers.sharded": "DeepSpeedZeroOptimizer_Stage3",
    },
    "deepspeed.runtime.zero.stage_1_and_2": {
        "ztk.deepspeed.optimizers.sharded": "DeepSpeedZeroOptimizer",
    },
    # deepspeed.sequence
    "deepspeed.sequence.layer": {"ztk.deepspeed.ulysses.layer": "DistributedAttention"},
    # deepspeed.utils
    "deepspeed.utils": {
        "ztk.deepspeed.tools.helpers": "OnDevice instrument_w_nvtx",
        "ztk.deepspeed.tools.log": "logger log_dist",
        "ztk.deepspeed.start.loader": "RepeatingLoader",
        **_PARAMETER_STATES,
        **_LEAF_MODULES,
    },
    "deepspeed.utils.groups": {"ztk.deepspeed.collectives.groups": "*"},
    "deepspeed.utils.init_on_device": {"ztk.deepspeed.tools.helpers": "OnDevice"},
    "deepspeed.utils.nvtx": {"ztk.deepspeed.tools.helpers": "instrument_w_nvtx"},
    "deepspeed.utils.logging": {"ztk.deepspeed.tools.log": "logger log_dist print_dist"},
    "deepspeed.utils.tensor_fragment": {"ztk.deepspeed.saved.types": "fragment_address", **_PARAMETER_STATES},
    "deepspeed.utils.timer": {
        "ztk.deepspeed.tools.timers": "SynchronizedWallClockTimer ThroughputTimer trim_mean",
    },
    "deepspeed.utils.z3_leaf_module": _LEAF_MODULES,
    "deepspeed.utils.zero_to_fp32": "ztk.deepspeed.zero_to_fp32",
    # a separate package
    "deepspeed_chat": {"ztk.deepspeed.chat": "*"},
    "deepspeed_chat.ppo_trainer": {"ztk.deepspeed.chat.ppo_trainer": "DeepSpeedPPOTrainer"},
    "deepspeed_chat.reward_model": {"ztk.deepspeed.chat.reward_model": "RewardModel compute_reward_loss"},
}
# Modules and names that no project of the survey in docs/deepspeed_users.md imports -> the way to the same end.
GONE = {
    "deepspeed.checkpoint.constants": "write a key or a name of a checkpoint's files as text: state['param_shapes']",
    "deepspeed.constants": "write the value: the port of torch.distributed is 29500",
    "deepspeed.moe.sharded_moe": "deepspeed.moe.layer.MoE routes and exchanges tokens; ztk.parallel.moe has its parts",
    "deepspeed.runtime.config_utils": "pydantic.BaseModel with ConfigDict(extra='forbid') refuses unknown keys",
    "deepspeed.profiling": "use torch.utils.flop_counter.FlopCounterMode, which counts each module's operations",
    "deepspeed.profiling.flops_profiler": "use torch.utils.flop_counter.FlopCounterMode, which counts each module's operations",
    "deepspeed.runtime.constants": "write a key of the configuration as text: config['train_batch_size']",
    "deepspeed.runtime.pipe.schedule": "ztk.parallel.pipeline.schedule has the schedules that the engine runs",
    "deepspeed.runtime.zero.tiling": "a Linear that is too large for a GPU is gathered in pieces: topology.tensor, or deepspeed.zero.Init",
    "deepspeed.zero.TiledLinear": "use nn.Linear with topology.tensor, or with deepspeed.zero.Init",
    "deepspeed.runtime.fp16.loss_scaler.LossScalerBase": "torch.amp.GradScaler scales the loss of an own loop",
}
_ESTIMATE = "ztk.plan, or python run.py task=plan with the run's options, counts every tier's bytes"
for _stage, _homes in ((2, ("zero", "runtime.zero.stage_1_and_2")), (3, ("zero", "runtime.zero.stage3"))):
    for _home in _homes:
        for _kind in ("live", "cold"):
            GONE[f"deepspeed.{_home}.estimate_zero{_stage}_model_states_mem_needs_all_{_kind}"] = _ESTIMATE
for _name in [
    "comms_logger",
    "configure",
    "log_summary",
    "reset_log",
    "has_comm_data",
    "get_comm_operation_count",
    "get_logged_comm_ops",
    "watch",
]:
    GONE[f"deepspeed.comm.{_name}"] = "torch.profiler.profile has the time and the bytes of each collective"
for _name in tuple(MODULES):
    while _name := _name.rpartition(".")[0]:
        MODULES.setdefault(_name, {})
