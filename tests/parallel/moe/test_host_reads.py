"""The host reads the device once per layer whose experts are on several ranks, and not again where the backward repeats the forward."""

from contextlib import nullcontext
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.device_tagged import DEVICE, Streams, backward_elsewhere, gpu_tensors
from tests.late_nccl import late
from tests.parallel.moe.runs import CONFIG, train
from ztk.core.runtime import Process, Topology
from ztk.core.runtime.planned import watch_reads
from ztk.core.runtime.repeated import contexts, start_reading
from ztk.core.runtime.streams import use_api
from ztk.kernels.launch.machine import INTERPRETER, assume
from ztk.parallel.recompute import RecomputePolicy, Regions

LAYERS = replace(CONFIG, layers=4)  # of which two have experts
STEPS, ACCUMULATION = 2, 2
ROWS, NAME = "rows per rank of the experts", "a number"


class Event:
    """An event that has happened. waits: how often the host has waited for one."""

    waits = 0

    def synchronize(self) -> None:
        Event.waits += 1

    def query(self) -> bool:
        return True

    def record_event(self) -> "Event":
        return self

    def wait_event(self, event: "Event") -> None:
        pass


class Counted(Streams):
    def current(self, device: torch.device) -> Event:
        return Event()

    def new(self, device: torch.device) -> Event:
        return Event()


def reads(process: Process, *, mode: str, repeats: bool, stage: int) -> tuple[int, int, str]:
    """Announced reads, waits of the host for copies to it, and the digest of a run on a tagged GPU. repeats: forwards keep their reads."""
    seen: list[str] = []
    Event.waits = 0
    keeps = nullcontext() if repeats else mock.patch("ztk.core.runtime.repeated.contexts", lambda: (nullcontext(),) * 2)
    with (
        gpu_tensors(),
        use_api(Counted()),
        assume(INTERPRETER),
        backward_elsewhere(),
        late(process, device=DEVICE) as own,
        watch_reads(seen.append),
        keeps,
    ):
        options = {"config": LAYERS, "accumulation_steps": ACCUMULATION, "steps": STEPS, "stage": stage}
        run = train(own, topology=Topology(expert=2), recompute=RecomputePolicy(mode=mode), **options)
    return seen.count(ROWS), Event.waits, run.digest


@pytest.mark.parametrize("stage", [0, 3])
def test_a_repeated_forward_does_not_wait_for_the_device(ranks, stage):
    layers = 2 * ACCUMULATION * STEPS
    [plain, *_] = ranks(2).run(reads, mode="none", repeats=True, stage=stage)
    [again, *_] = ranks(2).run(reads, mode="full", repeats=False, stage=stage)
    [once, *_] = ranks(2).run(reads, mode="full", repeats=True, stage=stage)
    assert (plain[0], again[0], once[0]) == (layers, 2 * layers, layers)
    assert again[1] - once[1] == layers and once[1] == plain[1]
    assert plain[2] == again[2] == once[2]


def squared(x: Tensor) -> Tensor:
    factor = start_reading(x.detach().sum(), name=NAME)()  # first, because a repetition ends with the last saved tensor
    return x * x.detach() * float(factor)


def counted(function, *args: Tensor) -> int:
    seen: list[str] = []
    with watch_reads(seen.append):
        function(*args)
    return seen.count(NAME)


def test_regions_inside_of_regions_and_kept_graphs_read_once():
    regions = Regions(RecomputePolicy(mode="full"), around=contexts)
    x = torch.tensor([1.0, 2.0], requires_grad=True)

    def inner(x: Tensor) -> Tensor:
        return squared(squared(x).exp())

    def outer(x: Tensor) -> Tensor:
        return squared(regions.run(inner, args=(squared(x),)))

    def run(x: Tensor) -> None:
        loss = regions.run(outer, args=(x,)).sum()
        loss.backward(retain_graph=True)
        loss.backward()

    assert counted(run, x) == 4
    expected = x.detach().clone().requires_grad_()
    for _ in range(2):
        squared(inner(squared(expected))).sum().backward()
    assert torch.equal(x.grad, expected.grad)


def test_other_values_in_the_repetition_are_refused():
    regions, runs = Regions(RecomputePolicy(mode="full"), around=contexts), []

    def other(x: Tensor) -> Tensor:
        runs.append(None)
        return squared(x + len(runs))

    def more(x: Tensor) -> Tensor:
        runs.append(None)
        for _ in runs[1:]:
            start_reading(x.detach().sum(), name=NAME)()
        return squared(x)

    for function, message in (
        (other, "a number differ in the repetition"),
        (more, "1 reads of the device, and the rep"),
    ):
        runs.clear()
        loss = regions.run(function, args=(torch.ones(2, requires_grad=True),)).sum()
        with pytest.raises(RuntimeError, match=message):
            loss.backward()
