"""Runs of an optimizer on every stage and tier, which have the bits of stage 0."""

from tests.zero.models import Layout, train
from ztk.optim import OptimizerPolicy

TIERS = ("none", "cpu", "nvme")


def check_bits(ranks, *, world: int, dtype: str, optimizer: OptimizerPolicy, steps: int) -> None:
    """All stages and tiers on two ranks in fp32, some elsewhere; in fp16 steps are skipped."""
    first = ranks(world).run(train, layout=Layout(), dtype=dtype, steps=steps, optimizer=optimizer)[0]
    assert (first.skipped > 0) == (dtype == "fp16")
    for layout in layouts(world, dtype=dtype):
        run = ranks(world).run(train, layout=layout, dtype=dtype, steps=steps, optimizer=optimizer)[0]
        assert repr(run.grad_norms) == repr(first.grad_norms), layout.id
        assert run.digest == first.digest, layout.id


def layouts(world: int, *, dtype: str) -> list[Layout]:
    if (world, dtype) == (2, "fp32"):
        return [Layout(stage=stage, offload=tier) for stage in range(4) for tier in TIERS][1:]
    return [Layout(stage=2, offload="cpu"), Layout(stage=3, offload="nvme" if world == 3 else "none")]
