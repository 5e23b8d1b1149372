"""Checks the HTML report of 100 runs in a real browser without a network.

python scripts/check_report.py [--shots FOLDER] [--folder RUNS]

Needs plotly (pip install -e ".[report]") and Chromium or Chrome on the PATH, or its path in CHROMIUM; Debian: apt-get install chromium.
Fails with a message if one of them is missing. The page is opened at 1400, 480 and 400 pixels, light and dark. Checks: no console message, no
request, every panel drawn, no legend over a chart, nothing wider than the window; filter, baseline and brushes change the table; the front
equals Runs.pareto; hostile texts stay texts; the page is under 6 MB. Then a live report of a sweep with one pending run: its page reloads
itself, keeps filter, baseline and sorting, waits while an axis is brushed, and stops when the run is done.
"""

import argparse
import contextlib
import itertools
import json
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from browser import LOADED, Browser, find_browser

import ztk
from ztk.report.html.live import follow
from ztk.report.html.page import write_report
from ztk.report.sweep import SweepJob, SweepRecord

LARGEST = 6_000_000  # bytes of the page
AGAIN = 4.0  # seconds between reloads of a live page: longer than a brush takes
HOSTILE = "</script><script>window.hurt = 1</script><img src=x onerror='window.hurt = 1'>"
# Panels whose legend covers their chart, or in which plotly draws a legend of its own.
OVERLAID = """[...document.querySelectorAll(".legend")].filter((legend) => {
  const plot = legend.parentElement.querySelector(".plot");
  const [below, above] = [legend.getBoundingClientRect(), plot.getBoundingClientRect()];
  return plot.querySelector("g.legend") || below.height && below.top < above.bottom - 1;
}).map((legend) => legend.parentElement.id)"""
PANELS = ("losses", "pareto", "parallel", "failures", "differences", "predictions")
DRAWN = {
    "runs": "document.querySelectorAll('#runs tbody tr').length",
    "losses": "document.querySelectorAll('#panel-losses .scatterlayer .trace').length",
    "pareto": "document.querySelectorAll('#panel-pareto .scatterlayer .trace').length",
    "parallel": "document.querySelectorAll('#panel-parallel svg path').length",
    "failures": "document.querySelectorAll('#panel-failures pre').length",
    "differences": "document.querySelectorAll('#panel-differences table tbody tr').length",
    "predictions": "document.querySelectorAll('#panel-predictions .scatterlayer .trace').length",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shots", type=Path, help="folder for screenshots")
    parser.add_argument("--folder", type=Path, help="open these runs instead, with the checks that fit every report")
    given = parser.parse_args()
    browser = find_browser()
    if browser is None:
        return 2
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.folder or make_runs(Path(scratch, "runs"))
        try:
            page = write_report(folder, to=Path(scratch, "report.html"))
        except ValueError as error:
            print(error, file=sys.stderr)
            return 2
        faults = [f"{page.stat().st_size} bytes, more than {LARGEST}"] * (page.stat().st_size >= LARGEST)
        for width, dark in itertools.product((1400, 480, 400), (False, True)):
            tab = Browser(browser, profile=Path(scratch, f"{width}{dark}"))
            found = list(check_page(tab, page=page, width=width, dark=dark, folder=None if given.folder else folder))
            faults += [f"{width} pixels, {'dark' if dark else 'light'}: {fault}" for fault in found]
            if given.shots:
                given.shots.mkdir(parents=True, exist_ok=True)
                tab.shoot(given.shots / f"{width}_{'dark' if dark else 'light'}.png")
            tab.close()
        if not given.folder:
            tab = Browser(browser, profile=Path(scratch, "live"))
            faults += [
                f"live: {fault}" for fault in check_live(tab, folder=make_runs(Path(scratch, "live_runs"), count=20))
            ]
            tab.close()
        print(f"{page.stat().st_size / 1e6:.2f} MB;", "\n".join(faults) or "6 pages and a live one without a fault")
    return int(bool(faults))


def check_page(tab: Browser, *, page: Path, width: int, dark: bool, folder: Path | None) -> Iterator[str]:
    tab.open(page, width=width, dark=dark)
    evaluate = tab.evaluate
    needed = DRAWN if folder else {"runs": DRAWN["runs"], "differences": DRAWN["differences"]}
    yield from (f"nothing drawn in {name}" for name, count in needed.items() if not evaluate(count))
    yield from (f"the legend of {panel} lies over its chart" for panel in evaluate(OVERLAID))
    if (wide := evaluate("document.documentElement.scrollWidth")) > width:
        yield f"the page is {wide} pixels wide"
    paper = evaluate("getComputedStyle(document.body).backgroundColor")
    if (sum(map(int, paper.strip("rgb()").split(","))) < 384) != dark:
        yield f"the background is {paper}"
    if folder is not None:
        yield from check_synthetic(tab, folder=folder)
    yield from tab.complaints


def check_synthetic(tab: Browser, *, folder: Path) -> Iterator[str]:
    evaluate, count = tab.evaluate, DRAWN["runs"]
    every = evaluate(count)
    best = set(ztk.load(folder).pareto("peak_memory.device_bytes", y="tokens_per_second")["arm"])
    drawn = evaluate("front(report.arms.map((arm, place) => [arm.metrics[chosen.x], arm.metrics[chosen.y], place]).filter(([x, y]) => x && y)"
        ".map(([x, y, arm]) => ({arm, x: x[1], y: y[1]}))).map((point) => report.arms[point.arm].arm)")  # fmt: skip
    if set(drawn) != best:
        yield f"the front is {sorted(drawn)}, Runs.pareto has {sorted(best)}"
    shown = evaluate(
        "[...document.querySelectorAll('#panel-differences select')].map((one) => armOf[Number(one.value)])"
    )
    if len(set(shown)) != 2:
        yield f"the first table of differences compares the arms {shown}"
    tab.drag("#panel-parallel .handle[data-key='tokens_per_second']", start=0.02, end=0.4)
    brushed = evaluate(count)
    speeds = evaluate("shownRuns().map((run) => cell(run, 'tokens_per_second'))")
    if not 0 < brushed < every or brushed != len(speeds):
        yield f"brushing left {brushed} of {every} rows"
    if None in speeds or min(speeds) < max(speeds) * 0.5:
        yield "brushing the fast half left slow runs"
    evaluate("document.getElementById('clear').click()")
    if evaluate(count) != every:
        yield "'show all' does not show all"
    evaluate("words.value = 'zero=stage3 optimizer.lr>0.002'; words.dispatchEvent(new Event('input')); 0")
    if evaluate(count) != evaluate(
        "report.runs.filter((row, run) => cell(run, 'zero') === 'stage3' && cell(run, 'optimizer.lr') > 0.002).length"
    ):
        yield "the filter shows the wrong rows"
    evaluate("words.value = ''; words.dispatchEvent(new Event('input')); 0")
    evaluate(
        "list = document.querySelector('#controls select'); list.value = '0'; list.dispatchEvent(new Event('change')); 0"
    )
    ratios = evaluate(
        "report.runs.map((row, run) => armOf[run] === 0 ? ratio(run, 'tokens_per_second') : null).filter((value) => value !== null)"
    )
    if not ratios or set(ratios) != {1} or not evaluate("document.querySelectorAll('th[data-key^=ratio]').length"):
        yield f"ratios of the baseline to itself: {ratios}"
    evaluate("document.querySelector('th[data-key=\"tokens_per_second\"] button').click()")
    column = evaluate(
        "[...document.querySelectorAll('#runs tbody tr')].map((row) => cell(Number(row.dataset.run), 'tokens_per_second'))"
    )
    known = [value for value in column if value is not None]
    if known != sorted(known) or column[: len(known)] != known:
        yield "a click on a column does not sort by it"
    if evaluate("window.hurt") is not None or evaluate("document.querySelectorAll('img').length"):
        yield "a text of a run became markup"
    if not evaluate("document.querySelector('#panel-failures').textContent.includes('onerror')"):
        yield "the text of a log is missing"


def check_live(tab: Browser, *, folder: Path) -> Iterator[str]:
    """Moves one run of the sweep away, so that it is pending, and puts it back while the page is open."""
    last = folder / "job3"
    last.rename(folder.with_name("kept"))
    writer = threading.Thread(target=follow, args=(folder,), kwargs={"seconds": AGAIN})
    writer.start()
    page, evaluate = folder / "report.html", tab.evaluate
    _until(page.exists)
    tab.open(page, width=1400, dark=False)
    loaded = evaluate("performance.timeOrigin")
    if not _until(lambda: evaluate("performance.timeOrigin") != loaded):
        yield "the page does not reload itself"
    evaluate(LOADED)
    tab.drag("#panel-parallel .handle[data-key='tokens_per_second']", start=0.02, end=0.4)
    loaded = evaluate("performance.timeOrigin")
    time.sleep(2 * AGAIN)
    if evaluate("performance.timeOrigin") != loaded:
        yield "the page reloads itself while an axis is brushed"
    evaluate("document.getElementById('clear').click()")
    for code in (
        "words.value = 'stage0 none'; words.dispatchEvent(new Event('input')); 0",
        "list = document.querySelector('#controls select'); list.value = '1'; list.dispatchEvent(new Event('change')); 0",
        "document.querySelector('th[data-key=\"tokens_per_second\"] button').click()",
    ):
        _until(lambda code=code: (evaluate(code), True)[1])  # retries while the page reloads
    before = evaluate(DRAWN["runs"])
    folder.with_name("kept").rename(last)
    if not _until(lambda: evaluate("typeof report === 'object' && report.live === undefined")):
        yield "the page does not show that the last run is done"
    writer.join(timeout=30)
    evaluate(LOADED)
    choices = evaluate(
        "[words.value, state.words, state.baseline, document.querySelector('#controls select').value, state.sort]"
    )
    if choices != ["stage0 none", "stage0 none", 1, "1", "tokens_per_second"]:
        yield f"filter, baseline and sorting were {choices} after the page was reloaded"
    if evaluate(DRAWN["runs"]) != before or evaluate("cell(3, 'status')") != "done":
        yield "the table of the last page differs from the runs"
    loaded = evaluate("performance.timeOrigin")
    time.sleep(2 * AGAIN)
    if evaluate("performance.timeOrigin") != loaded or writer.is_alive():
        yield "the page still reloads after the last run"
    yield from tab.complaints


def _until(is_true: Callable[[], bool], *, seconds: float = 30.0) -> bool:
    """Whether the condition became true in time. A reloading page raises an error, which counts as not yet."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with contextlib.suppress(RuntimeError):
            if is_true():
                return True
        time.sleep(0.2)
    return False


def make_runs(folder: Path, *, count: int = 100) -> Path:
    """Writes a sweep of `count` runs with 2,000 logged steps: 5 speeds, learning rates, 5 repeats, some failures, some plans."""
    draw = random.Random(0)
    grid = list(
        itertools.product(("stage0", "stage1", "stage2", "stage3"), ("none", "cpu"), ("1e-3", "3e-3", "1e-2"), range(5))
    )[: count - 4]
    jobs = []
    for place, (zero, offload, rate, repeat) in enumerate(grid):
        words = (f"zero={zero}", f"offload={offload}", f"optimizer.lr={rate}")
        jobs.append(SweepJob(folder=f"job{place}", hash=f"job{place}", overrides=words, repeat=repeat))
    hostile = HOSTILE.replace(" ", "_")
    for place in range(4):
        words = ("zero=stage0", f"data.path={hostile}{place}")
        jobs.append(SweepJob(folder=f"bad{place}", hash=f"bad{place}", overrides=words))
    fields: dict[str, Any] = {
        "command": "run.py",
        "flags": (),
        "words": (),
        "grid": {},
        "commit": "abc",
        "repeats": 5,
        "repeat_with": "seeds",
    }
    folder.mkdir()
    SweepRecord(**fields, jobs=tuple(jobs)).write(folder)
    for job in jobs:
        make_run(folder / job.folder, job=job, draw=draw)
    return folder


def make_run(folder: Path, *, job: SweepJob, draw: random.Random) -> None:
    (folder / "ranks").mkdir(parents=True)
    values = dict(word.split("=", 1) for word in job.overrides)
    stage, rate = int(values["zero"][-1]), float(values.get("optimizer.lr", 1e-3))
    tree = {
        "zero": {"stage": stage},
        "optimizer": {"name": "adamw", "lr": rate},
        "train": {"seed": job.repeat},
        "model": {"dim": 64},
    }
    (folder / "config.yaml").write_text(json.dumps(tree))
    (folder / "options.json").write_text(json.dumps({key: values[key] for key in ("zero", "offload") if key in values}))
    (folder / "env.json").write_text(json.dumps({"commit": "abc", "device_name": "cpu", "host": "here"}))
    if job.folder.startswith("bad"):
        (folder / "ranks" / "rank1.log").write_text(f"Traceback\n{HOSTILE}\n" * 400)
        (folder / "summary.json").write_text(
            json.dumps({"status": "failed", "error": f"rank 1: ValueError: {HOSTILE}"})
        )
        return
    slow = 1.6 if values["offload"] == "cpu" else 1.0
    speed = 9000 / slow * (1 - 0.08 * stage) * draw.gauss(1, 0.01)
    memory = 1_000_000 * (4 - stage) / slow
    losses = [5 * (step + 1) ** (-0.1 - 10 * rate) + draw.gauss(0, 0.03) for step in range(2000)]
    steps = [
        {"step": step + 1, "loss": loss, "comm.all_gather_bytes": 1000, "io.read_bytes": 0}
        for step, loss in enumerate(losses)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in steps))
    summary = {"status": "done", "steps": 2000, "tokens_per_second": speed, "step_seconds_median": 512 / speed, "final_loss": losses[-1],
        "peak_memory.device_bytes": memory, "memory.device.parameters_bytes": 900_000}  # fmt: skip
    (folder / "summary.json").write_text(json.dumps(summary))
    if job.repeat == 0:
        plan = {
            "peak_memory.device_bytes": 9,
            "memory.device.parameters_bytes": 880_000,
            "comm.data.all_gather_bytes": 1000,
            "step_seconds": 400 / speed,
        }
        (folder / "plan.json").write_text(json.dumps(plan))


if __name__ == "__main__":
    sys.exit(main())
