"""`python -m ztk.report` lists the features that this machine can run."""

import importlib.metadata
import socket
from dataclasses import replace

import pytest
import torch

from ztk.kernels import ALL_OPS
from ztk.report import machine
from ztk.report.__main__ import main
from ztk.report.machine import Section, describe_machine, render
from ztk.zero.offload.probe import Filesystem


def rows(sections: list[Section]) -> dict[str, str]:
    return {name: value for section in sections for name, value in section.rows}


def test_the_report_of_this_machine(tmp_path, capsys):
    assert main(["--folder", str(tmp_path), "--run_ops"]) == 0
    out = capsys.readouterr().out
    found = dict(line.split(" ..", 1) for line in out.splitlines() if " .." in line)
    found = {name: value.lstrip(". ") for name, value in found.items()}
    assert found["torch"] == torch.__version__ and found["folder"] == str(tmp_path)
    assert found["gloo"] == "yes" and found["the name deepspeed"].startswith("free")
    for spec in ALL_OPS:
        assert found[spec.name].endswith(", ran")
    assert "GB" in found["main memory"] and "GB" in found["free on its disk"]
    assert "[WARNING]" not in out or found["asynchronous direct I/O"] == "no"  # a container may lack it


def test_an_op_that_does_not_run_is_named_and_fails_the_command(monkeypatch, capsys):
    def broken(**inputs):
        raise RuntimeError("no such kernel\nmore")

    monkeypatch.setattr(machine, "ALL_OPS", [replace(ALL_OPS[0], op=broken)])
    assert main(["--run_ops"]) == 1
    assert f"[WARNING] {ALL_OPS[0].name} does not run: RuntimeError: no such kernel\n" in capsys.readouterr().out
    assert main([]) == 0


def test_faults_name_the_fix(monkeypatch, tmp_path):
    def refused(path, *, direct):
        raise ValueError("offload.nvme_path: no direct I/O")

    monkeypatch.setattr(machine, "probe_folder", refused)
    monkeypatch.setattr(machine, "_SMALL_SHARED_MEMORY", 2**60)
    text = render(describe_machine(folder=tmp_path, runs_ops=False))
    assert "[WARNING] offload.nvme_path: no direct I/O" in text and "asynchronous direct I/O ..... no" in text
    assert "[WARNING] /dev/shm is small" in text and "--run_ops runs each of them once" in text


def test_a_gpu_that_torch_does_not_find_and_a_full_disk_are_named_with_the_fix(monkeypatch, tmp_path):
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(machine, "_GPU_FILES", (str(tmp_path / "nvidia0"),))
    monkeypatch.setattr(machine, "_LITTLE_DISK", 2**60)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(machine, "version", {"torch": torch.__version__}.get)
    for built, fix in ((None, "install torch for it"), ("13.0", "unset CUDA_VISIBLE_DEVICES")):
        monkeypatch.setattr(torch.version, "cuda", built)
        text = render(describe_machine(folder=tmp_path, runs_ops=False))
        assert f"nvidia0 exists, and torch finds no GPU: {fix}" in text.replace(
            "see whether nvidia-smi or rocm-smi lists it, and ", ""
        )
        assert "16 bytes per parameter" in text and 'not installed; pip install "ztk[hf]"' in text
        assert text.splitlines()[-1] == f"{text.count('[WARNING]') - 1} to fix, see [WARNING] above"


def test_what_a_cluster_lacks_is_named_with_the_fix(monkeypatch, tmp_path):
    def unknown(name):
        raise socket.gaierror("no address")

    (tmp_path / "memory.max").write_text("2000000000\n")
    (tmp_path / "pids.max").write_text("512\n")
    (tmp_path / "memory.current").write_text("500000000\n")
    (tmp_path / "memory.stat").write_text("inactive_file 1\nactive_file 2\n")
    monkeypatch.setattr("ztk.core.runtime.system_memory.CONTROL_GROUP", tmp_path)
    monkeypatch.setattr(socket, "gethostbyname", unknown)
    monkeypatch.setattr(machine, "probe_folder", lambda path, *, direct: Filesystem(kind="nfs4", free_bytes=1))
    sections = describe_machine(folder=tmp_path, runs_ops=False)
    text = render(sections)
    assert "has no address" in text and "add it to /etc/hosts" in text
    assert "lies on nfs4, a disk across the network: offloading needs a disk of the machine" in text
    assert rows(sections)["limit of the container"] == "2.00 GB, 1.50 GB left"
    assert rows(sections)["processes and threads"] == "512"
    assert "only 512 processes and threads may run" in text and "--pids-limit" in text


def test_a_version_that_was_not_tested_is_shown(monkeypatch, tmp_path):
    (tmp_path / "tested").write_text("# set\neinops==0.0.1\ntorch==" + torch.__version__.partition("+")[0])
    monkeypatch.setattr(machine, "_TESTED", tmp_path / "tested")
    found = rows(describe_machine(folder=tmp_path, runs_ops=False))
    assert (
        "; the tests run with 0.0.1: pip install einops==0.0.1" in found["einops"]
        and found["torch"] == torch.__version__
    )


def test_a_launcher_whose_ranks_fail_is_named_with_its_last_line(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(machine, "_COMMAND", "import sys; sys.exit('no such device')")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    assert main(["--folder", str(tmp_path), "--run"]) == 1
    out = capsys.readouterr().out
    assert "[WARNING] two ranks do not train with ztk: no such device\n" in out
    assert "[WARNING] two ranks do not train with torchrun" in out  # of this environment, whatever PATH has
    assert "srun ........................ not installed" in out and "read per second" in out


def test_two_ranks_train_with_each_launcher(tmp_path, capsys):
    assert main(["--folder", str(tmp_path), "--run"]) == 0
    out = capsys.readouterr().out
    assert out.count("two ranks trained in") >= 2 and "unequal" not in out


@pytest.mark.parametrize(
    ("installed", "part"), [("0.19.8", "DeepSpeed 0.19.8, except under"), ("0.19.8+ztk", "ztk's, as 0.19.8+ztk")]
)
def test_whose_name_deepspeed_is(monkeypatch, tmp_path, installed, part):
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: installed if name == "deepspeed" else real(name))
    found = rows(describe_machine(folder=tmp_path, runs_ops=False))
    assert found["the name deepspeed"].startswith(part)
