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
# # ZeRO stages: memory, wire and speed
#
# **Question.** How much memory does each ZeRO stage save, and how much communication does it cost?
#
# Rajbhandari et al. (ZeRO, 2020) count bytes. With 16-bit parameters and gradients and Adam in 32 bits a parameter takes 2 + 2 + 12 bytes.
# Stage 1 shards the 12 over the N ranks, stage 2 also the gradients, stage 3 also the parameters. Stages 0 to 2 send 2 elements per
# parameter and step, stage 3 sends 3, because it gathers the parameters once more for the backward.
#
# **To run it.** `pip install -e ".[notebooks]"` in ztk's folder, then open this file in Jupyter. It takes about 3 minutes on two cores,
# and under 90 seconds with `ZTK_NOTEBOOKS=quick` in the environment. `python scripts/build_notebooks.py 1` executes it without Jupyter.
# `config_dir=FOLDER` of `ztk.plan_run`, `ztk.run` and `ztk.sweep` adds options of your own.

# %%
from charts import Figure, choose, claim, grouped, runs_folder

import ztk

RANKS = 2
STAGES = [0, 1, 2, 3]
OPTIONS = [f"stage{stage}" for stage in STAGES]
RUN = ("model=tiny", "data=synthetic", f"launch.ranks={RANKS}", "logger=disabled")
KEYS = {
    "data.seq_len": choose(256, quick=64),
    "train.micro_batch_size": choose(4, quick=1),
    "train.steps": choose(12, quick=2),
}
REPEATS = choose(6, quick=1)

# %% [markdown]
# ## Prediction
#
# Two predictions that must agree: the formula, and the plan, which runs ztk's own engine on tensors without values. First the numbers of the
# paper's figure 1, 7.5 billion parameters on 64 ranks.

# %%
import torch
from torch import nn


class Layers(nn.Module):
    """7.5 billion parameters without a bias."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(10_000, 10_000, bias=False) for _ in range(75))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.float().mean()


def formula(parameters, *, ranks, stage):
    """Bytes of parameters, gradients and Adam's states on a device."""
    parts = [(12, stage >= 1), (2, stage >= 2), (2, stage >= 3)]
    return sum(nbytes * parameters / (ranks if sharded else 1) for nbytes, sharded in parts)


STATE = ("parameters", "gradients", "optimizer")
paper = {0: 120.0, 1: 31.4, 2: 16.6, 3: 1.9}
planned = {}
for stage in STAGES:
    plan = ztk.plan(
        Layers,
        batch=(torch.empty(1, 10_000, dtype=torch.bfloat16, device="meta"),),
        world_size=64,
        precision=ztk.PrecisionPolicy.named("bf16"),
        zero=ztk.ZeroPolicy(stage=stage),
    )
    planned[stage] = sum(plan.fullest.state["device"][name] for name in STATE) / 1e9
    print(f"stage {stage}: planned {planned[stage]:.1f} GB, the paper's figure 1 {paper[stage]} GB")

claim(
    "the plan of 7.5 billion parameters on 64 ranks has the paper's numbers to the digit",
    holds=all(round(planned[stage], 1) == paper[stage] for stage in STAGES),
)

# %% [markdown]
# ## Measurement
#
# The same for a small model on two ranks, which are trained: every stage is one arm of a sweep, and all arms run once before any runs again.

# %%
found = ztk.sweep(
    *RUN,
    folder=runs_folder("zero"),
    quiet=True,
    zero=OPTIONS,
    **KEYS,
    **{"sweep.repeats": REPEATS, "sweep.repeat_with": "same_seed", "sweep.quick": True},
)
plans = {stage: ztk.plan_run(*RUN, f"zero=stage{stage}", **KEYS) for stage in STAGES}
found.summary("zero", metric="tokens_per_second")

# %%
for name in STATE:
    found.runs[f"memory.device.{name}_bytes"] = found.runs[f"memory.device.{name}_bytes"].astype(float)
found.runs["state"] = sum(found.runs[f"memory.device.{name}_bytes"] for name in STATE) / 1e6
wire = ("all_gather", "reduce_scatter", "all_reduce")
found.runs["wire"] = sum(found.runs[f"comm.{kind}_bytes"] for kind in wire) / found.runs["steps"] / 1e6

parameters = int(found.runs["parameters"].iloc[0])
by_formula = [formula(parameters, ranks=RANKS, stage=stage) / 1e6 for stage in STAGES]
by_plan = [sum(plans[stage].fullest.state["device"][name] for name in STATE) / 1e6 for stage in STAGES]
wire_formula = [(3 if stage == 3 else 2) * 2 * parameters / 1e6 for stage in STAGES]

figure = Figure(
    name="zero_stages",
    caption="Model state of a rank, bytes a rank sends in a step, and tokens per second of two ranks together, by ZeRO stage.",
    panels={
        "model state": ("ZeRO stage", "MB per rank"),
        "wire": ("ZeRO stage", "MB per rank and step"),
        "speed": ("ZeRO stage", "tokens per second"),
    },
    found=[found],
    ticks=STAGES,
    from_zero=["model state", "wire", "speed"],
)
figure.predicted(STAGES, y=by_formula, series="state", panel="model state")
figure.measured(
    STAGES, values=grouped(found, by="zero", metric="state", order=OPTIONS), series="state", panel="model state"
)
figure.predicted(STAGES, y=wire_formula, series="wire", panel="wire")
figure.measured(STAGES, values=grouped(found, by="zero", metric="wire", order=OPTIONS), series="wire", panel="wire")
speeds = grouped(found, by="zero", metric="tokens_per_second", order=OPTIONS)
figure.measured(STAGES, values=speeds, series="speed", panel="speed")
figure.done()

# %% [markdown]
# ## Claims
#
# Memory and wire are counted, so the claims hold exactly. Only the padding of buffers to a multiple of the ranks separates the formula from the
# counters. All stages have the same losses: a stage changes where numbers are stored, not their values.

# %%
states = [group[0] for group in grouped(found, by="zero", metric="state", order=OPTIONS)]
claim("the plan's bytes of state are the counters', to the byte", holds=states == by_plan)
claim(
    "the formula is within 0.1 % of both",
    holds=all(abs(a / b - 1) < 1e-3 for a, b in zip(states, by_formula, strict=True)),
)
moved = [group[0] for group in grouped(found, by="zero", metric="wire", order=OPTIONS)]
claim(
    "stages 0 to 2 send 2 elements per parameter and step, stage 3 sends 3 (within 0.1 %)",
    holds=all(abs(a / b - 1) < 1e-3 for a, b in zip(moved, wire_formula, strict=True)),
)
claim("all stages have the same losses, bit for bit", holds=found.runs["loss_digest"].nunique() == 1)
