"""Steps on the model of streams have no race, and every wait that is left out is one."""

import contextlib
from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import pytest
import torch

from tests.core.streams.model import modelled
from tests.planner.measure import Case, planned
from ztk.core.policies.recompute import RecomputePolicy
from ztk.core.runtime import MemoryLedger, streams
from ztk.core.runtime import store as device_store
from ztk.core.runtime.comm.comm import Work
from ztk.core.runtime.comm.planned import PlannedComm, PlannedTransport
from ztk.core.runtime.pending import Handle
from ztk.core.runtime.planned import host_bytes
from ztk.core.runtime.streams import Aside, Copy
from ztk.inference.device_stream import DeviceLayers
from ztk.inference.parts import LayerBuffer, LayerFile
from ztk.parallel.recompute.inputs import InputStore
from ztk.zero.buckets.exchange import QuantizedCollectives
from ztk.zero.buckets.residency import Residency
from ztk.zero.offload import NvmeStore, OffloadPolicy
from ztk.zero.offload import planned as planned_stores
from ztk.zero.shards import ReducedShards

CASES = {
    "parameters on the host": Case(ranks=2, stage=3, offload="cpu", parameters="cpu", dtype="bf16", accumulation=2),
    "states on the host, stage 1": Case(ranks=2, stage=1, offload="cpu", dtype="bf16", accumulation=2),
    "states on the host, stage 2": Case(ranks=2, stage=2, offload="cpu", dtype="bf16", accumulation=3),
    "states on the host, stage 3": Case(ranks=2, stage=3, offload="cpu", dtype="bf16"),
    "parameters on the host, states on the device": Case(ranks=2, stage=3, parameters="cpu", dtype="bf16"),
    "disk": Case(ranks=2, stage=3, offload="nvme", parameters="nvme", dtype="bf16", accumulation=2),
    "everything on the device": Case(ranks=2, stage=3, dtype="bf16", accumulation=2, layers=12),
    "one rank": Case(ranks=1, stage=3, offload="cpu", parameters="cpu", dtype="bf16"),
    "groups of ranks, host": Case(
        ranks=4, stage=3, offload="cpu", parameters="cpu", dtype="bf16", zero={"hpz_partition_size": 2}
    ),
    "groups of ranks, disk": Case(
        ranks=4, stage=3, offload="nvme", parameters="nvme", dtype="bf16", zero={"hpz_partition_size": 2}
    ),
    "quantized": Case(
        ranks=4,
        stage=3,
        offload="cpu",
        parameters="cpu",
        dtype="bf16",
        zero={"quantized_weights": True, "quantized_gradients": True},
    ),
    "inputs on the host": Case(ranks=1, stage=0, recompute="full", inputs_on_cpu=True),
    "inputs on the host, contiguous": Case(
        ranks=1, stage=0, recompute="full", inputs_on_cpu=True, contiguous=True, accumulation=2
    ),
    "pipeline": Case(ranks=2, stage=1, pipeline=2, accumulation=2),
    "experts": Case(ranks=2, stage=3, experts=4, expert=2, offload="cpu", parameters="cpu"),
}


@pytest.mark.parametrize("name", CASES)
def test_no_race(name, tmp_path):
    with modelled() as model:
        planned(CASES[name], folder=str(tmp_path))
    assert not model.races and model.checked > 1000


def _nothing(*args, **kwargs) -> None:
    """In place of a wait."""


def _unordered_copy(stream, *, source, out, after=None) -> Copy:
    """`copy_on` without the wait for the current stream."""
    with mock.patch.object(type(stream), "wait_event", _nothing):
        return _copy_on(stream, source=source, out=out, after=after)


def _before_others(stream, *, source, out, after=None) -> Copy:
    """`copy_on` without the wait for the copy before it."""
    return _copy_on(stream, source=source, out=out)


def _behind_nothing(event, *, source, out) -> None:
    """`copy_behind` without its wait."""
    with mock.patch.object(type(event), "clock", {}, create=True):
        _copy_behind(event, source=source, out=out)


def _abandoned_fetch(exchange, full, *, label, fetch, is_exact):
    """A gather from the group's copy that fetches the shard without need."""
    if exchange._copy_is_current:
        fetch()
    return _gather(exchange, full, label=label, fetch=fetch, is_exact=is_exact)


def _anywhere(aside, task):
    """`Aside.run` without the wait for the work before it."""
    with mock.patch.object(aside, "_behind", mock.Mock(clock={})):
        return _run_aside(aside, task)


_run_aside = Aside.run
_copy_on, _copy_behind, _gather = streams.copy_on, streams.copy_behind, QuantizedCollectives.gather
Plant = Callable[[], contextlib.AbstractContextManager]


def _put(target: object, name: str, value: object) -> Plant:
    return lambda: mock.patch.object(target, name, value)


PLANTS: dict[str, tuple[str, Plant]] = {
    "a copy does not wait for the kernels": ("parameters on the host", _put(streams, "copy_on", _unordered_copy)),
    "the kernels do not wait for a copy": ("parameters on the host", _put(Copy, "wait", _nothing)),
    "the host does not wait for a copy": ("states on the host, stage 1", _put(Copy, "synchronize", _nothing)),
    "a gather does not wait for its shard": ("one rank", _put(Handle, "wait", lambda handle: handle._value)),
    "a collective without a wait": ("states on the host, stage 2", _put(Work, "wait", _nothing)),
    "a shard's buffer is given back too early": (
        "states on the host, stage 2",
        _put(ReducedShards, "_finish_write", lambda shards: shards._pool.release(shards._writes.popleft()[1])),
    ),
    "the update behind the forward is not awaited": (
        "parameters on the host",
        _put(Residency, "wait_for_update", _nothing),
    ),
    "a slot on the device is read too early": ("states on the host, stage 3", _put(device_store, "_follow", _nothing)),
    "a transfer of the disk is not awaited": ("disk", _put(NvmeStore, "wait_for", _nothing)),
    "a transfer does not wait for the kernels": ("disk", _put(planned_stores, "copy_behind", _behind_nothing)),
    "a fetch without a wait": ("groups of ranks, disk", _put(QuantizedCollectives, "gather", _abandoned_fetch)),
    "freed memory is not kept for a copy": (
        "inputs on the host",
        lambda: mock.patch("tests.core.streams.model.StreamModel.keep_for", _nothing),
    ),
    "an input comes back before it is away": ("inputs on the host", _put(streams, "copy_on", _before_others)),
    "a gather starts before its place in the order": ("parameters on the host", _put(Aside, "run", _anywhere)),
}


@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_race_is_found(name, tmp_path):
    case, plant = PLANTS[name]
    with modelled() as model, plant():
        planned(CASES[case], folder=str(tmp_path))
    assert model.races


# Overlap


def lags(case: Case, *, folder: str) -> list[int]:
    """For each all-gather of rank 0 in the order of their issue: computing's operations so far that it does not wait for."""
    found: list[int] = []
    with modelled() as model:
        gather, compute = PlannedTransport.all_gather, model.current(torch.device("meta"))

        def counted(transport, full, *, label, **more):
            if label.startswith("all_gather"):
                seen = model.current(full.device).clock.get(compute.name, 0)
                found.append(compute.clock.get(compute.name, 0) - seen)
            return gather(transport, full, label=label, **more)

        with mock.patch.object(PlannedTransport, "all_gather", counted):
            planned(replace(case, layers=12), folder=folder)  # with fewer, nothing is gathered ahead
    assert not model.races
    return found


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("parameters on the host", 12),  # the twelve layers, in the forward after the first step's update
        ("states on the host, stage 3", 12),
        ("disk", 72),  # each gather that is asked for ahead, because it waits for the disk
    ],
)
def test_gathers_run_next_to_the_forward_while_later_buckets_are_updated(name, expected, tmp_path):
    """A gather that is asked for ahead follows the operations before its request, and not the layer that is computed meanwhile."""
    found = lags(CASES[name], folder=str(tmp_path))
    assert sum(lag > 0 for lag in found) == expected
    with mock.patch.object(Aside, "run", lambda aside, task: task()):
        in_order = lags(CASES[name], folder=str(tmp_path))
    assert len(in_order) == len(found) and not any(in_order)


# Single parts, whose faults the order of a step hides


def _use_a_slot() -> None:
    """A value goes to a slot on the host and comes back, without a wait in between."""
    store = planned_stores.PlannedHostStore(OffloadPolicy(optimizer="cpu"), ledger=MemoryLedger())
    slot = store.allocate(name="a", shape=(64,), dtype=torch.float32, category="gradients")
    value, out = torch.empty(64, device="meta"), torch.empty(64, device="meta")
    put = store.put(slot, value=value)
    fetched = store.fetch_into(slot, out=out)
    put.wait()
    value.zero_()
    fetched.wait().add_(1)
    store.fetch(slot).wait().add_(1)
    store.close()


def _use_a_place_twice() -> None:
    """An input that was fetched ahead is dropped, and its place in the contiguous buffer is taken by the next."""
    policy = RecomputePolicy(mode="full", inputs_on_cpu=True, contiguous=True, num_checkpoints=1)
    store = InputStore(policy, num_regions=1)
    for _ in range(2):
        saved = store.save(torch.empty(8, 8, device="meta"), place=0)
        saved._fetch()
        del saved


@pytest.mark.parametrize("use", [_use_a_slot, _use_a_place_twice])
def test_copies_of_one_place_keep_their_order(use):
    with modelled() as model:
        use()
    assert not model.races and model.checked >= 4
    with modelled() as model, mock.patch.object(streams, "copy_on", _before_others):
        use()
    assert model.races


class _Rewritten:
    """Four layers that pass through one buffer of the host, which a read overwrites, in place of `StreamedLayers`."""

    def __init__(self) -> None:
        self.file = mock.Mock(spec=LayerFile, count=4, nbytes=64)
        self.file.device_buffer = lambda device: _layer(torch.zeros(64, dtype=torch.uint8, device=device))
        self._memory = host_bytes(64)

    def buffers(self):
        for number in range(4):
            self._memory.zero_()
            yield _layer(self._memory, number=number)

    def settle(self) -> None:
        """Nothing is read ahead."""


def _layer(memory: torch.Tensor, number: int | None = None) -> LayerBuffer:
    return LayerBuffer(layer=memory, memory=memory, region=None, number=number)


@pytest.mark.parametrize("buffers", [1, 2, 3])
def test_layers_on_their_way_to_a_gpu_are_neither_early_nor_overwritten(buffers):
    def passes() -> None:
        layers = DeviceLayers(_Rewritten(), device=torch.device("meta"), buffers=buffers)
        out = torch.zeros(64, dtype=torch.uint8, device="meta")
        for _ in range(3):
            for memory in layers:
                out.add_(memory)
        for memory in layers:  # a pass that is not finished
            out.add_(memory)
            break
        for memory in layers:
            out.add_(memory)

    with modelled() as model:
        passes()
    assert not model.races and model.checked > 30
    for target, name, planted in ((Copy, "synchronize", _nothing), (streams, "copy_on", _unordered_copy)):
        with modelled() as model, mock.patch.object(target, name, planted):
            passes()
        assert model.races, name


@pytest.mark.parametrize(
    ("left_out", "race"),
    [
        (None, None),
        ("wait", "compute: aten.add_.Tensor reads"),
        ("synchronize", "host: aten.add_.Tensor reads"),
    ],
)
def test_a_race_is_described(left_out, race):
    patch = contextlib.nullcontext() if left_out is None else mock.patch.object(Copy, left_out, _nothing)
    with modelled() as model, patch:
        _use_a_slot()
    assert any(race in line for line in model.races) if race else not model.races


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "broadcast", "send"])
def test_a_collective_of_host_memory_is_reported(kind):
    """NCCL moves device memory only. A number with a value on the host goes through gloo, as in a run, and is allowed."""
    where = {"broadcast": {"source": 0}, "send": {"to": 1}}.get(kind, {})
    with modelled() as model:
        collective = getattr(PlannedComm(rank=0, size=2), kind)
        for values in (torch.empty(8, device="meta"), torch.ones(8)):
            collective(values, label="a", **where).wait()
        assert not model.races
        collective(host_bytes(8), label="b", **where).wait()
    assert model.races and all("moves memory of the host" in line for line in model.races)
