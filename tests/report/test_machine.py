"""`python -m ztk.report` lists the features that this machine can run."""

import importlib.metadata
from dataclasses import replace

import pytest
import torch

from ztk.kernels import ALL_OPS
from ztk.report import machine
from ztk.report.__main__ import main
from ztk.report.machine import Section, describe_machine, render


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


@pytest.mark.parametrize(
    ("installed", "part"), [("0.19.8", "DeepSpeed 0.19.8, except under"), ("0.19.8+ztk", "ztk's, as 0.19.8+ztk")]
)
def test_whose_name_deepspeed_is(monkeypatch, tmp_path, installed, part):
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: installed if name == "deepspeed" else real(name))
    found = rows(describe_machine(folder=tmp_path, runs_ops=False))
    assert found["the name deepspeed"].startswith(part)
