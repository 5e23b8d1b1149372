"""Compares arms of an experiment with a baseline: ratios of pairs, with intervals."""

import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

import pandas

from ztk.report.history import Runs, load, own_words
from ztk.report.statistics import FEWEST, Interval, median_interval, ratio_interval
from ztk.report.status import Status

METRICS = ("tokens_per_second", "step_seconds_median", "validation_loss", "peak_memory.device_bytes")
_TRAINING_LOSS = "final_loss"  # loss of the last batch; compared only if no run has a validation loss
_COUNTED = (
    "flops",
    "model_flops",
    "hardware_flops",
    "steps",
    "tokens",
    "parameters",
)  # bytes, which are equal in every repeat and need no statistics
_LOSSES = ("first_loss", "final_loss", "validation_loss")
_COLUMNS = (
    *("arm", "metric", "n", "mean", "standard error", "95 % t-interval", "median", "95 % interval"),
    *("mean ratio", "95 % t-interval of the ratio", "median ratio", "95 % interval of the ratio", "result"),
)


class TableFormat(StrEnum):
    """The output format of a comparison."""

    markdown = "markdown"
    latex = "latex"
    csv = "csv"


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """Finished runs that differ only in the repeat, in its order. name: their origin and their overrides."""

    name: str
    overrides: str
    runs: pandas.DataFrame


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """One metric of one arm. ratio: to the baseline, over pairs.

    None for the baseline itself, and if the metric cannot be compared; result then has the reason.
    """

    arm: str
    metric: str
    value: Interval
    ratio: Interval | None
    result: str


def compare(
    folders: Sequence[str], *, baseline: str | None = None, metrics: Sequence[str] | None = None
) -> list[Comparison]:
    """Compares every arm of the folders with its baseline.

    With one folder, the baseline of all arms is the first arm, or the one whose overrides contain the words of `baseline`. With several
    folders, the baseline of an arm is the arm of the first folder with the same overrides, or its only arm. Repeat i of an arm and repeat
    i of its baseline form a pair.

    Counted quantities (bytes, operations) are compared exactly if all pairs have the same ratio. A measured quantity differs if the 95 %
    interval of the ratios' median does not contain 1, or with fewer than `FEWEST` pairs the t-interval of their mean.

    metrics: keys of `summary.json`. Defaults to `METRICS`, with the last training loss if no run has a validation loss.

    Raises:
        ValueError: a folder has no finished run, no run has one of the metrics, `baseline` names no arm or several, or an arm has no
            counterpart.
    """
    arms = [list(_arms(load(folder), folder=folder, named=len(folders) > 1)) for folder in folders]
    runs = [arm.runs for group in arms for arm in group]
    if metrics is None:
        has_held_out = any(_values(one, metric="validation_loss") for one in runs)
        metrics = [_TRAINING_LOSS if name == "validation_loss" and not has_held_out else name for name in METRICS]
    if unknown := [
        name
        for name in metrics
        if name not in (*METRICS, _TRAINING_LOSS) and not any(_values(one, metric=name) for one in runs)
    ]:
        raise ValueError(f"--metrics {','.join(unknown)}: no finished run has it in its summary.json")
    first = arms[0]
    if baseline is not None or len(arms) == 1:
        base = _chosen(first, words=baseline)
        pairs = [(base, None), *((arm, base) for group in arms for arm in group if arm is not base)]
    else:
        pairs = [(arm, None) for arm in first]
        pairs += [(arm, _counterpart(arm, arms=first)) for group in arms[1:] for arm in group]
    return [found for arm, base in pairs for metric in metrics for found in _compared(arm, base=base, metric=metric)]


def render(comparisons: Sequence[Comparison], *, form: TableFormat = TableFormat.markdown) -> str:
    """Formats the comparisons as one table."""
    rows = [[_text(cell) for cell in _cells(found)] for found in comparisons]
    if form is not TableFormat.csv:
        rows = [[f"{cell} (last batch)" if cell == _TRAINING_LOSS else cell for cell in row] for row in rows]
    if form is TableFormat.csv:
        file = io.StringIO()
        csv.writer(file, lineterminator="\n").writerows([_COLUMNS, *rows])
        return file.getvalue().rstrip("\n")
    if form is TableFormat.latex:
        lines = [" & ".join(map(_latex, row)) + r" \\" for row in [list(_COLUMNS), *rows]]
        head = [rf"\begin{{tabular}}{{ll{'r' * (len(_COLUMNS) - 3)}l}}", r"\hline", lines[0], r"\hline"]
        return "\n".join([*head, *lines[1:], r"\hline", r"\end{tabular}"])
    lines = ["| " + " | ".join(row) + " |" for row in [list(_COLUMNS), ["---"] * len(_COLUMNS), *rows]]
    return "\n".join(lines)


def _arms(found: Runs, *, folder: str, named: bool) -> Iterator[Arm]:
    done = found.runs[found.runs["status"] == Status.done.value]
    if done.empty:
        raise ValueError(f"{folder}: has no finished run; continue its sweep with sweep.resume={folder}")
    words = own_words(done["arm"])
    groups = dict(iter(done.groupby("arm", sort=False)))
    for overrides in [
        arm for arm in found.runs["arm"].unique() if arm in groups
    ]:  # in the order of the jobs, including failed ones
        runs = groups[overrides]
        own = words[str(overrides)]
        name = f"{folder}: {own}" if named and own else own or folder
        yield Arm(name=name, overrides=str(overrides), runs=runs.sort_values("repeat", kind="stable"))


def _chosen(arms: Sequence[Arm], *, words: str | None) -> Arm:
    if words is None:
        return arms[0]
    found = [arm for arm in arms if set(words.split()) <= set(arm.overrides.split())]
    if len(found) != 1:
        names = "; ".join(arm.overrides for arm in arms)
        raise ValueError(f"--baseline '{words}': fits {len(found)} arms, and must fit one of: {names}")
    return found[0]


def _counterpart(arm: Arm, *, arms: Sequence[Arm]) -> Arm:
    found = [other for other in arms if other.overrides == arm.overrides] or (list(arms) if len(arms) == 1 else [])
    if not found:
        raise ValueError(f"{arm.name}: the first folder has no such arm; choose one by --baseline 'KEY=VALUE ...'")
    return found[0]


def _compared(arm: Arm, *, base: Arm | None, metric: str) -> Iterator[Comparison]:
    """Yields comparisons. Skips an arm if none of its runs has the metric; an arm that lacks it in some runs is listed but not
    compared.
    """
    values = _values(arm.runs, metric=metric)
    if not values:
        return
    value, missing = median_interval(values), len(arm.runs) - len(values)
    if missing or base is None:
        result = f"{missing} of {len(arm.runs)} runs have none" if missing else "baseline"
        yield Comparison(arm=arm.name, metric=metric, value=value, ratio=None, result=result)
        return
    own, others = _paired(arm.runs, base=base.runs)
    measured = _values(own, metric=metric), _values(others, metric=metric)
    if len(measured[0]) != len(measured[1]) or not all(measured[1]):
        result, ratio = "the baseline has none in some runs, or 0", None
    elif not measured[0]:
        result, ratio = "no pair of runs", None
    else:
        ratio = ratio_interval(measured[0], baseline=measured[1])
        result = _result(own, base=others, metric=metric, ratio=ratio, equal=measured[0] == measured[1])
    yield Comparison(arm=arm.name, metric=metric, value=value, ratio=ratio, result=result)


def _paired(arm: pandas.DataFrame, *, base: pandas.DataFrame) -> tuple[pandas.DataFrame, pandas.DataFrame]:
    """Returns the paired runs of both arms, repeat by repeat. Runs with the same repeat number are paired in their order."""
    numbers = [list(zip(side["repeat"], side.groupby("repeat").cumcount(), strict=True)) for side in (arm, base)]
    return arm[[number in numbers[1] for number in numbers[0]]], base[[number in numbers[0] for number in numbers[1]]]


def _values(runs: pandas.DataFrame, *, metric: str) -> list[float]:
    """Returns the values of the runs that have the metric."""
    return [float(value) for value in runs[metric].dropna()] if metric in runs else []


def _result(own: pandas.DataFrame, *, base: pandas.DataFrame, metric: str, ratio: Interval, equal: bool) -> str:
    """Describes the result. own, base: the pairs."""
    if metric in _LOSSES and _identical(own, base=base):
        return "identical"
    if equal:
        return "equal"
    if _is_counted(metric) and ratio.smallest == ratio.largest:
        return f"{abs(ratio.median - 1):.2%} {'more' if ratio.median > 1 else 'less'}, counted"
    is_few = ratio.n < FEWEST
    if is_few and ratio.n > 1 and ratio.smallest == ratio.largest:
        return f"no difference shown, {ratio.n} equal pairs are one"  # repeats of one seed, which have no spread
    center = ratio.mean if is_few else ratio.median
    if ratio.excludes_one:
        return f"{abs(center - 1):.1%} {'more' if center > 1 else 'less'}{' by the t-interval' if is_few else ''}"
    return "no difference shown" + (f", {ratio.n} pair{'s' if ratio.n > 1 else ''}" if is_few else "")


def _is_counted(metric: str) -> bool:
    return metric in _COUNTED or metric.endswith("_bytes")


def _identical(own: pandas.DataFrame, *, base: pandas.DataFrame) -> bool:
    """Returns whether the digests of all pairs are equal."""
    if any("loss_digest" not in side or side["loss_digest"].isna().any() for side in (own, base)):
        return False
    return list(own["loss_digest"]) == list(base["loss_digest"])


def _cells(found: Comparison) -> Iterator[object]:
    is_exact = _is_counted(found.metric) and found.value.smallest == found.value.largest
    yield from (found.arm, found.metric, found.value.n, found.value.mean)
    yield from _intervals(found.value, is_exact=is_exact)
    if found.ratio is None:
        yield from ("", "", "", "")
    else:
        _, *intervals = _intervals(found.ratio, is_exact=is_exact and found.ratio.smallest == found.ratio.largest)
        yield from (found.ratio.mean, *intervals)
    yield found.result


def _intervals(found: Interval, *, is_exact: bool) -> Iterator[object]:
    """Yields the cells from the standard error to the median's interval. is_exact: all values are one counted number."""
    error = "" if is_exact or found.n == 1 else found.standard_error
    yield from (error, "counted" if is_exact else found.mean_ends, found.median, "counted" if is_exact else found.ends)


def _text(cell: object) -> str:
    return f"{cell:.5g}" if isinstance(cell, float) else str(cell)


def _latex(text: str) -> str:
    for letter in "&%$#_{}":
        text = text.replace(letter, f"\\{letter}")
    return text
