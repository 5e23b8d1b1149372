"""Writes docs/results.md and docs/engine.svg from experiments/results: the tables of the benchmarks and the notes of single measurements.

`python scripts/results_page.py`. Every section names its command, date, commit and machine. A note is a file of experiments/results/cpu/notes:
a head of `key: value` lines, an empty line, and Markdown.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.bench import markdown
from scripts.results import RESULTS

Row = dict[str, Any]
CPU = RESULTS / "cpu"
PAGE = Path(__file__).resolve().parents[1] / "docs" / "results.md"
CHART = PAGE.with_name("engine.svg")  # the speed of ztk next to its peers
DTYPES = ("fp32", "bf16")
# Strategy -> engine -> its name in the results.
STRATEGIES = {
    "stage 0": {"DDP": "ddp", "DeepSpeed": "deepspeed0", "ztk": "ztk0"},
    "stage 1": {"DeepSpeed": "deepspeed1", "ZeroRedundancyOptimizer": "zro", "ztk": "ztk1"},
    "stage 2": {"DeepSpeed": "deepspeed2", "FSDP2": "fsdp2-keep", "ztk": "ztk2"},
    "stage 3": {"DeepSpeed": "deepspeed3", "FSDP2": "fsdp2", "ztk": "ztk3"},
    "stage 3, cpu": {"DeepSpeed": "deepspeed3+cpu", "ztk": "ztk3+cpu"},
    "stage 3, nvme": {"DeepSpeed": "deepspeed3+nvme", "ztk": "ztk3+nvme"},
}
COLORS = {
    "ztk": "#2563eb",
    "FSDP2": "#f59e0b",
    "DDP": "#9ca3af",
    "ZeroRedundancyOptimizer": "#10b981",
    "DeepSpeed": "#6b7280",
}
HEAD = ("title", "command", "date", "commit", "machine")
# Heading: the notes below it, after the tables of the benchmarks.
NOTES = {
    "First use": ("newcomer",),
    "Training": ("muon", "states", "ring", "kernel_times", "notebooks", "sweeps"),
    "Checkpoints and data": ("checkpoints", "kills", "tokenizers", "loaders", "hf_loading"),
    "Alignment": ("alignment_trl", "rollouts_trl", "rollouts_packing", "staleness", "served", "served_bytes", "frontier", "story"),
    "Inference": (
        "exact_answers", "inference_weights", "inference_streaming", "inference_first_token", "server_ends", "harness",
    ),
    "Planning": ("plan_bytes", "plan_times"),
    "Other libraries": ("hf_families", "deepspeed_chat", "openrlhf"),
    "Kernels and tests": ("kernel_launches", "kernel_counts", "coverage"),
}  # fmt: skip
WORKS = {
    "batch 1": "one sequence",
    "8 rows": "8 sequences",
    "32 ragged": "32 ragged requests",
    "prefix": "16 prompts, common prefix",
    "prompt": "prompt of 512",
}


def main() -> None:
    """Writes the page and the chart."""
    PAGE.write_text(page(), encoding="utf-8")
    draw_engines()


def page() -> str:
    """The text of docs/results.md."""
    benchmarks = [engines(), deepspeed(), inference(), real_engines(), tuning()]
    parts = [
        "# Results",
        "`python scripts/results_page.py` writes this page from `experiments/results/`. Every section names its command, date, commit and "
        "machine. The\ncommit is the measured one, or the one that recorded the numbers. **No number on this page is from a GPU:** "
        "[the run on an H200](gpu.md#the-first-run) has a page of its own.",
        "[Claims](claims.md) lists the commands that check ztk's claims, [published runs](published_runs.md) compares plans with runs of other "
        "projects,\nand [the documents' sizes](document_sizes.md) compares plans with four documents.",
        "## Benchmarks",
        *benchmarks,
    ]
    for heading, names in NOTES.items():
        parts += [f"## {heading}", *(note(name) for name in names)]
    return "\n\n".join(parts) + "\n"


def engines() -> str:
    """Training speed of ztk and its peers."""
    rows = engine_rows()
    speeds = {dtype: latest(rows, dtype=dtype) for dtype in DTYPES}
    peaks = by(rows, lambda row: (row["dtype"], row["candidate"]))
    lines = [
        [
            strategy,
            engine,
            *(
                f"{speeds[dtype][candidate]:.2f} ({peaks[dtype, candidate]['peak_resident_bytes'] / 1e6:.0f} MB)"
                for dtype in DTYPES
            ),
        ]
        for strategy, names in STRATEGIES.items()
        for engine, candidate in names.items()
    ]
    return section(
        "Training speed of ztk, DDP, FSDP2 and DeepSpeed",
        command="python scripts/bench_engine.py --deepspeed-python PATH",
        rows=rows,
        text="A 30M decoder of the same layers on two CPU ranks. Tokens per second, divided by the rate of forward, backward and AdamW\n"
        "without any communication; medians of interleaved rounds. In brackets, the largest resident memory\n"
        "of a rank. Peers run with their defaults.\n\n" + markdown(["strategy", "engine", *DTYPES], lines),
    )


def engine_rows() -> list[Row]:
    """The runs of the chart: the 30M decoder of ztk's layers on two ranks."""
    chosen = ("30m", "ztk", 2, 3)
    return [row for row in read("engine") if (row["model"], row.get("modules"), row["ranks"], row["rounds"]) == chosen]


def draw_engines() -> None:
    """Writes the chart."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    rows = read("engine")
    plt.rcParams.update({"svg.hashsalt": "ztk", "font.size": 9, "svg.fonttype": "path"})
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), sharey=True)
    for axis, dtype in zip(axes, DTYPES, strict=True):
        draw(axis, speeds=latest(rows, dtype=dtype), title=dtype)
    axes[0].invert_yaxis()
    handles = [plt.Rectangle((0, 0), 1, 1, color=color) for color in COLORS.values()]
    figure.legend(handles, COLORS, loc="lower center", ncols=len(COLORS), frameon=False)
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    figure.savefig(CHART, metadata={"Date": None})


def latest(rows: list[Row], *, dtype: str) -> dict[str, float]:
    """Tokens per second by candidate, relative to the compute-only loop of the same run. The last run of a candidate counts."""
    compute, found = 0.0, {}
    for row in rows:
        if [row.get(name) for name in ("model", "modules", "dtype", "ranks")] != ["30m", "ztk", dtype, 2]:
            continue
        if row["candidate"] == "compute":
            compute = row["tokens_per_second"]
        elif compute:
            found[row["candidate"]] = row["tokens_per_second"] / compute
    return found


def draw(axis: Any, *, speeds: dict[str, float], title: str) -> None:
    """One group of bars per strategy."""
    place, ticks = 0.0, []
    for engines in STRATEGIES.values():
        first = place
        for engine, candidate in engines.items():
            axis.barh(place, speeds[candidate], color=COLORS[engine], height=0.9)
            axis.text(speeds[candidate] + 0.01, place, f"{speeds[candidate]:.2f}", va="center", fontsize=8)
            place += 1
        ticks.append((first + place - 1) / 2)
        place += 0.7
    axis.set_yticks(ticks, STRATEGIES)
    axis.set_xlim(0, 1.15)
    axis.set_xlabel("speed relative to forward, backward and AdamW alone")
    axis.set_title(title)
    axis.spines[["top", "right"]].set_visible(False)


def deepspeed() -> str:
    """Losses and speed of one script under DeepSpeed and ztk."""
    newest = {row["stage"]: row for row in read("compare_deepspeed")}
    lines = [
        [
            str(stage),
            f"{row['largest_difference']:.1e}",
            f"{row['deepspeed_wall_seconds'] / row['ztk_wall_seconds']:.2f}",
        ]
        for stage, row in sorted(newest.items())
    ]
    return section(
        "One script under DeepSpeed and ztk",
        command="python scripts/compare_deepspeed.py --deepspeed-python PATH",
        rows=list(newest.values()),
        text="DeepSpeed 0.19.8, two CPU ranks, 10 steps. The table above has the memory of both libraries.\n\n"
        + markdown(["stage", "largest difference of a loss", "DeepSpeed's seconds / ztk's"], lines),
    )


def inference() -> str:
    """Tokens per CPU second compared with transformers."""
    newest = by(read("inference"), lambda row: (row["parameters"], row["weights"], row["work"]))
    sizes = sorted({(parameters, weights) for parameters, weights, _ in newest}, key=lambda pair: (-pair[0], pair[1]))
    ratios = [
        [f"{parameters / 1e6:.0f}M, {weights}", *(pair(newest[parameters, weights, work]) for work in WORKS)]
        for parameters, weights in sizes
    ]
    return section(
        "Inference compared with transformers",
        command="python scripts/bench_inference.py",
        rows=list(newest.values()),
        text="Tokens per CPU second on one thread, greedy, divided by transformers' `generate`; in brackets by its continuous batching.\n"
        "transformers computes in fp32 in all rows, in the same process. The next table has the memory of separate processes.\n\n"
        + markdown(["parameters, weights", *WORKS.values()], ratios),
    )


def pair(row: Row) -> str:
    """The two ratios of a row."""
    return f"{row['ratio']:.2f} ({row['ratio_to_continuous_batching']:.2f})"


def real_engines() -> str:
    """Prompts and decoding of a real model compared with other engines."""
    newest = by(read("engines"), lambda row: (row["work"], row["engine"]))
    works = list(dict.fromkeys(work for work, _ in newest))
    names = list(dict.fromkeys(name for _, name in newest))
    parts = []
    for title, figure, digits in (
        ("Decoded tokens per CPU second", "decode", 1), ("Tokens of the prompt per CPU second", "prompt", 0),
    ):  # fmt: skip
        lines = [
            [
                name,
                *(
                    f"{row[figure]:.{digits}f} ({row['megabytes']:.0f} MB)" if (row := newest.get((work, name))) else ""
                    for work in works
                ),
            ]
            for name in names
        ]
        parts.append(f"{title}, and the largest resident memory:\n\n" + markdown(["engine", *works], lines))
    return section(
        "SmolLM2-135M compared with llama.cpp, CTranslate2 and transformers",
        command="python scripts/compare_engines.py --peers PYTHON",
        rows=list(newest.values()),
        text="Sequences x tokens of the prompt, greedy, 129 tokens per answer of one sequence and 33 of more. `stored` is fp32. llama.cpp's\n"
        "F32 and F16 files hold the same weights; in rows with `fp32 cache` its keys and values are fp32, too. By its default, F16, it is\n"
        "several times as fast. On one thread of an AMD EPYC (Zen 5) Q8_0 then decodes 122 tokens per CPU second of one sequence, where\n"
        "ztk's int8 has 51, and 132 of eight, where int8 has 150. Its memory is 0.25 to 0.39 GB, where ztk has 1.4 to 1.7.\n\n"
        "CTranslate2 4.8, llama-cpp-python 0.3.36, transformers 5. An engine computes the works in\n"
        "this order in one process, which keeps memory of those before. ztk's and transformers' memory includes the mapped file of 538 MB,\n"
        "which the system can drop. Other work ran on the second core for 8 and 32 sequences, F16 and int8_float32.\n\n"
        + "\n\n".join(parts),
    )


def tuning() -> str:
    """CPU seconds of tuning steps of a real model compared with TRL and peft."""
    newest = by(read("tuning"), lambda row: row["case"])
    lines = [
        [case, str(row["batch"]), *(f"{row[side][0]:.1f}" for side in ("ztk", "trl")), f"{row['ratio']:.2f}",
         *(f"{row[side][1]:.0f}" for side in ("ztk", "trl"))]
        for case, row in newest.items()
    ]  # fmt: skip
    header = ["task", "batch", "ztk, CPU s per step", "TRL", "TRL / ztk", "ztk, peak MB", "TRL"]
    return section(
        "SmolLM2-135M: tuning steps compared with TRL and peft",
        command="python scripts/compare_tuning.py",
        rows=list(newest.values()),
        text="fp32. The peak is of the largest process.\n\n" + markdown(header, lines),
    )


def read(name: str) -> list[Row]:
    """The rows of a benchmark's file, in the order of their measurement."""
    return [json.loads(line) for line in (CPU / f"{name}.jsonl").read_text().splitlines()]


def by(rows: list[Row], key: Callable[[Row], tuple]) -> dict[tuple, Row]:
    """Key -> its newest row."""
    return {key(row): row for row in rows}


def section(title: str, *, command: str, rows: list[Row], text: str) -> str:
    """A benchmark with the dates and commits of its rows."""
    dates = sorted({row["date"][:10] for row in rows})
    commits = ", ".join(dict.fromkeys(row["commit"] for row in rows))
    head = f"`{command}` · {' to '.join(dict.fromkeys([dates[0], dates[-1]]))} · {commits} · {rows[-1]['machine']}"
    return f"### {title}\n\n{head}\n\n{text}"


def note(name: str) -> str:
    """A note as a section."""
    head, _, text = (CPU / "notes" / f"{name}.md").read_text(encoding="utf-8").partition("\n\n")
    values = dict(line.split(": ", 1) for line in head.splitlines())
    if tuple(values) != HEAD:
        raise ValueError(f"{name}.md begins with {', '.join(values)}; write {', '.join(HEAD)}, one per line")
    commands = ", ".join(f"`{command.strip()}`" for command in values["command"].split(";"))
    head = f"{commands} · {values['date']} · {values['commit']} · {values['machine']}"
    return f"### {values['title']}\n\n{head}\n\n{text.strip()}"


if __name__ == "__main__":
    main()
