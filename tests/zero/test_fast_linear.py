"""Linear layers of torch's own that an engine on CPU multiplies by other functions: the same training, and nothing gathered for it."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.zero.models import Layout, make_engine
from ztk.core.runtime import Process
from ztk.nn.linear import WIDENED, Linear


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 16), nn.Tanh(), nn.Linear(16, 8, bias=False))


def train(process: Process, *, stage: int, dtype: str = "fp32", **options) -> dict:
    """Losses, the kinds of the layers, and elements of parameters gathered in each step."""
    engine = make_engine(process, layout=Layout(stage=stage), dtype=dtype, model=build(), **options)
    kinds = {type(module) for module in engine.module.modules() if isinstance(module, nn.Linear)}
    process.comm.counters.reset()
    losses = []
    for step in range(6):
        x = torch.randn(12, 24, generator=torch.Generator().manual_seed(2 * step + process.rank))
        loss = engine(x.to(engine.zero.dtype)).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    gathered = process.comm.counters.elements.get("all_gather", 0)
    engine.close()
    return {"losses": losses, "kinds": kinds, "gathered": gathered}


def test_the_same_training_at_every_stage(ranks):
    plain = ranks(2).run(train, stage=0)[0]
    found = {stage: ranks(2).run(train, stage=stage, fast_linear=True)[0] for stage in range(4)}
    assert plain["kinds"] == {nn.Linear} and found[0]["kinds"] == {Linear}
    assert plain["losses"][-1] < plain["losses"][0]
    assert all(result["losses"] == found[0]["losses"] for result in found.values())
    # six steps of Adam, each with the rounding of sums over up to 40 products
    assert found[0]["losses"] == pytest.approx(plain["losses"], rel=6 * 40 * 2**-24)


def test_no_weight_is_gathered_that_the_backward_does_not_read(ranks):
    """The first layer's input needs no gradient."""
    plain = ranks(2).run(train, stage=3)[0]
    found = ranks(2).run(train, stage=3, fast_linear=True)[0]
    assert found["gathered"] == plain["gathered"] > 0


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_types_that_the_processor_cannot_multiply_go_that_way_unasked(ranks, dtype):
    widened = {"fp16": torch.float16, "bf16": torch.bfloat16}[dtype] in WIDENED
    assert ranks(2).run(train, stage=2, dtype=dtype)[0]["kinds"] == {Linear if widened else nn.Linear}


def refusal(process: Process) -> str:
    with pytest.raises(ValueError) as refused:
        make_engine(
            replace(process, device=torch.device("cuda")), layout=Layout(stage=0), model=build(), fast_linear=True
        )
    return str(refused.value)


def test_it_is_refused_where_it_does_nothing(ranks):
    assert "fast_linear=True has no effect on cuda" in ranks(1).run(refusal)[0]
