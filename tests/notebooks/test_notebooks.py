"""The notebooks: required parts; the quick forms of all are executed, one of them in a kernel by the command that builds all."""

import csv
import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import run_command
from ztk.cli import calls

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("[0-9]_*.py"))
STORY = "8_from_base_to_served"  # needs a real model; see test_story.py
EXECUTED = ("5",)  # in a kernel: ranks, plans and imports of its own


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_an_article_with_claims(path):
    text = path.read_text()
    compile(text, str(path), "exec")
    assert text.startswith("# ---\n# jupyter:") and "\n# %% [markdown]\n# # " in text
    for part in ("**Question.**", "## Claims", "claim(", "choose(", ".predicted(", ".measured(", "caption="):
        assert part in text, part


@pytest.fixture
def quick(tmp_path, monkeypatch):
    """Executes a notebook's cells here, in its quick form. The commands that it starts are forks of a warm interpreter."""
    monkeypatch.setenv("ZTK_NOTEBOOKS", "quick")
    monkeypatch.setenv("ZTK_NOTEBOOKS_FOLDER", str(tmp_path))
    monkeypatch.syspath_prepend(str(ROOT / "notebooks"))
    for name in ("charts", "measured"):
        monkeypatch.delitem(sys.modules, name, raising=False)

    def command(words, *, folder, quiet, check=True):
        done = run_command(*words, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr

    monkeypatch.setattr(calls, "_command", command)
    yield lambda path: runpy.run_path(str(path))
    for name in ("charts", "measured"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("path", [path for path in NOTEBOOKS if path.stem != STORY], ids=lambda path: path.stem)
def test_the_quick_form_holds(path, quick, tmp_path, capsys):
    quick(path)
    assert "holds: " in capsys.readouterr().out
    charts = sorted((tmp_path / "charts").glob("*.csv"))
    assert charts, "it has drawn nothing"
    kinds = set()
    for chart in charts:
        source, *lines = chart.read_text().splitlines()
        assert all(word in source for word in ("n = ", "machine: ", "commit: "))
        kinds |= {row["kind"] for row in csv.DictReader(lines)}
        assert chart.with_suffix(".svg").read_text().startswith("<?xml")
    assert "measured" in kinds and len(kinds) > 1, "a prediction and a measurement"


@pytest.mark.slow
def test_the_command_builds_notebooks_pages_and_charts(tmp_path):
    pytest.importorskip("nbclient")
    pytest.importorskip("jupytext")
    command = [
        sys.executable,
        str(ROOT / "scripts" / "build_notebooks.py"),
        "--quick",
        "--folder",
        str(tmp_path),
        *EXECUTED,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    charts = sorted((tmp_path / "charts").glob("*.csv"))
    assert [path.stem for path in charts] == ["experts"]
    for path in charts:
        source, *lines = path.read_text().splitlines()
        assert all(word in source for word in ("n = ", "machine: ", "commit: "))
        kinds = {row["kind"] for row in csv.DictReader(lines)}
        assert kinds == {"predicted", "measured"}
        assert path.with_suffix(".svg").read_text().startswith("<?xml")
    for path in tmp_path.glob("*.ipynb"):
        cells = json.loads(path.read_text())["cells"]
        assert any("holds: " in "".join(output.get("text", "")) for cell in cells for output in cell.get("outputs", []))
        page = path.with_suffix(".html").read_text()
        assert "<figcaption" in page and "<script" not in page


def test_a_claim_that_does_not_hold_fails_the_build(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "notebooks"))
    import charts

    monkeypatch.setattr(charts, "QUICK", False)
    with pytest.raises(AssertionError, match="does not hold: less is more"):
        charts.claim("less is more", holds=False)
    with pytest.raises(AssertionError, match="does not hold: in time"):
        charts.claim("in time", holds=False, full_only=True)
