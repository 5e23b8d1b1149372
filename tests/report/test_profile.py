"""Traces and memory of profiled steps."""

import gzip
import json
import threading

import torch
from torch import nn

from tests.report.test_report import Metrics, alone, make_gauges
from ztk.core.policies.profile import ProfilePolicy
from ztk.core.runtime.clock import PhaseClock
from ztk.core.runtime.ranges import named
from ztk.report.profile import BACKWARD, backward_by_module
from ztk.report.reporter import Reporter, ReportPolicy


def event(name: str, *, start: float, stop: float, number: int | None = None, cat: str = "cpu_op") -> dict:
    args = {} if number is None else {"Sequence number": number}
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": 7, "ts": start, "dur": stop - start, "args": args}


def test_backwards_have_the_names_of_their_forwards_modules():
    node = "autograd::engine::evaluate_function: MmBackward0"
    arrived = "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad"
    events = [
        event("module model", start=0, stop=100, cat="user_annotation"),
        event("module a", start=10, stop=40, cat="user_annotation"),
        event("aten::mm", start=15, stop=20, number=1),
        event("module b", start=40, stop=60, cat="user_annotation"),
        event("aten::mm", start=45, stop=50, number=2),
        event("aten::sum", start=70, stop=80, number=3),
        event(node, start=110, stop=120, number=3),
        event(node, start=120, stop=130, number=2),
        event(arrived, start=130, stop=131),
        event(node, start=140, stop=150, number=1),
        event(node, start=150, stop=160, number=99),  # of a forward outside the profile
    ]
    found = [(slice["name"], slice["tid"], slice["ts"], slice["dur"]) for slice in backward_by_module(events)]
    assert found == [
        ("backward of model", BACKWARD, 110, 10),
        ("backward of b", BACKWARD, 120, 11),
        ("backward of a", BACKWARD, 140, 10),
    ]


def test_a_run_writes_a_trace_and_the_memory_of_the_asked_steps(tmp_path):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    gauges, clock = make_gauges(), PhaseClock()
    policy = ReportPolicy(folder=str(tmp_path), total_steps=4, draws=False, profile=ProfilePolicy(first=2, last=3))
    with Reporter(policy, comm=alone(), parameters=8, gauges=gauges, module=model) as reporter:
        for _ in range(4):
            with clock.phase("forward"):
                loss = model(torch.ones(2, 8)).sum()
            with clock.phase("backward"):
                loss.backward()
            reporter.step(loss=loss.detach(), tokens=2, metrics=Metrics)
        reporter.finish()
    with gzip.open(tmp_path / "profile" / "rank0.trace.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    names = [event["name"] for event in events if event["ph"] == "X"]
    assert {name for name in names if name.startswith("step ")} == {"step 2", "step 3"}
    for name in ("phase forward", "phase backward", "module model", "module 0", "module 1"):
        assert names.count(name) == 2, name
    assert names.count("backward of 0") == names.count("backward of 1") == 2
    memory = json.loads((tmp_path / "profile" / "rank0.memory.json").read_text())
    assert memory["peak_bytes"] == max(row[2] for row in memory["timeline"]) > 0
    assert set(memory["booked"]) == {"device", "host", "nvme"}


def test_what_other_threads_do_is_in_the_trace_and_an_early_end_writes_it(tmp_path):
    policy = ReportPolicy(folder=str(tmp_path), total_steps=9, draws=False, profile=ProfilePolicy(first=1, last=9))

    def work() -> None:
        with named("all_gather b"):
            torch.ones(2)

    with Reporter(policy, gauges=make_gauges(), comm=alone(), parameters=8) as reporter:
        thread = threading.Thread(target=work, name="ztk-comm")
        thread.start()
        thread.join()
        reporter.step(loss=torch.tensor(1.0), tokens=1, metrics=Metrics)
        reporter.finish()
    with gzip.open(tmp_path / "profile" / "rank0.trace.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    (found,) = [event for event in events if event["name"] == "all_gather b"]
    assert found["tid"] == "ztk-comm"
    (step,) = [event for event in events if event["name"] == "step 1"]
    assert step["ts"] <= found["ts"] and found["ts"] + found["dur"] <= step["ts"] + step["dur"]
