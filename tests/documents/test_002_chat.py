"""Document 002, section 11: supervised fine-tuning, a reward model and PPO over four models with a configuration each."""

import shlex

import pytest
import torch

from tests.documents.comparing import ADAMW, compared, learns
from tests.documents.harness import BLOCKS, Run, run


def config(stage: int, *, lr: float | None = None, **zero) -> dict:
    """lr: None for a model that is only read."""
    optimizer = {} if lr is None else {"optimizer": {**ADAMW, "params": {"lr": lr}}}
    return {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage, **zero}, **optimizer}


def test_11_2_supervised_fine_tuning(documents):
    """The command's arguments as they are, but for the hub's names and the folder, in a script with DeepSpeed's calls."""
    words = shlex.split((BLOCKS / "002_11_2.sh").read_text().replace("\\\n", ""), comments=True)
    assert words[:2] == ["deepspeed", "main.py"]
    local = {"Dahoas/rm-static": "alpaca.json", "facebook/opt-1.3b": "llama", "/output/sft": "sft"}
    work = Run(
        block="../sft_main.py",
        names="llama_and_texts",
        argv=tuple(local.get(word, word) for word in words[2:]),
        keep=("before", "after"),
    )
    found = compared(documents, work)
    assert len(found.losses) == 3 and found.kept["after"] < found.kept["before"]


@pytest.mark.parametrize("stage", [0, 3])
def test_11_3_reward_model(documents, stage):
    """The block's own loss over the model and over its engine; ztk's function has the same value."""
    training = """
import deepspeed
from deepspeed_chat.reward_model import compute_reward_loss as offered
engine, *_ = deepspeed.initialize(model=reward_model, config="ds_config.json")
for _ in range(12):
    for rows in torch.arange(len(chosen)).split(4):
        loss = compute_reward_loss(engine, chosen[rows], rejected[rows])
        assert abs(float(loss) - float(offered(engine, chosen[rows], rejected[rows]))) < 1e-6
        engine.backward(loss)
        engine.step()
with torch.no_grad():
    correct = float((engine(chosen) > engine(rejected)).float().mean())
"""
    work = Run(
        block="002_11_3.py",
        names="preferences",
        options={"pairs": 16},
        config=config(stage, lr=3e-3),
        then=training,
        keep=("correct",),
    )
    found = compared(
        documents, work, steps=12
    )  # of 24, at three times the others' learning rate: 2e-6 here, 2e-5 at the end
    assert learns(found, by=0.3) and found.kept["correct"] == 1.0


FOUR = {
    "all full": {"actor": config(0, lr=1e-3), "critic": config(0, lr=1e-3), "ref": config(0), "reward": config(0)},
    "each its own": {
        "actor": config(3, lr=1e-3, stage3_param_persistence_threshold=0),
        "critic": config(2, lr=1e-3, offload_optimizer={"device": "cpu"}),
        "ref": config(3, offload_param={"device": "cpu"}, stage3_param_persistence_threshold=0),
        "reward": config(3, stage3_param_persistence_threshold=0),
    },
}


@pytest.mark.parametrize("name", FOUR)
def test_11_4_ppo(documents, name):
    """Losses of actor and critic in turn, as by plain PyTorch under the same trainer; the answers too are the same."""
    work = Run(
        block="002_11_4.py",
        names="four_models",
        options={"configs": FOUR[name], "epochs": 2},
        then="tokens = out['input_ids'].tolist()",
        keep=("tokens",),
    )
    found = compared(documents, work)
    assert len(found.losses) == 2 * 2 * 2
    plain = documents.run(run, work=work, by_plain_pytorch=True)
    assert found.kept["tokens"] == plain[0].kept["tokens"] != plain[1].kept["tokens"]
    assert torch.tensor(found.losses).abs().min() > 0
