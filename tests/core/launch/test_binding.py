"""Cores of ranks on machines that are trees of files, and the affinity of started ranks."""

import os
import sys
from pathlib import Path

import pytest

from ztk.core.launch import log_path, run_ranks
from ztk.core.launch.binding import cores_of_ranks

# uuid and bus of each GPU, as nvidia-smi prints them; two on each of two nodes.
GPUS = {
    "GPU-a": "00000000:1B:00.0",
    "GPU-b": "00000000:9A:00.0",
    "GPU-c": "00000000:3B:00.0",
    "GPU-d": "00000000:AB:00.0",
}
NODE_OF = {"0000:1b:00.0": 0, "0000:9a:00.0": 1, "0000:3b:00.0": 0, "0000:ab:00.0": 1}


def machine(folder: Path, *, nodes: dict[int, str], siblings: dict[int, str], gpus: dict[str, int]) -> Path:
    """nodes: cores of each NUMA node. siblings: hardware threads of a core, by each of them. gpus: node of each PCI address."""
    files = {f"devices/system/node/node{number}/cpulist": cores for number, cores in nodes.items()}
    files |= {f"devices/system/cpu/cpu{core}/topology/thread_siblings_list": both for core, both in siblings.items()}
    files |= {f"bus/pci/devices/{address}/numa_node": str(node) for address, node in gpus.items()}
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{text}\n")
    return folder


@pytest.fixture
def sysfs(tmp_path, monkeypatch) -> Path:
    """Two nodes of four physical cores with two hardware threads each; this process may use all but 7 and 15."""
    siblings = {core: f"{core % 8},{core % 8 + 8}" for core in range(16)}
    driver = tmp_path / "bin/nvidia-smi"
    driver.parent.mkdir()
    driver.write_text("#!/bin/sh\n" + "\n".join(f"echo '{name}, {bus}'" for name, bus in GPUS.items()))
    driver.chmod(0o755)
    monkeypatch.setenv("PATH", f"{driver.parent}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {*range(16)} - {7, 15})
    return machine(tmp_path / "sys", nodes={0: "0-3,8-11", 1: "4-7,12-15"}, siblings=siblings, gpus=NODE_OF)


def test_ranks_have_cores_of_their_gpus_node(sysfs, monkeypatch):
    on_gpus = {"on_gpus": True, "threads": 1, "sysfs": sysfs}
    assert cores_of_ranks([0, 1, 2, 3], **on_gpus) == [(0, 1, 8, 9), (4, 12), (2, 3, 10, 11), (5, 13)]
    assert cores_of_ranks([1, 2], **on_gpus) == [(4, 5, 6, 12, 13, 14), (0, 1, 2, 3, 8, 9, 10, 11)]
    for visible in ("GPU-d,GPU-a", "3,0"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert cores_of_ranks([0, 1], **on_gpus) == [(4, 5, 6, 12, 13, 14), (0, 1, 2, 3, 8, 9, 10, 11)]


def test_ranks_share_all_cores_where_no_gpu_has_a_node(sysfs, monkeypatch):
    equal = [(0, 1, 2, 8, 9, 10), (3, 4, 5, 11, 12, 13)]
    assert cores_of_ranks([0, 1], on_gpus=False, threads=6, sysfs=sysfs) == equal
    (sysfs / "bus/pci/devices/0000:9a:00.0/numa_node").write_text("-1\n")  # as on a virtual machine
    assert cores_of_ranks([0, 1], on_gpus=True, threads=1, sysfs=sysfs) == equal
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1,MIG-2")
    assert cores_of_ranks([0, 1], on_gpus=True, threads=1, sysfs=sysfs) == equal
    assert cores_of_ranks([0, 1], on_gpus=False, threads=1, sysfs=sysfs / "none") == [
        (0, 1, 2, 3, 4, 5, 6),
        (8, 9, 10, 11, 12, 13, 14),
    ]


def test_too_few_cores_are_refused(sysfs):
    with pytest.raises(ValueError, match="rank 1 has 2 hardware threads, and launch.threads=3; use launch.threads=2"):
        cores_of_ranks([0, 1, 2, 3], on_gpus=True, threads=3, sysfs=sysfs)
    with pytest.raises(ValueError, match="may use 7 physical cores for 8 ranks; use launch.ranks=7, or launch.bind_c"):
        cores_of_ranks(range(8), on_gpus=False, threads=1, sysfs=sysfs)


def test_a_started_rank_has_its_cores(tmp_path):
    own = sorted(os.sched_getaffinity(0))
    cores = [(own[-1],), tuple(own)]
    program = "import os; print(*sorted(os.sched_getaffinity(0)))"
    run_ranks([sys.executable, "-c", program], ranks=2, threads=1, output_dir=tmp_path, cores=cores[::-1])
    assert log_path(tmp_path, rank=1).read_text().split() == [str(own[-1])]
