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
# # Experts against dense layers at equal FLOPs
#
# **Question.** Do experts learn more from the same computation?
#
# A mixture of experts has many feed-forward layers of which a token uses few: more parameters for the same operations (Shazeer et al., 2017;
# Switch Transformer, 2021). `tiny_moe` has 8 experts in every second block, and a token uses 2 of hidden size 384 there, as
# much as a dense layer of 768. Its other blocks have 512. A dense model with 640 in every block computes the same. It is `tiny_wide`, an option
# in the folder `options` next to this file.
#
# **To run it.** `pip install -e ".[notebooks]"` in ztk's folder, then open this file in Jupyter. It takes about 3 minutes on two cores,
# and under 90 seconds with `ZTK_NOTEBOOKS=quick` in the environment. `python scripts/build_notebooks.py 5` executes it without Jupyter.
# `config_dir=FOLDER` of `ztk.plan_run`, `ztk.run` and `ztk.sweep` adds options of your own, as `options` here.

# %%
from charts import OPTIONS, Figure, choose, claim, runs_folder

import ztk
from ztk.report.statistics import ratio_interval

ARMS = {"dense": ("model=tiny_wide",), "experts": ("model=tiny_moe",)}
RUN = ("data=stdlib", "launch.ranks=2", "logger=disabled")
STEPS = choose(60, quick=4)
SEEDS = choose(6, quick=1)
KEYS = {"data.seq_len": choose(128, quick=64), "train.micro_batch_size": choose(4, quick=1), "train.steps": STEPS}

# %% [markdown]
# ## Prediction

# %%
plans = {name: ztk.plan_run(*words, *RUN, config_dir=OPTIONS, **KEYS) for name, words in ARMS.items()}
flops = {name: plan.as_dict()["flops"] for name, plan in plans.items()}
for name, plan in plans.items():
    print(
        f"{name:<8} {plan.parameters / 1e6:.2f} million parameters, {flops[name] / 1e9:.2f} billion operations a step"
    )
claim(
    "both compute the same, within 1 %; the experts have 2.3 times the parameters",
    holds=abs(flops["experts"] / flops["dense"] - 1) < 0.01
    and round(plans["experts"].parameters / plans["dense"].parameters, 1) in (2.3, 2.4),
)

# %% [markdown]
# ## Measurement

# %%
found = {
    name: ztk.sweep(
        *words,
        *RUN,
        folder=runs_folder(f"experts_{name}"),
        config_dir=OPTIONS,
        quiet=True,
        **KEYS,
        **{"sweep.repeats": SEEDS, "sweep.repeat_with": "seeds", "sweep.quick": True},
    )
    for name, words in ARMS.items()
}

# %%
points = choose([1, 10, 20, 30, 45, 60], quick=[1, 2, 4])
losses = {}
for name, one in found.items():
    # the mean of ten steps: the loss of a single batch varies more than the arms differ
    history = one.history.pivot(index="step", columns="run", values="loss").rolling(10, min_periods=1).mean()
    losses[name] = history[one.runs["run"].tolist()]
figure = Figure(
    name="experts",
    caption="Training loss (mean of 10 steps) over steps of equal FLOPs, and the forward and backward operations of a step.",
    panels={"loss": ("step", "nats per token"), "operations": ("", "billions per step and rank")},
    found=list(found.values()),
    from_zero=["operations"],
)
for name in ARMS:
    values = [losses[name].loc[step].tolist() for step in points]
    figure.measured(points, values=values, series=name, panel="loss")
    figure.axes("loss").plot(
        points,
        [sorted(group)[len(group) // 2] for group in values],
        ":",
        color=figure.axes("loss").lines[-1].get_color(),
        linewidth=0.8,
    )
figure.predicted([0, 1], y=[flops[name] / 1e9 for name in ARMS], series="operations", panel="operations", style="D")
figure.axes("operations").set_xticks([0, 1], list(ARMS))
figure.axes("operations").set_xlim(-0.5, 1.5)
figure.done()

# %% [markdown]
# ## Claims
#
# Pairs share a seed, so the claim is about ratios of pairs.

# %%
last = {name: losses[name].iloc[-1].tolist() for name in ARMS}
ratio = ratio_interval(last["experts"], baseline=last["dense"])
speed = ratio_interval(
    found["experts"].runs["tokens_per_second"].tolist(), baseline=found["dense"].runs["tokens_per_second"].tolist()
)
print(f"loss of experts / dense after {STEPS} steps: {ratio.median:.4f}, n = {ratio.n}, 95 % interval: {ratio.ends}")
print(f"tokens per second of experts / dense: {speed.median:.2f}, n = {speed.n}, 95 % interval: {speed.ends}")
claim("both learn", holds=all(losses[name].iloc[-1].max() < losses[name].iloc[0].min() for name in ARMS))
