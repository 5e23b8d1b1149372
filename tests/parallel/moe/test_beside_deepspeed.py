"""The layer compared with DeepSpeed 0.19.8's: same seed, choices, output, losses and gradients. Recorded by `make_deepspeed.py`."""

import json

import pytest
import torch

from tests.parallel.moe.make_deepspeed import CASES, DATA, make_layer, run
from ztk.parallel.moe import MoE

RECORDED = json.loads(DATA.read_text())["cases"]
# fp32 sums of at most 30 terms in another order: 30 * 2^-24 of numbers up to 10 is 2e-5; measured 2e-6.
TOLERANCE = {"rtol": 2e-5, "atol": 2e-5}


@pytest.mark.parametrize("case", CASES)
def test_the_layer_equals_deepspeeds(case):
    mine, theirs = run(make_layer(MoE, case=case), case=case), RECORDED[case]
    assert mine["counts"] == theirs["counts"]
    torch.testing.assert_close(torch.tensor(mine["output"]), torch.tensor(theirs["output"]), **TOLERANCE)
    assert mine["l_aux"] == pytest.approx(theirs["l_aux"], rel=1e-6)
    for own, recorded in zip(mine["gradients"], theirs["gradients"], strict=True):
        if recorded is None:
            assert own is None or not torch.tensor(own).any()
        else:
            torch.testing.assert_close(torch.tensor(own), torch.tensor(recorded), **TOLERANCE)


def test_cases_drop_the_expected_tokens():
    """The recording covers layers that drop and layers that do not."""
    outputs = {case: torch.tensor(RECORDED[case]["output"]).view(-1, 4) for case in CASES}
    dropped = {case: int((output == 0).all(1).sum()) for case, output in outputs.items()}
    assert dropped["top1, chance drops"] > 0 and dropped["top1, sampled"] > 0
    assert dropped["top1, nothing dropped"] == dropped["top2, nothing dropped"] == 0


def test_deepspeeds_state_dict_loads():
    layer = make_layer(MoE, case="top1, residual")
    renamed = {
        name.replace("experts.", "deepspeed_moe.experts.deepspeed_experts.").replace(
            "gate.", "deepspeed_moe.gate.wg."
        ): value + 1
        for name, value in layer.state_dict().items()
    }
    assert any(name.startswith("deepspeed_moe.gate.wg") for name in renamed)
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    layer.load_state_dict(renamed)
    for name, value in layer.state_dict().items():
        assert torch.equal(value, before[name] + 1), name
