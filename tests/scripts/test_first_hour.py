"""The one command for a GPU, with small sizes on a CPU: steps that fail or hang cost their own rows, and the rows make a page."""

import base64
import hashlib
import json
import sys
import zipfile
from pathlib import Path

import pytest

from scripts import first_hour, results


def test_a_step_runs_on_a_cpu_and_makes_a_page(monkeypatch, tmp_path):
    assert first_hour.run(tmp_path, dry=True, only=("decode",)) == 0
    (row,) = rows_of(tmp_path)
    assert row["status"] == "done" and row["result"].keys() == {"prompts_1", "batch_1", "prompts_64", "batch_64"}
    assert "| decode | done |" in page_of(tmp_path, monkeypatch=monkeypatch, gpu="unknown")


@pytest.mark.slow
def test_every_step_of_a_gpu_runs_on_a_cpu(monkeypatch, tmp_path):
    assert first_hour.run(tmp_path, dry=True, only=()) == 0
    on_gpu = [step.name for step in first_hour.steps(dry=False, work=tmp_path)]
    rows = rows_of(tmp_path)
    assert [row["name"] for row in rows] == on_gpu and len(on_gpu) == 20
    assert next(row["result"]["tokens"] for row in rows if row["name"] == "answers") == 96
    measured = {row["op"] for row in json.loads((tmp_path / "kernels.json").read_text())}
    assert measured >= set(first_hour.KERNELS)
    page = page_of(tmp_path, monkeypatch=monkeypatch)
    assert "| answers | done |" in page and "| cross_entropy | 3x41 | forward | ztk |" in page


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["more", "training", "peers", "serving", "offload", "launch", "several"])
def test_further_steps_run_on_a_cpu(kind, tmp_path):
    """The ranks of a CPU share it, as the ranks of a GPU do."""
    assert first_hour.run(tmp_path, dry=True, only=(), kind=kind) == 0
    rows = {row["name"]: row.get("result") for row in rows_of(tmp_path)}
    if kind == "more":
        assert rows["job"]["steps"] == 2 and rows["speed plain"]["tokens_per_second"] > 0
    elif kind == "training":
        speeds = [rows[f"speed {name}, round 3"]["tokens_per_second"] for name in first_hour.COMPILED]
        assert min(speeds) > 0 and len(rows) == 13
    elif kind == "peers":
        measured = {(row["op"], row["provider"]) for row in json.loads((tmp_path / "kernels.json").read_text())}
        assert measured >= {("rms_norm", "F.rms_norm"), ("linear_cross_entropy", "F.linear + F.cross_entropy")}
    elif kind == "serving":
        measured = {row["op"] for row in json.loads((tmp_path / "kernels.json").read_text())}
        assert measured == set(first_hour.SERVED) and rows["answers"]["tokens"] == 96
    elif kind == "launch":
        found = [rows[f"launches {launch}, round {number}"] for launch in first_hour.LAUNCHES for number in (1, 2, 3)]
        assert [row["launch"] for row in found] == ["private"] * 3 + ["public"] * 3
        assert len({row["loss_tiny"] for row in found}) == 1 and rows["eager public, round 3"]["batch_64"] > 0
    elif kind == "offload":
        alone = rows["host_update"]
        assert alone["bytes_per_second"] == 28 * alone["elements"] / min(
            alone[key] for key in alone if key[:8] == "workers_"
        )
        assert rows["speed ztk3+cpu:0.5"]["tokens_per_second"] > 0 and rows["overlap ztk3+cpu:0.5"]["ranks"] == 1
    else:
        digests = rows["identity bf16 --ranks 2 --shared"]["digests"]
        assert len(digests) == 6 and len(set(digests.values())) == 1  # without a GPU every tier's update is the host's
        assert rows["volume --ranks 2 --shared"]["counted"]["3"] > 3


def rows_of(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]


def test_rows_of_all_kernels_come_back(tmp_path):
    """Each step's process writes a file of its own, with a name of date and commit."""
    for op in ("attention", "adamw"):
        step = next(one for one in first_hour.steps(dry=False, work=tmp_path) if one.name == f"kernels {op}")
        folder = Path(step.command[step.command.index("--to") + 1])
        folder.mkdir()
        (folder / "kernels-2026-11-28-abc.json").write_text(json.dumps({"rows": [{"op": op}]}))
    first_hour.collect(tmp_path, results=tmp_path)
    assert json.loads((tmp_path / "kernels.json").read_text()) == [{"op": "adamw"}, {"op": "attention"}]


def page_of(folder, *, monkeypatch, gpu="cpu") -> str:
    """The page of the rows in `folder`. gpu: of the step `machine`."""
    monkeypatch.setattr(results, "RESULTS", folder / "results")
    first_hour.read(folder)
    return (folder / "results" / gpu / "first_hour.md").read_text()


def test_a_page_has_the_steps_and_the_kernels(monkeypatch, tmp_path):
    steps = [
        {"name": "machine", "status": "done", "seconds": 1.5, "result": {"gpu": "cpu", "to_device": 2.0}},
        {"name": "answers", "status": "done", "seconds": 2.5, "result": {"tokens": 96}},
    ]
    (tmp_path / "steps.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in steps))
    kernels = [
        {
            "op": "swiglu",
            "shape": [4, 8],
            "direction": "forward",
            "provider": "ztk",
            "p50": 0.5,
            "share": 0.9,
            "limit": "memory",
        }
    ]
    (tmp_path / "kernels.json").write_text(json.dumps(kernels))
    page = page_of(tmp_path, monkeypatch=monkeypatch)
    assert "| answers | done | 2.5 |" in page and "| tokens 96 |" in page
    assert "| swiglu | 4x8 | forward | ztk | 0.500 | 90% of memory |" in page
    (tmp_path / "steps.jsonl").write_text(json.dumps(steps[0] | {"status": "late"}) + "\n")
    assert first_hour.read(tmp_path) == 1


def test_measured_times_lie_next_to_predicted_ones(monkeypatch, tmp_path):
    """Steps and kernels find their predictions, and the worst ratio comes first."""
    predicted = {row["work"]: row for row in json.loads(results.PREDICTED.read_text())["h100"]}
    step, kernel = predicted["speed ztk0: step of 1B, 8,192 tokens"], predicted["adamw 1000000000"]
    rows = [
        {"name": "machine", "status": "done", "seconds": 1.0, "result": {"gpu": "NVIDIA H100 80GB HBM3"}},
        {"name": "speed ztk0", "status": "done", "seconds": 9.0, "result": {"step_seconds": 1.5 * step["seconds"]}},
        {"name": "overlap ztk3+cpu", "status": "failed", "seconds": 9.0, "error": "no memory"},
    ]
    (tmp_path / "steps.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    timed = {"op": "adamw", "shape": kernel["shape"], "direction": "forward", "share": 0.5, "limit": "memory"}
    peer = timed | {"provider": "torch eager", "p50": 99.0}
    timed |= {"provider": "ztk", "p50": 2e3 * kernel["seconds"]}
    (tmp_path / "kernels.json").write_text(json.dumps([timed, peer]))
    monkeypatch.setattr(results, "RESULTS", tmp_path / "results")
    assert first_hour.read(tmp_path) == 1
    folder = tmp_path / "results" / "nvidia-h100-80gb-hbm3"
    compared = json.loads((folder / "first_hour.json").read_text())["compared"]
    assert {row["work"]: round(row["ratio"], 6) for row in compared} == {step["work"]: 1.5, kernel["work"]: 2.0}
    page = (folder / "first_hour.md").read_text()
    assert page.index("| adamw 1000000000 |") < page.index("| speed ztk0: step of 1B, 8,192 tokens |")
    names = {one.name for one in first_hour.steps(dry=False, work=tmp_path)}
    for gpu in ("h200", "h100"):  # a step that no longer exists would have no measurement
        own = json.loads(results.PREDICTED.read_text())[gpu]
        assert {row["step"] for row in own if row["step"]} <= names and len(own) > 20


def test_a_step_that_fails_or_hangs_costs_its_own_row(monkeypatch, tmp_path):
    def python(text: str, *, name: str) -> first_hour.Step:
        return first_hour.Step(name=name, limit=20, command=(sys.executable, "-c", text), together=1)

    made = [
        python("sum(range(10**7)); print('text'); raise SystemExit(3)", name="fails"),
        # A shell, which has printed before its limit also on a busy machine.
        first_hour.Step(name="hangs", limit=3, command=("sh", "-c", "echo '{\"a\": 1}'; sleep 60"), together=1),
        python(
            "import json, os, pathlib; print(json.dumps({'b': os.environ['PYTHONPATH']})); print('end');"
            "path = pathlib.Path(os.environ['TRITON_CACHE_DIR'], 'KEY'); path.mkdir(); (path / '__grp__a.json').touch()",
            name="works",
        ),
    ]
    monkeypatch.setattr(first_hour, "steps", lambda **_: made)
    monkeypatch.setenv("PYTHONPATH", "/carried")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "programs"))
    (tmp_path / "programs").mkdir()
    assert first_hour.run(tmp_path, dry=True, only=()) == 2
    rows = rows_of(tmp_path)
    assert [row["status"] for row in rows] == ["failed", "late", "done"]
    assert rows[0]["cpu_seconds"] >= 0.1
    assert rows[1]["result"] == {"a": 1} and "text" in rows[0]["error"]
    assert rows[2]["result"] == {"b": f"{first_hour.REPOSITORY}:/carried"}  # wheels that came along stay in reach
    assert rows[2]["compiled"] == 1  # with its neighbours, programs that the carried cache lacked


def test_the_hash_of_a_library_comes_from_its_wheel(tmp_path):
    content = b"compiler"
    code = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
    with zipfile.ZipFile(tmp_path / "triton-3.6.0.whl", "w") as wheel:
        wheel.writestr(
            "triton-3.6.0.dist-info/RECORD", f"triton/__init__.py,sha256=x,3\ntriton/_C/libtriton.so,sha256={code},8\n"
        )
    assert first_hour.library_hash(tmp_path / "triton-3.6.0.whl") == hashlib.sha256(content).hexdigest()


def test_all_steps_fit_their_time(tmp_path):
    """Steps that run at the same time count once. A call of every set has 10 minutes."""
    for kind in first_hour.SETS:
        limits = {
            step.together or step.name: step.limit for step in first_hour.steps(dry=False, work=tmp_path, kind=kind)
        }
        assert sum(limits.values()) <= first_hour.SECONDS, kind
