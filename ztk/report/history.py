"""Reads runs back: one run folder, a sweep, or a folder of them."""

import contextlib
import html
import json
import os
import shutil
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas
import yaml

from ztk.core.policies.experiment import is_counted
from ztk.core.policies.records import check_aliases
from ztk.report.folder import ENVIRONMENT, METRICS, OPTIONS, SUMMARY, read_rows
from ztk.report.statistics import median_interval
from ztk.report.status import Status, read_status, read_summary
from ztk.report.sweep import SWEEP, SweepJob, as_written, read_sweep

LARGER_IS_BETTER = ("tokens_per_second", "tokens_per_second_per_gpu", "mfu", "hfu", "reward_after")
_SUMMARY = ("n", "mean", "standard_error", "mean_low", "mean_high", "median", "low", "high")
_WORDS = {"true": True, "false": False, "null": None}
_TIER_BYTES = ("memory.", "peak_memory.")
_FROM_ENVIRONMENT = ("commit", "device_name", "host")
_FIRST = ("run", "status", "arm", "repeat", "error")
_RESULTS = (  # listed first
    *(
        "validation_loss",
        "perplexity",
        "final_loss",
        "reward_after",
        "tokens_per_second",
        "tokens_per_second_per_gpu",
        "mfu",
        "hfu",
    ),
    *("step_seconds_median", "peak_memory.device_bytes", "peak_memory.allocator_bytes", "peak_memory.host_bytes"),
    *("peak_memory.nvme_bytes", "steps", "tokens"),
)
_SHOWN = tuple(
    name for name in _RESULTS if name not in ("tokens_per_second_per_gpu", "hfu", "steps", "tokens")
)  # in `Runs.table`
_DETAILS = ("memory.", "peak_memory.", "comm.", "io.", "seconds.")


class Runs(NamedTuple):
    """`runs` has one row per run, `history` one per logged step and run. Values are typed, so numbers sort as numbers.

    Columns of `runs`, in this order: `run`, `status`, `arm`, `repeat`; the keys of the command lines; losses, speed and peaks; the rest
    of the summary; `commit`, `device_name`, `host`; the option of every group (`zero`) and every key of the resolved configuration
    (`optimizer.lr`); bytes and seconds in detail. `arm` has the overrides without those that vary between repeats. If runs with the same
    overrides have different configurations, for example after a change of a default, it also has the keys that differ.
    """

    runs: pandas.DataFrame
    history: pandas.DataFrame

    @property
    def folder(self) -> Path:
        """The folder that was read: a run, a sweep, or a folder of them."""
        return Path(self.runs.attrs["folder"])

    @property
    def settings(self) -> list[str]:
        """The columns with options and keys of the configuration, in the order of `runs`."""
        return self.runs.attrs["settings"]

    @property
    def table(self) -> pandas.DataFrame:
        """The part of `runs` that a sweep is about: the state, the keys of the command lines that differ, and losses, speed and peaks.

        A single run has all keys of its command line. Columns without a value, or with zeros alone, are left out. Printing `Runs` shows
        this table.
        """
        runs, given = self.runs, self.runs.attrs["given"]
        varied = [key for key in given if len(runs) == 1 or runs[key].map(str).nunique() > 1]
        chosen = dict.fromkeys((*_FIRST, *varied, *_SHOWN))
        if varied:
            del chosen["arm"]
        if runs["repeat"].nunique() == 1:
            del chosen["repeat"]
        return runs[[key for key in chosen if key in runs and (key in varied or _is_filled(runs[key]))]]

    def __repr__(self) -> str:
        width = shutil.get_terminal_size((120, 0)).columns
        return f"{self.table.to_string(line_width=width, max_rows=60)}\n{self._rest()}"

    def _repr_html_(self) -> str:
        return f"{self.table.to_html(max_rows=60)}<p>{html.escape(self._rest())}</p>"

    def _rest(self) -> str:
        return f"{self.folder}: all {self.runs.shape[1]} columns are in .runs, {len(self.history)} logged steps in .history"

    def summary(self, by: str | Sequence[str], *, metric: str) -> pandas.DataFrame:
        """Returns median, 95 % interval (`low`, `high`) and n of `metric` over the finished runs, for every value of `by`.

        Raises:
            ValueError: `by` or `metric` is not a column.
        """
        keys = [by] if isinstance(by, str) else list(by)
        done = self._done(*keys, metric).dropna(subset=[metric])
        rows = []
        for values, group in done.groupby(keys, dropna=False, sort=False):
            found = median_interval(group[metric].astype(float).tolist())
            interval = {name: getattr(found, name) for name in _SUMMARY}
            rows.append(dict(zip(keys, values, strict=True)) | interval)
        return pandas.DataFrame(rows, columns=[*keys, *_SUMMARY])

    def pareto(self, x: str, *, y: str, larger: Sequence[str] = LARGER_IS_BETTER) -> pandas.DataFrame:
        """Returns the arms that no other arm beats in both metrics, by their medians, sorted by `x`. larger: metrics for which more is
        better.

        Raises:
            ValueError: `x` or `y` is not a column.
        """
        done = self._done(x, y).dropna(subset=[x, y])
        medians = done.groupby("arm", sort=False).agg(**{x: (x, "median"), y: (y, "median"), "n": (x, "size")})
        costs = [(-1 if name in larger else 1) * medians[name].astype(float) for name in (x, y)]
        points = list(zip(*costs, strict=True))
        kept = [not any(_beats(rival, other=point) for rival in points) for point in points]
        return medians[kept].sort_values(x).reset_index()

    def _done(self, *columns: str) -> pandas.DataFrame:
        """Returns the finished runs. Raises ValueError for unknown columns."""
        for column in columns:
            if column not in self.runs:
                raise ValueError(f"{column}: no run has it; the columns are {', '.join(sorted(map(str, self.runs)))}")
        return self.runs[self.runs["status"] == Status.done.value]


def load(path: str | os.PathLike[str]) -> Runs:
    """Reads every run folder at or below `path`, and the jobs of sweeps without a folder yet. `status` is as in `ztk.report.status`.

    The column `run` is the folder relative to `path` ("." for `path` itself). Bytes of a tier that a finished run did not use are 0.

    Raises:
        ValueError: there is no run.
    """
    root = Path(path)
    jobs = dict(_jobs(root))
    found = {file.parent for name in (SUMMARY, METRICS) for file in root.rglob(name)}
    folders = [*jobs, *sorted(found - jobs.keys())]
    if not folders:
        raise ValueError(f"{root} contains no run ({SUMMARY}, {METRICS} or {SWEEP}, at any depth)")
    runs, history, settings = [], [], []
    given, reported, options = set(), set(), set()  # keys of command lines and of summaries, and groups
    for folder in folders:
        run, job, values = str(folder.relative_to(root)), jobs.get(folder), _configuration(folder)
        summary = read_summary(folder)
        values |= {
            key: value for key, value in summary.items() if key in values
        }  # values that acted in place of configured ones
        runs.append({"run": run} | _describe(folder, job=job, values=values))
        history += [{"run": run} | row for row in read_rows(folder)]
        settings.append(_settings(values, job=job))
        given |= _overrides(folder, job=job).keys()
        reported |= summary.keys()
        options |= _read_json(folder / OPTIONS).keys()
    _part_arms(runs, settings=settings)
    frame = _frame(_with_unused_tiers(runs))
    frame = frame[sorted(frame, key=lambda key: _place(key, given=given, reported=reported))]
    frame.attrs["folder"] = str(root)
    frame.attrs["given"] = [key for key in map(str, frame) if key in given]
    others = {*_FIRST, *_FROM_ENVIRONMENT, *(reported - options)}
    frame.attrs["settings"] = [key for key in map(str, frame) if key not in others and not key.startswith(_TIER_BYTES)]
    return Runs(runs=frame, history=pandas.DataFrame(history))


def _is_filled(column: pandas.Series) -> bool:
    """Whether a value is neither missing nor 0."""
    return bool((column.notna() & (column != 0).fillna(False)).any())


def own_words(arms: Iterable[str]) -> dict[str, str]:
    """Returns arm -> the overrides that not all arms share."""
    found = list(dict.fromkeys(map(str, arms)))
    shared = set.intersection(*(set(arm.split()) for arm in found)) if len(found) > 1 else set()
    return {arm: " ".join(word for word in arm.split() if word not in shared) for arm in found}


def _place(key: str, *, given: Container[str], reported: Container[str]) -> tuple[int, int]:
    """Returns the sort key of a column. Columns of one group keep their order."""
    if key in _FIRST:
        return 0, _FIRST.index(key)
    if key in given:
        return 1, 0
    if key in _RESULTS:
        return 2, _RESULTS.index(key)
    if key.startswith(_DETAILS):
        return 6, 0
    return (3 if key in reported else 4 if key in _FROM_ENVIRONMENT else 5), 0


def _jobs(root: Path) -> Iterator[tuple[Path, SweepJob]]:
    """Yields (folder, job) of every sweep at, above or below `root`, in the order of the sweep."""
    for file in [*root.rglob(SWEEP), root.absolute().parent / SWEEP]:
        record = read_sweep(file.parent)
        for job in record.jobs if record is not None else ():
            folder = file.parent / job.folder
            if file.parent != root.absolute().parent:
                yield folder, job
            elif folder == root.absolute():
                yield root, job


def _settings(values: Mapping[str, Any], *, job: SweepJob | None) -> dict[str, str]:
    """Returns the experiment's settings in the resolved configuration, without those that vary between repeats."""
    varied = {word.partition("=")[0] for word in job.options} if job else set()
    return {
        key: json.dumps(value, separators=(",", ":")).strip('"')
        for key, value in values.items()
        if is_counted(key, value=value) and key not in varied
    }


def _part_arms(runs: Sequence[dict[str, Any]], *, settings: Sequence[dict[str, str]]) -> None:
    """Splits runs with the same overrides but different configurations into arms, and adds the keys that differ to the names."""
    arms: dict[str, list[int]] = {}
    for number, run in enumerate(runs):
        if settings[number]:  # a run without a configuration has not started
            arms.setdefault(run["arm"], []).append(number)
    for numbers in arms.values():
        keys = dict.fromkeys(key for number in numbers for key in settings[number])
        differing = [key for key in keys if len({settings[number].get(key) for number in numbers}) > 1]
        for number in numbers:
            own = [f"{key}={settings[number].get(key, 'null')}" for key in differing]
            runs[number]["arm"] = " ".join([runs[number]["arm"], *own]).strip()


def _describe(folder: Path, *, job: SweepJob | None, values: Mapping[str, Any]) -> dict[str, Any]:
    overrides = _overrides(folder, job=job)
    arm = (
        " ".join(map(as_written, job.overrides))
        if job
        else " ".join(f"{key}={value}" for key, value in overrides.items())
    )
    environment = _read_json(folder / ENVIRONMENT)
    status = read_status(folder)
    summary = read_summary(folder) if status not in (Status.running, Status.dead) else {}
    return {
        "arm": arm,
        "repeat": job.repeat if job else 0,
        **overrides,
        **values,
        **_read_json(folder / OPTIONS),
        **{key: environment[key] for key in _FROM_ENVIRONMENT if key in environment},
        **summary,
        "status": status.value,
    }


def _overrides(folder: Path, *, job: SweepJob | None) -> dict[str, Any]:
    """Returns key -> value of the command line, from `overrides.json`, a dictionary or a list of `key=value`, or from the sweep."""
    values = _read_json(folder / "overrides.json") or (list(job.words) if job else {})
    if isinstance(values, list):
        values = dict(entry.split("=", 1) for entry in values if "=" in entry)
    return {key: _value(value) if "." in key else value for key, value in values.items()}


def _value(text: Any) -> Any:
    """Returns `0.003` for "3e-3". Texts that are not numbers or switches are kept."""
    if not isinstance(text, str):
        return text
    if text in _WORDS:
        return _WORDS[text]
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


def _frame(rows: Sequence[dict[str, Any]]) -> pandas.DataFrame:
    """Makes a frame with typed columns, also if values are missing: whole numbers as Int64, switches as boolean."""
    columns = dict.fromkeys(key for row in rows for key in row)
    return pandas.DataFrame({key: _column([row.get(key) for row in rows]) for key in columns})


def _column(values: list[Any]) -> pandas.Series:
    kinds = {type(value) for value in values if value is not None}
    if kinds == {bool}:
        return pandas.Series(values, dtype="boolean" if None in values else "bool")
    if kinds == {int}:
        return pandas.Series(values, dtype="Int64" if None in values else "int64")
    if kinds in ({float}, {int, float}):
        return pandas.Series(values, dtype="float64")
    return pandas.Series(values, dtype="str" if kinds == {str} else "object")


def _with_unused_tiers(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sets the bytes of tiers and categories that a finished run did not use to 0."""
    tiers = {key for row in rows for key in row if key.startswith(_TIER_BYTES) and key.endswith("_bytes")}
    return [(dict.fromkeys(sorted(tiers), 0) | row) if row["status"] == Status.done.value else row for row in rows]


def _flat(values: Mapping[str, Any], *, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, prefix=f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _configuration(folder: Path) -> dict[str, Any]:
    """Returns key -> value of the resolved configuration. Raises ValueError for a file that is no record."""
    path = folder / "config.yaml"
    try:
        text = path.read_text(encoding="utf-8")
        if "&" in text:
            check_aliases(yaml.compose(text, Loader=yaml.SafeLoader))
        values = yaml.safe_load(text)
    except FileNotFoundError:
        return {}
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ValueError(f"{path}: is no record of a run ({' '.join(str(error).split())})") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path}: is no record of a run; take it out of the folder")
    return {key: _value(value) for key, value in _flat(values) if key != "output_dir"}


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}


def _beats(one: tuple[float, float], *, other: tuple[float, float]) -> bool:
    """Returns whether `one` costs no more than `other` in either metric, and less in one."""
    return one != other and one[0] <= other[0] and one[1] <= other[1]
