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
# # fp32, bf16 and fp16
#
# **Question.** How far are 16-bit losses from 32-bit losses, compared with the effect of another seed? And does a ZeRO stage change any
# of them?
#
# bf16 rounds to 8 significant bits, fp16 to 11, fp32 to 24. If rounding errors add up in proportion to one rounding, fp16 lies 8
# times nearer to fp32 than bf16. A stage only decides where numbers are stored, so it must not change a loss.
#
# **To run it.** `pip install -e ".[notebooks]"` in ztk's folder, then open this file in Jupyter. It takes about 3 minutes on two cores,
# and under 90 seconds with `ZTK_NOTEBOOKS=quick` in the environment. `python scripts/build_notebooks.py 3` executes it without Jupyter.
# `config_dir=FOLDER` of `ztk.plan_run`, `ztk.run` and `ztk.sweep` adds options of your own.

# %%
import numpy
from charts import Figure, choose, claim, runs_folder

import ztk

DTYPES = ["bf16", "fp16"]
SEEDS = choose(6, quick=1)
STEPS = choose(50, quick=4)
RUN = ("model=tiny", "data=stdlib", "launch.ranks=2", "logger=disabled")
KEYS = {"data.seq_len": 64, "train.micro_batch_size": choose(4, quick=1), "train.steps": STEPS}
STAGES = choose([0, 1, 2, 3], quick=[0, 3])

# %% [markdown]
# ## Measurement

# %%
# fp16 begins with a loss scale that does not overflow: a skipped step would be a difference of training, not of rounding
EXTRA = {"fp32": (), "bf16": (), "fp16": ("precision.loss_scale.initial=256",)}
found = {
    dtype: ztk.sweep(
        *RUN,
        *EXTRA[dtype],
        folder=runs_folder(f"precision_{dtype}"),
        quiet=True,
        precision=dtype,
        **KEYS,
        **{"sweep.repeats": SEEDS, "sweep.repeat_with": "seeds", "sweep.quick": True},
    )
    for dtype in ("fp32", *DTYPES)
}
stages = ztk.sweep(
    *RUN,
    folder=runs_folder("precision_stages"),
    quiet=True,
    precision=choose(["fp32", *DTYPES], quick=["bf16"]),
    zero=[f"stage{stage}" for stage in STAGES],
    **KEYS | {"train.steps": choose(10, quick=2)},
    **{"sweep.quick": True},
)

# %%
losses = {}
for dtype, one in found.items():
    history = one.history.merge(one.runs[["run", "train.seed"]], on="run")
    losses[dtype] = history.pivot(index="step", columns="train.seed", values="loss")
distance = {dtype: (losses[dtype] - losses["fp32"]).abs() for dtype in DTYPES}
between_seeds = losses["fp32"].std(axis=1) if SEEDS > 1 else None

points = choose([1, 2, 5, 10, 20, 50], quick=[1, 2, 4])
figure = Figure(
    name="precision",
    caption="Distance of the loss from the fp32 run of the same seed, over steps. The line for fp16 is an eighth of bf16's medians.",
    panels={"distance from fp32": ("step", "absolute difference, nats per token")},
    found=list(found.values()),
    ticks=points,
    log="xy",
    height=4.0,
)
for dtype in DTYPES:
    figure.measured(points, values=[distance[dtype].loc[step].tolist() for step in points], series=dtype)
eighth = [float(distance["bf16"].loc[step].median()) / 8 for step in points]
figure.predicted(points, y=eighth, series="fp16")
if between_seeds is not None:
    figure.axes().plot(
        points, between_seeds.loc[points], ":", color="#888888", label="seeds of fp32, standard deviation"
    )
figure.done()

# %% [markdown]
# ## Claims

# %%
median = {dtype: float(numpy.median(distance[dtype].to_numpy())) for dtype in DTYPES}
print(
    f"median distance over all steps: bf16 {median['bf16']:.2g}, fp16 {median['fp16']:.2g}, {median['bf16'] / median['fp16']:.1f} times"
)
claim(
    "within each precision all ZeRO stages have the same losses, bit for bit",
    holds=(stages.runs.groupby("precision")["loss_digest"].nunique() == 1).all(),
)
claim("fp16 skipped no step", holds=int(found["fp16"].history["skipped"].max()) == 0)
claim(
    "the three precisions have different losses",
    holds=len({one.runs["loss_digest"].iloc[0] for one in found.values()}) == 3,
)
claim("fp16 lies nearer to fp32 than bf16", holds=median["fp16"] < median["bf16"], full_only=True)
if between_seeds is not None:
    claim(
        "another seed changes the last loss more than bf16 does",
        holds=float(distance["bf16"].iloc[-1].median()) < float(between_seeds.iloc[-1]),
    )
