"""Statistics of few measurements, and arms compared with a baseline."""

import json
import random
import statistics

import numpy
import pytest

import ztk
from ztk.report.__main__ import main
from ztk.report.compare import TableFormat, compare, render
from ztk.report.statistics import median_interval, ratio_interval
from ztk.report.sweep import SweepJob, SweepRecord


def make_sweep(folder, *, arms: dict[str, list[dict]], repeats: int = 0):
    """A finished sweep: overrides -> the summaries of the repeats."""
    jobs = []
    repeats = repeats or max(map(len, arms.values()))
    for number in range(repeats):
        for place, (overrides, summaries) in enumerate(arms.items()):
            name = f"job{place}-{number}"
            jobs.append(SweepJob(folder=name, hash=name, overrides=tuple(overrides.split()), repeat=number))
            if number < len(summaries):
                (folder / name).mkdir(parents=True)
                (folder / name / "summary.json").write_text(json.dumps({"status": "done"} | summaries[number]))
    common = {"command": "run.py", "flags": (), "words": (), "grid": {}, "commit": None}
    SweepRecord(**common, repeats=repeats, repeat_with="same_seed", jobs=tuple(jobs)).write(folder)
    return folder


def speeds(*, scale: float, drift: list[float], seed: int) -> list[dict]:
    """Tokens per second of repeats: 1 % noise, and a drift of the machine that is common to both arms."""
    draw = random.Random(seed)
    return [{"tokens_per_second": 1000 * scale * slow * (1 + draw.gauss(0, 0.01))} for slow in drift]


def drift_of(seed: int, *, n: int = 10) -> list[float]:
    draw = random.Random(seed)
    return [1 + draw.gauss(0, 0.1) for _ in range(n)]


def test_an_interval_has_its_nominal_coverage():
    """Of 400 samples of 10, at most 5 % of the intervals miss: 2.1 % are expected, with a standard error of 0.7 %."""
    draw = numpy.random.default_rng(3)
    found = [median_interval(draw.lognormal(0, 0.5, 10).tolist()) for _ in range(400)]
    missed = sum(interval.low > 1 or interval.high < 1 for interval in found)
    assert 2 <= missed <= 20


def test_an_interval_is_a_function_of_the_values():
    values = [3.0, 1.0, 2.0, 5.0, 4.0, 9.0]
    assert median_interval(values) == median_interval(values)
    assert median_interval(values).median == statistics.median(values)
    assert median_interval([2.0]).n == 1 and median_interval([2.0]).low != median_interval([2.0]).low
    with pytest.raises(ValueError, match="one finite number or more"):
        median_interval([])
    with pytest.raises(ValueError, match="pairs need as many of each"):
        ratio_interval([1.0], baseline=[1.0, 2.0])


def test_three_seeds_have_a_mean_its_error_and_a_t_interval():
    """Of 1, 2 and 4: the mean is 7/3, the standard error sqrt(7)/3, Student's t for 2 degrees of freedom 4.3027."""
    found = median_interval([1.0, 2.0, 4.0])
    assert (found.mean, found.standard_error) == pytest.approx((7 / 3, 7**0.5 / 3))
    assert (found.mean_low, found.mean_high) == pytest.approx(
        (7 / 3 - 4.302653 * 7**0.5 / 3, 7 / 3 + 4.302653 * 7**0.5 / 3), 1e-5
    )
    one = median_interval([2.0])
    assert one.mean == 2 and numpy.isnan([one.standard_error, one.mean_low]).all() and one.mean_ends == "none (n = 1)"


def test_three_seeds_show_a_difference_or_none(tmp_path):
    near = [{"validation_loss": loss} for loss in (3.00, 3.04, 3.02)]
    far = [{"validation_loss": loss} for loss in (2.70, 2.75, 2.73)]
    mixed = [{"validation_loss": loss} for loss in (3.05, 2.98, 3.03)]
    arms = {"optimizer=adamw": near, "optimizer=muon": far, "optimizer=lion": mixed}
    base, better, same = compare([str(make_sweep(tmp_path, arms=arms))])
    assert better.result == "9.7% less by the t-interval" and same.result == "no difference shown, 3 pairs"
    table = render([base, better, same])
    assert "| mean | standard error | 95 % t-interval |" in table.splitlines()[0]
    assert "| 3 | 3.02 | 0.011547 | 2.9703 to 3.0697 | 3.02 | none (n = 3, all in 3 to 3.04) |" in table
    latex = render([base, better, same], form=TableFormat.latex)
    assert "3 & 3.02 & 0.011547 & 2.9703 to 3.0697 & 3.02 &" in latex and r"95 \% t-interval" in latex
    assert {line.count("&") for line in latex.splitlines() if "&" in line} == {12}


def test_equal_arms_of_three_are_called_different_at_most_once_in_twenty():
    """Expected are 5 %; 8 % is two standard errors above with these 300."""
    draw = numpy.random.default_rng(11)
    pairs = draw.normal(1, 0.01, (300, 2, 3))
    assert sum(ratio_interval(two.tolist(), baseline=one.tolist()).excludes_one for one, two in pairs) <= 24


def test_a_slowdown_of_three_percent_is_found(tmp_path):
    """A machine that drifts by 10 % between repeats hides 3 % from unpaired medians; pairs show it."""
    for trial in range(5):
        drift = drift_of(trial)
        arms = {"zero=stage0": speeds(scale=1, drift=drift, seed=100 + trial)}
        arms |= {"zero=stage2": speeds(scale=0.97, drift=drift, seed=300 + trial)}
        _, slow = compare([str(make_sweep(tmp_path / str(trial), arms=arms))])
        assert "less" in slow.result and slow.ratio.n == 10
        assert slow.ratio.median == pytest.approx(0.97, abs=0.02)


def test_equal_arms_are_called_different_at_most_once_in_twenty():
    """Expected are 2.1 %: of 10 ratios, 2 lie on each side of the interval; with these 300, 5 % is more than 3 standard errors above."""
    draw = numpy.random.default_rng(11)
    different = sum(
        ratio_interval(two.tolist(), baseline=one.tolist()).excludes_one
        for one, two in draw.normal(1, 0.01, (300, 2, 10))
    )
    assert different <= 15


def test_equal_digests_are_identical(tmp_path):
    done = {"final_loss": 2.0, "loss_digest": "ab", "tokens_per_second": 100.0}
    arms = {"zero=stage0": [done] * 3, "zero=stage3": [done | {"tokens_per_second": 50.0}] * 3}
    arms |= {"precision=fp16": [done | {"loss_digest": "cd", "final_loss": 2.5}] * 3}
    found = {(one.arm, one.metric): one.result for one in compare([str(make_sweep(tmp_path, arms=arms))])}
    assert found["zero=stage3", "final_loss"] == "identical"
    assert found["zero=stage3", "tokens_per_second"] == "no difference shown, 3 equal pairs are one"
    assert found["precision=fp16", "final_loss"] == "no difference shown, 3 equal pairs are one"
    assert found["precision=fp16", "tokens_per_second"] == "equal"


def test_counted_bytes_are_compared_exactly_with_one_pair(tmp_path):
    """Repeats do not change counters, so a ratio of 1.125 is exact."""
    speed = {"tokens_per_second": 100.0}
    arms = {f"zero=stage{stage}": [speed | {"peak_memory.device_bytes": 9 - stage}] for stage in (0, 1)}
    *_, speed, peak = compare(
        [str(make_sweep(tmp_path, arms=arms))], metrics=["tokens_per_second", "peak_memory.device_bytes"]
    )
    assert peak.result == "11.11% less, counted"
    (row,) = [line for line in render([peak]).splitlines() if "stage1" in line]
    assert row.count("| counted |") == 4
    varied = [{"peak_memory.allocator_bytes": nbytes} for nbytes in (100, 101, 99)]
    arms = {"zero=stage0": varied, "zero=stage1": varied[1:] + varied[:1]}
    (_, one) = compare([str(make_sweep(tmp_path / "varied", arms=arms))], metrics=["peak_memory.allocator_bytes"])
    assert one.result == "no difference shown, 3 pairs"


def test_compared_losses_are_validation_losses(tmp_path):
    summaries = [{"final_loss": 2.0 + number, "validation_loss": 3.0, "tokens_per_second": 1.0} for number in range(2)]
    arms = {"zero=stage0": summaries, "zero=stage1": summaries}
    found = compare([str(make_sweep(tmp_path / "held_out", arms=arms))])
    assert {one.metric for one in found} == {"validation_loss", "tokens_per_second"}
    arms = {name: [{"final_loss": 2.0}] for name in arms}
    found = compare([str(make_sweep(tmp_path / "synthetic", arms=arms))])
    assert {one.metric for one in found} == {"final_loss"} and "final_loss (last batch)" in render(found)


def test_few_measurements_have_no_interval_of_95_percent():
    """The smallest and the largest of n enclose the median in all but 2 of 2^n cases: 75 % for 3, 93.75 % for 5, 96.9 % for 6."""
    three, six = median_interval([1.0, 2.0, 3.0]), median_interval([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    assert numpy.isnan([three.low, three.high]).all() and three.ends == "none (n = 3, all in 1 to 3)"
    assert (six.low, six.high) == (1.0, 6.0) and six.ends == "1 to 6"


def test_repeats_that_failed_leave_pairs_of_the_same_number(tmp_path):
    """A machine whose speed doubles with every repeat: pairs of other numbers would show a ratio of 2."""
    done = [
        {"tokens_per_second": 100.0 * 2**number, "loss_digest": f"{number}", "final_loss": 2.0 + number}
        for number in range(9)
    ]
    failed = {"status": "failed", "error": "rank 0: killed"}
    arms = {"zero=stage0": done, "zero=stage3": [failed, *done[1:4], failed, *done[5:]]}
    found = {one.metric: one for one in compare([str(make_sweep(tmp_path, arms=arms))]) if one.ratio is not None}
    speed = found["tokens_per_second"]
    assert (speed.ratio.median, speed.ratio.n, speed.value.n, speed.result) == (1.0, 7, 7, "equal")
    assert found["final_loss"].result == "identical"


def test_runs_of_other_configurations_are_other_arms(tmp_path):
    """As after a default has changed between two repeats. Where a run wrote its files and which seed a repeat has makes no arm."""
    arms = {"zero=stage0": [{"final_loss": 3.0}] * 3, "zero=stage3": [{"final_loss": 2.0}] * 2}
    folder = make_sweep(tmp_path, arms=arms)
    for path in folder.glob("job*-*"):
        layers = 3 if path.name == "job0-2" else 2
        (path / "config.yaml").write_text(
            f"model:\n  layers: {layers}\nlaunch:\n  threads: {path.name[-1]}\noutput_dir: {path}\n"
        )
    found = [(one.arm, one.value.n) for one in compare([str(folder)], metrics=["final_loss"])]
    assert found == [("zero=stage0 model.layers=2", 2), ("zero=stage3", 2), ("zero=stage0 model.layers=3", 1)]

    record = json.loads((folder / "sweep.json").read_text())
    for job in record["jobs"]:
        job["options"] = [f"train.seed={job['repeat']}"]
        text = f"train:\n  seed: {job['repeat']}\n"
        if (folder / job["folder"]).exists():
            (folder / job["folder"] / "config.yaml").write_text(text)
    (folder / "sweep.json").write_text(json.dumps(record))
    assert sorted(set(ztk.load(folder).runs["arm"])) == ["zero=stage0", "zero=stage3"]


def test_what_has_no_pair_or_no_value_is_said(tmp_path):
    done, failed = {"final_loss": 2.0}, {"status": "failed", "error": "rank 0: killed"}
    arms = {
        "zero=stage0": [failed, done],
        "zero=stage1": [done, failed],
        "optimizer.lr=9": [{"final_loss": None}, done],
    }
    folder = str(make_sweep(tmp_path, arms=arms))
    assert [(one.value.n, one.result) for one in compare([folder])] == [
        (1, "baseline"),
        (1, "no pair of runs"),
        (1, "1 of 2 runs have none"),
    ]
    with pytest.raises(ValueError, match="--metrics tokens: no finished run has it"):
        compare([folder], metrics=["final_loss", "tokens"])


def test_two_folders_are_compared_arm_by_arm_in_every_format(tmp_path, capsys):
    arms = {f"zero=stage{stage}": [{"final_loss": 1.0 + stage}] * 2 for stage in range(2)}
    one, two = (str(make_sweep(tmp_path / name, arms=arms)) for name in "ab")
    assert main(["compare", one, two, "--metrics", "final_loss"]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert len(rows) == 6
    assert [row.endswith("equal |") for row in rows[4:]] == [True, True]
    assert main(["compare", one, "--baseline", "zero=stage1", "--format", "csv"]) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("zero=stage1,final_loss,2,2,")
    assert main(["compare", one, "--format", "latex"]) == 0
    out = capsys.readouterr().out
    assert r"final\_loss" in out and out.startswith(r"\begin{tabular}{ll" + 10 * "r" + "l}")
    assert main(["compare", one, "--baseline", "zero=stage7"]) == 2
    assert "fits 0 arms" in capsys.readouterr().err


def test_frames_have_types_options_and_every_job(tmp_path):
    arms = {f"zero=stage{stage} model.layers={layers}": [] for stage, layers in ((0, 5), (3, 10))}
    folder = make_sweep(tmp_path, arms=arms | {"zero=stage1 model.layers=7": []}, repeats=1)
    for place, (stage, layers) in enumerate(((0, 5), (3, 10))):
        run = folder / f"job{place}-0"
        run.mkdir()
        tiers = {"peak_memory.device_bytes": 10 - stage, "tokens_per_second": 5.0 + layers}
        tiers |= {"peak_memory.host_bytes": 7} if place else {}
        (run / "summary.json").write_text(json.dumps({"status": "done", "steps": 4} | tiers))
        (run / "options.json").write_text(json.dumps({"zero": f"stage{stage}", "offload": "none"}))
        (run / "config.yaml").write_text(
            f"model:\n  layers: {layers}\noptimizer:\n  lr: 1e-3\n  betas: [0.9, 0.95]\noutput_dir: /x\n"
        )
    found = ztk.load(folder)
    runs = found.runs
    assert list(runs.columns[:9]) == [
        *("run", "status", "arm", "repeat", "zero", "model.layers"),
        *("tokens_per_second", "peak_memory.device_bytes", "peak_memory.host_bytes"),
    ]
    assert list(runs["status"]) == ["done", "done", "pending"]
    assert runs["model.layers"].dtype == "int64" and list(runs["model.layers"]) == [5, 10, 7]
    assert runs["optimizer.lr"].dtype == "float64" and runs["optimizer.lr"][0] == 1e-3
    assert list(runs["offload"][:2]) == ["none", "none"] and list(runs["zero"]) == ["stage0", "stage3", "stage1"]
    assert list(runs["peak_memory.host_bytes"][:2]) == [0, 7]
    assert runs["steps"].dtype == "Int64"
    assert list(found.table) == [
        *("run", "status", "zero", "model.layers", "tokens_per_second", "peak_memory.device_bytes"),
        "peak_memory.host_bytes",
    ]
    assert f"all {runs.shape[1]} columns are in .runs" in repr(found) and "..." not in repr(found)
    assert "stage3" in found._repr_html_() and "optimizer.lr" not in found._repr_html_()
    summary = found.summary(["zero", "offload"], metric="tokens_per_second")
    assert summary[["zero", "n", "median"]].to_numpy().tolist() == [["stage0", 1, 10.0], ["stage3", 1, 15.0]]
    best = found.pareto("peak_memory.device_bytes", y="tokens_per_second")
    assert list(best["arm"]) == ["zero=stage3 model.layers=10"]
    with pytest.raises(ValueError, match="nothing: no run has it"):
        found.summary("zero", metric="nothing")


@pytest.mark.parametrize(
    "name, text",
    [
        ("summary.json", '{"accuracy": 1}'),
        ("summary.json", '{"status": "ok"}'),
        ("summary.json", "[1]"),
        ("summary.json", ""),
        ("sweep.json", '{"method": "bayes"}'),
    ],
)
def test_a_file_of_another_program_is_named(name, text, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / name).write_text(text)
    with pytest.raises(ValueError, match=f"other/{name}: is (not |empty, cut or no JSON)"):
        ztk.load(tmp_path)


def test_a_pareto_front_keeps_arms_that_no_arm_beats_in_both(tmp_path):
    points = {"a": (1, 10.0), "b": (2, 20.0), "c": (3, 15.0), "d": (2, 19.0)}
    arms = {
        f"model.layers={number}": [{"peak_memory.device_bytes": x, "tokens_per_second": y}]
        for number, (x, y) in enumerate(points.values())
    }
    arms["model.layers=9"] = [{"tokens_per_second": 5.0, "peak_memory.device_bytes": None}]
    front = ztk.load(make_sweep(tmp_path, arms=arms)).pareto("peak_memory.device_bytes", y="tokens_per_second")
    assert list(front["arm"]) == ["model.layers=0", "model.layers=1"]


def test_help_lists_the_commands(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    out = capsys.readouterr().out
    assert all(f"python -m ztk.report {command}" in out for command in ("compare", "html", "profile"))
