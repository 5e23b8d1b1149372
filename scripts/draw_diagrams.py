"""Draws the Mermaid diagrams of the pages as docs/diagrams/HASH.svg, which the site shows without a network.

    python scripts/draw_diagrams.py

Needs Node's npx and Chromium (PUPPETEER_EXECUTABLE_PATH names another one), and a network to fetch the drawing program. Run it after you have
changed a diagram; `mkdocs build` refuses one that is not drawn. Drawings of changed and removed diagrams are deleted.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"
DIAGRAM = re.compile(r"^```mermaid\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PROGRAM = "@mermaid-js/mermaid-cli@11"
LOOK = {"theme": "neutral", "htmlLabels": False, "flowchart": {"htmlLabels": False}}


def file_of(diagram: str) -> str:
    """The name of a diagram's drawing below `docs`, by its text."""
    return f"diagrams/{hashlib.sha256(diagram.encode()).hexdigest()[:12]}.svg"


def main() -> None:
    pages = [page.read_text(encoding="utf-8") for page in sorted(DOCS.rglob("*.md"))]
    wanted = {file_of(text): text for page in pages for text in DIAGRAM.findall(page)}
    (DOCS / "diagrams").mkdir(exist_ok=True)
    for drawing in (DOCS / "diagrams").glob("*.svg"):
        if f"diagrams/{drawing.name}" not in wanted:
            drawing.unlink()
    browser = os.environ.get("PUPPETEER_EXECUTABLE_PATH") or shutil.which("chromium") or shutil.which("google-chrome")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "browser.json").write_text(json.dumps({"executablePath": browser, "args": ["--no-sandbox"]}))
        (folder / "look.json").write_text(json.dumps(LOOK))
        for name, text in wanted.items():
            if not (DOCS / name).exists():
                (folder / "diagram.mmd").write_text(text)
                files = ["-p", "browser.json", "-c", "look.json", "-i", "diagram.mmd", "-o", str(DOCS / name)]
                command = ["npx", "--yes", "-p", PROGRAM, "mmdc", "--quiet", "-b", "white", *files]
                subprocess.run(command, cwd=folder, check=True, env={**os.environ, "PUPPETEER_SKIP_DOWNLOAD": "1"})
                print(f"drew {name}")


if __name__ == "__main__":
    main()
