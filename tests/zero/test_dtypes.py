"""Parameters whose values the training's dtype cannot represent: refused by name, or said."""

import logging

import pytest
import torch
from torch import nn

from ztk.zero.build import _check_dtypes


def _with(values: torch.Tensor) -> nn.Module:
    module = nn.Linear(2, 2)
    module.extra = nn.Parameter(values, requires_grad=values.is_floating_point() or values.is_complex())
    return module


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (
            torch.ones(2, dtype=torch.complex64),
            "parameter extra: is complex64, and training would drop its imaginary part",
        ),
        (torch.tensor([33554433]), "parameter extra: is int64, and training would make it a float"),
        (torch.tensor([True]), "parameter extra: is bool"),
    ],
)
def test_values_that_a_cast_would_change_are_refused(ranks, values, said):
    assert said in ranks(1).run(refuse, values=values)[0]


def refuse(process, *, values: torch.Tensor) -> str:
    import ztk

    with pytest.raises(ValueError) as refused:
        ztk.parallelize(_with(values), process=process, optimizer=ztk.OptimizerPolicy(lr=1e-3))
    return str(refused.value)


def test_float64_is_said(caplog):
    with caplog.at_level(logging.WARNING):
        _check_dtypes(_with(torch.ones(2, dtype=torch.float64)), dtype=torch.float32, warns=True)
    assert "parameter extra: is float64" in caplog.text


@pytest.mark.parametrize("given", [torch.bfloat16, torch.float16])
def test_a_16_bit_model_that_trains_in_fp32_is_said(caplog, given):
    model = _with(torch.ones(2, dtype=given))
    with caplog.at_level(logging.WARNING):
        _check_dtypes(model, dtype=given, warns=True)
        _check_dtypes(model, dtype=torch.float32, warns=False)  # another rank
        assert not caplog.text
        _check_dtypes(model, dtype=torch.float32, warns=True)
    assert "1 parameters are 16 bit (extra)" in caplog.text and '"bf16": {"enabled": true}' in caplog.text
