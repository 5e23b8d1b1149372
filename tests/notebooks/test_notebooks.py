"""The notebooks: what each must have, and one of them executed in its quick form by the command that builds all."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("[0-9]_*.py"))
EXECUTED = ("1",)  # ranks and a plan; the others take half a minute to a minute each


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_an_article_with_claims(path):
    text = path.read_text()
    compile(text, str(path), "exec")
    assert text.startswith("# ---\n# jupyter:") and "\n# %% [markdown]\n# # " in text
    for part in ("**Question.**", "## Claims", "claim(", "choose(", ".predicted(", ".measured(", "caption="):
        assert part in text, part


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
    assert [path.stem for path in charts] == ["zero_stages"]
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
        charts.claim("in time", holds=False, timed=True)
