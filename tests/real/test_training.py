"""SmolLM2-135M-Instruct learns: a short fine-tuning lowers the held-out loss of chats."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.real

ROOT = Path(__file__).resolve().parents[2]
ONES = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


def chats(count: int, *, seed: int) -> list[dict]:
    """Small sums in words, answered in a form of their own."""
    drawn = random.Random(seed)
    found = []
    for _ in range(count):
        left, right = drawn.randint(1, 9), drawn.randint(1, 9)
        question, answer = f"What is {ONES[left - 1]} plus {ONES[right - 1]}?", f"<sum>{left + right}</sum>"
        found.append({"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]})
    return found


def test_a_short_fine_tuning_lowers_the_held_out_loss(folder, tmp_path):
    """A quarter of the chats is held out. The evaluation of the last step is in the summary."""
    file = tmp_path / "chats.jsonl"
    file.write_text("".join(json.dumps(chat) + "\n" for chat in chats(64, seed=0)))
    words = (
        "task=sft", "model=hf", f"model.path={folder}", "data=chat", f"data.path={file}", "data.validation_fraction=0.25",
        "data.chat_template=tokenizer", "train.steps=4", "train.eval_every=1", "optimizer.lr=1e-4", "launch.ranks=1",
        "launch.threads=1", "train.micro_batch_size=4", "train.global_batch_size=8", f"hydra.run.dir={tmp_path / 'run'}",
    )  # fmt: skip
    done = subprocess.run([sys.executable, str(ROOT / "run.py"), *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    losses = held_out_losses(tmp_path / "run")
    assert len(losses) == 3 and losses[-1] < 0.7 * losses[0], losses


def held_out_losses(run: Path) -> list[float]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row["validation_loss"] for row in rows if row.get("validation_loss") is not None]
