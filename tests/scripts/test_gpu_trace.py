"""Overlap from a trace, by hand."""

from scripts.gpu_trace import common, length, merged, overlap_of


def event(name: str, *, start: float, stop: float, cat: str) -> dict:
    return {"ph": "X", "name": name, "cat": cat, "ts": start, "dur": stop - start}


def test_intervals():
    assert merged([(5, 7), (0, 2), (1, 3), (3, 4)]) == [(0, 4), (5, 7)]
    assert common([(0, 4), (5, 7)], [(3, 6)]) == [(3, 4), (5, 6)]
    assert length(common([(0, 1)], [(1, 2)])) == 0


def test_hidden_share_and_ratio_of_the_step_to_its_longest_part():
    """Two streams of kernels compute from 0 to 100; a copy of 50, half behind them; a collective of 40, all behind them."""
    events = [
        event("gemm", start=0, stop=60, cat="kernel"),
        event("adamw", start=50, stop=100, cat="kernel"),
        event("ncclDevKernel_ReduceScatter", start=20, stop=60, cat="kernel"),
        event("Memcpy HtoD (Pinned -> Device)", start=75, stop=125, cat="gpu_memcpy"),
        event("aten::mm", start=0, stop=500, cat="cpu_op"),
        {"ph": "i", "name": "no interval", "ts": 3},
    ]
    found = overlap_of(events, seconds=2 * 150e-6, steps=2)
    assert found.compute == 50e-6 and found.wire == 20e-6 and found.to_device == 25e-6 and found.from_device == 0
    assert found.hidden == (40 + 25) / 90
    assert abs(found.of_longest - 3.0) < 1e-12 and found.step == 150e-6


def test_the_host_updates_after_the_backward():
    """An update of 200 on the host is the longest part, after the backward's two thirds of 90."""
    events = [event("gemm", start=0, stop=90, cat="kernel")]
    found = overlap_of(events, seconds=286e-6, steps=1, host_seconds=200e-6)
    assert found.host == 200e-6 and abs(found.of_longest - 1.1) < 1e-12


def test_a_trace_without_a_gpu_has_no_shares():
    found = overlap_of([event("aten::mm", start=0, stop=5, cat="cpu_op")], seconds=1.0, steps=1)
    assert found.hidden is None and found.of_longest is None
