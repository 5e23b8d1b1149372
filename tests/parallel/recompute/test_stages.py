"""Two ranks: recomputing changes no bit at any stage and tier, and tensor-parallel ranks share the saved inputs."""

import pytest
import torch

from tests.parallel.recompute.models import LAYERS, ROWS, WIDTH, build, rows, train
from tests.zero.models import Layout, make_engine
from ztk.core.runtime import MemoryLedger, Process, Tier
from ztk.parallel.recompute import RecomputePolicy, recompute_blocks

INPUT = ROWS * WIDTH * 4  # bytes of one block's input


def losses(
    process: Process, *, stage: int, dtype: str, accumulation: int = 1, input_gradients: bool = False, **options
) -> list[float]:
    """Each step's loss and gradient norm."""
    policy = RecomputePolicy(**options)
    engine = make_engine(
        process,
        layout=Layout(stage=stage),
        dtype=dtype,
        model=build(),
        recompute=policy,
        accumulation_steps=accumulation,
    )
    torch.manual_seed(process.rank)  # of the dropout
    found = []
    for step in range(4 * accumulation):
        x = rows(2 * step + process.rank).to(engine.zero.dtype).requires_grad_(input_gradients)
        loss = engine(x).float()
        engine.backward(loss)
        if engine.step():
            found += [loss.item(), engine.read_metrics().grad_norm]
    assert engine.memory.peak(Tier.host if policy.inputs_on_cpu else Tier.device) > 0
    engine.close()
    return found


KINDS = [
    {"mode": "full"},
    {"mode": "selective", "inputs_on_cpu": True},
    {"mode": "full", "every": 2, "contiguous": True},
]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_no_stage_sees_a_difference(ranks, stage, dtype):
    plain = ranks(2).run(losses, stage=stage, dtype=dtype)
    assert plain[0] != plain[1]
    for kind in KINDS:
        assert ranks(2).run(losses, stage=stage, dtype=dtype, **kind) == plain


def test_the_backward_gathers_more_than_the_forward(ranks):
    """The root's weight is read after the first block's backward, so it is gathered ahead within a repetition of that block; a selective
    one counts operations and must not see these."""
    plain = ranks(2).run(losses, stage=3, dtype="fp32", input_gradients=True)
    assert ranks(2).run(losses, stage=3, dtype="fp32", input_gradients=True, mode="selective") == plain


def test_accumulated_micro_batches(ranks):
    plain = ranks(2).run(losses, stage=3, dtype="fp32", accumulation=2)
    assert ranks(2).run(losses, stage=3, dtype="fp32", accumulation=2, mode="full") == plain


def partitioned(process: Process, **options) -> dict:
    """Both ranks train on the same batch, as under tensor parallelism."""
    model, ledger = build(), MemoryLedger()
    recompute_blocks(model, policy=RecomputePolicy(**options), comm=process.comm, ledger=ledger)
    process.comm.counters.reset()
    found = train(model)
    gathered = process.comm.counters.elements.get("all_gather", 0)
    return {"found": found, "peak": {tier: ledger.peak(tier) for tier in Tier}, "gathered": gathered}


@pytest.mark.parametrize("more", [{}, {"inputs_on_cpu": True}, {"contiguous": True}, {"mode": "selective"}], ids=str)
def test_tensor_parallel_ranks_share_the_inputs(ranks, more):
    results = ranks(2).run(partitioned, **{"mode": "full", "partition_inputs": True, **more})
    expected = train(build())
    for result in results:
        assert result["found"] == expected
        tier = Tier.host if more.get("inputs_on_cpu") else Tier.device
        assert result["peak"][tier] == LAYERS * INPUT // 2
        assert result["gathered"] == 3 * LAYERS * ROWS * WIDTH  # 3 steps


def odd(process: Process) -> dict:
    """An input that does not divide by the ranks."""
    from ztk.parallel.recompute import Regions

    x = torch.arange(7.0, requires_grad=True)
    regions = Regions(RecomputePolicy(mode="full", partition_inputs=True), comm=process.comm)
    regions.run(lambda x: (x * x).sum(), args=(x * 1.0,)).backward()
    return x.grad.tolist()


def test_an_input_that_does_not_divide(ranks):
    assert ranks(2).run(odd) == [[2.0 * i for i in range(7)]] * 2
