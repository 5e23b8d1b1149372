"""Document 002, sections 5.3, 5.4 and 12.1: Trainer, Accelerate and LoRA, with small models of the hub's classes."""

import contextlib

import pytest
import torch

from tests.documents import plain
from tests.documents.comparing import TOLERANCE, learns
from tests.documents.harness import Run, config_of, run
from tests.documents.preludes import Texts, tiny_gpt2
from ztk.core.runtime import Process

STEPS, ACCUMULATION, MICRO_BATCH = 24, 8, 4
SAMPLES = STEPS * MICRO_BATCH * 2  # on two ranks


def by_plain_pytorch(process: Process, *, config: dict, folder: str) -> list[float]:
    """The same batches, dealt to the ranks in turn: the mean over ranks of every loss.

    Without `accelerator.accumulate` every backward is a step, of a loss divided by the accumulation steps.
    """
    from transformers import GPT2LMHeadModel

    with contextlib.chdir(folder):
        model = GPT2LMHeadModel.from_pretrained(tiny_gpt2(process))
    engine = plain.PlainEngine(model, config=config, parameters=None)
    loader = torch.utils.data.DataLoader(Texts(samples=SAMPLES), batch_size=MICRO_BATCH)
    losses = []
    for number, batch in enumerate(loader):
        if number % process.world_size == process.rank:
            loss = engine(**batch).loss
            losses.append(float(process.comm.gather_scalars(loss.detach().float().view(1), label="loss").mean()))
            engine.backward(loss / ACCUMULATION)
            engine.step()
    return losses


def test_5_4_accelerate(documents, tmp_path):
    """In fp16."""
    work = Run(block="002_5_4.py", names="accelerate_loop", options={"samples": SAMPLES, "micro_batch": MICRO_BATCH})
    found = documents.run(run, work=work)[0]
    assert found.error is None, found.error
    config = {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "optimizer": {"params": {"lr": 1e-2, "weight_decay": 0.01}},
        "fp16": {"enabled": True},
    }
    expected = documents.run(by_plain_pytorch, config=config, folder=str(tmp_path))[0]
    assert len(found.losses) == STEPS
    # lr is ten times the other blocks' rate, so weights deviate ten times as far.
    assert found.losses == pytest.approx(expected, abs=10 * TOLERANCE["fp16"])
    assert learns(found, by=0.95)


def test_5_3_trainer(documents):
    """The JSON of section 4.1, whose "auto" the Trainer fills in; fp16 as in the block."""
    work = Run(
        block="002_5_3.py",
        names="trainer",
        options={"samples": 192},
        config=config_of("002_4_1.json"),
        replace={
            "save_steps=1000,": 'save_steps=1000, learning_rate=1e-2, report_to="none", use_cpu=True,',
            "logging_steps=10": "logging_steps=1",
        },
        then="history = [row['loss'] for row in trainer.state.log_history if 'loss' in row]\nsteps = trainer.state.global_step",
        keep=("history", "steps"),
    )
    found = documents.run(run, work=work)[0]
    assert found.error is None, found.error
    assert found.kept["steps"] == 9 and found.kept["history"][-1] < found.kept["history"][0]


def test_12_1_llama_with_lora(documents):
    """The full script with its JSON: LoRA, Trainer in bf16, a saved adapter."""
    work = Run(
        block="002_12_1.py",
        names="llama_and_texts",
        files={"ds_zero2_config.json": config_of("002_12_1.json")},
        replace={
            "meta-llama/Llama-2-7b-hf": "llama",
            'load_dataset("tatsu-lab/alpaca", split="train")': 'load_dataset("json", data_files="alpaca.json", split="train")',
            "max_length=512": "max_length=16",
            'report_to="wandb"': 'report_to="none", use_cpu=True',
            "warmup_steps=100": "warmup_steps=2",
            "logging_steps=10": "logging_steps=1",
            "learning_rate=2e-4": "learning_rate=2e-2",
            "    trainer.train()\n": "    global finished\n    finished = trainer\n    trainer.train()\n",
        },
        then="""
import os
history = [row["loss"] for row in finished.state.log_history if "loss" in row]
saved = sorted(os.listdir("llama2-finetuned-final")) if os.path.isdir("llama2-finetuned-final") else []
""",
        keep=("history", "saved"),
    )
    found = documents.run(run, work=work)[0]
    assert found.error is None, found.error
    history = found.kept["history"]
    assert len(history) == 9 and sum(history[-3:]) < 0.95 * sum(history[:3])
    assert "adapter_model.safetensors" in found.kept["saved"]
