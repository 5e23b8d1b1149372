"""Runs a block under ztk and under plain PyTorch and compares them."""

import pytest

from tests.documents.harness import Found, Run, run

ADAMW = {"type": "AdamW", "params": {"lr": 1e-3}}
# A 16-bit gradient is rounded to 11 (fp16) or 8 bits before and once after the ranks' sum; AdamW normalises it, so a weight strays by at
# most that share of lr per step, and losses by less than this over the few steps here.
TOLERANCE = {"fp32": 1e-5, "fp16": 5e-3, "bf16": 3e-2}


def compared(documents, work: Run, *, dtype: str = "fp32", steps: int | None = None) -> Found:
    """ztk's run, after a look at the plain loop's: losses, and in fp32 the weights.

    steps: losses of the first ones alone, where rounding grows with training; the weights at the end speak for the others.
    """
    found = documents.run(run, work=work)[0]
    expected = documents.run(run, work=work, by_plain_pytorch=True)[0]
    assert found.error is None, found.error
    assert expected.error is None, expected.error
    assert len(found.losses) == len(expected.losses)
    assert found.losses[:steps] == pytest.approx(expected.losses[:steps], abs=TOLERANCE[dtype])
    if dtype == "fp32":
        assert found.weights.keys() == expected.weights.keys()
        for name, value in expected.weights.items():
            assert found.weights[name].view(-1) == pytest.approx(value.view(-1), abs=1e-4), name
    return found


def learns(found: Found, *, by: float) -> bool:
    """The last quarter of the losses lies below the first, times `by`."""
    quarter = max(1, len(found.losses) // 4)
    return sum(found.losses[-quarter:]) < by * sum(found.losses[:quarter])
