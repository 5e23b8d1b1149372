"""Buffers of a model in 16 bit."""

import pytest
import torch
from torch import Tensor, nn

import ztk.deepspeed as deepspeed

CONFIG = {"train_batch_size": 1, "bf16": {"enabled": True}}


class Positions(nn.Module):
    """Adds a table to its input, as models of many tutorials do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 8)
        self.register_buffer("positions", torch.linspace(0, 1, 8))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x + self.positions)


def test_an_error_about_dtypes_names_the_buffers_and_the_key():
    engine, *_ = deepspeed.initialize(model=Positions(), config=CONFIG)
    with pytest.raises(RuntimeError, match="dtype") as found:
        engine(torch.ones(1, 8, dtype=torch.bfloat16))
    (note,) = found.value.__notes__
    assert "positions" in note and "count" not in note and '"buffer_dtype": "bfloat16"' in note
    engine.destroy()


@pytest.mark.parametrize("word", ["bf16", "bfloat16"])
def test_buffers_are_cast_if_asked(word):
    x, plain = torch.ones(1, 8, dtype=torch.bfloat16), Positions().bfloat16()
    engine, *_ = deepspeed.initialize(model=Positions(), config={**CONFIG, "data_types": {"buffer_dtype": word}})
    assert engine.module.count.dtype is torch.int64
    # 8 products, added in fp32 by either product, and rounded to bf16 once: neighbours at most
    torch.testing.assert_close(engine(x), plain(x), rtol=2**-7, atol=2**-9)
    engine.backward(engine(x).float().square().sum())
    engine.step()
    engine.destroy()
