"""Compares the losses of the float8 recipes with bf16 at equal steps and tokens.

    python scripts/compare_precisions.py --work FOLDER                          300 steps, two seeds, each precision
    python scripts/compare_precisions.py --work FOLDER --max-seconds 400        stops runs after 400 s; the same command continues them

The seed decides the first weights and the order of the text, so all runs of a seed read the same tokens from the same weights. A finished
run in FOLDER is not repeated; an interrupted run continues from its checkpoint. Writes experiments/results/cpu/compare_precisions.csv, one row
per finished run: the mean training loss of every tenth of the steps, the held-out loss after the last, and its difference from bf16.
"""

import csv
import sys
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.bench import parser_of
from scripts.compare_optimizers import is_done, train, validation_loss
from scripts.results import folder_of
from ztk.report.folder import read_rows

ARMS = {
    "bf16": ("precision=bf16",),
    "rowwise": ("precision=fp8",),
    "rowwise_with_gw_hp": ("precision=fp8", "precision.float8=rowwise_with_gw_hp"),
    "rowwise_e5m2": ("precision=fp8", "precision.float8=rowwise_e5m2"),
}
PARTS = 10  # of the steps


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder for runs")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), help="precisions to run now")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1], help="seeds to run now")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--sequences", type=int, default=4, help="sequences of 128 tokens per step")
    parser.add_argument("--model", default="nano", help="an option of the group model")
    parser.add_argument("--max-seconds", type=int, help="time limit of one run; the same command continues it")
    options = parser.parse_args()
    if options.steps < PARTS:
        parser.error(
            f"--steps {options.steps}: use {PARTS} or more, because losses are averaged over every tenth of them"
        )
    for seed in options.seeds:
        for arm in options.arms:
            words = (*ARMS[arm], "data.seq_len=128", "train.eval_batches=8")
            train(*words, folder=options.work / f"{arm}-{seed}", seed=seed, options=options)
    rows = report(options.work)
    if not rows:
        print(f"no run in bf16 has finished in {options.work}")
        return 1
    with (folder_of("cpu") / "compare_precisions.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    for row in rows:
        print(
            f"{row['precision']:20s} seed {row['seed']}: held out {row['held_out']:.4f}, {row['to_bf16']:+.4f} from bf16"
        )
    return 0


def report(work: Path) -> list[dict]:
    """A row per finished run whose seed has finished in bf16, too."""
    found = []
    for first in sorted(folder for folder in work.glob("bf16-*") if is_done(folder)):
        seed = first.name.rpartition("-")[2]
        for arm in ARMS:
            folder = work / f"{arm}-{seed}"
            if not is_done(folder):
                continue
            losses = [row["loss"] for row in read_rows(folder)]
            size = max(1, len(losses) // PARTS)
            parts = [fmean(losses[start : start + size]) for start in range(0, size * PARTS, size)]
            held_out = validation_loss(folder)
            row = {"precision": arm, "seed": int(seed), "steps": len(losses)}
            row |= {f"steps_to_{(number + 1) * size}": round(loss, 4) for number, loss in enumerate(parts)}
            found.append(row | {"held_out": round(held_out, 4), "to_bf16": round(held_out - validation_loss(first), 4)})
    return found


if __name__ == "__main__":
    sys.exit(main())
