"""Executes the notebooks and writes each as .ipynb and HTML, with the SVG and CSV files of its charts.

    python scripts/build_notebooks.py                    # all notebooks in full, to outputs/notebooks/full
    python scripts/build_notebooks.py --quick 1 4        # two notebooks in their quick form, to outputs/notebooks/quick
    python scripts/build_notebooks.py --store 5          # executes nothing; copies a built .ipynb and its charts to docs/notebooks

A second build continues: runs that are done are not trained again. Delete the folder to start over. The exit code is 1 if a notebook fails or
one of its claims does not hold; the others are built nevertheless. Needs `pip install -e ".[notebooks]"`.
"""

import argparse
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "notebooks"
STORED = ROOT / "docs" / "notebooks"
CELL_SECONDS = 3600
# nbconvert's page loads scripts for formulas and diagrams from the network. The notebooks have neither.
SCRIPT = re.compile(r"<script\b.*?</script>", re.DOTALL)


def find_sources(names: list[str]) -> list[Path]:
    """The notebooks whose file names begin with one of `names`; all notebooks without names."""
    found = sorted(SOURCES.glob("[0-9]_*.py"))
    chosen = [path for path in found if not names or any(path.name.startswith(name) for name in names)]
    if unknown := [name for name in names if not any(path.name.startswith(name) for path in found)]:
        raise SystemExit(f"{', '.join(unknown)}: no such notebook; there are {', '.join(path.stem for path in found)}")
    return chosen


def build(source: Path, *, folder: Path, quick: bool) -> str | None:
    """Executes one notebook and writes it, up to the first failure. Returns the failed cell's error, or None."""
    import jupytext
    import nbformat
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError
    from nbconvert import HTMLExporter

    notebook: Any = jupytext.read(source)
    paths = [str(ROOT), str(SOURCES), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ |= {
        "ZTK_NOTEBOOKS": "quick" if quick else "full",
        "ZTK_NOTEBOOKS_FOLDER": str(folder),
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)),
    }
    client = NotebookClient(notebook, timeout=CELL_SECONDS, resources={"metadata": {"path": str(SOURCES)}})
    error = None
    try:
        client.execute()
    except CellExecutionError as failed:
        error = f"{failed.ename}: {failed.evalue}"
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times of the day
    nbformat.write(notebook, folder / f"{source.stem}.ipynb")
    page, _ = HTMLExporter().from_notebook_node(notebook)
    (folder / f"{source.stem}.html").write_text(SCRIPT.sub("", page), encoding="utf-8")
    return error


def store(source: Path, *, folder: Path) -> str | None:
    """Copies a built notebook and its charts to the documentation. Returns why it does not, or None.

    Builds do not store, because a changed file marks the commit of the next notebook's runs with "+".
    """
    built = folder / f"{source.stem}.ipynb"
    if not built.exists():
        return f"{built} does not exist: build it first"
    if any(output["output_type"] == "error" for output in outputs(built)):
        return "a cell failed"
    names = re.findall(r'name="(\w+)"', source.read_text(encoding="utf-8"))
    charts = [folder / "charts" / f"{name}.{kind}" for name in names for kind in ("csv", "svg")]
    for path in (built, *filter(Path.exists, charts)):
        shutil.copy(path, STORED)
    return None


def outputs(notebook: Path) -> Iterator[dict[str, Any]]:
    """The outputs of all cells of an .ipynb file."""
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        yield from cell.get("outputs", [])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("notebooks", nargs="*", help="numbers of notebooks (default: all)")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter runs, under 90 seconds per notebook")
    parser.add_argument("--store", action="store_true", help="copy built notebooks to docs/notebooks")
    parser.add_argument("--folder", type=Path, help="default: outputs/notebooks/full or quick")
    given = parser.parse_args()
    if given.quick and given.store:
        parser.error("--store: the documentation has full forms only; leave out --quick")
    folder = (given.folder or Path("outputs/notebooks", "quick" if given.quick else "full")).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    failed = 0
    for source in find_sources(given.notebooks):
        started = time.monotonic()
        error = store(source, folder=folder) if given.store else build(source, folder=folder, quick=given.quick)
        failed += error is not None
        print(f"{source.stem:<20} {time.monotonic() - started:6.1f} s  {error or 'done'}", flush=True)
    print(folder)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
