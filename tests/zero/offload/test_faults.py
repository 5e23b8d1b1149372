"""Disks that fail: the error names file, offset, cause and fix, and nothing hangs or stays behind."""

import errno
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ztk.core.policies.offload import PAGE_BYTES as PAGE
from ztk.core.runtime.io import IoCounters
from ztk.core.runtime.memory import MemoryLedger
from ztk.zero.offload import DiskError, NvmeStore, OffloadPolicy, filesystem_of, probe_folder


def _slot(store, *, numel=2048):
    return store.allocate(name="a", shape=(numel,), dtype=torch.float32, category="optimizer")


def test_a_failed_write_surfaces_everywhere_it_matters(make_store, faults) -> None:
    store = make_store()
    good, bad = _slot(store), _slot(store)
    faults.write_error = errno.EIO
    pending = store.put(bad, value=torch.ones(2048))
    with pytest.raises(DiskError) as caught:
        pending.wait()
    text = str(caught.value)
    assert re.search(r"writing 4096 bytes at offset (8192|12288) of .*/ztk-rank0-\w+\.bin", text), text
    assert "EIO" in text and "offload.nvme_path" in text and caught.value.errno == errno.EIO
    faults.write_error = 0
    for _ in range(2):
        with pytest.raises(DiskError):
            store.flush()
    with pytest.raises(DiskError):
        store.fetch_into(bad, out=torch.empty(2048)).wait()
    with pytest.raises(DiskError):
        store.fetch(bad).wait()
    store.release(bad)
    assert not store.fetch(good).wait().any()


def test_a_failed_read_surfaces_in_wait(make_store, faults) -> None:
    store = make_store()
    slot = _slot(store)
    faults.read_error = errno.EIO
    with pytest.raises(DiskError, match="reading 4096 bytes at offset"):
        store.fetch(slot).wait()
    store.release(slot)
    faults.read_error = 0
    assert not store.fetch(slot).wait().any()
    store.flush()


def test_buffers_return_from_failed_writes(make_store, faults) -> None:
    store = make_store()
    slots = [_slot(store) for _ in range(4)]
    tensors = [store.fetch(slot).wait() for slot in slots[:3]]
    faults.write_error = errno.ENOSPC
    for slot, tensor in zip(slots, tensors, strict=False):
        store.put(slot, value=tensor)
    assert not store.fetch(slots[3]).wait().any()
    with pytest.raises(DiskError, match=r"ENOSPC.*free space"):
        store.flush()


@pytest.mark.parametrize("most_bytes", [PAGE, PAGE + 100, 3 * PAGE - 1])
@pytest.mark.parametrize("direct_io", [True, False])
def test_short_transfers_are_continued(make_store, faults, most_bytes, direct_io) -> None:
    store = make_store(block_bytes=4 * PAGE, direct_io=direct_io)
    slot = _slot(store, numel=4000)
    faults.most_bytes = most_bytes
    value = torch.randn(4000)
    store.put(slot, value=value)
    assert torch.equal(store.fetch(slot).wait(), value)
    assert len(faults.log) > 2


def test_a_truncated_file_is_an_error(make_store, faults) -> None:
    store = make_store()
    slot = _slot(store)
    faults.end_of_file = PAGE
    with pytest.raises(DiskError, match="truncated"):
        store.fetch(slot).wait()


def test_a_full_disk_shows_at_allocation(make_store, faults) -> None:
    store = make_store()
    faults.capacity = 4 * PAGE
    _slot(store)
    with pytest.raises(ValueError) as caught:
        store.allocate(name="b", shape=(1 << 30,), dtype=torch.float32, category="optimizer")
    text = str(caught.value)
    assert "offload.nvme_path=" in text and "needs 4.00 GiB" in text and "GiB are free" in text
    assert _slot(store).offset == 2 * PAGE  # the store goes on


def test_a_really_full_disk(small_disk: Path) -> None:
    """On an ext4 filesystem of 32 MiB."""
    policy = OffloadPolicy(optimizer="nvme", nvme_path=str(small_disk), buffer_bytes=1 << 20)
    store = NvmeStore(policy, rank=0, ledger=MemoryLedger(), counters=IoCounters())
    try:
        store.reserve(nbytes=4 << 20)
        with pytest.raises(ValueError, match=r"needs 0\.06 GiB.*are free.*offload\.nvme_path"):
            store.reserve(nbytes=64 << 20)
        slot = store.allocate(name="a", shape=(1 << 18,), dtype=torch.float32, category="optimizer")
        store.put(slot, value=torch.ones(1 << 18))
        store.flush()
    finally:
        store.close()
    assert list(small_disk.glob("ztk-*")) == []


def test_a_read_only_filesystem(small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(ValueError, match=r"offload\.nvme_path=.* lies on a read-only filesystem; choose"):
        probe_folder(small_disk, direct=True)


@pytest.fixture
def small_disk(tmp_path: Path):
    """A mounted ext4 image; needs root and loop devices."""
    image, folder = tmp_path / "image", tmp_path / "mounted"
    image.write_bytes(b"")
    os.truncate(image, 32 << 20)
    folder.mkdir()
    made = subprocess.run(["mkfs.ext4", "-q", str(image)], capture_output=True)
    if made.returncode or subprocess.run(["mount", "-o", "loop", str(image), str(folder)]).returncode:
        pytest.skip("mounting a loop device needs root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_missing_folder_is_made(tmp_path) -> None:
    found = probe_folder(tmp_path / "a" / "b", direct=True)
    assert (tmp_path / "a" / "b").is_dir() and found.free_bytes > 0
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_a_file_is_not_a_folder(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ValueError, match=rf"offload\.nvme_path={path} .*; (name|choose) a folder"):
            probe_folder(path, direct=True)


def test_an_unwritable_folder() -> None:
    for path in ("/proc/ztk", "/sys/kernel"):
        with pytest.raises(ValueError, match=rf"offload\.nvme_path={path} .*; choose a folder you may write to"):
            probe_folder(path, direct=True)


def test_main_memory_is_no_disk() -> None:
    folder = Path("/dev/shm/ztk-test-probe")
    if not folder.parent.is_dir() or filesystem_of(folder.parent).kind != "tmpfs":
        pytest.skip("/dev/shm is not a tmpfs here")
    try:
        with pytest.raises(ValueError, match=r"offload\.nvme_path=/dev/shm/.* tmpfs, which is main memory"):
            probe_folder(folder, direct=True)
        probe_folder(folder, direct=False)
    finally:
        folder.rmdir()


_VICTIM = """
import sys, time, torch
from ztk.zero.offload import NvmeStore, OffloadPolicy
from ztk.core.runtime.io import IoCounters
from ztk.core.runtime.memory import MemoryLedger
policy = OffloadPolicy(optimizer="nvme", nvme_path=sys.argv[1], buffer_bytes=1 << 20)
store = NvmeStore(policy, rank=0, ledger=MemoryLedger(), counters=IoCounters())
slots = [store.allocate(name=str(i), shape=(1 << 22,), dtype=torch.float32, category="optimizer") for i in range(8)]
store.put(slots[0], value=torch.ones(1 << 22)).wait()
print("ready", flush=True)
if sys.argv[2] == "exit":  # threads are in the middle of copying to their staging blocks
    for slot in slots:
        store.put(slot, value=torch.zeros(1 << 22))
    sys.exit(0)
time.sleep(60)
"""


@pytest.mark.parametrize("end", ["kill", "exit"])
def test_no_file_survives_the_process(tmp_path, end) -> None:
    """Killed, or ended by itself without close() and with a write under way."""
    victim = subprocess.Popen([sys.executable, "-c", _VICTIM, str(tmp_path), end], stdout=subprocess.PIPE, text=True)
    assert victim.stdout.readline() == "ready\n"
    assert list(tmp_path.iterdir()) == []
    if end == "kill":
        victim.send_signal(signal.SIGKILL)
    assert victim.wait(20) == (-signal.SIGKILL if end == "kill" else 0)
    victim.stdout.close()
    assert list(tmp_path.iterdir()) == []
