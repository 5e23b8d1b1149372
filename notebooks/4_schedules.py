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
# # Pipeline schedules: the bubble against the micro-batches
#
# **Question.** How much of the time do pipeline stages wait, and how much does a schedule reduce it?
#
# With p stages and m micro-batches, GPipe and 1F1B leave `(p - 1) / (m + p - 1)` of the time idle (Megatron-LM); v stages per rank leave
# `(p - 1) / (v m + p - 1)`. Zero-bubble schedules (Qi et al., 2023) split the backward: no other stage waits for the gradients of weights,
# so they fill the gaps.
#
# **To run it.** `pip install -e ".[notebooks]"` in ztk's folder, then open this file in Jupyter. It takes about 3 minutes on two cores,
# and under 90 seconds with `ZTK_NOTEBOOKS=quick` in the environment. `python scripts/build_notebooks.py 4` executes it without Jupyter.
# `config_dir=FOLDER` of `ztk.plan_run`, `ztk.run` and `ztk.sweep` adds options of your own.

# %%
from charts import COLOURS, Figure, choose, claim, runs_folder

import ztk
from ztk.parallel.pipeline import Costs, Kind, bubble_share, make_schedule, zero_bubble_share

SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zero_bubble": 1}  # with stages per rank
STAGES = 4
MICRO_BATCHES = [4, 8, 16, 32]

# %% [markdown]
# ## Prediction
#
# A schedule is data: a list of actions for each rank. `simulate` executes it with equal costs for a forward, for the gradient of a stage's
# input and for the gradient of its weights. The lines are the formulas; the simulated values are printed next to them.

# %%
lines = {
    name: [
        zero_bubble_share(num_ranks=STAGES, num_micro_batches=count, costs=Costs())
        if name == "zero_bubble"
        else bubble_share(num_ranks=STAGES, num_micro_batches=count, virtual_stages=virtual)
        for count in MICRO_BATCHES
    ]
    for name, virtual in SCHEDULES.items()
}


def timeline(name, *, count, stages=STAGES):
    """The simulated timeline of every rank. If a rank has two stages, each costs half as much."""
    virtual = SCHEDULES[name]
    schedule = make_schedule(name, num_ranks=stages, num_micro_batches=count, virtual_stages=virtual)
    unit = 1 / virtual
    return schedule.timeline(costs=Costs(forward=unit, backward_input=unit, backward_weight=unit))


simulated = {name: [timeline(name, count=count).idle_share for count in MICRO_BATCHES] for name in SCHEDULES}
for name in SCHEDULES:
    print(
        f"{name:<12}",
        "  ".join(
            f"m={m}: {a:.4f} ({b:.4f})" for m, a, b in zip(MICRO_BATCHES, simulated[name], lines[name], strict=True)
        ),
    )
claim(
    "the simulated bubbles equal the formulas",
    holds=all(abs(a - b) < 1e-9 for name in SCHEDULES for a, b in zip(simulated[name], lines[name], strict=True)),
)

# %% [markdown]
# The four schedules with 4 stages and 8 micro-batches.

# %%
figure = Figure(
    name="schedules_timeline",
    caption="Simulated time of 4 stages and 8 micro-batches: forwards, gradients of inputs, gradients of weights, all of one cost.",
    panels=dict.fromkeys(("gpipe", "1f1b"), ("units of a forward", "stage"))
    | dict.fromkeys(("interleaved", "zero_bubble"), ("units of a forward", "stage")),
    height=2.8,
)
KINDS = {
    Kind.forward: COLOURS[0],
    Kind.backward: COLOURS[2],
    Kind.backward_input: COLOURS[5],
    Kind.backward_weight: COLOURS[4],
}
for name in SCHEDULES:
    axes = figure.axes(name)
    drawn = timeline(name, count=8)
    for kind, colour in KINDS.items():
        label = kind.name.replace("_", " ")
        for interval in (one for one in drawn.intervals if one.action.kind is kind):
            width = interval.stop - interval.start
            axes.barh(
                interval.rank,
                width,
                left=interval.start,
                height=0.9,
                color=colour,
                edgecolor="white",
                linewidth=0.4,
                label=label,
            )
            label = None
    axes.set(title=f"{name}: {drawn.idle_share:.0%} idle", yticks=range(STAGES), xlim=(0, 34))
    axes.invert_yaxis()
    axes.grid(False)
figure.done()

# %% [markdown]
# ## Measurement
#
# Two stages on two ranks of this machine, trained for real. `seconds.bubble` counts the time in which a rank waits for a micro-batch.

# %%
COUNTS = choose([2, 4, 8], quick=[2, 8])
ARMS = choose(["gpipe", "1f1b", "zero_bubble"], quick=["1f1b"])
found = ztk.sweep(
    "model=tiny",
    "data=synthetic",
    "topology=pp2",
    "launch.ranks=2",
    "logger=disabled",
    folder=runs_folder("schedules"),
    quiet=True,
    **{
        "topology.schedule": ARMS,
        "train.accumulation_steps": COUNTS,
        "train.micro_batch_size": 4,
        "data.seq_len": choose(128, quick=64),
        "train.steps": choose(6, quick=2),
        "sweep.repeats": choose(6, quick=1),
        "sweep.repeat_with": "same_seed",
        "sweep.quick": True,
    },
)
runs = found.runs
phases = [f"seconds.{name}" for name in ("forward", "backward", "bubble", "communication", "optimizer", "io")]
runs["idle"] = runs["seconds.bubble"] / runs[phases].sum(axis=1)

figure = Figure(
    name="schedules_bubble",
    caption="The idle share by micro-batches: formulas for 4 stages of equal cost, and formulas and runs of 2 stages on this machine.",
    panels={"4 stages": ("micro-batches", "idle share"), "2 stages, trained": ("micro-batches", "idle share")},
    found=[found],
    log="x",
    from_zero=["4 stages", "2 stages, trained"],
)
for name in SCHEDULES:
    figure.predicted(MICRO_BATCHES, y=lines[name], series=name, panel="4 stages", style="--" if name == "1f1b" else "-")
for name in ARMS:
    arm = runs[runs["topology.schedule"] == name]
    formula = [
        zero_bubble_share(num_ranks=2, num_micro_batches=count, costs=Costs())
        if name == "zero_bubble"
        else bubble_share(num_ranks=2, num_micro_batches=count)
        for count in COUNTS
    ]
    figure.predicted(COUNTS, y=formula, series=name, panel="2 stages, trained", style="--" if name == "1f1b" else "-")
    values = [arm[arm["train.accumulation_steps"] == count]["idle"] for count in COUNTS]
    figure.measured(COUNTS, values=values, series=name, panel="2 stages, trained")
for panel, ticks in (("4 stages", MICRO_BATCHES), ("2 stages, trained", COUNTS)):
    figure.axes(panel).set_xticks(ticks, [str(tick) for tick in ticks])
    figure.axes(panel).minorticks_off()
figure.done()

# %% [markdown]
# ## Claims
#
# The stages of a real model have different costs (the last one also has the loss), and processes share the machine: measured shares follow the
# order of the formulas, not their digits.

# %%
middle = runs.groupby(["topology.schedule", "train.accumulation_steps"])["idle"].median()
claim(
    "more micro-batches leave less idle, in every schedule",
    holds=all(middle[name, COUNTS[-1]] < middle[name, COUNTS[0]] for name in ARMS),
    full_only=True,
)
digests = runs.groupby("train.accumulation_steps")["loss_digest"].nunique()
claim("schedules change no loss, bit for bit", holds=(digests == 1).all())
