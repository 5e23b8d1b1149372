"""The kernel page shows measurements, and states that there are none."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from scripts import kernel_callers
from scripts.kernel_callers import HOT_PATHS, callers
from scripts.kernel_records import Record
from ztk.kernels import ALL_OPS

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture
def page(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("kernels_page", SCRIPTS / "kernels_page.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "kernels_page", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "RESULTS", tmp_path)
    monkeypatch.setattr(module, "AOT_FOLDER", tmp_path / "aot")
    monkeypatch.setattr(module, "PAGE", tmp_path / "kernels.md")
    return module


def test_without_rows_speed_is_unmeasured(page):
    page.write()
    text = page.PAGE.read_text()
    assert "Speed is unmeasured" in text
    for spec in page.ALL_OPS:
        assert f"| {spec.name} |" in text, f"no counted floor for {spec.name}"


def test_the_page_in_the_repository_is_current(page, monkeypatch, tmp_path):
    """Callers and kernels come from the source, floors and budgets from the SPECs, the rest from files: `python scripts/kernels_page.py`."""
    results = SCRIPTS.parent / "experiments" / "results"
    monkeypatch.setattr(page, "RESULTS", results)
    monkeypatch.setattr(page, "AOT_FOLDER", results / "aot")
    page.write()
    assert page.PAGE.read_text() == (SCRIPTS.parent / "docs" / "kernels.md").read_text()


def test_newest_rows_are_shown_with_their_goals(page, tmp_path):
    def row(provider, p50, speedup):
        return {
            "op": "adamw", "shape": [16], "dtype": "bfloat16", "direction": "forward", "provider": provider, "p20": p50,
            "p50": p50, "p80": p50, "floor_bytes": 1, "floor_flops": 1, "gb_per_s": 3900.0, "tflop_per_s": 1.0,
            "share": 0.91, "limit": "memory", "speedup": speedup, "gpu": "Test GPU", "date": "2026-01-02",
            "commit": "abc", "torch": "2", "triton": "3",
        }  # fmt: skip

    limits = {"copy_gb_per_s": 4300.0, "matmul_tflop_per_s": 790.0}
    folder = tmp_path / "test-gpu"
    folder.mkdir()
    for name, p50 in (("kernels-2026-01-01-old.json", 9.0), ("kernels-2026-01-02-abc.json", 7.0)):
        rows = [row("ztk", p50, None), row("torch", 2 * p50, 2.0)]
        (folder / name).write_text(json.dumps({"limits": limits, "rows": rows}))
    page.write()
    text = page.PAGE.read_text()
    assert "Speed is unmeasured" not in text
    assert "| adamw | 16 | forward | 7 | 7 | 7 | 3900 GB/s | 91% | 90 % | torch 2.00x |" in text
    assert "Not measured in that run" in text and "| 9 |" not in text


def test_compilations_of_two_versions_stand_in_one_row(page):
    def row(**changed):
        same = dict.fromkeys(("stack_bytes", "shared_bytes", "matrix_instructions", "widest_load", "widest_store"), 16)
        counts = {"registers": 80, "programs": 396, "programs_per_processor": 3, "instructions_per_element": 9.5}
        names = {"op": "rms_norm", "kernel": "_rms_norm_bwd", "arch": "sm_90", "loop_instructions": None}
        return {**same, **counts, **names, "ok": True, "reason": "", **changed}

    page.AOT_FOLDER.mkdir()
    broken = row(registers=98, programs_per_processor=2, ok=False, reason="396 programs")
    for version, rows in (("3.10.0", [row()]), ("3.6.0", [broken])):
        (page.AOT_FOLDER / f"triton-{version}.json").write_text(json.dumps(rows))
    page.write()
    text = page.PAGE.read_text()
    assert "Triton 3.6.0: 0 of 1, Triton 3.10.0: 1 of 1" in text
    cells = "98 / 80 | 16 | 16 | 396, 2 / 396, 3 | 16, 16 | 16 | 9.5 | - | **broken**: 396 programs / kept |"
    assert f"| rms_norm | `_rms_norm_bwd` | sm_90 | {cells}" in text


def test_every_op_has_a_caller(page):
    """An op that nothing calls is deleted."""
    found, names = callers(), {spec.name for spec in ALL_OPS}
    assert set(HOT_PATHS) == names
    assert all(found.get(name) for name in names)
    cells = [cell.strip() for line in page.called().splitlines() for cell in line.strip("|").split("|")]
    assert all(cells) and len(cells) == 4 * (2 + len(names))


def test_callers_are_uses_and_no_imports(tmp_path, monkeypatch):
    (tmp_path / "ztk").mkdir()
    (tmp_path / "ztk" / "a.py").write_text(
        "from ztk import kernels\nfrom ztk.kernels import rope as turn, swiglu\n"
        "class A:\n    def f(self):\n        return kernels.adamw, turn(1)\nx = turn\n"
    )
    monkeypatch.setattr(kernel_callers, "ROOT", tmp_path)
    monkeypatch.setattr(kernel_callers, "PACKAGE", tmp_path / "ztk")
    assert callers() == {"adamw": ["ztk.a.A.f"], "rope": ["ztk.a.A.f", "ztk.a"]}


def test_rows_become_a_picture_and_a_run(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    rows = [{"op": "adamw", "share": 0.9}, {"op": "rope", "share": None}]
    path = Record(title="share of the limit", column="share", line=1.0).write(
        rows, folder=tmp_path, name="kernels", labels=["adamw", "rope"]
    )
    assert path.read_bytes().startswith(b"\x89PNG") and "adamw" in path.with_suffix(".svg").read_text()
    (run,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    assert run.stat().st_size > 0


def test_the_benchmark_ends_at_its_deadline_and_keeps_its_rows(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    bench = importlib.import_module("bench_kernels")
    limits = bench.Limits(copy_gb_per_s=1.0, matmul_tflop_per_s=1.0)
    results = bench.Results(limits=limits, file=tmp_path / "rows.json")
    numbers = dict.fromkeys(("p20", "p50", "p80", "gb_per_s", "tflop_per_s", "share"), 1.0)
    names = dict.fromkeys(
        ("op", "dtype", "direction", "provider", "limit", "gpu", "date", "commit", "torch", "triton"), "x"
    )
    with pytest.raises(bench.OutOfTime), bench.time_limit(0.05):
        results.add(bench.Row(shape=(1,), floor_bytes=1, floor_flops=1, speedup=None, **numbers, **names))
        while True:
            pass
    assert len(json.loads(results.file.read_text())["rows"]) == 1
