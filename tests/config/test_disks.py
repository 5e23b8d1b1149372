"""The folder of offloaded states where the run folder is on a network file system."""

import pytest

from ztk.config import Machine, compose
from ztk.core.policies import disks


@pytest.fixture
def mounts(tmp_path, monkeypatch):
    """Shared and own folders below `tmp_path`, as a node of a cluster has them."""
    for name in ("shared", "memory", "own disk", "shared/disk"):
        (tmp_path / name).mkdir()
    place = str(tmp_path)
    lines = [
        "/dev/sda / ext4 rw 0 0",
        f"server:/x {place}/shared nfs4 rw 0 0",
        f"/dev/sdb {place}/shared/disk xfs rw 0 0",
        f"tmpfs {place}/memory tmpfs rw 0 0",
        f"/dev/sdc {place}/own\\040disk xfs rw 0 0",
    ]
    (tmp_path / "mounts").write_text("\n".join(lines) + "\n")
    monkeypatch.setattr(disks, "MOUNTS", tmp_path / "mounts")
    for name in ("SLURM_TMPDIR", "TMPDIR"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def composed(*words, folder):
    return compose("zero=stage3", *words, output_dir=folder, machine=Machine(gpus=0, cores=2))


@pytest.mark.parametrize(
    ("folder", "kind"),
    [
        ("shared/a/b", "nfs4"),
        ("shared/disk/a", "xfs"),
        ("sharedness", "ext4"),
        ("own disk/a", "xfs"),
        ("memory", "tmpfs"),
    ],
)
def test_a_folder_has_the_file_system_of_its_nearest_mount(folder, kind, mounts):
    assert disks.file_system(mounts / folder) == kind


def test_a_shared_run_folder_leaves_the_states_on_the_nodes_disk(mounts, monkeypatch):
    monkeypatch.setenv("SLURM_TMPDIR", str(mounts / "memory"))  # no disk
    monkeypatch.setenv("TMPDIR", str(mounts / "own disk"))
    config = composed("offload=nvme", folder=mounts / "shared" / "run")
    assert config.offload.nvme_path.startswith(f"{mounts}/own disk/ztk-")
    assert not any("network" in note for note in config.notes)
    own = composed("offload=nvme", folder=mounts / "run")
    assert own.offload.nvme_path == str(mounts / "run" / "nvme")


def test_states_on_the_network_are_noted(mounts, monkeypatch):
    without = composed("offload=nvme", folder=mounts / "shared" / "run")
    assert without.offload.nvme_path == str(mounts / "shared" / "run" / "nvme")
    monkeypatch.setenv("TMPDIR", str(mounts / "own disk"))
    named = composed("offload=nvme", f"offload.nvme_path={mounts}/shared/x", folder=mounts / "run")
    for config in (without, named):
        assert sum("network file system (nfs4)" in note for note in config.notes) == 1
    assert composed(folder=mounts / "shared" / "run").offload.nvme_path is None
