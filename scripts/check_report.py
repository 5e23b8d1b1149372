"""The HTML report of 100 runs in a real browser without a network.

python scripts/check_report.py [--shots FOLDER] [--folder RUNS]

Needs plotly (pip install -e ".[report]") and Chromium or Chrome on the PATH, or its path in CHROMIUM; Debian: apt-get install chromium.
Without one of them it says so and fails. It opens the page at 1400 and 400 pixels, light and dark, and checks: no message of the console,
no request, every panel drawn, nothing wider than the window, filter, baseline and brushes change the table, the front is that of
Runs.pareto, hostile texts stay texts, under 6 MB. Then a live report of a sweep with one run that is not done: its page loads itself again,
keeps filter, baseline and sorting, waits while an axis is brushed, and stops with the run.
"""

import argparse
import base64
import contextlib
import fcntl
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ztk
from ztk.report.html.live import follow
from ztk.report.html.page import write_report
from ztk.report.sweep import SweepJob, SweepRecord

LARGEST = 6_000_000  # bytes of the page
AGAIN = 4.0  # seconds after which a live page loads itself again: longer than a brush takes
HOSTILE = "</script><script>window.hurt = 1</script><img src=x onerror='window.hurt = 1'>"
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
# Ends when the page is loaded and plotly has had half a second.
LOADED = """new Promise((done) => {
  const wait = () => document.readyState === "complete" ? setTimeout(done, 500) : setTimeout(wait, 50);
  wait();
})"""
# The middle of an element's width, its top and its height, once it is in view.
BOX = """((one) => {{
  one.scrollIntoView({{block: "center", inline: "center"}});
  const box = one.getBoundingClientRect();
  return [box.x + box.width / 2, box.y, box.height];
}})(document.querySelector({selector}))"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shots", type=Path, help="where screenshots go")
    parser.add_argument("--folder", type=Path, help="runs to open instead; then only what every report has is checked")
    given = parser.parse_args()
    browser = (
        os.environ.get("CHROMIUM")
        or shutil.which("chromium")
        or shutil.which("google-chrome")
        or shutil.which("chromium-headless-shell")
    )
    if browser is None:
        print(
            "needs Chromium: install it (Debian: apt-get install chromium) or give its path in CHROMIUM",
            file=sys.stderr,
        )
        return 2
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.folder or make_runs(Path(scratch, "runs"))
        try:
            page = write_report(folder, to=Path(scratch, "report.html"))
        except ValueError as error:
            print(error, file=sys.stderr)
            return 2
        faults = [f"{page.stat().st_size} bytes, more than {LARGEST}"] * (page.stat().st_size >= LARGEST)
        for width, dark in itertools.product((1400, 400), (False, True)):
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
        print(f"{page.stat().st_size / 1e6:.2f} MB;", "\n".join(faults) or "4 pages and a live one without a fault")
    return int(bool(faults))


def check_page(tab: "Browser", *, page: Path, width: int, dark: bool, folder: Path | None) -> Iterator[str]:
    tab.open(page, width=width, dark=dark)
    evaluate = tab.evaluate
    needed = DRAWN if folder else {"runs": DRAWN["runs"], "differences": DRAWN["differences"]}
    yield from (f"nothing drawn in {name}" for name, count in needed.items() if not evaluate(count))
    if (wide := evaluate("document.documentElement.scrollWidth")) > width:
        yield f"the page is {wide} pixels wide"
    paper = evaluate("getComputedStyle(document.body).backgroundColor")
    if (sum(map(int, paper.strip("rgb()").split(","))) < 384) != dark:
        yield f"the background is {paper}"
    if folder is not None:
        yield from check_synthetic(tab, folder=folder)
    yield from tab.complaints


def check_synthetic(tab: "Browser", *, folder: Path) -> Iterator[str]:
    evaluate, count = tab.evaluate, DRAWN["runs"]
    every = evaluate(count)
    best = set(ztk.load(folder).pareto("peak_memory.device_bytes", y="tokens_per_second")["arm"])
    drawn = evaluate("front(report.arms.map((arm, place) => [arm.metrics[chosen.x], arm.metrics[chosen.y], place]).filter(([x, y]) => x && y)"
        ".map(([x, y, arm]) => ({arm, x: x[1], y: y[1]}))).map((point) => report.arms[point.arm].arm)")  # fmt: skip
    if set(drawn) != best:
        yield f"the front is {sorted(drawn)}, that of Runs.pareto {sorted(best)}"
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
        yield "the filter shows other rows than it says"
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


def check_live(tab: "Browser", *, folder: Path) -> Iterator[str]:
    """One run of the sweep is taken away, so that it is pending, and comes back while the page is open."""
    last = folder / "job3"
    last.rename(folder.with_name("kept"))
    writer = threading.Thread(target=follow, args=(folder,), kwargs={"seconds": AGAIN})
    writer.start()
    page, evaluate = folder / "report.html", tab.evaluate
    _until(page.exists)
    tab.open(page, width=1400, dark=False)
    loaded = evaluate("performance.timeOrigin")
    if not _until(lambda: evaluate("performance.timeOrigin") != loaded):
        yield "the page does not load itself again"
    evaluate(LOADED)
    tab.drag("#panel-parallel .handle[data-key='tokens_per_second']", start=0.02, end=0.4)
    loaded = evaluate("performance.timeOrigin")
    time.sleep(2 * AGAIN)
    if evaluate("performance.timeOrigin") != loaded:
        yield "the page loads itself again while an axis is brushed"
    evaluate("document.getElementById('clear').click()")
    for code in (
        "words.value = 'stage0 none'; words.dispatchEvent(new Event('input')); 0",
        "list = document.querySelector('#controls select'); list.value = '1'; list.dispatchEvent(new Event('change')); 0",
        "document.querySelector('th[data-key=\"tokens_per_second\"] button').click()",
    ):
        evaluate(code)
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
        yield f"filter, baseline and sorting were {choices} after the page was loaded again"
    if evaluate(DRAWN["runs"]) != before or evaluate("cell(3, 'status')") != "done":
        yield "the table of the last page is not that of the runs"
    loaded = evaluate("performance.timeOrigin")
    time.sleep(2 * AGAIN)
    if evaluate("performance.timeOrigin") != loaded or writer.is_alive():
        yield "it goes on after the last run"
    yield from tab.complaints


def _until(is_true: Callable[[], bool], *, seconds: float = 30.0) -> bool:
    """Whether it became true in time. A page that is just loading itself again has no answer yet."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with contextlib.suppress(RuntimeError):
            if is_true():
                return True
        time.sleep(0.2)
    return False


def make_runs(folder: Path, *, count: int = 100) -> Path:
    """A sweep of `count` runs: 5 stages of speed, rates, 5 repeats, some that failed, plans for some; 2,000 logged steps each."""
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


class Browser:
    """A headless Chromium, driven over two pipes (--remote-debugging-pipe) by the DevTools protocol."""

    def __init__(self, path: str, *, profile: Path) -> None:
        reads, self._writes = os.pipe()
        self._reads, writes = os.pipe()
        inner = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (reads, writes)]  # clear of 3 and 4, which it uses
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--disable-extensions",
            "--disable-background-networking", "--host-resolver-rules=MAP * ~NOTFOUND", "--remote-debugging-pipe"]  # fmt: skip
        command = [
            "bash",
            "-c",
            'exec "$@" 3<&' + str(inner[0]) + " 4>&" + str(inner[1]),
            "bash",
            path,
            *flags,
            f"--user-data-dir={profile}",
        ]
        self._process = subprocess.Popen(command, pass_fds=inner, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for end in (reads, writes, *inner):
            os.close(end)
        self._buffer, self._number, self._session = b"", 0, None
        self.complaints: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")
        self._call(
            "Network.emulateNetworkConditions", offline=True, latency=0, downloadThroughput=-1, uploadThroughput=-1
        )

    def open(self, page: Path, *, width: int, dark: bool) -> None:
        self._size(width=width, height=1000)
        self._call(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}],
        )
        self._call("Page.navigate", url=page.absolute().as_uri())
        self.evaluate(LOADED)

    def _size(self, *, width: int, height: int) -> None:
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def evaluate(self, code: str) -> Any:
        """The value of an expression in the page; an error in it is a complaint."""
        answer = self._call("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            self.complaints.append(f"{code}: {answer['exceptionDetails'].get('exception', {}).get('description')}")
        return answer["result"].get("value")

    def drag(self, selector: str, *, start: float, end: float) -> None:
        """Presses the mouse at a share of the element's height, moves it and releases it."""
        box = self.evaluate(BOX.format(selector=json.dumps(selector)))
        x, y, height = box
        points = [y + height * (start + (end - start) * part / 4) for part in range(5)]
        for kind, at in (
            ("mousePressed", points[0]),
            *(("mouseMoved", at) for at in points),
            ("mouseReleased", points[-1]),
        ):
            self._call("Input.dispatchMouseEvent", type=kind, x=x, y=at, button="left", buttons=1, clickCount=1)

    def shoot(self, path: Path) -> None:
        """A picture of the page, at most 4000 pixels high."""
        width, height = self.evaluate("[innerWidth, Math.min(4000, document.documentElement.scrollHeight)]")
        self._size(width=width, height=height)
        self.evaluate(LOADED)
        self.evaluate("scrollTo(0, 0)")
        shot = self._call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(shot["data"]))

    def close(self) -> None:
        self._call("Browser.close", session=False)
        self._process.wait(timeout=30)
        os.close(self._reads)
        os.close(self._writes)

    def _call(self, method: str, *, session: bool = True, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session and session:
            message["sessionId"] = self._session
        os.write(self._writes, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            self._note(answer)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            piece = os.read(self._reads, 1 << 20)
            if not piece:
                raise RuntimeError("the browser ended; start it by hand to see why")
            self._buffer += piece
        text, self._buffer = self._buffer.split(b"\0", 1)
        return json.loads(text)

    def _note(self, message: dict[str, Any]) -> None:
        """Errors, warnings and requests are complaints."""
        method, values = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.complaints.append(f"exception: {values['exceptionDetails'].get('exception', {}).get('description')}")
        elif method == "Runtime.consoleAPICalled" and values["type"] in ("error", "warning", "assert"):
            self.complaints.append(f"console: {[one.get('value') for one in values['args']]}")
        elif method == "Log.entryAdded" and values["entry"]["level"] in ("error", "warning"):
            self.complaints.append(f"log: {values['entry']['text']} {values['entry'].get('url', '')}")
        elif method == "Network.requestWillBeSent":
            url = values["request"]["url"]
            if not url.startswith(("data:", "blob:", "about:")) and not (
                url.startswith("file:") and url.endswith("/report.html")
            ):
                self.complaints.append(f"request: {url[:200]}")


if __name__ == "__main__":
    sys.exit(main())
