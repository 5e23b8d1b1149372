"""Random faults of servers and of the trainer change no bit of a run whose answers servers draw, and lose no prompt.

Real processes are killed, killed while weights are on their way, stopped, slowed down, cut off and exchanged for others with old weights. The
trainer is killed and resumed. `ZTK_SEED` seeds the faults.
"""

import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence

import pytest

from tests.slow.served import (
    FAULTS,
    ROOT,
    SHAPE,
    Scene,
    cut,
    finished,
    killed,
    outcome,
    scene,
    slow,
    started,
    stopped,
    trainer_command,
    wait_for_steps,
)

RUN_SECONDS = 1200.0
TRANSFERS = ("http", "gloo")


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """The folder of a run that draws by itself."""
    return finished(tmp_path_factory.mktemp("own") / "run", seconds=RUN_SECONDS)


def ended(made: Scene) -> dict:
    code = made.trainer.wait(RUN_SECONDS)
    assert code == 0, made.log.read_text()[-3000:]
    return outcome(made.run_folder)


def disturbed(stage: Scene, *, faults: Sequence, draw: random.Random, most: int) -> Counter[str]:
    """The faults during a run, all kinds equally often, up to `most`."""
    made, left = Counter[str](), []
    wait_for_steps(stage, 1)
    while stage.is_running and made.total() < most:
        left = left or draw.sample(faults, len(faults))
        if left[-1](stage, draw=draw):
            made[left.pop().__name__.replace("_", " ")] += 1
        time.sleep(draw.uniform(0, 2))
    return made


@pytest.mark.parametrize("transfer", TRANSFERS)
def test_random_faults_change_no_bit(own, tmp_path, show, amount, transfer):
    seed, count = int(os.environ.get("ZTK_SEED", "0")), -(-amount(100) // len(TRANSFERS))
    draw, made = random.Random(f"{seed} {transfer}"), Counter[str]()
    expected = outcome(own)
    with scene(tmp_path, model=own, words=[f"rollout.servers_transfer={transfer}"]) as stage:
        while made.total() < count:
            stage.start_run()
            made += disturbed(stage, faults=FAULTS, draw=draw, most=count - made.total())
            assert ended(stage) == expected, f"run {stage.runs} of seed {seed}, after {dict(made)}"
        runs = stage.runs
    kinds = ", ".join(f"{number} {name}" for name, number in sorted(made.items()))
    show(f"{transfer}: {made.total()} faults in {runs} runs, equal digests and answers ({kinds})")


@pytest.mark.parametrize("late", ["carry", "cut"])
def test_late_answers_are_waited_for_or_cut_and_never_too_old(own, tmp_path, late, show):
    """With a server whose answers take longer than the updates of two rollouts."""
    steps, most = 20, 2
    words = (
        f"train.steps={steps}",
        f"rollout.staleness={most}",
        "rollout.identity=corrected",
        f"rollout.late={late}",
        "checkpoint.every=100",  # a checkpoint waits for whole answers
    )
    with scene(tmp_path, model=own, words=words) as stage:
        stage.cables[0].delay = 3.0
        stage.start_run()
        assert stage.trainer.wait(RUN_SECONDS) == 0, stage.log.read_text()[-3000:]
        folder = stage.run_folder
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    oldest = [row["rollout_staleness_max"] for row in rows]
    assert len(rows) == steps and oldest[:4] == [0, 0, 1, 1] and max(oldest) == most
    if late == "cut":
        cut = sum(row["rollout_late"] for row in rows) / steps
        assert 0 < cut < 1
        show(f"rollout.late=cut: {cut:.0%} of the answers cut")
    assert all(row["rollout_k3"] > 0 for row in rows[4:])
    answers = Counter(json.loads(line)["step"] for line in (folder / "completions.jsonl").read_text().splitlines())
    assert answers == dict.fromkeys(range(1, steps, 2), 32)


def test_reward_models_that_die_change_no_reward(tmp_path, show):
    """One of a run of `task=reward` in processes of `task=serve`, next to the same in the run."""
    pairs, reward = tmp_path / "pairs.jsonl", tmp_path / "reward"
    lines = [{"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": "x"} for a in range(5) for b in range(5)]
    pairs.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = (
        f"data.path={pairs}",
        "data.seq_len=12",
        "train.steps=20",
        "launch.device=cpu",
        "launch.ranks=1",
        "logger=disabled",
    )
    command = [sys.executable, str(ROOT / "run.py"), "task=reward", *SHAPE, *words, f"hydra.run.dir={reward}"]
    assert started(command, log=tmp_path / "reward.log").wait(RUN_SECONDS) == 0, (tmp_path / "reward.log").read_text()
    own = tmp_path / "own" / "run"
    command = trainer_command(own, f"reward.path={reward}")
    assert started(command, log=own.with_suffix(".log")).wait(RUN_SECONDS) == 0, own.with_suffix(".log").read_text()
    faults = (killed, stopped, slow, cut)
    with scene(tmp_path, model=reward, key="reward.servers") as stage:
        stage.start_run()
        made = disturbed(stage, faults=faults, draw=random.Random(0), most=len(faults))
        assert ended(stage) == outcome(own)
    assert made
    show(f"reward models: {made.total()} faults, equal digests and answers ({', '.join(made)})")
