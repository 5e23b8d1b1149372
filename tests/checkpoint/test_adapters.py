"""Adapters read from peft folders, and the faults of such folders."""

import json

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.inference.models import build
from ztk.checkpoint import CheckpointError, read_adapter

OPTIONS = {
    "plain": {"target_modules": "all-linear"},
    "patterns": {
        "target_modules": ["q_proj", "down_proj"],
        "rank_pattern": {"down_proj": 5},
        "alpha_pattern": {r"layers\.1\..*q_proj": 3, "down_proj": 9},
    },
    "rslora": {"target_modules": ["q_proj"], "use_rslora": True},
    "conv1d": {"target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True},
}


def saved(model, *, folder, **options):
    """An adapter of peft with random matrices in `folder`, and the model with it."""
    config = peft.LoraConfig(r=2, lora_alpha=7, **options)
    torch.manual_seed(0)
    adapted = peft.get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.3)
    adapted.save_pretrained(folder)
    return adapted


@pytest.mark.parametrize("case", OPTIONS)
def test_a_folder_of_peft_equals_its_merge(case, tmp_path):
    family = "gpt2" if case == "conv1d" else "llama"
    base = build(family)
    merged = saved(build(family), folder=tmp_path, **OPTIONS[case]).merge_and_unload()
    adapter = read_adapter(tmp_path)
    changed = 0
    for name, value in base.named_parameters():
        layer, expected = name.removesuffix(".weight"), merged.get_parameter(name)
        if layer in adapter:
            delta = adapter[layer].delta()
            assert torch.equal(value + (delta.T if family == "gpt2" else delta), expected), name
            changed += 1
        else:
            assert torch.equal(value, expected), name
    assert changed == len(adapter) > 1


def test_what_is_no_adapter_is_named(tmp_path):
    folder = tmp_path / "adapter"
    saved(build("llama"), folder=folder, target_modules=["q_proj"])
    config, weights = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    original, state = json.loads(config.read_text()), load_file(weights)

    def refused(message: str) -> None:
        with pytest.raises(CheckpointError, match=message):
            read_adapter(folder)

    for changes, message in (
        ({"use_dora": True}, "adapter_config.json: use_dora=True is more than two matrices"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save="),
        ({"bias": "all"}, "bias='all'"),
        (
            {"init_lora_weights": "pissa_niter_4"},
            "init_lora_weights='pissa_niter_4' has changed the weights of its base",
        ),
        ({"lora_alpha": None}, "has no number lora_alpha"),
    ):
        config.write_text(json.dumps(original | changes))
        refused(message)
    config.write_text("{")
    refused("adapter_config.json is no JSON")
    config.write_text(json.dumps(original))
    first = next(name for name in state if "lora_A" in name)
    layer = first.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
    for changes, message in (
        ({first: state[first] * float("nan")}, f"{layer} is no finite product"),
        ({first: state[first][:1]}, rf"{layer} is no finite product of two matrices \(\[32, 2\] times \[1, 32\]\)"),
        ({"base_model.model.lm_head.weight": torch.zeros(2, 2)}, "lm_head.weight is no matrix of an adapter"),
    ):
        save_file(state | {name: value.contiguous() for name, value in changes.items()}, weights)
        refused(message)
    save_file({name: value for name, value in state.items() if name != first}, weights)
    refused(f"{layer}.lora_A.weight is missing")
    weights.write_bytes(weights.read_bytes()[:200])
    refused("adapter_model.safetensors cannot be read")
    weights.unlink()
    refused("adapter_model.safetensors cannot be read")
    with pytest.raises(CheckpointError, match=r"has neither adapter_config\.json nor a checkpoint"):
        read_adapter(tmp_path)
