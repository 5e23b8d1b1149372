"""Runs of `task=grpo`, `task=ppo` and `task=dpo` as a user starts them: kills, frozen bits and faults.

A rank that is killed (SIGKILL) while it draws, scores or updates: the run continues with `checkpoint.resume=auto`, and its rows, texts and
losses equal the uninterrupted run. After 100 steps the frozen reference has the same bits, and so has the base model under adapters. A reward
that is NaN, hangs or is equal for all answers, and answers that never end, end the run with a message that names the cause.
"""

import hashlib
import json
import os
import signal
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.commands import run_command

SMALL = (
    *("model.layers=2", "model.dim=32", "model.heads=2", "model.kv_heads=1", "model.hidden_dim=64", "launch.ranks=2"),
    *("rollout.prompts=4", "rollout.group_size=4", "rollout.max_tokens=6", "data.seq_len=12", "launch.threads=1"),
    *("train.global_batch_size=8", "train.micro_batch_size=4", "scheduler=constant", "scheduler.warmup_steps=0"),
    *("warm_start.steps=30", "warm_start.batch_size=16", "warm_start.lr=0.01", "logger=disabled", "launch.device=cpu"),
)
MODULE = f"task.module={__name__}"
LAYOUTS = {"grpo": ("zero=stage2",), "ppo": ("zero=stage3", "offload=cpu")}
KILLED_AT = 3  # step; each rollout serves two steps
LOG, KILL = "ZTK_CHECK_DIGESTS", "ZTK_CHECK_KILL"
REWARDS = {
    "NaN": "float('nan')",
    "hanging": "__import__('time').sleep(600)",
    "equal": "1.0",
    "unlike": "(sum(answer.encode()) % 7) / 7",
}


# On a rank


def main(config: Any) -> None:
    """Runs the task of `config.task.name` with the kill or the digests that environment variables request; each rank calls it."""
    if KILL in os.environ:
        _plant_kill(*os.environ[KILL].split(" ", 1))
    if LOG in os.environ:
        _plant_digests(Path(os.environ[LOG]))
    import_module(f"ztk.experiments.{config.task.name}").main(config)


def _plant_kill(phase: str, marker: str) -> None:
    """Kills rank 1 in `phase` of step `KILLED_AT`. Creates the file `marker`, so that this happens once."""
    from ztk.experiments import grpo
    from ztk.inference import sample
    from ztk.rl.rollout import hybrid

    owners, name, calls = {
        "rollout": ((sample, hybrid), "choose", 2),  # the second token of this rollout
        "scoring": ((grpo,), "score_samples", 1),
        "update": ((grpo,), "losses_of", 1),  # the first micro-batch of this step
    }[phase]
    made, count, run_of = getattr(owners[0], name), [0], []
    open_run = grpo.open_run
    grpo.open_run = lambda *args, **options: run_of.append(open_run(*args, **options)) or run_of[-1]

    def called(*args: Any, **options: Any) -> Any:
        run = run_of[-1] if run_of else None
        if run is not None and run.actor.global_steps == KILLED_AT - 1 and run.process.rank == 1:
            count[0] += 1
            if count[0] == calls and not Path(marker).exists():
                Path(marker).touch()
                os.kill(os.getpid(), signal.SIGKILL)
        return made(*args, **options)

    for owner in owners:
        setattr(owner, name, called)


def _plant_digests(log: Path) -> None:
    """Appends hashes of the frozen parameters of every engine, before its first step and after its last."""
    from ztk.experiments import models, policy_run, reference

    build = models.build

    def built(*args: Any, **options: Any) -> Any:
        engine = build(*args, **options)
        close = engine.close

        def closed() -> None:
            _write_digest(engine, log=log)
            close()

        engine.close = closed
        first = engine.backward

        def backward(*args: Any, **options: Any) -> Any:
            engine.backward = first
            _write_digest(engine, log=log)  # after warm_start.path, before the first update
            return first(*args, **options)

        engine.backward = backward
        if options.get("is_trained", True) is False:
            _write_digest(engine, log=log)
        return engine

    for module in (models, policy_run, reference):
        module.build = built


def _write_digest(engine: Any, *, log: Path) -> None:
    """Appends the hash of the engine's frozen parameters, if it has any."""
    frozen = {name for name, parameter in engine.module.named_parameters() if not parameter.requires_grad}
    digest, count = hashlib.sha256(), 0
    for name, value in engine.zero.full_parameters():
        if name in frozen:
            digest.update(value.detach().cpu().contiguous().numpy().tobytes())
            count += 1
    if count and engine.process.rank == 0:
        line = {"frozen": count, "step": engine.global_steps, "digest": digest.hexdigest()}
        with log.open("a") as file:
            file.write(json.dumps(line) + "\n")


# On the command line


def run(*words: str, folder: Path, **environment: str) -> tuple[int, str]:
    """Runs the command. Returns exit code and output."""
    done = run_command(*words, f"hydra.run.dir={folder}", cwd=folder.parent, environment=environment)
    return done.returncode, done.stdout + done.stderr


def rows_of(folder: Path) -> list[dict]:
    """The rows without times and counters, which a resumed run cannot repeat."""
    measured = ("seconds", "tokens_per_second", "memory.", "comm.", "io.", "time")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if not any(word in key for word in measured)} for row in rows]


def results_of(folder: Path) -> tuple:
    digest = json.loads((folder / "summary.json").read_text())["loss_digest"]
    return rows_of(folder), (folder / "samples.jsonl").read_text(), digest


def without(*groups: str) -> list[str]:
    return [word for word in SMALL if not word.startswith(groups)]


def reward(name: str, *, folder: Path) -> str:
    file = folder / f"{name}.py"
    file.write_text(f"def score(prompt, answer, record):\n    return {REWARDS[name]}\n")
    return f"reward.function={file}:score"


@pytest.mark.parametrize("task", LAYOUTS)
def test_a_run_goes_on_after_a_kill_in_every_phase(tmp_path, task):
    words = (f"task={task}", MODULE, *SMALL, *LAYOUTS[task], reward("unlike", folder=tmp_path), "train.steps=6")
    words = (*words, "checkpoint=periodic", "checkpoint.every=1", "checkpoint.resume=auto", "rollout.show_every=2")
    code, text = run(*words, folder=tmp_path / "undisturbed")
    assert code == 0, text
    for phase in ("rollout", "scoring", "update"):
        folder, marker = tmp_path / phase, tmp_path / f"{phase}.killed"
        code, text = run(*words, folder=folder, **{KILL: f"{phase} {marker}"})
        assert code == 1 and marker.exists(), text
        code, text = run(*words, folder=folder, **{KILL: f"{phase} {marker}"})
        assert code == 0, text
        assert results_of(folder) == results_of(tmp_path / "undisturbed"), phase


@pytest.fixture(scope="module")
def hugging(tmp_path_factory) -> tuple[str, ...]:
    """The words of adapters on a byte-level Llama whose answers end after about three letters."""
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=256, max_position_embeddings=64, eos_token_id=10, bos_token_id=1, **shape)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(40):
        rows = torch.randint(97, 105, (16, 12))
        rows = torch.where(torch.rand(rows.shape) < 0.3, 10, rows)
        model(input_ids=rows, labels=rows).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(path)
    return ("model=hf", f"model.path={path}", "warm_start.steps=0", "lora=adapter")


@pytest.mark.parametrize("base", ["reference", "base below adapters"])
@pytest.mark.parametrize("task", ["grpo", "dpo"])
def test_frozen_parameters_keep_their_bits(tmp_path, hugging, show, task, base):
    data, log = tmp_path / "data.jsonl", tmp_path / "digests"
    row = {"prompt": "ab>"} | ({"chosen": "ab", "rejected": "ba"} if task == "dpo" else {})
    data.write_text(f"{json.dumps(row)}\n" * 40)
    other = () if task == "grpo" else ("rollout.",)
    if base == "reference":
        words = (*without(*other), "zero=stage3", *(["offload=cpu"] if task == "dpo" else []))
    else:
        words = (*hugging, f"data.path={data}", *without("model.", "warm_start.", *other))
        words += ("kl.reference=lora_off", "rollout.task=null") if task == "grpo" else ("dpo.reference=lora_off",)
        words += ("zero=stage2",) if task == "dpo" else ()
    words += (reward("unlike", folder=tmp_path),) if task == "grpo" else ()
    options = (f"task={task}", MODULE, "train.steps=100", "optimizer.lr=5e-5")
    code, text = run(*options, *words, folder=tmp_path / "run", **{LOG: str(log)})
    assert code == 0, text
    found = [json.loads(line) for line in log.read_text().splitlines()]
    show(f"{task}, {base}: {len(found)} hashes of {found[0]['frozen']} parameters")
    assert len(found) >= 2 and len({row["digest"] for row in found}) == 1


@pytest.mark.parametrize(
    ("name", "words", "expected"),
    [
        ("NaN", (), "returned nan"),
        ("hanging", ("reward.timeout_seconds=1",), "did not return within"),
        ("equal", (), "had equal rewards"),
        (None, ("warm_start.steps=0",), "were cut at rollout.max_tokens"),
    ],
)
def test_a_fault_is_named(tmp_path, name, words, expected):
    words += (reward(name, folder=tmp_path), *SMALL) if name else tuple(without("warm_start."))
    code, text = run("task=grpo", "train.steps=20", *words, folder=tmp_path / "run")
    assert code in (1, 2) and expected in text, text


def test_empty_answers_are_counted(tmp_path):
    file = tmp_path / "empty.py"
    file.write_text("def score(prompt, answer, record):\n    return float(not answer)\n")
    words = (f"reward.function={file}:score", "train.steps=60", "optimizer.lr=1e-2")
    run("task=grpo", *without("train.global"), "train.global_batch_size=16", *words, folder=tmp_path / "run")
    counted = [row["empty"] for row in rows_of(tmp_path / "run")]
    assert max(counted) > counted[0]
