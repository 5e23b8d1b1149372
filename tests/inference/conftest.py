"""Models of these tests are opened soon."""

import pytest

from ztk.inference import rates


@pytest.fixture(autouse=True)
def short_reads(monkeypatch):
    """Opening a streamed model reads for 0.02 s, twice, to measure the rate of a plan, not for 0.3 s. tests/slow/test_streaming.py measures."""
    monkeypatch.setattr(rates, "_READ_SECONDS", 0.02)
