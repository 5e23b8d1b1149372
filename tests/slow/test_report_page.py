"""The HTML report of 100 runs in a real browser without a network, at 1400, 480 and 400 pixels, light and dark.

The console has no message, no request is sent, every panel is drawn, no legend lies over a chart, nothing is wider than the window; filter,
baseline and brushes change the table; the front equals Runs.pareto; hostile texts stay texts; the page is under 6 MB. A live report of a sweep
with one pending run reloads itself, keeps filter, baseline and sorting, waits while an axis is brushed, and stops when the run is done. Needs
plotly (pip install -e ".[report]").
"""

import itertools
import json
import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import ztk
from tests.slow.browser import LOADED, Browser, until
from ztk.report.html.page import follow, write_report
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
DRAWN = {
    "runs": "document.querySelectorAll('#runs tbody tr').length",
    "losses": "document.querySelectorAll('#panel-losses .scatterlayer .trace').length",
    "pareto": "document.querySelectorAll('#panel-pareto .scatterlayer .trace').length",
    "parallel": "document.querySelectorAll('#panel-parallel svg path').length",
    "failures": "document.querySelectorAll('#panel-failures pre').length",
    "differences": "document.querySelectorAll('#panel-differences table tbody tr').length",
    "predictions": "document.querySelectorAll('#panel-predictions .scatterlayer .trace').length",
}


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> tuple[Path, Path]:
    """The folder of the runs, and their page."""
    folder = make_runs(tmp_path_factory.mktemp("report") / "runs")
    return folder, write_report(folder, to=folder.with_name("report.html"))


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1400, 480, 400])
def test_the_report_of_100_runs(browser, report, tmp_path, show, width, dark):
    folder, page = report
    show(f"{page.stat().st_size / 1e6:.2f} MB")
    assert page.stat().st_size < LARGEST
    tab = browser()
    tab.open(page, width=width, dark=dark)
    assert not [name for name, count in DRAWN.items() if not tab.evaluate(count)], "nothing drawn"
    assert not tab.evaluate(OVERLAID), "a legend lies over its chart"
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    paper = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, paper.strip("rgb()").split(","))) < 384) == dark, paper
    check_interaction(tab, folder=folder)
    assert not tab.complaints
    tab.shoot(tmp_path / "report.png")


def check_interaction(tab: Browser, *, folder: Path) -> None:
    evaluate, count = tab.evaluate, DRAWN["runs"]
    every = evaluate(count)
    best = set(ztk.load(folder).pareto("peak_memory.device_bytes", y="tokens_per_second")["arm"])
    drawn = evaluate("front(report.arms.map((arm, place) => [arm.metrics[chosen.x], arm.metrics[chosen.y], place]).filter(([x, y]) => x && y)"
        ".map(([x, y, arm]) => ({arm, x: x[1], y: y[1]}))).map((point) => report.arms[point.arm].arm)")  # fmt: skip
    assert set(drawn) == best
    shown = evaluate(
        "[...document.querySelectorAll('#panel-differences select')].map((one) => armOf[Number(one.value)])"
    )
    assert len(set(shown)) == 2, f"the first table of differences compares the arms {shown}"
    tab.drag("#panel-parallel .handle[data-key='tokens_per_second']", start=0.02, end=0.4)
    brushed = evaluate(count)
    speeds = evaluate("shownRuns().map((run) => cell(run, 'tokens_per_second'))")
    assert 0 < brushed < every and brushed == len(speeds)
    assert None not in speeds and min(speeds) >= max(speeds) * 0.5, "brushing the fast half left slow runs"
    evaluate("document.getElementById('clear').click()")
    assert evaluate(count) == every
    evaluate("words.value = 'zero=stage3 optimizer.lr>0.002'; words.dispatchEvent(new Event('input')); 0")
    assert evaluate(count) == evaluate(
        "report.runs.filter((row, run) => cell(run, 'zero') === 'stage3' && cell(run, 'optimizer.lr') > 0.002).length"
    )
    evaluate("words.value = ''; words.dispatchEvent(new Event('input')); 0")
    evaluate(
        "list = document.querySelector('#controls select'); list.value = '0'; list.dispatchEvent(new Event('change')); 0"
    )
    ratios = evaluate(
        "report.runs.map((row, run) => armOf[run] === 0 ? ratio(run, 'tokens_per_second') : null).filter((value) => value !== null)"
    )
    assert set(ratios) == {1} and evaluate("document.querySelectorAll('th[data-key^=ratio]').length")
    evaluate("document.querySelector('th[data-key=\"tokens_per_second\"] button').click()")
    column = evaluate(
        "[...document.querySelectorAll('#runs tbody tr')].map((row) => cell(Number(row.dataset.run), 'tokens_per_second'))"
    )
    known = [value for value in column if value is not None]
    assert known == sorted(known) and column[: len(known)] == known, "a click on a column does not sort by it"
    assert evaluate("window.hurt") is None and not evaluate("document.querySelectorAll('img').length")
    assert evaluate("document.querySelector('#panel-failures').textContent.includes('onerror')")


def test_a_live_report(browser, tmp_path):
    """One run of the sweep is moved away, so that it is pending, and put back while the page is open."""
    folder = make_runs(tmp_path / "runs", count=20)
    last, kept = folder / "job3", tmp_path / "kept"
    last.rename(kept)
    writer = threading.Thread(target=follow, args=(folder,), kwargs={"seconds": AGAIN}, daemon=True)
    writer.start()
    tab, page = browser(), folder / "report.html"
    evaluate = tab.evaluate
    until(page.exists)
    tab.open(page, width=1400, dark=False)
    loaded = evaluate("performance.timeOrigin")
    assert until(lambda: evaluate("performance.timeOrigin") != loaded), "the page does not reload itself"
    evaluate(LOADED)
    tab.drag("#panel-parallel .handle[data-key='tokens_per_second']", start=0.02, end=0.4)
    loaded = evaluate("performance.timeOrigin")
    time.sleep(2 * AGAIN)
    assert evaluate("performance.timeOrigin") == loaded, "the page reloads itself while an axis is brushed"
    evaluate("document.getElementById('clear').click()")
    for code, choice, value in (
        ("words.value = 'stage0 none', words.dispatchEvent(new Event('input'))", "state.words", "stage0 none"),
        (
            "list = document.querySelector('#controls select'), list.value = '1', list.dispatchEvent(new Event('change'))",
            "state.baseline",
            1,
        ),
        (
            "document.querySelector('th[data-key=\"tokens_per_second\"] button').click()",
            "state.sort",
            "tokens_per_second",
        ),
    ):
        # again if it came while the page was being replaced
        try_once = f"typeof state === 'object' && ({choice} === {json.dumps(value)} || ({code}, false))"
        assert until(lambda once=try_once: evaluate(once))
    before = evaluate(DRAWN["runs"])
    kept.rename(last)
    assert until(lambda: evaluate("typeof report === 'object' && report.live === undefined"))
    writer.join(timeout=30)
    evaluate(LOADED)
    choices = evaluate(
        "[words.value, state.words, state.baseline, document.querySelector('#controls select').value, state.sort]"
    )
    assert choices == ["stage0 none", "stage0 none", 1, "1", "tokens_per_second"]
    assert evaluate(DRAWN["runs"]) == before and evaluate("cell(3, 'status')") == "done"
    loaded = evaluate("performance.timeOrigin")
    time.sleep(2 * AGAIN)
    assert evaluate("performance.timeOrigin") == loaded and not writer.is_alive()
    assert not tab.complaints


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
