# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Where offload stops costing
#
# **Question.** From which batch on is training with offloaded optimizer states as fast as without?
#
# ZeRO-Offload and ZeRO-Infinity keep Adam's states outside of the device. The traffic of a step depends only on the parameters: NVMe reads
# 12 bytes per parameter and writes 12 (master weights and two moments in 32 bits) for any batch. The device's computing time grows with the
# batch, so the ratio of step times must fall towards 1.
#
# **To run it.** `pip install -e ".[notebooks]"` in ztk's folder, then open this file in Jupyter. It takes about 4 minutes on two cores,
# and under 90 seconds with `ZTK_NOTEBOOKS=quick` in the environment. `python scripts/build_notebooks.py 2` executes it without Jupyter.
# `config_dir=FOLDER` of `ztk.plan_run`, `ztk.run` and `ztk.sweep` adds options of your own.

# %%
import subprocess
import sys

from charts import FOLDER, Figure, choose, claim, runs_folder

import ztk
from ztk.report.statistics import median_interval

RANKS = 2
BATCHES = choose([1, 4, 16], quick=[1, 4])
TIERS = choose(["none", "cpu", "nvme"], quick=["none", "nvme"])
RUN = ("model=tiny", "data=synthetic", "zero=stage2", f"launch.ranks={RANKS}", "logger=disabled")
KEYS = {"data.seq_len": choose(128, quick=64), "train.steps": choose(10, quick=2)}
REPEATS = choose(6, quick=1)

# %% [markdown]
# ## Prediction
#
# `python -m ztk.calibrate` measures this machine's rates of computing and copying. With them a plan has seconds: a lane for computing, for the
# wire, for main memory and for the disk. On a CPU the same cores compute, reduce and update, so a step can hide only the disk. The plan
# assumes this. A step that hides nothing takes as long as all lanes together. A run should lie between the two.

# %%
# the quick form measures no rates: it plans for a device with a data sheet
hardware = FOLDER / "hardware.json"
HARDWARE = choose(("hardware=here", f"hardware.file={hardware}"), quick=("hardware=a100_80",))
if "hardware=here" in HARDWARE and not hardware.exists():
    hardware.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(
        [sys.executable, "-m", "ztk.calibrate", "--ranks", str(RANKS), "--folder", str(FOLDER), "--to", str(hardware)],
        check=True,
        stdout=subprocess.DEVNULL,
    )
plans = {
    (tier, batch): ztk.plan_run(
        *RUN,
        f"offload={tier}",
        *HARDWARE,
        **KEYS,
        **{"train.micro_batch_size": batch},
    )
    for tier in TIERS
    for batch in BATCHES
}


def planned(plan):
    """Seconds of a step that hides the disk."""
    return plan.time.seconds


def in_turn(plan):
    """Seconds of a step whose lanes work one after the other."""
    return sum(plan.time.busy.values())


for tier in TIERS:
    first, last = (plans[tier, batch].time for batch in (BATCHES[0], BATCHES[-1]))
    print(f"{tier}: {first.limit} limits a step of batch {BATCHES[0]}, {last.limit} one of batch {BATCHES[-1]}")

# %% [markdown]
# ## Measurement

# %%
found = ztk.sweep(
    *RUN,
    folder=runs_folder("tiers"),
    quiet=True,
    **KEYS,
    **{"offload": TIERS, "train.micro_batch_size": BATCHES, "sweep.repeats": REPEATS},
    **{"sweep.repeat_with": "same_seed", "sweep.quick": True},
)
runs = found.runs
baseline = runs[runs["offload"] == "none"].set_index(["train.micro_batch_size", "repeat"])["step_seconds_median"]
runs["ratio"] = [
    seconds / baseline[batch, repeat]
    for seconds, batch, repeat in zip(
        runs["step_seconds_median"], runs["train.micro_batch_size"], runs["repeat"], strict=True
    )
]

figure = Figure(
    name="offload_tiers",
    caption="Seconds of a step with optimizer states in main memory and on the disk, over those without offload, by the micro-batch of a rank.",
    panels={
        "cost of offload": ("sequences per rank and step", "step time / that without offload"),
        "disk": ("sequences per rank and step", "MB per rank and step"),
    },
    found=[found],
    ticks=BATCHES,
    log="x",
    from_zero=["disk"],
)
for tier in TIERS[1:]:
    arm = runs[runs["offload"] == tier]
    by_batch = [arm[arm["train.micro_batch_size"] == batch] for batch in BATCHES]
    for bound, style, words in ((planned, "-", "planned"), (in_turn, "--", "if nothing overlaps")):
        ratios = [bound(plans[tier, batch]) / plans["none", batch].time.seconds for batch in BATCHES]
        figure.predicted(BATCHES, y=ratios, series=tier, panel="cost of offload", style=style, words=words)
    figure.measured(BATCHES, values=[rows["ratio"] for rows in by_batch], series=tier, panel="cost of offload")
figure.axes("cost of offload").axhline(1.0, color="#888888", linewidth=0.8, zorder=1)

nvme = runs[runs["offload"] == "nvme"]
written = [
    (rows["io.write_bytes"] / rows["steps"] / 1e6).tolist()
    for rows in (nvme[nvme["train.micro_batch_size"] == b] for b in BATCHES)
]
figure.predicted(
    BATCHES, y=[12 * plans["none", 1].parameters / RANKS / 1e6] * len(BATCHES), series="written", panel="disk"
)
figure.measured(BATCHES, values=written, series="written", panel="disk")
figure.done()

# %% [markdown]
# ## Claims
#
# Bytes are counted, so claims about them hold exactly. Seconds need an idle machine: a wide interval, or one above the upper line, shows
# that other programs ran.

# %%
flat = [value for group in written for value in group]
claim("bytes written to the disk do not depend on the batch", holds=max(flat) == min(flat))
claim(
    "they are 12 per parameter of the rank's shard, within 1 %",
    holds=abs(flat[0] * 1e6 / (12 * plans["none", 1].parameters / RANKS) - 1) < 0.01,
)
bounds = [in_turn(plans["nvme", batch]) / plans["none", batch].time.seconds for batch in BATCHES]
ratios = [planned(plans["nvme", batch]) / plans["none", batch].time.seconds for batch in BATCHES]
claim(
    "no plan has a faster step with offload than without",
    holds=all(planned(plan) >= plans["none", batch].time.seconds for (_, batch), plan in plans.items()),
)
claim(
    "the planned upper bound of the disk's cost falls with every larger batch",
    holds=bounds == sorted(bounds, reverse=True),
    full_only=True,
)
for batch, expected, bound in zip(BATCHES, ratios, bounds, strict=True):
    seen = median_interval(nvme[nvme["train.micro_batch_size"] == batch]["ratio"].tolist())
    print(
        f"batch {batch}: {seen.median:.2f} times (n = {seen.n}, 95 % interval: {seen.ends}), planned {expected:.2f}, at most {bound:.2f}"
    )
claim(
    "all tiers have the same losses at each batch, bit for bit",
    holds=(runs.groupby("train.micro_batch_size")["loss_digest"].nunique() == 1).all(),
)
