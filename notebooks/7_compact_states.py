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
# # Compact optimizer states
#
# **Question.** How much memory do smaller AdamW states save, and do they change the loss more than another seed does?
#
# In addition to a bf16 parameter AdamW keeps 12 bytes: a master weight and two moments in fp32. With `optimizer.states=bf16` the moments have
# 2 bytes each. `precision.master=stochastic` drops the master weight: the bf16 parameter itself is updated and rounded stochastically, so that
# small updates are not lost on average. `optimizer.states=8bit` keeps 8 more bits of the weight and moments of 8 bits, with one scale per 32
# elements (Dettmers et al., 2022). Unbiased rounding should add noise and no bias: runs with the same seed stay closer to each other than runs
# with different seeds, at every length of the run.
#
# **To run it.** `pip install -e ".[notebooks]"` in ztk's folder, then open this file in Jupyter. It takes an estimated 10 minutes on two cores,
# and under 90 seconds with `ZTK_NOTEBOOKS=quick` in the environment. `python scripts/build_notebooks.py 7` executes it without Jupyter.
# `config_dir=FOLDER` of `ztk.plan_run`, `ztk.run` and `ztk.sweep` adds options of your own.

# %%
from charts import Figure, choose, claim, runs_folder

import ztk

# name -> (optimizer.states, precision.master), bytes per parameter without the parameter and its gradient
FORMATS = {
    "fp32": (("fp32", "fp32"), 12.0),
    "bf16": (("bf16", "fp32"), 8.0),
    "bf16, no master": (("bf16", "stochastic"), 4.0),
    "8bit": (("8bit", "stochastic"), 3.125),
}
NAMES = choose(list(FORMATS), quick=["fp32", "8bit"])
SEEDS = choose(6, quick=1)
STEPS = choose(100, quick=4)
RUN = ("model=tiny", "data=stdlib", "precision=bf16", "launch.ranks=1", "logger=disabled")
KEYS = {"data.seq_len": 64, "train.micro_batch_size": choose(4, quick=1), "train.steps": STEPS}

# %% [markdown]
# ## Prediction

# %%
words = {
    name: {"optimizer.states": states, "precision.master": master} for name, ((states, master), _) in FORMATS.items()
}
plans = {name: ztk.plan_run(*RUN, **KEYS, **words[name]).as_dict() for name in NAMES}
parameters = plans["fp32"]["parameters"]
for name, plan in plans.items():
    print(
        f"{name:<16} {plan['memory.device.optimizer_bytes'] / parameters:6.3f} bytes of states per parameter,"
        f" peak {plan['peak_memory.device_bytes'] / 1e6:.1f} MB"
    )

# %% [markdown]
# ## Measurement
#
# Repeats have the seeds 0 to n - 1, which decide the first weights, the text and the rounding bits.

# %%
found = {
    name: ztk.sweep(
        *RUN,
        folder=runs_folder(f"compact_{name.replace(', ', '_').replace(' ', '_')}"),
        quiet=True,
        **KEYS,
        **words[name],
        **{"sweep.repeats": SEEDS, "sweep.repeat_with": "seeds", "sweep.quick": True},
    )
    for name in NAMES
}

# %%
losses = {}
for name, one in found.items():
    history = one.history.merge(one.runs[["run", "train.seed"]], on="run")
    losses[name] = history.pivot(index="step", columns="train.seed", values="loss")
compact = NAMES[1:]
distance = {name: (losses[name] - losses["fp32"]).abs() for name in compact}
between_seeds = losses["fp32"].std(axis=1) if SEEDS > 1 else None
kept = {name: (one.runs["memory.device.optimizer_bytes"] / parameters).tolist() for name, one in found.items()}

points = choose([1, 2, 5, 10, 20, 50, 100], quick=[1, 2, 4])
figure = Figure(
    name="compact_states",
    caption="Bytes of states that a run kept per parameter, and the distance of the loss from the run of the same seed with fp32 states.",
    panels={
        "memory": ("", "bytes of optimizer states per parameter"),
        "distance from fp32 states": ("step", "absolute difference, nats per token"),
    },
    found=list(found.values()),
    from_zero=["memory"],
    height=4.2,
)
places = list(range(len(NAMES)))
figure.predicted(places, y=[FORMATS[name][1] for name in NAMES], series="states", panel="memory", words="formula")
figure.measured(places, values=[kept[name] for name in NAMES], series="states", panel="memory")
figure.axes("memory").set_xticks(places, [name.replace(", ", ",\n") for name in NAMES])
far = figure.axes("distance from fp32 states")
for name in compact:
    # the first loss has equal weights: a distance of 0, which a logarithmic axis cannot show
    figure.measured(
        points[1:],
        values=[distance[name].loc[step].tolist() for step in points[1:]],
        series=name,
        panel="distance from fp32 states",
    )
if between_seeds is not None:
    far.plot(points[1:], between_seeds.loc[points[1:]], ":", color="#888888", label="seeds of fp32, standard deviation")
far.set_xscale("log")
far.set_yscale("log")
far.set_xticks(points[1:], [str(step) for step in points[1:]])
far.set_xticks([], minor=True)
figure.done()

# %% [markdown]
# ## Claims

# %%
for name in NAMES:
    booked = set(found[name].runs["memory.device.optimizer_bytes"])
    claim(
        f"{name}: every run kept the planned bytes of states, and no other",
        holds=booked == {plans[name]["memory.device.optimizer_bytes"]},
    )
    claim(
        f"{name}: they are {FORMATS[name][1]:g} per parameter, within 0.1 %",
        holds=abs(kept[name][0] / FORMATS[name][1] - 1) < 1e-3,
    )
# 8-bit states round the first weights to 24 bits and these to 16, so some of their bf16 weights are the other neighbour
for name in [name for name in compact if name.startswith("bf16")]:
    claim(
        f"{name}: the first loss equals fp32 states' loss, bit for bit",
        holds=float(distance[name].loc[1].max()) == 0.0,
    )
claim(
    "every format has losses of its own",
    holds=len({one.runs["loss_digest"].iloc[0] for one in found.values()}) == len(NAMES),
)
if between_seeds is not None:
    for name in compact:
        last = distance[name].tail(10).mean()
        print(
            f"{name:<16} distance in the last 10 steps, per seed: {', '.join(f'{value:.4f}' for value in last)};"
            f" seeds differ by {float(between_seeds.tail(10).mean()):.4f}"
        )
    claim(
        "in the last 10 steps no format, of no seed, is as far from fp32 states as seeds are from each other",
        holds=all(
            float(distance[name].tail(10).mean().max()) < float(between_seeds.tail(10).mean()) for name in compact
        ),
    )
