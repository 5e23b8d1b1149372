"""Buffers of a model in 16 bit."""

import copy

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


@pytest.mark.parametrize(
    ("make", "name"), [(Positions, "positions"), (lambda: nn.utils.spectral_norm(nn.Linear(8, 8)), "weight_u")]
)
def test_an_error_about_dtypes_names_the_buffers_and_the_key(make, name):
    engine, *_ = deepspeed.initialize(model=make(), config=CONFIG)
    with pytest.raises(RuntimeError) as found:
        engine(torch.ones(1, 8, dtype=torch.bfloat16))
    text = str(found.value)
    assert name in text and "count" not in text and '"buffer_dtype": "bfloat16"' in text and "dtype, but got" in text
    engine.destroy()


def test_a_model_that_is_converted_after_initialize_is_named():
    config = CONFIG | {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine, *_ = deepspeed.initialize(model=nn.Linear(8, 8), config=config)
    engine.module.float()
    with pytest.raises(
        RuntimeError, match=r"parameters weight, bias are float32 now.*computes in bfloat16.*initialize"
    ):
        engine(torch.ones(1, 8, dtype=torch.bfloat16))
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


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_batch_norm_computes_in_16_bit(precision):
    """As in a plain model of that dtype: torch has no batch norm with 16-bit weights and float32 statistics."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    plain, x = copy.deepcopy(model).to(dtype), torch.randn(16, 8).to(dtype)
    config = {
        "train_batch_size": 16,
        precision: {"enabled": True, "initial_scale_power": 4} if precision == "fp16" else {"enabled": True},
    }
    engine, *_ = deepspeed.initialize(model=model, config=config)
    # sums of 8 products and of 16 rows in fp32, rounded to 16 bit after each of three layers
    torch.testing.assert_close(engine(x), plain(x), rtol=2**-5, atol=2**-5)
    torch.testing.assert_close(engine.module[1].running_mean, plain[1].running_mean, rtol=2**-5, atol=2**-7)
    before = engine.module[1].bias.detach().clone()
    engine.backward(engine(x).float().square().sum())
    engine.step()
    assert not torch.equal(engine.module[1].bias, before)
    engine.destroy()
