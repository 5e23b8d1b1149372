"""Compares the speed of alignment with TRL's trainers: one model, same texts and order, fp32, one process.

    pip install trl
    python scripts/bench_trl.py                tokens per second of an optimizer step of SFT, reward models and DPO
    python scripts/bench_trl.py --rollouts     of GRPO's training and generation; TRL replays ztk's answers and rewards

tests/slow/test_trl.py compares the losses.
"""

import json
import random
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import transformers
import trl
from trl.trainer import grpo_trainer

from scripts.bench import parser_of
from tests.rl.align import trl_runs
from tests.rl.align.trl_runs import COMMON, DPO
from tests.rl.rollout import trl_runs as rollout_runs
from tests.rl.rollout.trl_runs import LONG
from ztk.config import Machine, compose
from ztk.core.runtime import Process
from ztk.experiments import rollouts
from ztk.experiments.alignment import open_stream
from ztk.report import plot

# The sizes of `ROLLOUTS`, and texts whose lengths vary like chats.
SPEED = (
    *("model.dim=256", "model.layers=2", "model.heads=4", "model.kv_heads=4", "model.hidden_dim=688", "data.seq_len=384"),
    *("model.max_seq_len=384", "data.validation_fraction=0"),
)  # fmt: skip
SPEEDS = {
    "sft": ("task=sft", "data=preferences", "train.global_batch_size=32", "train.micro_batch_size=32"),
    "reward": ("task=reward", "data=preferences"),
    "dpo": (*DPO, "data=preferences"),
}
RECORDS = 256
LETTERS = "abcdefghij"
# Answers of an untrained model: a line feed ends one in four or five answers before the limit of 64 tokens.
ROLLOUTS = (
    *("model.dim=256", "model.layers=2", "model.heads=4", "model.kv_heads=4", "model.hidden_dim=688", "warm_start.steps=0"),
    *("rollout.prompts=4", "rollout.group_size=8", "kl.reference=none", "rollout.max_tokens=64"),
    *("train.global_batch_size=32", "train.micro_batch_size=32", "train.steps=6", "optimizer.lr=1e-7"),
)  # fmt: skip
LONG_PROMPTS = (f"data.seq_len={LONG + 64}", f"model.max_seq_len={LONG + 64}", "rollout.task=null")


@dataclass(frozen=True, kw_only=True)
class Speed:
    """choices: possible rollouts in addition to `ROLLOUTS`. ends: probability that a token ends an answer, at any position; by default the
    untrained model's."""

    choices: tuple[str, ...]
    ends: float | None = None


# Prompts with a task description are long. If every token ends an answer with p = 1 / 36, answers have (1 - (1 - p)^64) / p = 30 tokens on
# average, about half of the longest, as in practice; the peer computes padding after the answers that have ended.
OF_ROLLOUTS = {
    "prompts of 6 tokens": Speed(choices=("data.seq_len=72",)),
    f"prompts of {LONG} tokens": Speed(choices=LONG_PROMPTS),
    "prompts of 6 tokens, answers that end": Speed(choices=("data.seq_len=72",), ends=1 / 36),
    f"prompts of {LONG} tokens, answers that end": Speed(choices=LONG_PROMPTS, ends=1 / 36),
}
ANSWERS = 4 * 8  # answers per rollout in `ROLLOUTS`


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=6, help="optimizer steps; of rollouts always 6")
    parser.add_argument("--rollouts", action="store_true")
    options = parser.parse_args()
    if options.steps < 3:
        parser.error(f"--steps {options.steps}: use 3 or more, because the first and the last are left out")
    # pyrefly: ignore[bad-assignment]  # parts of a run that are not timed are left out
    plot.plot_run, rollouts.HELD_OUT_PROMPTS, rollouts.EVALUATED = (lambda folder: None), 1, 1
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    # pyrefly: ignore[bad-assignment]  # TRL's function is replaced
    grpo_trainer.shuffle_sequence_dict = lambda batch: batch  # the order of ztk's samples
    process = Process.start(device="cpu")
    print(f"TRL {trl.__version__}, transformers {transformers.__version__}, torch {torch.__version__}")
    if options.rollouts:
        compare_rollouts(process)
    else:
        compare_trainers(process, steps=options.steps)


def compare_trainers(process: Process, *, steps: int) -> None:
    """Prints tokens per second of both without padding, and the share of padding in the peer's tokens."""
    print("task       ztk      TRL   ratio   tokens of a text: mean, longest")
    for name, overrides in SPEEDS.items():
        with tempfile.TemporaryDirectory() as folder:
            path = write_records(Path(folder, "records.jsonl"))
            choices = (*COMMON, *SPEED, *overrides, f"train.steps={steps}", f"data.path={path}")
            config = compose(*choices, output_dir=folder, machine=Machine(gpus=0, cores=2))
            lengths = [
                count
                for batch in open_stream(config, process=process).next_step().micro_batches
                for count in batch.sequences.lengths.tolist()
            ]
            ours, theirs = trl_runs.run_both(config, process=process, folder=folder, options={})
        ratio, mean = ours.rate / theirs.rate, statistics.mean(lengths)
        print(f"{name:6} {ours.rate:8.0f} {theirs.rate:8.0f}   {ratio:5.2f}   {mean:8.1f}, {max(lengths)}", flush=True)


def write_records(path: Path) -> Path:
    """Writes prompts of 16 to 128 letters with pairs of answers of 8 to 192 letters."""
    chance = random.Random(0)

    def text(least: int, most: int) -> str:
        return "".join(chance.choices(LETTERS, k=chance.randint(least, most)))

    with path.open("w") as file:
        for _ in range(RECORDS):
            prompt, chosen, rejected = text(16, 128), text(8, 192), text(8, 192)
            pair = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
            file.write(json.dumps(pair) + "\n")
    return path


def compare_rollouts(process: Process) -> None:
    """Prints tokens per second, medians over rollouts without the first, and the mean and largest length of an answer. Training counts prompts
    and answers without padding; generation excludes rewards."""
    for title, speed in OF_ROLLOUTS.items():
        print(f"{title:43} training   generation   of TRL's     answers: mean, longest")
        records = {}
        for identity in ("exact", "corrected"):
            choices = (*ROLLOUTS, *speed.choices, f"rollout.identity={identity}")
            ours, theirs = rollout_runs.run_both(
                choices,
                process=process,
                options={"loss_type": "bnpo", "beta": 0.0},
                generates=identity == "corrected",
                ends=speed.ends,
            )
            records[f"ztk, identity={identity}"], records["TRL"] = ours, theirs
        rates = {
            # Training tokens come from the last run's samples, which TRL replays; both runs update on the same samples.
            name: (
                rate(record.texts or ours.texts, seconds=record.training),
                rate(record.answers, seconds=record.generation),
            )
            for name, record in records.items()
        }
        for name, (training, generation) in rates.items():
            shares = ", ".join(f"{own / of:.2f}" for own, of in zip(rates[name], rates["TRL"], strict=True))
            mean, longest = statistics.mean(records[name].answers) / ANSWERS, max(records[name].longest)
            print(f"{name:43} {training:8.0f}   {generation:10.0f}   {shares}   {mean:8.1f}, {longest}", flush=True)


def rate(tokens: list[int], *, seconds: list[float]) -> float:
    """The median tokens per second without the first rollout, which warms up."""
    return statistics.median(count / taken for count, taken in zip(tokens[1:], seconds[1:], strict=True))


if __name__ == "__main__":
    main()
