"""`TrainingArguments(deepspeed=...)`: the Trainer on two ranks compared with the plain Trainer on one, with the same global batches.

[Note: Tolerance]
Losses are fp32 sums over about ten thousand products. Ranks take them in another order, which changes a loss by a relative 1e-6 per step. Adam
carries differences of gradients on with a factor of about one per step. 1e-5 over 8 steps is ten times the observed difference.
"""

import functools
import json
from pathlib import Path

import pytest

from tests.hf import small

STEPS, MICRO, ACCUMULATION = 8, 2, 2


def arguments(folder, *, config=None, micro=MICRO, **changes):
    from transformers import TrainingArguments

    plain = {"use_cpu": True} if config is None else {"deepspeed": config}
    batches = {"per_device_train_batch_size": micro, "gradient_accumulation_steps": ACCUMULATION}
    quiet = {"report_to": [], "disable_tqdm": True, "save_strategy": "no"}
    steps = {"max_steps": STEPS, "warmup_steps": 2, "learning_rate": 1e-2, "logging_steps": 1, "seed": 3}
    return TrainingArguments(str(folder), **(plain | batches | quiet | steps | changes))


def adapted(model):
    from peft import LoraConfig, get_peft_model
    from transformers import set_seed

    set_seed(5)
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))


def train(*, source, folder, config=None, micro=MICRO, lora=False, resume=None, **changes) -> dict:
    """A script as people write it: load, perhaps adapt, train, evaluate, generate, save."""
    import torch
    from transformers import AutoModelForCausalLM, Trainer

    args = arguments(folder, config=config, micro=micro, **changes)
    model = AutoModelForCausalLM.from_pretrained(source)
    model = adapted(model) if lora else model
    trainer = Trainer(model=model, args=args, train_dataset=small.rows(64), eval_dataset=small.rows(16, seed=9))
    trainer.train(resume_from_checkpoint=resume)
    log = trainer.state.log_history
    # The number of tokens depends on the rank: under stage 3 all ranks must still make the same number of forwards.
    tokens = trainer.model.generate(
        input_ids=torch.tensor([[2, 5, 8]]), max_new_tokens=4 + args.process_index, do_sample=False
    )
    found = {
        "losses": [entry["loss"] for entry in log if "loss" in entry],
        "norms": [float(entry["grad_norm"]) for entry in log if "grad_norm" in entry],
        "eval": trainer.evaluate()["eval_loss"],
        "tokens": tokens.tolist()[0][:7],
        "best": trainer.state.best_model_checkpoint,
        "placeholders": sum(p.untyped_storage().nbytes() < p.nbytes for p in trainer.model.parameters()),
    }
    trainer.save_model(str(Path(folder) / "final"))
    if config is not None:
        trainer.accelerator.free_memory()
    return found


@functools.cache
def plain(source: str, folder: str, *, lora: bool = False) -> dict:
    """The same script on one rank without DeepSpeed; a micro-batch is both ranks'."""
    return train(source=source, folder=folder, micro=2 * MICRO, lora=lora)


def close(found: dict, expected: dict) -> None:
    """See [Note: Tolerance]."""
    for name in ("losses", "norms", "eval"):
        assert found[name] == pytest.approx(expected[name], rel=1e-5), name
    assert found["tokens"] == expected["tokens"]
    assert found["losses"][-1] < found["losses"][0]


WAYS = {
    "stage 2": small.ds_config(2),
    "stage 3": small.ds_config(3),
    "stage 3, the Trainer's optimizer on the CPU": small.ds_config(
        3, optimizer=None, offload_optimizer={"device": "cpu"}, offload_param={"device": "cpu"}
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_losses_are_those_of_the_plain_trainer(hf, model_folder, tmp_path, way):
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(WAYS[way]))
    found = hf(train, source=model_folder, folder=str(tmp_path / "out"), config=str(path))
    close(found[0], plain(model_folder, str(tmp_path / "plain")))
    assert found[1]["eval"] == found[0]["eval"]
    assert (found[0]["placeholders"] > 0) == ("stage 3" in way)


SAVING = {"save_strategy": "steps", "save_steps": 4, "eval_strategy": "steps", "eval_steps": 4}


def resumed_with_less(*, folder: str, source: str, lora: bool) -> dict:
    """Resumes from the checkpoint in the middle, at stage 2."""
    return train(
        source=source, folder=f"{folder}-2", config=small.ds_config(2), lora=lora, resume=f"{folder}/checkpoint-4"
    )


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_saving_and_resuming_at_stage_3(hf, model_folder, tmp_path, lora):
    """Checkpoints on the way, the best at the end, the final weights; then on from half way, at stage 3 and at stage 2."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    folder = str(tmp_path / "out")
    expected = plain(model_folder, str(tmp_path / "plain"), lora=lora)
    case = {"source": model_folder, "folder": folder, "config": small.ds_config(3), "lora": lora}
    full = hf(train, **case, **SAVING, load_best_model_at_end=True)[0]
    close(full, expected)
    assert full["best"].endswith("checkpoint-8")
    close(hf(train, **case, resume=f"{folder}/checkpoint-4")[0], expected)
    close(hf(resumed_with_less, folder=folder, source=model_folder, lora=lora)[0], expected)

    name = "adapter_model.safetensors" if lora else "model.safetensors"
    saved, other = (load_file(tmp_path / where / "final" / name) for where in ("out", "plain"))
    assert saved.keys() == other.keys() and all("lora_" in key for key in saved) == lora
    for key, value in saved.items():
        assert value.shape == other[key].shape and (value - other[key]).abs().max() < 1e-4, (
            key
        )  # 8 steps of at most 1e-2
    if lora:  # the frozen base is not in the checkpoint of the adapter
        size = sum(file.stat().st_size for file in Path(folder, "checkpoint-8").rglob("*") if file.is_file())
        base = sum(p.numel() * 4 for p in AutoModelForCausalLM.from_pretrained(model_folder).parameters())
        assert size < base / 2
