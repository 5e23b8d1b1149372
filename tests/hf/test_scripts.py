"""Unchanged scripts by the real runner and by `accelerate launch`: they do not mention ztk."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.hf import small
from ztk.deepspeed.names import SHIM

ROOT = Path(__file__).resolve().parents[2]

# The fine-tuning script of the customer's document 002, with a local model and data for the hub's; `deepspeed train.py ...` starts it.
TRAIN = """
import sys
import torch
import deepspeed
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq, Trainer, TrainingArguments
from datasets import Dataset
from peft import LoraConfig, TaskType, get_peft_model


def main():
    model_name, config, out = sys.argv[1:4]
    tokenizer = AutoTokenizer.from_pretrained(model_name)
    tokenizer.pad_token = tokenizer.eos_token
    training_args = TrainingArguments(
        output_dir=out, num_train_epochs=2, per_device_train_batch_size=4, gradient_accumulation_steps=2,
        learning_rate=1e-2, warmup_steps=2, logging_steps=1, save_steps=500, bf16=True,
        deepspeed=config, remove_unused_columns=False, report_to="none", run_name="llama2-alpaca-deepspeed",
    )
    model = AutoModelForCausalLM.from_pretrained(model_name, dtype=torch.bfloat16, device_map=None)
    lora_config = LoraConfig(
        task_type=TaskType.CAUSAL_LM, r=16, lora_alpha=32, lora_dropout=0.0, bias="none",
        target_modules=["q_proj", "v_proj", "k_proj", "o_proj"],
    )
    model = get_peft_model(model, lora_config)
    model.print_trainable_parameters()
    dataset = Dataset.from_list([{"instruction": f"say{i % 5}", "output": f"abc{i % 5}"} for i in range(64)])

    def preprocess(example):
        prompt = f"{example['instruction']}?{example['output']}"
        tokens = tokenizer(prompt, truncation=True, max_length=16, padding="max_length")
        tokens["labels"] = tokens["input_ids"].copy()
        return tokens

    tokenized_dataset = dataset.map(preprocess, remove_columns=dataset.column_names)
    trainer = Trainer(
        model=model, args=training_args, train_dataset=tokenized_dataset,
        data_collator=DataCollatorForSeq2Seq(tokenizer, padding=True),
    )
    trainer.train()
    trainer.save_model(out + "/final")


if __name__ == "__main__":
    main()
"""

# As accelerate's documentation has it: everything about DeepSpeed stands in the configuration file.
ACCELERATE = """
import sys
import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM

accelerator = Accelerator()
model = AutoModelForCausalLM.from_pretrained(sys.argv[1]).train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
tokens = (torch.arange(12) * 3 % 37 + 2).repeat(64, 1)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(tokens), batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for (batch,) in loader:
    with accelerator.accumulate(model):
        loss = model(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.print("LOSS", loss.item())
accelerator.print("RANKS", accelerator.num_processes, type(model).__module__, accelerator.deepspeed_config["zero_optimization"]["stage"])
"""


def run(*words, cwd, path):
    environment = {"PYTHONPATH": os.pathsep.join(map(str, path)), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", *map(str, words)]
    done = subprocess.run(
        command, cwd=cwd, env=os.environ | environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_a_fine_tuning_script_by_the_runner(model_folder, tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "ds.json").write_text(json.dumps(small.ds_config(3)))
    out = run("ztk.deepspeed", "--num_gpus=2", "train.py", model_folder, "ds.json", "out", cwd=tmp_path, path=[ROOT])
    losses = [float(line.split("'")[3]) for line in out.splitlines() if line.startswith("{'loss'")]
    assert "trainable params: 14,336 || all params" in out
    assert len(losses) == 8 and losses[-1] < losses[0] - 0.1
    assert (tmp_path / "out" / "final" / "adapter_model.safetensors").is_file()


def test_accelerate_launch(model_folder, tmp_path):
    """With the runner's folder on PYTHONPATH, accelerate's launcher and its ranks import the name, too."""
    (tmp_path / "train.py").write_text(ACCELERATE)
    plugin = {"zero_stage": 3, "gradient_accumulation_steps": 2, "offload_optimizer_device": "none"}
    plugin |= {"offload_param_device": "none", "zero3_init_flag": True, "zero3_save_16bit_model": True}
    plugin |= {"gradient_clipping": 1.0}
    config = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "DEEPSPEED", "deepspeed_config": plugin}
    config |= {
        "num_machines": 1,
        "num_processes": 2,
        "machine_rank": 0,
        "mixed_precision": "no",
        "main_process_port": 0,
    }
    (tmp_path / "config.yaml").write_text(json.dumps(config))  # YAML holds JSON
    words = ("accelerate.commands.launch", "--config_file", "config.yaml", "train.py", model_folder)
    out = run(*words, cwd=tmp_path, path=[SHIM, ROOT])
    losses = [float(line.split()[1]) for line in out.splitlines() if line.startswith("LOSS")]
    assert len(losses) == 8 and losses[-1] < losses[0] - 0.3
    assert "RANKS 2 ztk.deepspeed.engine.deepspeed_engine 3" in out
