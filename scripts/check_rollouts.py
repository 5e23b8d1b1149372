"""Checks runs of `task=grpo`, `task=ppo` and `task=dpo` as a user starts them: kills, frozen bits and faults.

    python scripts/check_rollouts.py [kills] [bits] [faults] [--work FOLDER]

kills: a rank is killed (SIGKILL) while it draws, scores or updates. The run continues with `checkpoint.resume=auto`, and its rows, texts and
losses must equal the uninterrupted run. bits: after 100 steps the frozen reference has the same bits, and so has the base model under
adapters. faults: a reward that is NaN, hangs or is equal for all answers; answers that never end; empty answers. The check compares the run's
message and the seconds until it appears. Prints a line per case; the exit code is 1 if a case fails.
"""

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SMALL = (
    *("model.layers=2", "model.dim=32", "model.heads=2", "model.kv_heads=1", "model.hidden_dim=64", "launch.ranks=2"),
    *("rollout.prompts=4", "rollout.group_size=4", "rollout.max_tokens=6", "data.seq_len=12", "launch.threads=1"),
    *("train.global_batch_size=8", "train.micro_batch_size=4", "scheduler=constant", "scheduler.warmup_steps=0"),
    *("warm_start.steps=30", "warm_start.batch_size=16", "warm_start.lr=0.01", "logger=disabled", "launch.device=cpu"),
)
PHASES = ("rollout", "scoring", "update")
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
    from importlib import import_module

    if KILL in os.environ:
        _plant_kill(*os.environ[KILL].split(" ", 1))
    if LOG in os.environ:
        _plant_digests(Path(os.environ[LOG]))
    import_module(f"experiments.{config.task.name}").main(config)


def _plant_kill(phase: str, marker: str) -> None:
    """Kills rank 1 in `phase` of step `KILLED_AT`. Creates the file `marker`, so that this happens once."""
    from experiments import policy_update, rollout_loop
    from ztk.rl.rollout import answering, hybrid

    owners, name, calls = {
        "rollout": ((answering, hybrid), "choose", 2),  # the second token of this rollout
        "scoring": ((rollout_loop,), "score_samples", 1),
        "update": ((policy_update,), "losses_of", 1),  # the first micro-batch of this step
    }[phase]
    made, count, run_of = getattr(owners[0], name), [0], []
    open_run = rollout_loop.open_run
    rollout_loop.open_run = lambda *args, **options: run_of.append(open_run(*args, **options)) or run_of[-1]

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
    from experiments import models, reference, rollout_run

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

    for module in (models, reference, rollout_run):
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


def run(*overrides: str, folder: Path, environment: dict[str, str] | None = None) -> tuple[int, str, float]:
    """Runs the command. Returns exit code, output and seconds."""
    began = time.monotonic()
    command = [sys.executable, str(ROOT / "run.py"), *overrides, f"hydra.run.dir={folder}"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | (environment or {})
    done = subprocess.run(command, cwd=folder.parent, env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr, time.monotonic() - began


def rows_of(folder: Path) -> list[dict]:
    """The rows without times and counters, which a resumed run cannot repeat."""
    measured = ("seconds", "tokens_per_second", "memory.", "comm.", "io.", "time")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if not any(word in key for word in measured)} for row in rows]


def kills(work: Path) -> Iterator[tuple[str, bool, str]]:
    """Yields (case, whether it passed, observation)."""
    reward = _reward("unlike", work=work)
    for task, layout in (("grpo", ("zero=stage2",)), ("ppo", ("zero=stage3", "offload=cpu"))):
        words = (f"task={task}", "task.module=scripts.check_rollouts", *SMALL, *layout, reward, "train.steps=6")
        words = (*words, "checkpoint=periodic", "checkpoint.every=1", "checkpoint.resume=auto", "rollout.show_every=2")
        undisturbed = work / f"{task}_undisturbed"
        code, text, _ = run(*words, folder=undisturbed)
        yield f"{task}, not interrupted", code == 0, "" if code == 0 else text[-500:]
        for phase in PHASES:
            folder, marker = work / f"{task}_{phase}", work / f"{task}_{phase}.killed"
            environment = {KILL: f"{phase} {marker}"}
            first, _, _ = run(*words, folder=folder, environment=environment)
            second, text, _ = run(*words, folder=folder, environment=environment)
            same = second == 0 and rows_of(folder) == rows_of(undisturbed)
            same = same and (folder / "samples.jsonl").read_text() == (undisturbed / "samples.jsonl").read_text()
            digests = (
                [json.loads((place / "summary.json").read_text())["loss_digest"] for place in (folder, undisturbed)]
                if same
                else []
            )
            is_right = first == 1 and marker.exists() and same and digests[0] == digests[1]
            yield f"{task}, killed in {phase}", is_right, f"exit {first}, then {second}; {digests or text[-300:]}"


def bits(work: Path) -> Iterator[tuple[str, bool, str]]:
    """Yields (case, whether it passed, observation)."""
    model, reward = _save_model(work / "model"), _reward("unlike", work=work)
    hugging = (
        "model=hf",
        f"model.path={model}",
        "rollout.task=null",
        "warm_start.steps=0",
        f"data.path={work}/prompts.jsonl",
        "lora=adapter",
    )
    native = [word for word in SMALL if not word.startswith("model.")]
    shared = [word for word in native if not word.startswith("warm_start.")]
    pairs = [word for word in shared if not word.startswith("rollout.")]
    cases = {
        "grpo, reference": ("task=grpo", *SMALL, "zero=stage3", reward),
        "dpo, reference": (
            "task=dpo",
            *[word for word in SMALL if not word.startswith("rollout.")],
            "zero=stage3",
            "offload=cpu",
        ),
        "grpo, base below adapters": ("task=grpo", *hugging, *shared, "kl.reference=lora_off", reward),
        "dpo, base below adapters": (
            *("task=dpo", *hugging[:2], "warm_start.steps=0", f"data.path={work}/pairs.jsonl", "lora=adapter", *pairs),
            *("dpo.reference=lora_off", "zero=stage2"),
        ),
    }
    (work / "prompts.jsonl").write_text('{"prompt": "ab>"}\n{"prompt": "ba>"}\n{"prompt": "cab>"}\n')
    pair = {"prompt": "ab>", "chosen": "ab", "rejected": "ba"}
    (work / "pairs.jsonl").write_text(f"{json.dumps(pair)}\n" * 40)
    for number, (case, words) in enumerate(cases.items()):
        log, folder = work / f"digests{number}", work / f"bits{number}"
        options = ("task.module=scripts.check_rollouts", "train.steps=100", "optimizer.lr=5e-5")
        code, text, _ = run(*words, *options, folder=folder, environment={LOG: str(log)})
        found = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        last = max((row["step"] for row in found), default=0)
        is_right = code == 0 and len(found) >= 2 and len({row["digest"] for row in found}) == 1
        said = (
            f"{len(found)} hashes of {found[0]['frozen']} parameters, the last after step {last or 100}: "
            if found
            else ""
        )
        yield case, is_right, said + (found[0]["digest"][:12] if is_right else text[-400:])


def faults(work: Path) -> Iterator[tuple[str, bool, str]]:
    """Yields (case, whether it passed, message)."""
    cases = {
        "NaN reward": ((_reward("NaN", work=work),), "returned nan"),
        "hanging reward": ((_reward("hanging", work=work), "reward.timeout_seconds=1"), "did not return within"),
        "equal groups": ((_reward("equal", work=work),), "had equal rewards"),
        "all truncated": (("warm_start.steps=0",), "were cut at rollout.max_tokens"),
    }
    for number, (case, (words, expected)) in enumerate(cases.items()):
        common = [word for word in SMALL if "warm_start.steps=0" not in words or not word.startswith("warm_start.")]
        code, text, seconds = run("task=grpo", *common, "train.steps=20", *words, folder=work / f"fault{number}")
        said = next((line for line in text.splitlines() if expected in line), text[-300:])
        yield case, code in (1, 2) and expected in text, f"exit {code} after {seconds:.0f} s: {said.strip()[:200]}"
    file = work / "empty.py"
    file.write_text("def score(prompt, answer, record):\n    return float(not answer)\n")
    words = (f"reward.function={file}:score", "train.steps=60", "optimizer.lr=1e-2", "train.global_batch_size=16")
    folder = work / "empty"
    code, text, seconds = run("task=grpo", *SMALL, *words, folder=folder)
    counted = [row["empty"] for row in rows_of(folder)] if (folder / "metrics.jsonl").exists() else []
    said = f"exit {code} after {seconds:.0f} s; empty: {counted[:1]} to {counted[-1:]}"
    yield "empty answers", bool(counted) and max(counted) > counted[0], said


def _reward(name: str, *, work: Path) -> str:
    file = work / f"{name}.py"
    file.write_text(f"def score(prompt, answer, record):\n    return {REWARDS[name]}\n")
    return f"reward.function={file}:score"


def _save_model(path: Path) -> Path:
    """Saves a byte-level Llama whose answers end after about three letters."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

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
    return path


CHECKS: dict[str, Callable[[Path], Iterator[tuple[str, bool, str]]]] = {"kills": kills, "bits": bits, "faults": faults}


def check() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checks", nargs="*", default=list(CHECKS), help="kills, bits or faults (default: all)")
    parser.add_argument("--work", type=Path, help="an empty folder (default: a temporary one)")
    given = parser.parse_args()
    wrong = 0
    with tempfile.TemporaryDirectory() as temporary:
        work = (given.work or Path(temporary)).resolve()
        work.mkdir(parents=True, exist_ok=True)
        for name in given.checks:
            for case, is_right, said in CHECKS[name](work):
                wrong += not is_right
                print(f"{'ok   ' if is_right else 'WRONG'} {name}: {case}: {said}", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(check())
