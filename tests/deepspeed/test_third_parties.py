"""Names that other projects import, and the configurations that OpenRLHF 0.11, Lightning's DeepSpeedStrategy and DeepSpeed-Chat write:
accepted, with the effect they expect.

Keys and defaults come from their sources (openrlhf/utils/deepspeed, lightning/pytorch/strategies/deepspeed.py, dschat/utils/ds_utils.py), batch
sizes from their trainers.
"""

import itertools
from pathlib import Path

import pytest

from ztk.deepspeed.config import Settings, parse_config
from ztk.deepspeed.names.tree import module_of

PAGE = Path(__file__).parents[2] / "docs" / "deepspeed_users.md"

STAGES = (0, 1, 2, 3)
SIZES = {"train_micro_batch_size_per_gpu": 2, "train_batch_size": 8}


def parse(config: dict) -> Settings:
    return parse_config(config, world_size=2)


def openrlhf(*, stage: int, offload: bool, adam_offload: bool, precision: str, trains: bool) -> dict:
    place = "cpu" if offload else "none"
    section = {
        "stage": stage,
        **dict.fromkeys(("stage3_max_live_parameters", "stage3_max_reuse_distance"), "auto"),
        **dict.fromkeys(("stage3_param_persistence_threshold", "stage3_prefetch_bucket_size"), "auto"),
    }
    config = {
        **SIZES,
        "steps_per_print": 100,
        "bf16": {"enabled": precision == "bf16"},
        "fp16": {"enabled": precision == "fp16"},
        "gradient_clipping": 1.0,
        "prescale_gradients": False,
        "wall_clock_breakdown": False,
        "compile": {"deepcompile": False},
        "tensor_parallel": {"autotp_size": 1},
        "zero_optimization": section,
    }
    if not trains:
        section["offload_param"] = {"device": place, "pin_memory": True}
        return config
    section |= {
        "offload_param": {"device": place},
        "offload_optimizer": {"device": "cpu" if adam_offload else "none", "pin_memory": True},
        "sub_group_size": "auto",
        "reduce_bucket_size": "auto",
        "zero_hpz_partition_size": 1,
        "zero_quantized_weights": False,
        "zero_quantized_gradients": False,
        "overlap_comm": True,
        "contiguous_gradients": True,
    }
    if stage == 3:
        section["reduce_scatter"] = True
    return config | {"data_types": {"grad_accum_dtype": None}, "checkpoint": {"load_universal": False}}


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("stage", STAGES)
def test_openrlhf(stage, precision):
    for offload, adam_offload, trains in itertools.product((False, True), repeat=3):
        config = openrlhf(stage=stage, offload=offload, adam_offload=adam_offload, precision=precision, trains=trains)
        made = parse(config)
        assert (made.zero.stage, made.batch.accumulation, made.precision.reduce_dtype) == (stage, 2, None)
        assert made.precision.dtype.itemsize == 2 and made.gradient_clipping == 1.0
        assert made.offload.optimizer == ("cpu" if adam_offload and trains else "none")
        assert made.offload.parameters == ("cpu" if offload and stage == 3 else "none")
        noted = any("offload_param.device=cpu: acts at stage 3" in note for note in made.notes)
        assert noted == (offload and stage < 3)


def lightning(*, stage: int, optimizer: str | None = None, parameters: str | None = None, precision: str) -> dict:
    """With `deepspeed_stage_3_offload` and its kin: where the states go to, None for no section."""
    section = {
        "stage": stage,
        "contiguous_gradients": True,
        "overlap_comm": True,
        "allgather_partitions": True,
        "reduce_scatter": True,
        "allgather_bucket_size": 200_000_000,
        "reduce_bucket_size": 200_000_000,
        "sub_group_size": 1_000_000_000_000,
    }
    shared = {"nvme_path": "/local_nvme", "pin_memory": False}
    if optimizer is not None:
        section["offload_optimizer"] = {"device": optimizer, "buffer_count": 4, **shared}
    if parameters is not None:
        pool = {"buffer_count": 5, "buffer_size": 100_000_000, "max_in_cpu": 1_000_000_000}
        section["offload_param"] = {"device": parameters, **pool, **shared}
    scale = {
        "loss_scale": 0,
        "initial_scale_power": 16,
        "loss_scale_window": 1000,
        "hysteresis": 2,
        "min_loss_scale": 1,
    }
    return {
        "zero_allow_untested_optimizer": True,
        "zero_optimization": section,
        "activation_checkpointing": {
            "partition_activations": False,
            "cpu_checkpointing": False,
            "contiguous_memory_optimization": False,
            "synchronize_checkpoint_boundary": False,
        },
        "aio": {
            "block_size": 1048576,
            "queue_depth": 8,
            "single_submit": False,
            "overlap_events": True,
            "thread_count": 1,
        },
        "gradient_accumulation_steps": 2,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        **({"fp16": {"enabled": True, **scale}} if precision == "16-mixed" else {"bf16": {"enabled": True}}),
    }


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
@pytest.mark.parametrize(
    ("stage", "optimizer", "parameters"),
    [(0, None, None), (1, None, None), (2, None, None), (2, "cpu", None), (3, None, None), (3, "cpu", None),
     (3, "cpu", "cpu"), (3, "nvme", "nvme"), (1, "cpu", "cpu")],
)  # fmt: skip
def test_lightning(stage, optimizer, parameters, precision):
    made = parse(lightning(stage=stage, optimizer=optimizer, parameters=parameters, precision=precision))
    assert (made.batch.train, made.gradient_clipping, made.zero.bucket_size) == (8, 0.0, 200_000_000)
    assert made.offload.optimizer == (optimizer or "none")
    assert made.offload.parameters == ((parameters or "none") if stage == 3 else "none")
    if optimizer == "nvme":
        assert (made.offload.threads, made.offload.block_bytes) == (1, 1 << 20)
        assert (made.offload.nvme_path, made.offload.pin_memory) == ("/local_nvme", False)
    assert any("aio.thread_count: is read as intra_op_parallelism" in note for note in made.notes)
    if optimizer == "cpu":
        assert any("offload_optimizer.nvme_path='/local_nvme': has no effect" in note for note in made.notes)


def deepspeed_chat(*, stage: int, offload: bool, dtype: str, trains: bool) -> dict:
    device = {"device": "cpu" if offload else "none"}
    section = {
        "stage": stage,
        "offload_param": device,
        "stage3_param_persistence_threshold": 1e4,
        "memory_efficient_linear": False,
    }
    config = {
        **SIZES,
        "steps_per_print": 10,
        "zero_optimization": section,
        **({"fp16": {"enabled": True}} if dtype == "fp16" else {"bfloat16": {"enabled": True}}),
        "gradient_clipping": 1.0,
        "prescale_gradients": False,
        "wall_clock_breakdown": False,
    }
    if not trains:
        return config
    section |= {"overlap_comm": True, "offload_optimizer": device}
    section |= {"stage3_max_live_parameters": 3e7, "stage3_prefetch_bucket_size": 3e7}
    if dtype == "fp16":
        config["fp16"]["loss_scale_window"] = 100
    return config | {
        "hybrid_engine": {
            "enabled": False,
            "max_out_tokens": 512,
            "inference_tp_size": 1,
            "release_inference_cache": False,
            "pin_parameters": True,
            "tp_gather_partition_size": 8,
        },
        "tensorboard": {"enabled": False, "output_path": "/ds_tensorboard_logs/", "job_name": "_tensorboard"},
    }


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("stage", STAGES)
def test_deepspeed_chat(stage, dtype):
    """Steps 1 and 2, and the frozen models of step 3, whose hybrid engine `test_hybrid` has."""
    for offload, trains in itertools.product((False, True), repeat=2):
        made = parse(deepspeed_chat(stage=stage, offload=offload, dtype=dtype, trains=trains))
        assert (made.zero.stage, made.batch.accumulation) == (stage, 2) and made.precision.dtype.itemsize == 2
        assert made.offload.optimizer == ("cpu" if offload and trains else "none")
        assert made.offload.parameters == ("cpu" if offload and stage == 3 else "none")
        if dtype == "fp16" and trains:
            assert made.precision.loss_scale.window == 100


# The imports of each project: module, names. Read from their sources in November 2026.
IMPORTS = [
    ("open-instruct", "comm", "get_rank init_distributed"),
    ("open-instruct", "runtime.checkpoint_engine.torch_checkpoint_engine", "TorchCheckpointEngine"),
    ("open-instruct", "runtime.engine", "DeepSpeedEngine"),
    ("open-instruct", "runtime.sequence_parallel.ulysses_sp", "UlyssesSPAttentionHF UlyssesSPDataLoaderAdapter"),
    ("open-instruct", "runtime.zero.offload_config", "OffloadDeviceEnum OffloadStateTypeEnum"),
    ("open-instruct", "runtime.zero.partition_parameters", "ZeroParamStatus"),
    ("open-instruct", "utils", "groups logger"),
    (
        "open-instruct",
        "utils.groups",
        "_get_sequence_parallel_group _get_sequence_parallel_rank _get_sequence_parallel_world_size",
    ),
    ("open-instruct", "zero", "GatheredParameters Init"),
    ("ArcticTraining", "accelerator", "get_accelerator"),
    ("ArcticTraining", "checkpoint.utils", "clone_tensors_for_torch_save"),
    ("ArcticTraining", "comm", "init_distributed"),
    ("ArcticTraining", "git_version_info", "accelerator_name installed_ops torch_info"),
    ("ArcticTraining", "launcher.runner", "EXPORT_ENVS main"),
    ("ArcticTraining", "ops.adam", "DeepSpeedCPUAdam FusedAdam"),
    ("ArcticTraining", "runtime.checkpoint_engine", "TorchCheckpointEngine"),
    ("ArcticTraining", "runtime.engine", "DeepSpeedEngine MoE autocast_if_enabled"),
    (
        "ArcticTraining",
        "runtime.sequence_parallel.ulysses_sp",
        "TiledFusedLogitsLoss TiledMLP UlyssesSPAttentionHF UlyssesSPDataLoaderAdapter sequence_tiled_compute",
    ),
    ("ArcticTraining", "runtime.zero", "GatheredParameters"),
    ("ArcticTraining", "runtime.zero.partition_parameters", "ZeroParamStatus"),
    ("ArcticTraining", "utils", "groups logger"),
    ("ArcticTraining", "utils.logging", "print_dist"),
    ("ArcticTraining", "utils.timer", "SynchronizedWallClockTimer"),
    ("OpenRLHF", "checkpoint.utils", "clone_tensors_for_torch_save"),
    ("OpenRLHF", "module_inject.layers", "GatherReplacedLayerParams"),
    ("OpenRLHF", "runtime.zero.offload_config", "OffloadDeviceEnum OffloadStateTypeEnum"),
    ("OpenRLHF", "runtime.zero.partition_parameters", "ZeroParamStatus"),
    ("OpenRLHF", "ops.adam", "DeepSpeedCPUAdam FusedAdam"),
    ("OpenRLHF", "zero", "GatheredParameters Init"),
    ("DeepSpeed-Chat", "compression.helper", "recursive_getattr recursive_setattr"),
    ("DeepSpeed-Chat", "ops.adam", "DeepSpeedCPUAdam FusedAdam"),
    ("DeepSpeed-Chat", "runtime.zero.partition_parameters", "ZeroParamStatus"),
    ("Lightning", "checkpoint.utils", "clone_tensors_for_torch_save"),
    ("Lightning", "utils.zero_to_fp32", "get_fp32_state_dict_from_zero_checkpoint"),
]


@pytest.mark.parametrize(("project", "module", "names"), IMPORTS, ids=lambda value: str(value)[:40])
def test_imports(project, module, names):
    """Each name exists, and the project's row of the page has it."""
    found = module_of(f"deepspeed.{module}")
    for name in names.split():
        assert getattr(found, name) is not None
    text = " ".join(f"`{name}`" for name in names.split())
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith(f"| {project} | `")]
    assert any(f"`{module}`: {text}" in row for row in rows)
