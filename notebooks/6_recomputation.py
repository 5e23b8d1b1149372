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
# # Recomputation: memory against time
#
# **Question.** How much memory does recomputing activations in the backward save, and how much time does it cost?
#
# With `recompute=full` a block keeps only its input and runs again in the backward (Chen et al., 2016): a second forward. A step of 1 + 2 units
# then takes 1 + 1 + 2, at most 4/3. `every2` recomputes every second block. `selective` keeps the results of matrix products and attention
# and recomputes the rest (Korthikanti et al., 2022), which costs few operations.
#
# **To run it.** `pip install -e ".[notebooks]"` in ztk's folder, then open this file in Jupyter. It takes about 2 minutes on two cores,
# and under 90 seconds with `ZTK_NOTEBOOKS=quick` in the environment. `python scripts/build_notebooks.py 6` executes it without Jupyter.
# `config_dir=FOLDER` of `ztk.plan_run`, `ztk.run` and `ztk.sweep` adds options of your own.

# %%
from charts import Figure, choose, claim, grouped, runs_folder
from measured import peak_of_step

import ztk

MODES = ["none", "selective", "every2", "full"]
RUN = ("model=tiny", "data=synthetic", "logger=disabled", "launch.ranks=1")
KEYS = {"data.seq_len": choose(256, quick=64), "train.micro_batch_size": choose(8, quick=2)}

# %% [markdown]
# ## Prediction

# %%
plans = {mode: ztk.plan_run(*RUN, f"recompute={mode}", **KEYS).as_dict() for mode in MODES}
for mode, plan in plans.items():
    print(
        f"{mode:<10} peak {plan['peak_memory.device_bytes'] / 1e6:6.1f} MB in {plan['peak.where']:<30}"
        f" saved for the backward {plan['saved_for_backward_bytes'] / 1e6:5.1f} MB, {plan['flops'] / 1e9:.1f} billion operations"
    )

# %% [markdown]
# ## Measurement
#
# Seconds come from a sweep. Bytes are counted in this process: on the CPU no allocator reports a peak, so a step is made
# with real tensors, and every storage counts from its allocation to its end.

# %%
found = ztk.sweep(
    *RUN,
    folder=runs_folder("recomputation"),
    quiet=True,
    recompute=MODES,
    **KEYS,
    **{"train.steps": choose(6, quick=2), "sweep.repeats": choose(6, quick=1)},
    **{"sweep.repeat_with": "same_seed", "sweep.quick": True},
)
peaks = {mode: peak_of_step(*RUN, f"recompute={mode}", **KEYS) / 1e6 for mode in MODES}
runs = found.runs
without = runs[runs["recompute"] == "none"].set_index("repeat")["step_seconds_median"]
runs["ratio"] = [
    seconds / without[repeat] for seconds, repeat in zip(runs["step_seconds_median"], runs["repeat"], strict=True)
]
ratios = grouped(found, by="recompute", metric="ratio", order=MODES)

# %%
figure = Figure(
    name="recomputation",
    caption="Time of a step over that without recomputation, by the peak of a rank. The line joins the plans: operations and bytes.",
    panels={"memory and time": ("peak of a step, MB", "step time / that without recomputation")},
    found=[found],
    height=4.0,
)
planned = sorted(
    (plans[mode]["peak_memory.device_bytes"] / 1e6, plans[mode]["flops"] / plans["none"]["flops"]) for mode in MODES
)
figure.predicted([x for x, _ in planned], y=[y for _, y in planned], series="none to full")
for mode, values in zip(MODES, ratios, strict=True):
    figure.measured([peaks[mode]], values=[values], series=mode)
figure.done()

# %% [markdown]
# ## Claims

# %%
for mode in MODES:
    print(f"{mode:<10} planned {plans[mode]['peak_memory.device_bytes'] / 1e6:.3f} MB, counted {peaks[mode]:.3f} MB")
claim(
    "the planned peaks equal the counted ones within 0.1 %",
    holds=all(abs(plans[mode]["peak_memory.device_bytes"] / 1e6 / peaks[mode] - 1) < 1e-3 for mode in MODES),
)
claim(
    "every mode keeps less than the one before: none, selective, every2, full",
    holds=sorted(peaks.values(), reverse=True) == list(peaks.values()),
)
claim("recomputation changes no loss, bit for bit", holds=runs["loss_digest"].nunique() == 1)
middle = runs.groupby("recompute")["ratio"].median()
claim("a step with full recomputation takes at most 1.4 times as long", holds=middle["full"] < 1.4, full_only=True)
