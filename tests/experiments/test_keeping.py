"""Checkpoints that a run keeps, and the one that it continues from when the newest is damaged."""

import json

from tests.experiments.test_faults import folder_of, run

OPTIONS = ("zero=stage3", "launch.ranks=2", "checkpoint.every=1", "checkpoint.keep=1", "checkpoint.keep_best=true")
DIVERGES = ("optimizer.lr=1.0", "optimizer.clip_grad_norm=0")  # so that the newest is not the best


def test_the_best_stays_and_stands_in_for_a_damaged_newest(tmp_path):
    done = run(*OPTIONS, *DIVERGES, "train.steps=4", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    folder = folder_of(tmp_path)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = {row["step"]: row["validation_loss"] for row in rows if "validation_loss" in row}
    assert sorted(losses) == [1, 2, 3, 4]
    best = min(losses, key=losses.get)
    kept = sorted(path.name for path in (folder / "checkpoints").glob("step-*"))
    assert best < 4 and kept == [f"step-00000{best}", "step-000004"]

    damaged = folder / "checkpoints" / "step-000004" / "rank-00001.safetensors"
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)
    again = ("train.steps=5", "checkpoint.resume=auto", f"hydra.run.dir={folder}")
    done = run(*OPTIONS, *DIVERGES, *again, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    told = done.stdout + done.stderr
    assert f"{damaged} bytes" in told and f"continues after step {best} " in told
