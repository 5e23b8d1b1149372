"""Training steps of every stage and tier on tensors that report a GPU, with NCCL's transport over late collectives.

They give the CPU's bits, mix no devices, and let the host wait for the GPU once per step with offload, and never without.
"""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.device_tagged import DEVICE, DeviceMismatch, Record, Streams, backward_elsewhere, gpu_tensors
from tests.late_nccl import late
from tests.zero.models import Layout, batches, make_engine
from ztk.core.runtime import Process
from ztk.core.runtime.streams import Copy, use_api
from ztk.train.engine.control import StepControl
from ztk.zero.offload.pool import AlignedRegion
from ztk.zero.update import update

ACCUMULATION = 2
TIERS = ("none", "cpu", "nvme")
LAYOUTS = [Layout(stage=stage, offload=tier) for stage in (0, 1, 2, 3) for tier in TIERS]
LAYOUTS += [Layout(stage=3, offload="cpu", fraction=0.5), Layout(stage=3, offload="none", parameters="cpu")]
BY_DTYPE = {
    "bf16": LAYOUTS,
    "fp32": LAYOUTS[::4],  # every stage and every tier
    "fp16": [Layout(stage=1, offload="cpu"), Layout(stage=3, offload="nvme")],  # the first step overflows
}
READ = "ztk.zero.update.update.ShardUpdate.run"  # the decision to step


@contextmanager
def on_gpu(process: Process) -> Iterator[tuple[Process, Record]]:
    """The process as one of a GPU."""
    with gpu_tensors() as record, use_api(Streams()), backward_elsewhere(), late(process, device=DEVICE) as own:
        yield own, record


def trained(process: Process, *, layout: Layout, dtype: str, record: Record | None = None) -> dict[str, Any]:
    """Losses, norms and weights of two steps with clipping, and the driver's calls from the second step's first forward to its end.

    One micro-batch does not use a block.
    """
    engine = make_engine(process, layout=layout, dtype=dtype, accumulation_steps=ACCUMULATION)
    record, losses, norms = record or Record(), [], []
    for number, tokens in enumerate(batches(2 * ACCUMULATION, rank=process.rank, world=process.world_size)):
        tokens = tokens.to(process.device)
        if number == ACCUMULATION:
            record.reads.clear()
            record.pageable.clear()
        losses.append(engine(tokens, use_all=number != 1))
        engine.backward(losses[-1])
        engine.step()
        if number == ACCUMULATION - 1:
            norms.append(engine.read_metrics().grad_norm)
    found = {"reads": list(record.reads), "pageable": list(record.pageable)}
    norms.append(engine.read_metrics().grad_norm)
    found |= {
        "losses": [float(loss.detach()) for loss in losses],
        "norms": repr(norms),
        "weights": [(name, bits(value, device=process.device)) for name, value in engine.zero.full_parameters()],
        "skipped": engine.read_metrics().skipped_total,
    }
    engine.close()
    return found | {"locked": record.locked}


def bits(value: Tensor, *, device: torch.device) -> str:
    assert value.device == device
    return hashlib.sha256(value.cpu().contiguous().view(torch.uint8).numpy()).hexdigest()


def faults_of(process: Process, *, layout: Layout, dtype: str, expected: dict[str, Any]) -> list[str]:
    """Differences of a GPU's run from the CPU's, and waits without need."""
    try:
        with on_gpu(process) as (gpu, record):
            found = trained(gpu, layout=layout, dtype=dtype, record=record)
    except DeviceMismatch as error:
        return [f"{layout.id} {dtype}: {error}"]
    decides = layout.offload != "none" or layout.parameters
    waits = {**expected, "reads": [READ] if decides else []}
    return [f"{layout.id} {dtype}: {name}" for name, value in waits.items() if found[name] != value]


def faults(process: Process, *, layouts: list[Layout], dtype: str, plant: Callable[[], Any] = nullcontext) -> list[str]:
    # Stages 2 and 3 add up micro-batches after their reduction.
    stages = {layout.stage // 2 * 2 for layout in layouts}
    expected = {stage: trained(process, layout=Layout(stage=stage), dtype=dtype) for stage in stages}
    assert all((run["skipped"] > 0) == (dtype == "fp16") for run in expected.values())
    with plant():
        return [
            fault
            for layout in layouts
            for fault in faults_of(process, layout=layout, dtype=dtype, expected=expected[layout.stage // 2 * 2])
        ]


@pytest.mark.parametrize("dtype", BY_DTYPE)
def test_a_gpu_has_the_steps_of_a_cpu(ranks, dtype):
    assert ranks(2).run(faults, layouts=BY_DTYPE[dtype], dtype=dtype) == [[], []]


def norm_on_the_host() -> Any:
    """Clips by a norm that is in main memory."""
    decide = StepControl.decide
    return mock.patch.object(StepControl, "decide", lambda self, squares: decide(self, squares.cpu()))


def norm_is_read() -> Any:
    """Waits for the norm in every step."""
    decide = StepControl.decide

    def reading(self: StepControl, squares: Tensor) -> None:
        squares.item()
        decide(self, squares)

    return mock.patch.object(StepControl, "decide", reading)


def nothing_is_copied_back() -> Any:
    """Updates on the host, and leaves the device's parameters as they are."""
    ended = Copy(event=Streams().new(DEVICE), device=DEVICE)
    return mock.patch.object(update, "start_copy", lambda source, *, out: ended)


def pages_are_not_locked() -> Any:
    """Leaves the states in memory that a GPU cannot copy from by itself."""
    allocate = AlignedRegion.__init__
    return mock.patch.object(
        AlignedRegion, "__init__", lambda self, *, nbytes, pin: allocate(self, nbytes=nbytes, pin=False)
    )


def test_planted_faults_are_noticed(ranks):
    planted = {"layouts": [Layout(stage=2, offload="cpu")], "dtype": "bf16"}
    for plant, noticed in {
        norm_on_the_host: ["step_control"],
        norm_is_read: ["reads"],
        nothing_is_copied_back: ["losses", "norms", "weights"],
        pages_are_not_locked: ["pageable"],
    }.items():
        for found in ranks(2).run(faults, plant=plant, **planted):
            assert [fault.split(": ")[1] for fault in found] == noticed, plant
