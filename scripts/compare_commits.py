"""Compares the training of two trees: losses, bytes on the wire, memory by tier and disk traffic in 40 configurations of the main job.

    python scripts/compare_commits.py [REVISION]                  compares this tree with a revision (default 9a5936c); runs both
    python scripts/compare_commits.py --record FILE               writes this tree's values as JSON
    python scripts/compare_commits.py --against FILE              compares this tree with recorded values

The configurations are stages 0 to 3 x tiers x precisions, spread over five layouts on 2 ranks. All compared values are counted or computed, not
measured: losses, gradient norms and loss scales to the bit; bytes per step of each collective and of the disk; the memory ledger's bytes per
step and its peaks. The ledger books allocations (`ztk/core/runtime/memory.py`), so resident sets and times have no influence. The keys in
`BY_TIMING` are left out. A counter that one tree lacks counts as zero. The script reads only names of the run folder's contract and sets only
public groups and keys, so that it can compare trees with other internal names.

The bits of a loss depend on the processor and the torch version, so a record from another machine is refused. Exit code 0: all equal. 1: a
configuration differs or failed. 2: nothing could be compared.
"""

import argparse
import contextlib
import datetime
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))
RUNNER = Path(__file__).with_name("run_configurations.py")
REVISION = "9a5936c"
RANKS, STEPS, MICRO_BATCH = 2, 3, 2
LAYOUTS = ("dp", "tp2", "pp2", "ep2", "sp2")
STAGES = (0, 1, 2, 3)
TIERS = ("none", "cpu", "nvme")
PRECISIONS = ("fp32", "bf16", "fp16")
# Columns of the table, with the prefixes of their keys. A key belongs to the first column that matches.
SUBJECTS = {
    "numbers": ("loss", "grad_norm", "skipped", "lr", "steps", "parameters"),
    "wire": ("comm.",),
    "memory": ("memory.",),
    "peak memory": ("peak_memory.",),
    "disk": ("io.",),
}
OF_ROWS = ("loss", "lr", "grad_norm", "loss_scale", "skipped")  # in addition to all byte counters
OF_SUMMARY = ("steps", "parameters", "loss_digest")
# Stage 3 on NVMe: the update overlaps the next forward, so bytes written and freed at the end of a step vary between runs of one tree.
BY_TIMING = ("io.", "memory.device_bytes")
# Keys of `env.json` that must be equal for values to be comparable.
MACHINE = ("device_name", "cpu_count", "torch")

Values = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Configuration:
    """A configuration of the main job. accumulation_steps: micro-batches per optimizer step."""

    layout: str
    stage: int
    tier: str
    precision: str
    accumulation_steps: int

    @property
    def name(self) -> str:
        return f"{self.layout} stage{self.stage} {self.tier} {self.precision} x{self.accumulation_steps}"

    def arguments(self, *, folder: Path) -> list[str]:
        """Arguments of `run.py`. Synthetic data disables evaluation and samples, and wandb is disabled."""
        return [
            f"topology={self.layout}",
            f"zero=stage{self.stage}",
            f"offload={self.tier}",
            f"precision={self.precision}",
            f"model={'tiny_moe' if self.layout == 'ep2' else 'tiny'}",
            "data=synthetic",
            "logger=disabled",
            f"train.steps={STEPS}",
            f"train.micro_batch_size={MICRO_BATCH}",
            f"train.accumulation_steps={self.accumulation_steps}",
            f"hydra.run.dir={folder}",
        ]


def choose() -> tuple[Configuration, ...]:
    """Every stage with every tier and precision, cycling through the five layouts; stage 3 on NVMe also on the last four."""
    cells = [*itertools.product(STAGES, TIERS, PRECISIONS)]
    shared = [(LAYOUTS[number % len(LAYOUTS)], *cell) for number, cell in enumerate(cells)]
    more = [
        ("tp2", 3, "nvme", "bf16"),
        ("pp2", 3, "nvme", "fp32"),
        ("ep2", 3, "nvme", "bf16"),
        ("sp2", 3, "nvme", "fp32"),
    ]
    return tuple(
        Configuration(
            layout=layout,
            stage=stage,
            tier=tier,
            precision=precision,
            # Pipelines need micro-batches to interleave; the other layouts alternate between one and two.
            accumulation_steps=2 if layout == "pp2" or (stage + TIERS.index(tier)) % 2 else 1,
        )
        for layout, stage, tier, precision in (*shared, *more)
    )


CONFIGURATIONS = choose()


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """Values of a tree by `Configuration.name`, with their origin: the keys of `MACHINE`, commit and date."""

    origin: dict[str, Any]
    values: dict[str, Values]

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [f"    {json.dumps(name)}: {json.dumps(values)}" for name, values in self.values.items()]
        body = ",\n".join(lines)
        path.write_text(
            f'{{\n  "origin": {json.dumps(self.origin)},\n  "values": {{\n{body}\n  }}\n}}\n', encoding="utf-8"
        )

    @staticmethod
    def load(path: Path) -> "Record":
        """Raises ValueError if the file is not a record."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            return Record(origin=content["origin"], values=content["values"])
        except (OSError, json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(
                f"--against {path}: not a record of values ({error!r}): write one with --record FILE"
            ) from error


def read_values(folder: Path) -> Values:
    """The counted and computed values of a run folder: counters as lists over the steps, peaks as numbers.

    Raises ValueError if the run is not done or a figure is missing.
    """
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    if summary.get("status") != "done" or len(rows) != STEPS:
        raise ValueError(
            f"{folder}: status {summary.get('status')}, {len(rows)} of {STEPS} rows: {summary.get('error')}"
        )
    counters = [key for key in rows[0] if key.endswith("_bytes") and key.startswith(("comm.", "memory.", "io."))]
    # Peaks per category (`peak_memory.TIER.CATEGORY_bytes`) are left out: old trees lack them, and the categories of each step are compared.
    peaks = [key for key in summary if re.fullmatch(r"peak_memory\.\w+_bytes", key)]
    wanted = [key for key in (*OF_ROWS, *counters) if any(key not in row for row in rows)]
    wanted += [key for key in OF_SUMMARY if key not in summary]
    if wanted or not counters or not peaks:
        raise ValueError(f"{folder}: no {', '.join(wanted) or 'counters'} in metrics.jsonl or summary.json")
    return {
        **{key: summary[key] for key in (*OF_SUMMARY, *peaks)},
        **{key: [row[key] for row in rows] for key in (*OF_ROWS, *counters)},
    }


def differences(before: Values, *, after: Values) -> dict[str, tuple[Any, Any]]:
    """Keys with different values, and both values. An absent key equals zeros."""

    def is_zero(value: Any) -> bool:
        return value is None or not any(value if isinstance(value, list) else [value])

    found = {}
    for key in dict.fromkeys((*before, *after)):
        one, other = before.get(key), after.get(key)
        absent = key not in before or key not in after
        if one != other and not (absent and is_zero(one) and is_zero(other)):
            found[key] = (one, other)
    return found


def subject_of(key: str) -> str:
    """The column of `key`."""
    return next(subject for subject, beginnings in SUBJECTS.items() if key.startswith(beginnings))


def comparability_fault(recorded: Mapping[str, Any], *, here: Mapping[str, Any]) -> str | None:
    """The reason why values of machine `recorded` are not comparable with machine `here`; None if they are."""
    others = [
        f"{key} {recorded.get(key)!r}, here {here.get(key)!r}" for key in MACHINE if recorded.get(key) != here.get(key)
    ]
    if not others:
        return None
    return f"recorded on another machine ({'; '.join(others)}): compare with a revision, which runs both trees here"


def run_tree(tree: Path, *, configurations: Sequence[Configuration], console: Console) -> Record:
    """Runs the main job of `tree`. Raises ValueError if a run fails or imports ztk from another tree."""
    origin, values = {}, {}
    with tempfile.TemporaryDirectory(prefix="compare_commits.") as scratch:
        folders = [Path(scratch, str(number)) for number in range(len(configurations))]
        logs = [folder.with_suffix(".log") for folder in folders]
        lines = [
            {"ranks": RANKS, "arguments": configuration.arguments(folder=folder), "log": str(log)}
            for configuration, folder, log in zip(configurations, folders, logs, strict=True)
        ]
        plan = Path(scratch, "plan.json")
        plan.write_text(json.dumps(lines), encoding="utf-8")
        command = [sys.executable, str(RUNNER), str(tree), str(plan)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as runner:
            for configuration, folder, log in zip(configurations, folders, logs, strict=True):
                assert runner.stdout is not None
                codes = runner.stdout.readline().strip()
                if not codes or any(json.loads(codes)):
                    runner.terminate()
                    said = log.read_text(encoding="utf-8")[-2000:] if log.exists() else ""
                    raise ValueError(f"{tree}: {configuration.name} failed (exit codes {codes}): {said}")
                values[configuration.name] = read_values(folder)
                environment = json.loads((folder / "env.json").read_text(encoding="utf-8"))
                commit = environment["commit"]
                if not commit or not commit.startswith(head_of(tree)):
                    raise ValueError(f"{tree}: the run imported ztk of commit {commit}, not the tree's {head_of(tree)}")
                origin = {key: environment[key] for key in (*MACHINE, "triton", "commit")}
                console.print(f"{tree.name}: {configuration.name}", highlight=False)
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return Record(origin={"date": now, **origin}, values=values)


def head_of(tree: Path) -> str:
    """The checked-out commit of `tree`."""
    return git("rev-parse", "HEAD", tree=tree)


def git(*arguments: str, tree: Path = REPOSITORY) -> str:
    """Runs git. Raises ValueError with its message if it fails."""
    done = subprocess.run(["git", "-C", str(tree), *arguments], capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout.strip()


@contextlib.contextmanager
def checkout(revision: str) -> Iterator[Path]:
    """A temporary worktree of `revision`."""
    with tempfile.TemporaryDirectory(prefix="compare_commits.") as scratch:
        tree = Path(scratch, git("rev-parse", "--short", f"{revision}^{{commit}}"))
        git("worktree", "add", "--detach", str(tree), revision)
        try:
            yield tree
        finally:
            git("worktree", "remove", "--force", str(tree))


def machine_here() -> dict[str, Any]:
    """This machine's values of the keys in `MACHINE`, as a run's `env.json` has them."""
    import torch

    from ztk.report.environment import device_name

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return {"device_name": device_name(device), "cpu_count": os.cpu_count(), "torch": torch.__version__}


def compare(before: Record, *, after: Record, console: Console) -> int:
    """Prints one row per configuration and every different value. Returns the number of different configurations."""
    table = Table(title=f"{before.origin['commit'][:9]} and {after.origin['commit'][:9]}: {STEPS} steps, {RANKS} ranks")
    for column in ("configuration", *SUBJECTS, "loss digest"):
        table.add_column(column, no_wrap=True)
    lines, differing = [], 0
    for name, values in after.values.items():
        found = differences(before.values[name], after=values)
        if "stage3 nvme" in name:
            found = {key: pair for key, pair in found.items() if not key.startswith(BY_TIMING)}
        subjects = {subject_of(key) for key in found}
        cells = ["DIFFERS" if subject in subjects else "equal" for subject in SUBJECTS]
        table.add_row(name, *cells, values["loss_digest"][:12], style="red" if found else None)
        lines += [f"{name}: {key} {one} -> {other}" for key, (one, other) in found.items()]
        differing += bool(found)
    console.print(table)
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    console.print(f"{len(after.values)} configurations, {differing} differ")
    return differing


def main() -> int:
    options, console = parse(), Console(width=140)
    chosen = [configuration for configuration in CONFIGURATIONS if options.only in configuration.name]
    try:
        if not chosen:
            raise ValueError(
                f"--only {options.only}: no configuration's name contains it; names are like {CONFIGURATIONS[0].name!r}"
            )
        return run(options, chosen=chosen, console=console)
    except ValueError as error:
        console.print(f"compare_commits: {error}", highlight=False, markup=False, soft_wrap=True)
        return 2


def run(options: argparse.Namespace, *, chosen: Sequence[Configuration], console: Console) -> int:
    """Records or compares, as the options request. Returns 1 if a configuration differs."""
    tree = options.tree.resolve()
    before = None
    if options.against:
        before = Record.load(options.against)
        missing = [configuration.name for configuration in chosen if configuration.name not in before.values]
        fault = comparability_fault(before.origin, here=machine_here())
        if missing:
            fault = f"no values of {', '.join(missing)}: record them again"
        if fault:
            raise ValueError(f"--against {options.against}: {fault}")
    elif not options.record:
        with checkout(options.revision) as other:
            before = run_tree(other, configurations=chosen, console=console)
    after = run_tree(tree, configurations=chosen, console=console)
    if options.record:
        after.save(options.record)
        console.print(f"{len(after.values)} configurations recorded: {options.record}")
    return 0 if before is None else int(compare(before, after=after, console=console) > 0)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision", nargs="?", default=REVISION, help="revision to compare with (default: %(default)s)")
    parser.add_argument("--record", type=Path, metavar="FILE", help="write this tree's values")
    parser.add_argument(
        "--against", type=Path, metavar="FILE", help="compare with recorded values, not with a revision"
    )
    parser.add_argument("--tree", type=Path, default=REPOSITORY, help="the checkout to examine (default: this one)")
    parser.add_argument("--only", default="", metavar="TEXT", help="only configurations whose name contains this")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
