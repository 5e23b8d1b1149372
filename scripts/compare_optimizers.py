"""Compares Muon with AdamW at equal steps and tokens: loss curves over seeds, with intervals.

    python scripts/compare_optimizers.py --work FOLDER                          a 30M model, 60 steps, three seeds, half an hour on one core
    python scripts/compare_optimizers.py --work FOLDER --arms muon --seeds 2    a part of it
    python scripts/compare_optimizers.py --work FOLDER --max-seconds 400        stops runs after 400 s; the same command continues them

Both optimizers use the keys of conf/optimizer, with their own learning rates. The seed decides the first weights and the order of the text, so
both arms of a seed read the same tokens from the same weights. A finished run in FOLDER is not repeated; an interrupted run continues from its
checkpoint. Writes FOLDER/compare_optimizers.csv and .svg: per optimizer and step, the median over seeds of the training loss, averaged over
--window steps, and the 95 % interval of `ztk.report.statistics`. Prints held-out losses and the difference of each pair.
"""

import argparse
import csv
import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import ztk
from scripts.bench import markdown, parser_of
from ztk.report.folder import read_rows
from ztk.report.statistics import median_interval

ARMS = {"adamw": "#4477aa", "muon": "#ee6677"}  # optimizer -> colour
COMMON = (
    "launch.ranks=1",
    "launch.device=cpu",
    "logger=disabled",
    "train.log_every=1",
    "train.eval_every=100000",  # only at the end
    "checkpoint=periodic",
    "checkpoint.keep=1",
    "checkpoint.resume=auto",
)
FIELDS = ("optimizer", "step", "tokens", "loss", "low", "high", "seeds")


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder for runs and results")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), help="optimizers to run now")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="seeds to run now")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--sequences", type=int, default=2, help="sequences of 256 tokens per step")
    parser.add_argument("--model", default="30m", help="an option of the group model")
    parser.add_argument("--window", type=int, default=5, help="steps averaged for a point of a curve")
    parser.add_argument("--max-seconds", type=int, help="time limit of one run; the same command continues it")
    options = parser.parse_args()
    for seed in options.seeds:
        for arm in options.arms:
            words = ("precision=fp32", f"optimizer={arm}", "data.seq_len=256")
            words += (f"train.eval_batches={max(1, 64 // options.sequences)}",)
            train(*words, folder=options.work / f"{arm}-{seed}", seed=seed, options=options)
    found = {arm: list(done_runs(options.work, arm=arm)) for arm in ARMS}
    report(found, work=options.work, window=options.window)
    return 0


def train(*words: str, folder: Path, seed: int, options: argparse.Namespace) -> None:
    """Executes one run, or the rest of it. words: of this run, in addition to those of the command line in `options`."""
    if is_done(folder):
        return
    limit = () if options.max_seconds is None else (f"train.max_seconds={options.max_seconds}",)
    ztk.run(
        *COMMON,
        *limit,
        *words,
        f"model={options.model}",
        f"train.micro_batch_size={options.sequences}",
        f"train.steps={options.steps}",
        f"train.seed={seed}",
        f"checkpoint.every={max(1, options.steps // 3)}",
        folder=folder,
    )


def is_done(folder: Path) -> bool:
    """Whether the run has finished its steps."""
    if not (folder / "summary.json").is_file():
        return False
    summary = json.loads((folder / "summary.json").read_text())
    return summary["status"] == "done" and str(summary["ended_by"]).startswith("train.steps")


def done_runs(work: Path, *, arm: str) -> Iterator[Path]:
    return (folder for folder in sorted(work.glob(f"{arm}-*")) if is_done(folder))


def report(found: dict[str, list[Path]], *, work: Path, window: int) -> None:
    """Writes the table and the curves, and prints the held-out losses."""
    rows = [row for arm, folders in found.items() for row in curve(arm, folders=folders, window=window)]
    with (work / "compare_optimizers.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        writer.writeheader()
        writer.writerows(rows)
    draw(rows, path=work / "compare_optimizers.svg")
    held_out = {arm: {folder.name.rpartition("-")[2]: validation_loss(folder) for folder in found[arm]} for arm in ARMS}
    pairs = [seed for seed in held_out["adamw"] if seed in held_out["muon"]]
    differences = [held_out["muon"][seed] - held_out["adamw"][seed] for seed in pairs]
    lines = [
        (seed, f"{held_out['adamw'][seed]:.4f}", f"{held_out['muon'][seed]:.4f}", f"{difference:+.4f}")
        for seed, difference in zip(pairs, differences, strict=True)
    ]
    print(markdown(("seed", *ARMS, "difference"), lines))
    if len(pairs) > 1:
        interval = median_interval(differences)
        print(
            f"\nmuon - adamw: {interval.median:+.4f} ({interval.low:+.4f} to {interval.high:+.4f}), {len(pairs)} pairs"
        )


def validation_loss(folder: Path) -> float:
    """Held-out nats per token after the last step."""
    return json.loads((folder / "summary.json").read_text())["validation_loss"]


def curve(arm: str, *, folders: list[Path], window: int) -> Iterator[dict[str, object]]:
    """A row per window of steps, up to the length of the shortest run."""
    runs = [list(read_rows(folder)) for folder in folders]
    for stop in range(window, min(map(len, runs), default=0) + 1, window):
        means = [statistics.fmean(row["loss"] for row in rows[stop - window : stop]) for rows in runs]
        interval = median_interval(means)
        yield {
            "optimizer": arm,
            "step": stop,
            "tokens": runs[0][stop - 1]["tokens"],
            "loss": round(interval.median, 5),
            "low": round(interval.low, 5),
            "high": round(interval.high, 5),
            "seeds": interval.n,
        }


def draw(rows: list[dict[str, object]], *, path: Path) -> None:
    """The curves with a band per optimizer."""
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.set(xlabel="step", ylabel="training loss, nats per byte")
    axes.grid(alpha=0.25)
    for arm, colour in ARMS.items():
        own = [row for row in rows if row["optimizer"] == arm]
        columns = {name: [float(str(row[name])) for row in own] for name in ("step", "loss", "low", "high")}
        axes.plot(columns["step"], columns["loss"], color=colour, label=arm)
        axes.fill_between(columns["step"], columns["low"], columns["high"], color=colour, alpha=0.2, linewidth=0)
    axes.legend(frameon=False)
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    sys.exit(main())
