"""Compares the cost of fine-tuning and alignment steps with TRL and peft on a real model: CPU seconds per step and memory.

    python scripts/get_model.py smollm2
    python scripts/compare_tuning.py                    SFT, LoRA, DPO and GRPO, fp32, one thread
    python scripts/compare_tuning.py --cases sft dpo --json FILE

Each side is a whole command: `run.py task=...`, and a program with TRL's trainer. Both see the same records, in batches of the same size. A
command runs with --short and with --steps optimizer steps; the difference of their CPU seconds, divided by the difference of their steps, is
one step without start, loading and saving. The two sides take turns. TRL keeps its defaults but for precision, batch, lengths and logging, so
its batches have padding. Texts are questions about Python with answers of 40 to 300 words from its documentation; GRPO draws 32 tokens.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.bench import ROOT, append_rows, parser_of, status_bytes

BATCH = {"sft": 8, "lora": 8, "dpo": 4, "grpo": 16}  # records, pairs or answers of a step
GROUP, DRAWN, LONGEST = 4, 32, 768
COMMON = (
    *("model=hf", "precision=fp32", "launch.ranks=1", "launch.threads=1", "launch.device=cpu", "logger=disabled"),
    *("checkpoint=none", "train.eval_every=0"),
)
CASES = {
    "sft": ("task=sft",),
    "lora": ("task=sft", "lora=adapter"),
    "dpo": ("task=dpo", "warm_start.steps=0"),
    "grpo": (
        *("task=grpo", "warm_start.steps=0", "kl.reference=none", "rollout.task=null"),
        *("rollout.engine=generator", "rollout.identity=corrected", "rollout.stop_truncated_above=null"),
        *(f"rollout.prompts={BATCH['grpo'] // GROUP}", f"rollout.group_size={GROUP}", f"rollout.max_tokens={DRAWN}"),
    ),
}


def main() -> None:
    parser = parser_of(__doc__)
    home = Path.home() / ".cache" / "ztk" / "smollm2"
    parser.add_argument("--model", type=Path, default=home, help="a folder of transformers (%(default)s)")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--short", type=int, default=1)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--json", type=Path, help="append the results to this file")
    parser.add_argument("--peer", nargs=3, metavar=("CASE", "DATA", "STEPS"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.peer:
        case, data, steps = given.peer
        train_by_trl(case, model=given.model, data=Path(data), steps=int(steps))
        return
    for case in given.cases:
        with tempfile.TemporaryDirectory() as scratch:
            found = compare(case, scratch=Path(scratch), given=given)
        print(
            f"{case}: ztk {found['ztk'][0]:.1f} CPU s per step, TRL {found['trl'][0]:.1f}, TRL / ztk {found['ratio']:.2f}; "
            f"peak {found['ztk'][1]:.0f} and {found['trl'][1]:.0f} MB",
            flush=True,
        )
        if given.json:
            row = {"case": case, "batch": BATCH[case]} | found
            append_rows(given.json, [row], machine="one thread", model=given.model.name)


def compare(case: str, *, scratch: Path, given: argparse.Namespace) -> dict:
    """CPU seconds per step and peak in MB of both sides, and the ratio of the seconds."""
    data = scratch / "records.jsonl"
    data.write_text("".join(json.dumps(one) + "\n" for one in records(case)))
    seconds: dict[str, list[float]] = {"ztk": [], "trl": []}
    peaks = dict.fromkeys(seconds, 0.0)
    for steps in (given.short, given.steps):
        commands = {
            "ztk": (
                *(sys.executable, "run.py", *CASES[case], *COMMON, f"model.path={given.model}", f"data.path={data}"),
                *(f"train.steps={steps}", f"train.global_batch_size={BATCH[case]}", *reward(case, scratch=scratch)),
                *(f"train.micro_batch_size={BATCH[case]}", f"hydra.run.dir={scratch / f'run_{steps}'}"),
                *((f"data.seq_len={LONGEST}", "data.validation_fraction=0") if case != "grpo" else ()),
            ),
            "trl": (sys.executable, __file__, "--model", str(given.model), "--peer", case, str(data), str(steps)),
        }
        for side, command in commands.items():
            cpu, megabytes = cost_of(command)
            seconds[side].append(cpu)
            peaks[side] = max(peaks[side], megabytes)
    each = {side: (long - short) / (given.steps - given.short) for side, (short, long) in seconds.items()}
    return {side: [round(each[side], 2), round(peaks[side])] for side in each} | {
        "ratio": round(each["trl"] / each["ztk"], 3)
    }


def reward(case: str, *, scratch: Path) -> tuple[str, ...]:
    """The words that name GRPO's reward function, which prefers short words."""
    if case != "grpo":
        return ()
    path = scratch / "own_reward.py"
    path.write_text("def score(completions, **_):\n    return [float(len(str(one).split())) for one in completions]\n")
    return (f"reward.function={path}:score",)


def cost_of(command: Sequence[str]) -> tuple[float, float]:
    """CPU seconds of a command and of all processes that it starts, and the largest resident memory of one of them in MB."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    before = os.times()
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    peak = 0
    while process.poll() is None:
        peak = max([peak, *map(_peak, _descendants(process.pid))])
        time.sleep(0.2)
    if process.returncode:
        assert process.stdout is not None
        sys.exit(f"{' '.join(command)} failed:\n{process.stdout.read()[-1500:]}")
    after = os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return cpu, peak / 1e6


def _descendants(pid: int) -> list[int]:
    found = [pid]
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += [one for child in task.read_text().split() for one in _descendants(int(child))]
        except OSError:
            continue
    return found


def _peak(pid: int) -> int:
    """Bytes of the largest resident memory of a process; 0 of one that has ended."""
    try:
        return status_bytes("VmHWM", pid=pid)
    except OSError:
        return 0


def records(case: str) -> list[dict]:
    """160 records of the task's form, always the same."""
    chance, made = random.Random(0), []
    names = sorted(topics)
    for number in range(160):
        name = names[number % len(names)]
        words = topics[name].split()
        asked = [{"role": "user", "content": f"What does Python's documentation say about {name.lower()}?"}]
        other = topics[names[(number + 1) % len(names)]].split()
        texts = [" ".join(part[: chance.randint(40, 300)]) for part in (words, other)]
        answers = [[{"role": "assistant", "content": text}] for text in texts]
        if case == "grpo":
            made.append({"prompt": asked})
        elif case == "dpo":
            made.append({"prompt": asked, "chosen": answers[0], "rejected": answers[1]})
        else:
            made.append({"prompt": asked, "completion": answers[0]})
    return made


def words_of(completions: list, **_: object) -> list[float]:
    """The reward of GRPO: words of each completion."""
    return [float(len(str(one).split())) for one in completions]


def train_by_trl(case: str, *, model: Path, data: Path, steps: int) -> None:
    """Trains with TRL's trainer."""
    import datasets
    import peft
    import torch
    import trl

    torch.set_num_threads(1)
    batch = BATCH[case]
    common = {
        **{"output_dir": str(data.with_name(f"trl_{steps}")), "max_steps": steps, "per_device_train_batch_size": batch},
        **{"report_to": "none", "save_strategy": "no", "logging_steps": 1, "use_cpu": True, "bf16": False},
        **{"gradient_checkpointing": False, "disable_tqdm": True, "model_init_kwargs": {"dtype": "float32"}},
    }
    rows = datasets.Dataset.from_list([json.loads(line) for line in data.read_text().splitlines()])
    given: dict = {"model": str(model), "train_dataset": rows}
    if case in ("sft", "lora"):
        if case == "lora":
            given["peft_config"] = peft.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear")
        trl.SFTTrainer(**given, args=trl.SFTConfig(**common, max_length=LONGEST)).train()
    elif case == "dpo":
        trl.DPOTrainer(**given, args=trl.DPOConfig(**common, max_length=LONGEST)).train()
    else:
        options = trl.GRPOConfig(**common, num_generations=GROUP, max_completion_length=DRAWN, beta=0.0)
        trl.GRPOTrainer(**given, args=options, reward_funcs=words_of).train()


if __name__ == "__main__":
    main()
