"""The HTML report's content, read with an HTML parser. `tests/slow/test_report_page.py` opens it in a browser."""

import base64
import hashlib
import json
import os
import sys
from html.parser import HTMLParser

import pytest

import ztk
from tests.report.test_compare import make_sweep
from ztk.report.__main__ import main
from ztk.report.folder import write_failed_summary
from ztk.report.heartbeat import Heartbeat
from ztk.report.html import data as collected
from ztk.report.html import page as live_pages
from ztk.report.html.data import collect
from ztk.report.html.page import render, write_report
from ztk.report.status import Status

HOSTILE = "</script><img/src=x/onerror=hurt()><!--&$title"
SCRIPT = "Plotly={}"  # in place of 4.8 MB


class Page(HTMLParser):
    """Elements with their attributes and texts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self.texts.append("")

    def handle_data(self, data):
        if self.texts:
            self.texts[-1] += data

    def handle_endtag(self, tag):
        self.elements.append((f"/{tag}", {}))
        self.texts.append("")

    def all(self, tag: str) -> list[tuple[dict[str, str | None], str]]:
        found = zip(self.elements, self.texts, strict=True)
        return [(attributes, text) for (name, attributes), text in found if name == tag]

    @property
    def data(self):
        return next(json.loads(text) for attributes, text in self.all("script") if attributes.get("id") == "data")


def make_runs(folder):
    """Two arms of three repeats with five steps, one failed and one pending run, whose overrides are markup."""
    done = [
        {"tokens_per_second": 100.0 + 10 * repeat, "final_loss": 2.0, "peak_memory.device_bytes": 7}
        for repeat in range(3)
    ]
    faster = [{"tokens_per_second": 200.0, "final_loss": 2.0, "peak_memory.device_bytes": 9}] * 3
    failed = [{"status": "failed", "error": f"rank 1: {HOSTILE}"}]
    make_sweep(
        folder,
        arms={
            "zero=stage0": done,
            "zero=stage3": faster,
            f"zero=stage0 data.path={HOSTILE}": failed,
            "zero=stage1": [],
        },
    )
    for arm, stage in enumerate((0, 3)):
        for repeat in range(3):
            run = folder / f"job{arm}-{repeat}"
            (run / "options.json").write_text(json.dumps({"zero": f"stage{stage}", "offload": "none"}))
            (run / "config.yaml").write_text(
                f"zero: {{stage: {stage}}}\nmodel: {{dim: 64}}\noptimizer: {{betas: [0.9, 0.95]}}\n"
            )
            rows = [{"step": step, "loss": float(10 * step + repeat + 100 * arm)} for step in range(1, 6)]
            (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    logs = folder / "job2-0" / "ranks"
    logs.mkdir()
    (logs / "rank0.log").write_text("Traceback: another rank\n")
    (logs / "rank1.log").write_text("first\n" * 5000 + HOSTILE)
    return folder


@pytest.fixture
def data(tmp_path):
    return collect(make_runs(tmp_path))


def row_of(data, run: str):
    keys = [column["key"] for column in data["columns"]]
    return next(dict(zip(keys, row, strict=True)) for row in data["runs"] if row[0] == run)


def test_the_page_loads_nothing_and_runs_its_own_scripts_alone(data):
    text = render(data, plotly=SCRIPT)
    page = Page(text)
    sources = [value for _, attributes in page.elements for key, value in attributes.items() if key in ("src", "href")]
    assert sources == ["data:,"]
    policy = next(attributes["content"] for attributes, _ in page.all("meta") if attributes.get("http-equiv"))
    scripts = [text for attributes, text in page.all("script") if "type" not in attributes]
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    assert len(scripts) == 2 and scripts[0] == SCRIPT
    assert f"script-src 'sha256-{hashes[0]}' 'sha256-{hashes[1]}';" in policy and policy.startswith(
        "default-src 'none'"
    )
    assert "http://" not in scripts[1].replace("http://www.w3.org/2000/svg", "") and "https://" not in scripts[1]
    assert "innerHTML" not in scripts[1] and "eval(" not in scripts[1]


def test_texts_of_runs_are_data_and_never_markup(data):
    text = render(data | {"title": HOSTILE}, plotly=SCRIPT)
    page = Page(text)
    assert "img" not in {tag for tag, _ in page.elements} and "<!--" not in text
    assert page.data == data | {"title": HOSTILE}
    assert page.all("title")[0][1] == f"Runs of {HOSTILE}"
    with pytest.raises(ValueError, match="would end its element"):
        render(data, plotly="'</SCRIPT>'")


def test_columns_are_the_settings_that_differ_and_the_metrics(data):
    columns = {column["key"]: column for column in data["columns"]}
    assert list(columns) == [
        *("run", "status", "arm", "repeat"),
        *("zero", "data.path", "zero.stage"),
        *("tokens_per_second", "final_loss", "peak_memory.device_bytes"),
    ]
    assert columns["zero"]["named"] and not columns["zero.stage"]["named"]
    assert columns["peak_memory.device_bytes"]["form"] == "bytes" and columns["tokens_per_second"]["larger"]
    assert data["same"] == {"offload": "none", "model.dim": 64, "optimizer.betas": "[0.9, 0.95]"}
    assert row_of(data, "job1-2")["tokens_per_second"] == 200.0
    assert row_of(data, "job3-0")["status"] == "pending" and row_of(data, "job3-0")["zero"] == "stage1"


def test_arms_have_medians_of_their_finished_runs(data):
    arms = {arm["name"]: arm for arm in data["arms"]}
    assert list(arms) == ["zero=stage0", "zero=stage3", f"zero=stage0 data.path={HOSTILE}", "zero=stage1"]
    n, median, low, high = arms["zero=stage0"]["metrics"]["tokens_per_second"]
    assert (n, median, low, high) == (3, 110.0, None, None)  # of 3 runs there is no interval of 95 %
    assert arms["zero=stage1"]["metrics"] == {} and arms["zero=stage1"]["runs"] == 3


def test_bands_span_the_repeats_and_long_runs_keep_their_last_step(data, tmp_path, monkeypatch):
    first, second = data["curves"]
    assert first["step"] == [1, 2, 3, 4, 5] and first["median"] == [11.0, 21.0, 31.0, 41.0, 51.0]
    assert first["low"][0] == 10.0 and first["high"][0] == 12.0 and first["n"] == 3
    assert (first["arm"], second["arm"], second["median"][-1]) == (0, 1, 151.0)
    monkeypatch.setattr(collected, "_POINTS", 2)
    assert collect(tmp_path)["curves"][0]["step"] == [2, 5] and collect(tmp_path)["curves"][0]["every"] == 3


def test_a_failure_has_the_end_of_the_log_of_the_rank_it_names(data):
    (failure,) = data["failures"]
    assert data["runs"][failure["run"]][0] == "job2-0"
    assert failure["error"] == f"rank 1: {HOSTILE}" and failure["log"] == "ranks/rank1.log"
    assert failure["end"].endswith(HOSTILE) and len(failure["end"]) == collected._LETTERS


def test_a_job_that_does_not_fit_is_a_row(tmp_path):
    make_runs(tmp_path)
    write_failed_summary(tmp_path / "job3-0", error="needs 9 GB more", status=Status.does_not_fit)
    (tmp_path / "job3-0" / "plan.json").write_text(json.dumps({"fits": False, "peak_memory.device_bytes": 5}))
    assert row_of(collect(tmp_path), "job3-0")["status"] == "does_not_fit"


def test_a_plan_is_shown_with_the_runs_of_its_configuration(tmp_path):
    make_runs(tmp_path)
    plan = tmp_path / "job3-0"
    plan.mkdir()
    (plan / "summary.json").write_text(json.dumps({"status": "done", "peak_memory.device_bytes": 5}))
    (plan / "config.yaml").write_text(
        "task: {name: plan}\noffload: {pin_memory: true, nvme_path: /y}\nzero: {stage: 3}\nmodel: {dim: 64}\noptimizer: {betas: [0.9, 0.95]}\n"
    )
    (plan / "options.json").write_text(json.dumps({"zero": "stage3"}))
    numbers = {
        "memory.device.parameters_bytes": 90,
        "comm.data.send_bytes": 20,
        "comm.tp.send_bytes": 4,
        "step_seconds": 0.5,
    }
    (plan / "plan.json").write_text(json.dumps(numbers | {"peak_memory.device_bytes": 5}))
    run = tmp_path / "job1-0"
    summary = json.loads((run / "summary.json").read_text())
    summary |= {"memory.device.parameters_bytes": 99, "step_seconds_median": 1.0, "peak_memory.allocator_bytes": 10}
    (run / "summary.json").write_text(json.dumps(summary))
    with open(run / "metrics.jsonl", "w") as file:
        file.writelines(
            json.dumps({"step": step, "loss": 1.0, "comm.send_bytes": moved}) + "\n"
            for step, moved in ((1, 90), (2, 24), (3, 24))
        )
    data = collect(tmp_path)
    assert "job3-0" not in [row[0] for row in data["runs"]]
    found = {
        one["quantity"]: (one["predicted"], one["measured"])
        for one in data["predictions"]
        if data["runs"][one["run"]][0] == "job1-0"
    }
    assert found == {
        "memory.device.parameters_bytes": (90, 99.0),
        "peak_memory.device_bytes": (5, 10.0),
        "comm.send_bytes per step": (24, 24.0),
        "step_seconds": (0.5, 1.0),
    }
    others = {data["runs"][one["run"]][0] for one in data["predictions"]} - {"job1-0"}
    assert others <= {"job1-1", "job1-2"}, "runs of stage 0 have no plan"


def test_the_command_writes_the_file_with_plotly_inside(tmp_path, capsys, monkeypatch):
    make_runs(tmp_path / "sweep")
    assert main(["html", str(tmp_path / "sweep")]) == 0
    text = (tmp_path / "sweep" / "report.html").read_text()
    assert "report.html" in capsys.readouterr().out and "plotly.js v" in text[: 10**6] and len(text) < 6_000_000
    assert len(Page(text).data["runs"]) == 12
    assert main(["html", str(tmp_path / "sweep"), "--to", str(tmp_path / "none" / "a.html")]) == 2
    assert "does not exist" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert main(["html", str(tmp_path / "empty")]) == 2
    assert "contains no run" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(ValueError, match=r'pip install "ztk\[report\]"'):
        write_report(tmp_path / "sweep")


@pytest.fixture
def small_plotly(monkeypatch):
    monkeypatch.setattr(live_pages, "plotly_script", lambda: SCRIPT)


def follow(folder, *, steps):
    """Follows `folder` and runs one of `steps` instead of every wait. Returns (the page's data, the time of its writing) before each step, and
    the data of the last page."""
    seen, left = [], iter(steps)
    page = folder / "report.html"

    def wait(seconds):
        assert seconds == 2.0
        seen.append((Page(page.read_text()).data, page.stat().st_mtime_ns))
        next(left)()

    live_pages.follow(folder, seconds=2.0, wait=wait)
    assert next(left, None) is None
    return seen, Page(page.read_text()).data


def finish(run, **summary):
    run.mkdir(exist_ok=True)
    (run / "summary.json").write_text(json.dumps({"status": "done", "tokens_per_second": 50.0} | summary))


def test_a_live_report_follows_the_runs_until_none_goes_on(tmp_path, small_plotly):
    """Between the pages a row is logged, then nothing happens, then all runs end."""
    make_runs(tmp_path)
    rest = [tmp_path / f"job{arm}-{repeat}" for arm, repeat in ((2, 1), (2, 2), (3, 0), (3, 1), (3, 2))]
    first = rest[0]

    def log():
        first.mkdir()
        (first / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": 7.5}) + "\n")

    seen, last = follow(tmp_path, steps=[log, lambda: None, lambda: [finish(run) for run in rest]])
    (one, _), (two, wrote), (three, again) = seen
    assert one["live"]["seconds"] == 2.0
    assert [len(data["curves"]) for data in (one, two, last)] == [2, 3, 3] and two["curves"][2]["median"] == [7.5]
    assert (three, again) == (two, wrote), "nothing had changed"
    assert "live" not in last and row_of(last, "job3-2")["status"] == "done"


def test_a_live_report_shows_that_a_run_was_killed_and_ends_when_it_is_interrupted(tmp_path, small_plotly):
    make_runs(tmp_path)
    run = tmp_path / "job3-0"
    with Heartbeat(run):
        beat = (run / "heartbeat.json").read_text()

    def die():
        run.joinpath("heartbeat.json").write_text(beat.replace(str(os.getpid()), str(2**22 + 1)))

    def interrupt():
        raise KeyboardInterrupt

    run.joinpath("heartbeat.json").write_text(beat)
    seen, last = follow(tmp_path, steps=[die, interrupt])
    assert [row_of(data, "job3-0")["status"] for data, _ in seen] == ["running", "dead"]
    assert "live" not in last and row_of(last, "job3-1")["status"] == "pending"


def test_the_command_follows_and_refuses_no_seconds(tmp_path, capsys, small_plotly):
    folder = make_runs(tmp_path) / "job0-0"
    assert main(["html", str(folder), "--live", "0"]) == 2
    assert "--live=0: seconds between two pages are more than 0" in capsys.readouterr().err
    assert main(["html", str(folder), "--live"]) == 0
    assert (
        str(folder / "report.html") in capsys.readouterr().out
        and "live" not in Page((folder / "report.html").read_text()).data
    )


def test_a_finished_run_alone_is_a_report(tmp_path):
    data = collect(make_runs(tmp_path) / "job0-0")
    assert len(data["runs"]) == 1 and data["runs"][0][0] == "." and len(data["curves"]) == 1
    assert ztk.load(tmp_path / "job0-0").runs["status"][0] == "done"
