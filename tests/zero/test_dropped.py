"""An engine that is dropped without `close`, as a notebook does with its last one, gives everything back."""

import gc
import os
import threading
import time
import weakref
from contextlib import suppress

import pytest

from tests.zero.models import Layout, batches, build, make_engine
from ztk.core.runtime import Process

PATIENCE_SECONDS = 20.0  # for an update that still runs behind the last step


def engine_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith(("ztk-io", "ztk-update"))}


def offload_files() -> set[str]:
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the one that listed
            found |= {path for path in [os.readlink(f"/proc/self/fd/{number}")] if "ztk-rank" in path}
    return found


def drop_engine(process: Process, *, layout: Layout) -> tuple[tuple[int, int, bool], tuple[int, int, bool]]:
    """Threads, files and whether the model lives, of this engine alone; while it trains, and after it was dropped.

    Sets and no counts: an earlier test's engine may give its own back at any moment in between.
    """
    gc.collect()  # earlier tests' engines
    before = engine_threads(), offload_files()

    def held() -> tuple[int, int, bool]:
        return len(engine_threads() - before[0]), len(offload_files() - before[1]), parameter() is not None

    engine = make_engine(process, layout=layout, model=build())
    parameter = weakref.ref(next(engine.module.parameters()))
    engine.backward(engine(*batches(1, rank=process.rank, world=process.world_size)))
    engine.step()
    training = held()
    del engine
    deadline = time.monotonic() + PATIENCE_SECONDS
    while held() != (0, 0, False) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    return training, held()


@pytest.mark.parametrize(
    "layout",
    [Layout(stage=0), Layout(stage=1, offload="cpu"), Layout(stage=1, offload="nvme"), Layout(stage=3, offload="nvme")],
    ids=lambda layout: layout.id,
)
def test_nothing_stays(ranks, layout):
    for training, dropped in ranks(2).run(drop_engine, layout=layout):
        assert training[2] and (training[0] > 0) == (training[1] == 1) == (layout.offload == "nvme")
        assert dropped == (0, 0, False)
