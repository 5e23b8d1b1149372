"""The one command for a GPU, with small sizes on a CPU: steps that fail or hang cost their own rows, and the rows make a page."""

import json
import sys

from scripts import first_hour, results


def test_steps_run_on_a_cpu_and_make_a_page(monkeypatch, tmp_path):
    assert first_hour.run(tmp_path, dry=True, only=("machine", "answers")) == 0
    rows = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [(row["name"], row["status"]) for row in rows] == [("machine", "done"), ("answers", "done")]
    assert rows[0]["result"]["to_device"] > 0 and rows[1]["result"]["tokens"] == 96
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
    monkeypatch.setattr(results, "RESULTS", tmp_path / "results")
    assert first_hour.read(tmp_path) == 0
    page = (tmp_path / "results" / "cpu" / "first_hour.md").read_text()
    assert "| answers | done |" in page and "| swiglu | 4x8 | forward | ztk | 0.500 | 90% of memory |" in page


def test_a_step_that_fails_or_hangs_costs_its_own_row(monkeypatch, tmp_path):
    def python(text: str, *, name: str, limit: float = 20) -> first_hour.Step:
        return first_hour.Step(name=name, limit=limit, command=(sys.executable, "-c", text), together=1)

    made = [
        python("print('text'); raise SystemExit(3)", name="fails"),
        python("print('{\"a\": 1}', flush=True); import time; time.sleep(60)", name="hangs", limit=3),
        python("import json, os; print(json.dumps({'b': os.environ['PYTHONPATH']})); print('end')", name="works"),
    ]
    monkeypatch.setattr(first_hour, "steps", lambda **_: made)
    monkeypatch.setenv("PYTHONPATH", "/carried")
    assert first_hour.run(tmp_path, dry=True, only=()) == 2
    rows = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [row["status"] for row in rows] == ["failed", "late", "done"]
    assert rows[1]["result"] == {"a": 1} and "text" in rows[0]["error"]
    assert rows[2]["result"] == {"b": f"{first_hour.REPOSITORY}:/carried"}  # wheels that came along stay in reach


def test_all_steps_fit_their_time(tmp_path):
    """Steps that run at the same time count once."""
    limits = {step.together or step.name: step.limit for step in first_hour.steps(dry=False, work=tmp_path)}
    assert sum(limits.values()) <= first_hour.SECONDS
