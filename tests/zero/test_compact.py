"""AdamW with smaller states: the same bits at every stage and tier, the bytes that are kept, and how well it trains beside fp32."""

from dataclasses import dataclass

import pytest
import torch

from tests.zero.models import Layout, make_engine, train
from ztk.optim import OptimizerPolicy
from ztk.runtime import Tier


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """dtype: of the parameters. kept: bytes per parameter of states beside the parameter, with its master weight and without."""

    states: str
    master: str | None
    dtype: str
    kept: tuple[float, float]

    @property
    def id(self) -> str:
        return f"{self.states}-{self.master or 'default'}-{self.dtype}"

    @property
    def options(self) -> dict:
        policy = OptimizerPolicy(lr=1e-2, weight_decay=0.1, clip_grad_norm=0.5, states=self.states, rounding_seed=5)
        return {"dtype": self.dtype, "master": self.master, "optimizer": policy}


CHOICES = (
    Choice(states="bf16", master=None, dtype="fp32", kept=(8, 4)),
    Choice(states="bf16", master="fp32", dtype="bf16", kept=(8, 8)),
    Choice(states="bf16", master="fp32", dtype="fp16", kept=(8, 8)),
    Choice(states="bf16", master="stochastic", dtype="bf16", kept=(6, 4)),
    Choice(states="8bit", master=None, dtype="bf16", kept=(5.125, 3.125)),
)
LAYOUTS = (
    Layout(stage=1),
    Layout(stage=1, offload="cpu"),
    Layout(stage=2, offload="nvme"),
    Layout(stage=3),
    Layout(stage=3, offload="cpu"),
    Layout(stage=3, offload="nvme"),
    Layout(stage=3, offload="cpu", parameters="none"),
    Layout(stage=3, offload="nvme", parameters="cpu"),
    Layout(stage=3, zero={"bucket_size": 10**6}),
    Layout(stage=3, offload="cpu", zero={"param_persistence_threshold": 110}),
)


@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: choice.id)
def test_every_stage_tier_and_bucket_size_gives_the_same_bits(ranks, choice):
    """The bits of rounding are drawn by an element's position in the model, and 32 elements that share a scale are always the same 32. The
    norm is summed per bucket, so only runs without clipping agree over bucket sizes; clipping at 0.5 never acts on the gradients here alike."""
    first = ranks(2).run(train, layout=Layout(stage=0), steps=6, **choice.options)[0]
    assert first.losses[-1] < first.losses[0]
    for layout in LAYOUTS[:8]:
        runs = ranks(2).run(train, layout=layout, steps=6, **choice.options)
        for run in runs:
            assert run.losses == first.losses, layout.id
            assert run.digest == first.digest, layout.id
