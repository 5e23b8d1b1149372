"""ds_config: every key takes effect, is accepted with a note, or is refused with a fix; all faults in one error."""

import base64
import json
import pickle
import re

import pytest

from ztk.deepspeed.config import DeepSpeedConfigError, parse_config

BATCH = {"train_batch_size": 8}
ADAM = {"type": "AdamW", "params": {"lr": 1e-3}}


def parse(world_size: int = 2, **config):
    return parse_config({**BATCH, **config}, world_size=world_size)


def faults(**config) -> list[str]:
    with pytest.raises(DeepSpeedConfigError) as caught:
        parse(**config)
    return caught.value.faults


# The wrong or pointless configurations of which DeepSpeed 0.19.8 accepts all but four, and a part of the fix. Three more are accepted with
# a note, in test_accepted.py: offload_param at stages 1 and 2, and aio.thread_count.
WRONG = [
    ({"zero_optimisation": {"stage": 2}}, "did you mean zero_optimization"),
    ({"fp_16": {"enabled": True}}, "did you mean fp16"),
    ({"gradient_cliping": 1.0}, "did you mean gradient_clipping"),
    ({"wall_clock_break_down": True}, "did you mean wall_clock_breakdown"),
    ({"activation_checkpointing": {"partitioned_activations": True}}, "did you mean partition_activations"),
    ({"pipeline": {"actication_checkpoint_interval": 1}}, "did you mean activation_checkpoint_interval"),
    ({"checkpoint": {"load_univeral": True}}, "did you mean load_universal"),
    ({"flops_profiler": {"enable": True}}, "did you mean enabled"),
    ({"data_types": {"grad_accum_type": "fp32"}}, "did you mean grad_accum_dtype"),
    ({"torch_autocast": {"enable": True}}, "did you mean enabled"),
    ({"expert_parallel": {"auto_ep_size": 2}}, "did you mean autoep_size"),
    ({"zero_optimization": {"stage": "auto"}}, "give a value"),
    ({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}}, "nvme_path: is missing"),
    ({"zero_optimization": {"stage": 2, "zero_quantized_gradients": True}}, "has no effect at stage 2"),
    ({"zero_optimization": {"stage": 2, "zero_hpz_partition_size": 4}}, "has no effect at stage 2"),
    ({"optimizer": {"params": {"lr": 1e-3}}}, "optimizer.type: is missing"),
    ({"optimizer": {"type": "AdamW", "params": {"learning_rate": 1e-3}}}, "there is no such key"),
    ({"optimizer": {"type": "NAdam", "params": {"lr": -1}}}, "torch.optim.NAdam: Invalid learning rate"),
    ({"optimizer": {"type": "RMSprop", "params": {"betas": [0.9, 0.99]}}}, "unexpected keyword argument 'betas'"),
    ({"scheduler": {"type": "WarmupLr"}}, "did you mean WarmupLR"),
    ({"zero_optimization": {"stage": 2, "overlap_com": True}}, "did you mean overlap_comm"),
    ({"tensor_parallel": {"autotp_sice": 2}}, "did you mean autotp_size"),
    ({"bf16": {"enabled": True, "check_overflow": True}}, "did you mean check_grad_overflow"),
    ({"nebula": {"enabled": True}}, "was removed from DeepSpeed"),
    ({"zero_optimization": {"stage": 1, "reduce_bucket_size": 1e308}}, "at most 9223372036854775807"),
    ({"zero_optimization": {"stage": 1, "reduce_bucket_size": 10**400}}, "that a 64-bit float holds"),
    ({"optimizer": {"type": "AdamW", "params": {"lr": 1e308}}}, "params.lr=1e+308: must be 0 or more and finite, also"),
    ({"optimizer": {"type": "AdamW", "params": {"eps": float("inf")}}}, "params.eps=inf: must be 0 or more and finite"),
    (
        {"optimizer": {"type": "AdamW", "params": {"betas": [0.9, 0.999999999]}}},
        "number 2 must be 0 or more and below 1",
    ),
    ({"gradient_clipping": 1e-300}, "also in float32, where it becomes 0"),
    ({"gradient_clipping": 1e308}, "also in float32, where it becomes inf"),
    ({"train_micro_batch_size_per_gpu": "\u0661"}, "must be a number"),
    ({"fp16": {"enabled": True, "initial_scale_power": 1e308}}, "at most 127"),
    ({"aio": {"intra_op_parallelism": 100_000}}, "at most 1024"),
]


@pytest.mark.parametrize(("config", "fix"), WRONG, ids=lambda value: str(value)[:60])
def test_wrong_and_pointless_configurations_are_refused(config, fix):
    assert any(fix in fault for fault in faults(**config)), faults(**config)


def test_the_error_crosses_processes():
    """As from ranks that torch.multiprocessing has started."""
    for faults in (["a: no"], ["a: no", "b: no"]):
        copied = pickle.loads(pickle.dumps(DeepSpeedConfigError(faults)))
        assert str(copied) == str(DeepSpeedConfigError(faults)) and copied.faults == faults


def test_all_faults_come_in_one_error():
    found = faults(fp_16={}, gradient_cliping=1, zero_optimization={"stage": 7, "overlap_com": True})
    assert len(found) == 4


@pytest.mark.parametrize(
    ("config", "part"),
    [
        ({"zero_optimization": {"stage": 2, "mics_shard_size": 4}}, "was removed"),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "gpu"}}}, "must be one of"),
        (
            {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 1.5}}},
            "ratio=1.5: must be 0 or more and at most 1",
        ),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"pin_memory": True}}}, "device: is missing"),
        ({"zero_optimization": {"stage": True}}, "must be a number"),
        ({"zero_optimization": [2]}, "must be an object"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "one dtype"),
        ({"fp16": {"enabled": "auto"}}, "give a value"),
        ({"optimizer": {"type": "Adam", "params": {"lr": "auto"}}}, "Hugging Face"),
        ({"optimizer": {"type": "OneBitAdam"}}, "was removed"),
        ({"optimizer": {"type": "Muon"}}, "not offered"),
        ({"optimizer": {"type": "Lamb", "params": {"min_coeff": 2, "max_coeff": 1}}}, "is above"),
        ({"bf16": {"enabled": True, "bf16_optimizer_states": True}}, "requires bf16.bf16_master_weights_and_grads"),
        ({"optimizer": {"type": "AdamW", "params": {"max_grad_norm": 1}}}, "gradient_clipping"),
        ({"optimizer": {"type": "AdamW", "params": {"betas": [0.9]}}}, "two numbers"),
        ({"optimizer": {"type": "SGD", "params": {"momentum": 2}}}, "0 or more and below 1"),
        ({"scheduler": {"type": "WarmupDecayLR"}}, "total_num_steps: is missing"),
        ({"communication_data_type": "int8"}, "must be one of"),
        ({"communication_data_type": "fp16", "data_types": {"grad_accum_dtype": "fp32"}}, "give one of them"),
        ({"gradient_allreduce_op": "max"}, "must be one of"),
        ({"train_micro_batch_size_per_gpu": 3}, "would fit"),
        ({"train_batch_size": "auto"}, "Hugging Face"),
        ({"data_efficiency": {"enabled": True}}, "not offered"),
        ({"flops_profiler": True}, "must be an object"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_other_refusals(config, part):
    assert any(part in fault for fault in faults(**config)), faults(**config)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"train_batch_size": 32}, (32, 16, 1)),
        ({"train_batch_size": 32, "gradient_accumulation_steps": 2}, (32, 8, 2)),
        ({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4}, (32, 4, 4)),
        ({"train_micro_batch_size_per_gpu": 4}, (8, 4, 1)),
        ({"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3}, (24, 4, 3)),
    ],
)
def test_two_of_the_batch_sizes_give_the_third(given, expected):
    batch = parse_config(given, world_size=2).batch
    assert (batch.train, batch.micro, batch.accumulation) == expected


@pytest.mark.parametrize("given", [{}, {"gradient_accumulation_steps": 2}, {"train_batch_size": 3}])
def test_a_batch_that_does_not_come_out_is_refused(given):
    with pytest.raises(DeepSpeedConfigError, match="train_batch_size"):
        parse_config(given, world_size=2)


SOURCE = """
{
  // the size of a step
  "train_batch_size": 8,   # all ranks
  "zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8,},
  /* a url in a text stays: */ "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
}
"""


def test_every_source_gives_the_same_configuration(tmp_path):
    path = tmp_path / "ds_config.json"
    path.write_text(SOURCE)
    from_dict = parse(zero_optimization={"stage": 2, "reduce_bucket_size": 5e8}, optimizer=ADAM)
    coded = base64.urlsafe_b64encode(json.dumps(from_dict.given).encode()).decode()
    assert parse_config(str(path), world_size=2) == parse_config(coded, world_size=2) == from_dict


@pytest.mark.parametrize(
    ("text", "part"), [('{"a": 1, "a": 2}', "twice"), ('{"a": }', "line 1"), ("[1]", "must hold an object")]
)
def test_a_broken_file_is_named(tmp_path, text, part):
    path = tmp_path / "ds_config.json"
    path.write_text(text)
    with pytest.raises(DeepSpeedConfigError, match=part):
        parse_config(path, world_size=2)


def test_a_missing_file_is_named():
    with pytest.raises(DeepSpeedConfigError, match="there is no such file"):
        parse_config("nowhere.json", world_size=2)


def test_keys_reach_their_policies(tmp_path):
    settings = parse(
        fp16={"enabled": True, "initial_scale_power": 12, "loss_scale_window": 7, "hysteresis": 3, "min_loss_scale": 2},
        zero_optimization={
            "stage": 3,
            "reduce_bucket_size": 1e6,
            "stage3_prefetch_bucket_size": 10,
            "stage3_max_live_parameters": 20,
            "stage3_max_reuse_distance": 30,
            "stage3_param_persistence_threshold": 40,
            "stage3_gather_16bit_weights_on_model_save": True,
            "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path), "pin_memory": False, "ratio": 0.3},
            "offload_param": {"device": "cpu", "pin_memory": False},
        },
        aio={"block_size": 1 << 20, "intra_op_parallelism": 2, "queue_depth": 8},
        gradient_clipping=0.5,
        communication_data_type="fp32",
        optimizer={"type": "Adam", "params": {"lr": 2e-3, "betas": [0.8, 0.9], "adam_w_mode": False}},
    )
    scale, zero, offload = settings.precision.loss_scale, settings.zero, settings.offload
    assert (scale.initial, scale.window, scale.hysteresis, scale.floor) == (4096, 7, 3, 2)
    assert (zero.stage, zero.bucket_size, zero.prefetch_bucket_size) == (3, 1_000_000, 10)
    assert (zero.max_live_parameters, zero.max_reuse_distance, zero.param_persistence_threshold) == (20, 30, 40)
    assert (offload.optimizer, offload.parameters, offload.nvme_path) == ("nvme", "cpu", str(tmp_path))
    assert offload.optimizer_fraction == 0.3
    assert (offload.pin_memory, offload.threads, offload.block_bytes) == (False, 2, 1 << 20)
    assert settings.precision.gradient_dtype.itemsize == 4 and settings.gathers_on_save
    optimizer = settings.optimizer
    assert (optimizer.name, optimizer.lr, optimizer.betas, optimizer.eps) == ("adam", 2e-3, (0.8, 0.9), 1e-8)
    assert optimizer.decay_all and optimizer.clip_grad_norm == 0.5
    assert [note.partition("=")[0] for note in settings.notes] == ["aio.queue_depth"]


def test_defaults_are_deepspeeds():
    settings = parse(zero_optimization={"stage": 3}, optimizer={"type": "Adam"})
    assert settings.gradient_clipping == 1.0
    assert (settings.optimizer.name, settings.optimizer.lr, settings.optimizer.betas) == ("adamw", 1e-3, (0.9, 0.999))
    assert (settings.zero.param_persistence_threshold, settings.zero.prefetch_bucket_size) == (100_000, 50_000_000)


def test_keys_without_effect_are_logged():
    config = {"stage": 2, "overlap_comm": False, "sub_group_size": 1e9, "contiguous_gradients": True}
    notes = parse(zero_optimization=config).notes
    assert len(notes) == 2 and "behind computation" in notes[0] and "sub_group_size" in notes[1]


def test_sizes_of_stage_3_may_stay_when_the_stage_is_changed():
    settings = parse(zero_optimization={"stage": 2, "stage3_max_live_parameters": 1e9})
    assert settings.notes == ("zero_optimization.stage3_max_live_parameters: acts at stage 3; this is stage 2",)


def test_old_flags_of_offloading():
    settings = parse(zero_optimization={"stage": 2, "cpu_offload": True})
    assert settings.offload.optimizer == "cpu"


def test_a_level_of_the_log_may_be_in_upper_case():
    assert parse(log_level="ERROR").log_level == "error"


def test_sections_that_are_off_are_accepted():
    parse(
        wandb={"enabled": False, "project": "x"},
        flops_profiler={"enabled": False},
        activation_checkpointing={"partition_activations": False, "cpu_checkpointing": False},
        tensor_parallel={"autotp_size": 0},
        steps_per_print=float("inf"),
    )


def test_what_a_document_writes_and_deepspeed_refuses():
    """Document 002, 13.1: DeepSpeed 0.19.8 requires a whole number there."""
    settings = parse_config({"train_batch_size": 1, "fp16": {"enabled": True, "min_loss_scale": 1e-8}}, world_size=1)
    assert settings.precision.loss_scale.floor == 1e-8


def test_leaf_modules():
    section = {"classes": "Experts", "name_suffixes": ["mlp", "mlp"]}
    given = {"train_batch_size": 1, "zero_optimization": {"stage": 3, "leaf_module": section}}
    leaves = parse_config(given, world_size=1).leaves
    assert leaves.classes == ("Experts",) and leaves.name_suffixes == ("mlp",) and leaves.wanted == {"Experts", "mlp"}
    usual = parse_config({"train_batch_size": 1}, world_size=1).leaves
    assert "MixtralSparseMoeBlock" in usual.classes[0] and not usual.wanted
    for wrong, part in (({"stage": 2, "leaf_module": section}, "no effect at stage 2"),
                        ({"stage": 3, "leaf_module": {"classes": [3]}}, "list of texts"),
                        ({"stage": 3, "leaf_module": {"class": []}}, "classes")):  # fmt: skip
        with pytest.raises(ValueError, match=part):
            parse_config({"train_batch_size": 1, "zero_optimization": wrong}, world_size=1)


@pytest.mark.parametrize(
    "config, named",
    [
        ({1: 2}, "1: a key must be a text, and this is of type int"),
        ({"train_batch_size": 2, None: 3}, "None: a key must be a text"),
        ({b"train_batch_size": 2}, "b'train_batch_size': a key must be a text"),
        ({"zero_optimization": {"offload_param": {2: 1}}}, "zero_optimization.offload_param.2: a key must be a text"),
    ],
)
def test_a_key_that_is_no_text_is_named(config, named):
    with pytest.raises(DeepSpeedConfigError, match=re.escape(named)):
        parse_config(config, world_size=1)
