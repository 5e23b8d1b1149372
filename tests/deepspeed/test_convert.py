"""ds_config.json as run.py's command line, and back."""

import dataclasses
import json

import pytest

from ztk.cli.convert import main
from ztk.config import compose
from ztk.deepspeed.config import parse_config
from ztk.deepspeed.config.convert import to_ds_config, to_overrides

ADAM = {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.8, 0.99], "eps": 1e-6}}
WARMUP = {"warmup_num_steps": 5, "warmup_min_lr": 1e-4, "warmup_max_lr": 1e-3}
CASES = [
    {"zero_optimization": {"stage": 1, "reduce_bucket_size": 1000}, "optimizer": ADAM},
    {
        "bf16": {"enabled": True},
        "communication_data_type": "fp32",
        "zero_optimization": {
            "stage": 3,
            "stage3_prefetch_bucket_size": 5,
            "offload_optimizer": {"device": "cpu", "ratio": 0.75},
            "offload_param": {"device": "cpu"},
        },
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "adam_w_mode": False}},
        "scheduler": {"type": "WarmupLR", "params": WARMUP},
    },
    {
        "fp16": {"enabled": True, "initial_scale_power": 10, "hysteresis": 3},
        "optimizer": {"type": "SGD", "params": {"lr": 1e-3, "momentum": 0.9}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 50, "warmup_type": "linear", **WARMUP}},
    },
    {
        "fp16": {"enabled": True, "loss_scale": 128},
        "optimizer": {"type": "Lion", "params": {"lr": 1e-3}},
        "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 50, "warmup_num_steps": 4}},
    },
    {
        "optimizer": ADAM,
        "scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3, "cycle_momentum": False}},
    },
    {"optimizer": ADAM, "scheduler": {"type": "LRRangeTest", "params": {"lr_range_test_min_lr": 1e-3}}},
]  # fmt: skip
ZERO_PLUS_PLUS = {"stage": 3, "zero_quantized_weights": True, "zero_quantized_gradients": True}
CASES.append({"optimizer": ADAM, "zero_optimization": {**ZERO_PLUS_PLUS, "zero_hpz_partition_size": 2}})
SAME = ("batch", "precision", "zero", "offload", "optimizer")


@pytest.mark.parametrize("given", CASES, ids=lambda case: str(case)[:50])
def test_there_and_back(given, tmp_path):
    first = parse_config({"train_batch_size": 8, "gradient_accumulation_steps": 2, **given}, world_size=2)
    words = to_overrides(first, ranks=2).words
    config = dataclasses.asdict(compose(*words, "train.steps=100", output_dir=tmp_path))
    second = parse_config(to_ds_config(config), world_size=2)
    for name in SAME:
        assert getattr(second, name) == getattr(first, name), name
    assert (second.schedule and second.schedule.type) == (first.schedule and first.schedule.type)
    if first.schedule:
        for key, value in first.schedule.params.items():
            expected = pytest.approx(value) if isinstance(value, float) else value
            assert second.schedule.params[key] == expected, key


def test_a_disk_is_there_and_back(tmp_path):
    off = {"device": "nvme", "nvme_path": str(tmp_path)}
    given = {"stage": 3, "offload_optimizer": off, "offload_param": off}
    first = parse_config({"train_batch_size": 8, "zero_optimization": given, "optimizer": ADAM}, world_size=1)
    words = to_overrides(first).words
    config = dataclasses.asdict(compose(*words, output_dir=tmp_path))
    assert parse_config(to_ds_config(config), world_size=1).offload == first.offload


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> dict:
    """A run of run.py on 2 ranks, micro-batches of 4."""
    words = ("train.micro_batch_size=4", "launch.ranks=2")
    return dataclasses.asdict(compose(*words, output_dir=tmp_path_factory.mktemp("run")))


@pytest.mark.parametrize(
    ("section", "changed", "fix"),
    [
        ("train", {"global_batch_size": 10}, "a multiple of 8.*use 8 or 16"),
        ("train", {"global_batch_size": 3}, "use 8, or another"),
        ("topology", {"pipeline": 2}, "PipelineModule"),
        ("topology", {"sequence": 2}, "topology.sequence=1"),
        ("topology", {"context": 2}, "topology.context=1"),
        ("ema", {"decay": 0.99}, "ema.decay=0"),
        ("optimizer", {"states": "8bit"}, "use optimizer.states=fp32"),
        ("precision", {"master": "stochastic"}, "use precision.master=fp32"),
        ("scheduler", {"name": "wsd"}, "use scheduler=linear"),
        ("optimizer", {"name": "muon"}, "use optimizer=adamw"),
    ],
)
def test_what_a_ds_config_cannot_say_is_refused(run, section, changed, fix):
    """Silently another run would be worse."""
    with pytest.raises(ValueError, match=fix):
        to_ds_config({**run, section: run[section] | changed})


def test_batches_and_cuts_are_said(run):
    made = to_ds_config({**run, "train": run["train"] | {"global_batch_size": 16, "accumulation_steps": 2}})
    assert parse_config(made, world_size=2).batch.train == 16
    made = to_ds_config({**run, "topology": run["topology"] | {"tensor": 2, "expert": 4}})
    settings = parse_config(made, world_size=8)
    assert (settings.tensor.degree, settings.experts.size) == (2, 4)


def test_the_command(tmp_path, capsys):
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps({"train_batch_size": 8, "optimizer": ADAM, "scheduler": {"type": "WarmupLR"}}))
    assert main([str(path), "--ranks", "2"]) == 0
    printed = capsys.readouterr().out
    assert "optimizer=adamw\noptimizer.lr=0.001\n" in printed and "# scheduler: DeepSpeed makes one update" in printed
    assert main(["--back", "zero=stage3", "offload=cpu", "precision=bf16"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["zero_optimization"]["offload_param"] == {"device": "cpu"} and made["bf16"] == {"enabled": True}
    assert main(["--back", "zero=ddp"]) == 2
    path.write_text('{"train_batchsize": 8}')
    assert main([str(path)]) == 2
    assert "did you mean train_batch_size" in capsys.readouterr().err


def test_differences_from_run_py_are_noted(tmp_path):
    kept = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    notes = to_overrides(parse_config({"train_batch_size": 2, "bf16": kept, "optimizer": ADAM}, world_size=1)).notes
    assert {note.partition(":")[0] for note in notes} == {f"bf16.{key}" for key in kept if key != "enabled"}

    given = {"train_batch_size": 2, "torch_autocast": {"enabled": True, "dtype": "float16"}, "optimizer": ADAM}
    made = to_overrides(parse_config(given, world_size=1))
    assert made.notes == ["torch_autocast: run.py computes in one dtype; choose precision=fp16"]
    assert compose(*made.words, output_dir=tmp_path).precision.dtype == "fp32"


def test_every_section_is_converted_or_listed():
    """Keys without an equivalent in run.py are listed with a fix; keys that are off are not listed."""
    given = {
        "csv_monitor": {"enabled": True},
        "wandb": {"enabled": False},
        "steps_per_print": 5,
        "dump_state": False,
        "activation_checkpointing": {"cpu_checkpointing": True},
        "zero_optimization": {"stage": 3, "leaf_module": {"classes": ["Block"]}},
        "prescale_gradients": False,
    }
    notes = to_overrides(parse_config({"train_batch_size": 8, "optimizer": ADAM, **given}, world_size=1)).notes
    told = {note.partition(":")[0] for note in notes}
    expected = {"csv_monitor", "steps_per_print", "activation_checkpointing", "zero_optimization.leaf_module"}
    assert told == expected, notes
