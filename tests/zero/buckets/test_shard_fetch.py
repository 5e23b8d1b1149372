"""Whether a gather starts at once must not depend on how far this rank's update is: ranks see its end at different times."""

from concurrent.futures import Future

import pytest
import torch
from torch import nn

from ztk.core.runtime import Comm, MemoryLedger
from ztk.core.runtime.buffers import BufferPool
from ztk.core.runtime.comm.transport import SingleRankTransport
from ztk.core.runtime.store import DeviceStore, Stores
from ztk.zero.buckets.exchange import Exchange
from ztk.zero.buckets.layout import BucketLayout, ParameterSpec
from ztk.zero.buckets.piece import Piece
from ztk.zero.buckets.residency import ParameterState, Residency
from ztk.zero.buckets.units import BucketTraits

CPU = torch.device("cpu")


def residency(updated: Future | None) -> Residency:
    """Of one parameter of 8 ones in one shard on the device."""
    layout = BucketLayout.plan([ParameterSpec(name="weight", shape=(8,))], num_shards=1)
    ledger = MemoryLedger()
    store = DeviceStore(device=CPU, ledger=ledger)
    slot = store.allocate(name="weight", shape=(layout.size,), dtype=torch.float32, category="parameters")
    slot.tensor.fill_(1)
    span = layout.shard(0)
    piece = Piece(
        start=0,
        stop=layout.size,
        stores=Stores(optimizer=store, gradients=store, parameters=store),
        segments=(),
        fragments=tuple(layout.fragments(span)),
        states=None,
        gradient=None,
        parameter=slot,
    )
    made = Residency(
        [nn.Parameter(torch.zeros(8))],
        traits=BucketTraits(
            name="weight",
            unit="root",
            dtype=torch.float32,
            gradient_dtype=torch.float32,
            trainable=True,
            shards_parameters=True,
            shards_gradients=True,
        ),
        layout=layout,
        pieces=[piece],
        store=store,
        exchange=Exchange(Comm(SingleRankTransport(), rank=0, size=1, device=CPU)),
        pool=BufferPool(device=CPU, ledger=ledger, category="gathered"),
    )
    made.updated = updated
    return made


@pytest.mark.parametrize("done", [False, True])
def test_an_update_behind_the_forward_defers_the_gather_whether_done_or_not(done):
    updated = Future()
    if done:
        updated.set_result(None)
    made = residency(updated)
    made.full = torch.zeros(128)
    assert not made.start_fetch().is_immediate
    made.full = None
    made.start_gather()
    assert made.state is ParameterState.gathering
    if not done:
        updated.set_result(None)
    made.finish_gather()
    assert made.state is ParameterState.gathered and made.full[:8].eq(1).all()


def test_without_an_update_it_starts_at_once():
    made = residency(None)
    made.full = torch.zeros(128)
    assert made.start_fetch().is_immediate
