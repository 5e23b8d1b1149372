"""The cost of saving and loading: memory of a piece, not of the model; no bytes on the counters of training."""

import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.checkpoint.runs import Setup, save_some
from tests.zero.models import Layout, make_engine
from ztk.checkpoint import Saver, load, save
from ztk.checkpoint.bits import BLOCK_BYTES, BlockChecksums
from ztk.core.runtime import Tier
from ztk.core.runtime.host_memory import view_bytes

WIDTH, LAYERS = 512, 16  # 4.2M parameters, 50 MB of state


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


class Peak:
    """The largest growth of the resident set inside."""

    def __enter__(self) -> "Peak":
        self.before = self.most = resident()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._over.is_set():
            self.most = max(self.most, resident())
            time.sleep(0.0005)

    def __exit__(self, *exception) -> None:
        self._over.set()
        self._thread.join()
        self.nbytes = max(self.most, resident()) - self.before


def chain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def peaks(process, *, folder: str, offload: str) -> tuple[int, int]:
    layout = Layout(stage=3, offload=offload, zero={"bucket_size": WIDTH * WIDTH + WIDTH})
    engine = make_engine(process, layout=layout, model=chain(), buffer_bytes=1 << 18)
    with Peak() as saving:
        save(engine, folder=folder)
    with Peak() as loading:
        load(engine, path=folder)
    return saving.nbytes, loading.nbytes


@pytest.mark.parametrize("offload", ["none", "nvme"])
def test_memory_is_a_piece_not_the_model(ranks, tmp_path, offload):
    """One unit in fp32 is 1 MB, the reader keeps at most 8 blocks of 1 MB; the state is 50 MB."""
    pool = ranks(1)
    pool.run(peaks, folder=str(tmp_path / "warm"), offload=offload)
    saving, loading = pool.run(peaks, folder=str(tmp_path / "measured"), offload=offload)[0]
    assert saving < 10 << 20 and loading < 16 << 20, (saving >> 20, loading >> 20)


def test_training_counters_do_not_see_checkpoints(ranks, tmp_path):
    assert ranks(2).run(count_traffic, folder=str(tmp_path)) == [{}, {}]


def count_traffic(process, *, folder: str) -> dict[str, int]:
    engine = Setup(layout=Layout(stage=3)).engine(process)
    process.comm.counters.reset()
    save(engine, folder=folder)
    load(engine, path=folder)
    return {kind: count for kind, count in process.comm.counters.elements.items() if count and kind != "scalars"}


def test_staging_is_counted_and_freed(ranks, tmp_path):
    for booked, after in ranks(2).run(book_staging, folder=str(tmp_path)):
        assert booked > 0 and after == 0


def book_staging(process, *, folder: str) -> tuple[int, int]:
    engine = Setup(layout=Layout(stage=1)).engine(process)
    with Saver(engine, folder=folder, asynchronous=True) as saver:
        saver.save()
        booked = engine.memory.by_category(Tier.host)["checkpoint staging"]
    return booked, engine.memory.current(Tier.host)


def test_a_new_save_waits_for_the_last(ranks, tmp_path):
    names = ranks(2).run(save_some, setup=Setup(), folder=str(tmp_path), steps=[1, 2, 3, 4], asynchronous=True)[0]
    assert names == ["latest", "step-000003", "step-000004"]


def test_objects_reach_every_rank_whatever_their_size(ranks):
    expected = [("rank", rank, "x" * (1000 * rank)) for rank in range(4)]
    assert ranks(4).run(gather_objects) == [expected] * 4


def gather_objects(process) -> list:
    return process.comm.gather_objects(("rank", process.rank, "x" * (1000 * process.rank)))


@pytest.mark.parametrize("sizes", [[], [0], [5], [BLOCK_BYTES], [BLOCK_BYTES - 3, 7, 2 * BLOCK_BYTES]])
def test_block_checksums_do_not_depend_on_the_parts(sizes):
    data = torch.randint(256, (sum(sizes),), dtype=torch.uint8)
    in_parts, at_once = BlockChecksums(), BlockChecksums()
    for part in data.split(sizes) if sizes else ():
        in_parts.add(view_bytes(part))
    at_once.add(view_bytes(data))
    assert in_parts.values == at_once.values
    assert len(at_once.values) == -(-data.numel() // BLOCK_BYTES)
