"""All pages of docs and README: lines of code fit on a screen, links lead somewhere, generated pages are current."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

from scripts import compare_engines, results_page
from scripts.results_page import latest

CHECKOUT = Path(__file__).parents[2]
DOCS = CHECKOUT / "docs"
PAGES = [CHECKOUT / "README.md", *sorted(DOCS.rglob("*.md"))]
CODE_COLUMNS = 88


def code_lines(page: Path) -> Iterator[str]:
    """The lines of code of a page, fenced or indented."""
    text = page.read_text(encoding="utf-8")
    fences = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
    for fence in fences.findall(text):
        yield from fence.splitlines()
    yield from re.findall(r"^    .*", fences.sub("", text), re.MULTILINE)


def anchor(heading: str) -> str:
    """The anchor that mkdocs and GitHub give a heading."""
    return re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", heading.replace("`", "").lower()).strip())


def anchors(page: Path) -> set[str]:
    """The anchors of a page."""
    return {anchor(heading) for heading in re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)}


def test_code_fits_on_a_page():
    long = [f"{page.name}: {line}" for page in PAGES for line in code_lines(page) if len(line) > CODE_COLUMNS]
    assert not long, "\n".join(long)


def test_links_lead_to_pages_and_headings():
    missing = []
    for page in PAGES:
        text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        for link in re.findall(r"\]\(([^)\s]+)\)", text):
            path, _, place = link.partition("#")
            if "://" in link:
                continue
            target = (page.parent / path).resolve() if path else page
            if not target.exists() or (place and place not in anchors(target)):
                missing.append(f"{page.name}: {link}")
    assert not missing, "\n".join(missing)


def test_every_page_is_in_the_navigation():
    navigation = (CHECKOUT / "mkdocs.yml").read_text(encoding="utf-8")
    assert not [page for page in PAGES[1:] if f": {page.relative_to(DOCS).as_posix()}\n" not in navigation]


def test_the_page_of_results_is_current():
    """`python scripts/results_page.py` writes it."""
    assert results_page.page() == results_page.PAGE.read_text(encoding="utf-8")


def test_every_note_is_on_the_page_of_results():
    shown = {name for names in results_page.NOTES.values() for name in names}
    assert shown == {file.stem for file in (results_page.CPU / "notes").glob("*.md")}


def test_badges_are_true():
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    texts = {file.stem: file.read_text() for file in (DOCS / "badges").glob("*.svg")}
    assert project["requires-python"].startswith(">=3.11") and "python: 3.11 or newer" in texts["python"]
    assert project["license"] == "Apache-2.0" and "licence: Apache-2.0" in texts["licence"]
    assert all(
        name in texts["core"] for name in ("torch", "triton", "einops")
    )  # tests/test_architecture.py: levels 0 to 8
    measured = [folder for folder in results_page.RESULTS.iterdir() if (folder / "first_hour.json").exists()]
    assert bool(measured) != ("not yet" in texts["gpu"])


def test_quoted_errors_of_plans_are_the_page_of_published_runs():
    page = (DOCS / "published_runs.md").read_text(encoding="utf-8")
    count, error = re.search(r"^\| all \| (\d+) \| ([\d.]+)% \|", page, re.MULTILINE).groups()
    assert int(count) > 100
    quoted = [DOCS / "tutorials" / "plan.md", CHECKOUT / "README.md"]
    wrong = [file.name for file in quoted if f"{float(error):.0f} %" not in file.read_text(encoding="utf-8")]
    assert not wrong, f"write {float(error):.0f} %"


def test_quoted_speeds_are_the_measured_ones():
    text = (DOCS / "compared.md").read_text(encoding="utf-8")
    for name, candidates in {
        "DDP": ("ztk0", "ddp"),
        "FSDP2": ("ztk3", "fsdp2"),
        "NVMe": ("ztk3+nvme", "deepspeed3+nvme"),
    }.items():
        for dtype in ("fp32", "bf16"):
            speeds = latest(results_page.engine_rows(), dtype=dtype)
            ratio = f"{speeds[candidates[0]] / speeds[candidates[1]]:.2f}"
            rows = [line for line in text.splitlines() if line.startswith("| D") or line.startswith("| F")]
            assert any(name in row and f"{ratio} " in row.replace("|", " ") + " " for row in rows), (
                f"{name} {dtype}: {ratio}"
            )


def test_speeds_of_llama_cpp_have_its_memory_and_are_shown_by_its_defaults():
    """Its default cache of keys and values is F16; with an fp32 cache it is several times slower."""
    page = (DOCS / "results.md").read_text(encoding="utf-8")
    text = page.partition("compared with llama.cpp")[2].partition("\n### ")[0]
    rows = [line.strip("| ").split("|") for line in text.splitlines() if line.startswith("| llama.cpp/")]
    assert rows and all(re.search(r"\(\d+ MB\)", cell) for _, *cells in rows for cell in cells)
    assert any("fp32 cache" not in name for name, *_ in rows) or "By its default, F16" in text
    kinds = compare_engines.FORMATS["llama.cpp"]
    slow = [kind for kind in kinds if kind.endswith(compare_engines.FP32_CACHE)]
    assert slow and all(kind.removesuffix(compare_engines.FP32_CACHE) in kinds for kind in slow)
