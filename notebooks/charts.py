"""Shared by the notebooks: folders of results, charts with their data, claims.

A figure shows predictions as lines and measurements as points with their 95 % intervals, or from the smallest to the largest where
there are fewer than six. It is written as SVG, its numbers as CSV, and below it stand n, machine and commit, which are read from the runs.
"""

import csv
import html
import io
import os
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib
import pandas
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import FixedLocator, NullLocator

from ztk.report import Runs
from ztk.report.commit import read_commit
from ztk.report.statistics import FEWEST, Interval, median_interval

if TYPE_CHECKING:
    from story import Share

QUICK = os.environ.get("ZTK_NOTEBOOKS") == "quick"
FOLDER = Path(os.environ.get("ZTK_NOTEBOOKS_FOLDER", "outputs/notebooks/" + ("quick" if QUICK else "full"))).absolute()
OPTIONS = Path(__file__).with_name("options")  # options of configurations, for `config_dir`
COLOURS = ("#4477aa", "#ee6677", "#228833", "#aa3377", "#ccbb44", "#66ccee")
_MARKERS = "osD^vP"
_STYLE = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "svg.hashsalt": "ztk",  # the same figure is the same file
}


def choose(full, *, quick):
    """A value of the full form, or of the quick one that CI executes."""
    return quick if QUICK else full


def runs_folder(name: str) -> Path:
    """The folder of a notebook's runs. A second execution continues with them."""
    return FOLDER / "runs" / name


def claim(text: str, *, holds: bool, full_only: bool = False) -> None:
    """Prints the claim, or raises AssertionError with it. full_only: a claim about seconds or about a median of many steps, which the few
    short runs of the quick form cannot show."""
    if full_only and QUICK:
        print(f"not judged in the quick form: {text}")
        return
    if not holds:
        raise AssertionError(f"does not hold: {text}")
    print(f"holds: {text}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One number of a figure, a row of its CSV. low, high: of the 95 % interval; None for predictions and for fewer than `FEWEST` measurements,
    which have `smallest` and `largest` alone."""

    panel: str
    kind: str  # predicted, or how; measured
    series: str
    x: float | str
    y: float
    low: float | None = None
    high: float | None = None
    smallest: float | None = None
    largest: float | None = None
    n: int | None = None


@dataclass(kw_only=True)
class Figure:
    """Panels side by side with a caption below.

    name: of its files. caption: one or two sentences. panels: title -> (label of x, label of y). found: the runs behind the points; none for
    a figure of plans alone. ticks, labels: of x, in all panels. log: scales that are logarithmic, of "x" and "y".
    from_zero: panels whose y begins there.
    """

    name: str
    caption: str
    panels: Mapping[str, tuple[str, str]]
    found: Sequence[Runs] = ()
    ticks: Sequence[float] | None = None
    labels: Sequence[str] | None = None
    log: str = ""
    from_zero: Sequence[str] = ()
    height: float = 3.4
    points: list[Point] = field(default_factory=list)
    _axes: dict[str, Axes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        with matplotlib.rc_context(_STYLE):
            self._canvas = Canvas(figsize=(max(5.2, 3.9 * len(self.panels)), self.height), layout="constrained")
            drawn = self._canvas.subplots(1, len(self.panels), squeeze=False)[0]
        for axes, (title, (x, y)) in zip(drawn, self.panels.items(), strict=True):
            axes.set(title=title, xlabel=x, ylabel=y)
            axes.title.set_fontsize(10)
            if "x" in self.log:
                axes.set_xscale("log", base=2)
            if "y" in self.log:
                axes.set_yscale("log")
            self._axes[title] = axes
        self._colours: dict[str, str] = {}

    def axes(self, panel: str | None = None) -> Axes:
        """Adds elements other than lines and points."""
        return self._axes[panel or next(iter(self.panels))]

    def predicted(
        self,
        x: Sequence[float],
        *,
        y: Sequence[float],
        series: str,
        panel: str | None = None,
        style: str = "-",
        words: str = "predicted",
    ) -> None:
        """Adds a line. words: text of its legend after the name of the series."""
        title = panel or next(iter(self.panels))
        colour = self._colour(series)
        self.axes(title).plot(x, y, style, color=colour, linewidth=1.6, zorder=2, label=f"{series}, {words}")
        self.points += [
            Point(panel=title, kind=words, series=series, x=float(a), y=float(b)) for a, b in zip(x, y, strict=True)
        ]

    def measured(
        self, x: Sequence[float], *, values: Sequence[Sequence[float]], series: str, panel: str | None = None
    ) -> None:
        """Points: the median of `values[i]` at `x[i]`, with its interval, or its span where there is none."""
        title = panel or next(iter(self.panels))
        found = [median_interval([float(value) for value in group]) for group in values]
        rows = [
            Point(
                panel=title,
                kind="measured",
                series=series,
                x=float(a),
                y=one.median,
                low=one.low if one.n >= FEWEST else None,
                high=one.high if one.n >= FEWEST else None,
                smallest=one.smallest,
                largest=one.largest,
                n=one.n,
            )
            for a, one in zip(x, found, strict=True)
        ]
        self._add_measured(rows, bars=[_bar(one) for one in found])

    def shares(self, x: Sequence[float], *, shares: "Sequence[Share]", series: str, panel: str) -> None:
        """Adds points with the intervals of shares."""
        rows = [
            Point(panel=panel, kind="measured", series=series, x=a, y=one.share, low=one.low, high=one.high, n=one.n)
            for a, one in zip(x, shares, strict=True)
        ]
        self._add_measured(rows, bars=[(one.share - one.low, one.high - one.share) for one in shares])

    def _add_measured(self, rows: list[Point], *, bars: Sequence[tuple[float, float]]) -> None:
        """Adds points of one series and panel. bars: the length of each point's interval below and above."""
        panel, series = rows[0].panel, rows[0].series
        colour = self._colour(series)
        self.axes(panel).errorbar(
            [row.x for row in rows],
            [row.y for row in rows],
            yerr=[[below for below, _ in bars], [above for _, above in bars]],
            fmt=_MARKERS[list(self._colours).index(series) % len(_MARKERS)],
            color=colour,
            markersize=5.5,
            markerfacecolor="white",
            markeredgewidth=1.5,
            capsize=3,
            zorder=3,
            label=f"{series}, measured",
        )
        self.points += rows

    def done(self) -> "Figure":
        """Writes NAME.svg and NAME.csv, and shows itself in a notebook. Call it last."""
        for title, axes in self._axes.items():
            if self.ticks is not None:
                axes.xaxis.set_major_locator(FixedLocator(list(self.ticks)))
                axes.xaxis.set_minor_locator(NullLocator())
                axes.set_xticklabels(self.labels or [f"{tick:g}" for tick in self.ticks])
            if title in self.from_zero:
                found = [point for point in self.points if point.panel == title]
                axes.set_ylim(0, 1.08 * max(point.high or point.largest or point.y for point in found))
            if axes.get_legend_handles_labels()[0]:
                # below the panel: a legend never hides a point
                axes.legend(fontsize=7.5, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2)
        folder = FOLDER / "charts"
        folder.mkdir(parents=True, exist_ok=True)
        with matplotlib.rc_context(_STYLE):
            self._canvas.savefig(folder / f"{self.name}.svg", metadata={"Date": None})
        with open(folder / f"{self.name}.csv", "w", newline="", encoding="utf-8") as file:
            file.write(f"# {self.source}\n")
            writer = csv.DictWriter(file, fieldnames=list(Point.__dataclass_fields__), lineterminator="\n")
            writer.writeheader()
            writer.writerows(asdict(point) for point in self.points)
        return self

    @property
    def source(self) -> str:
        """n, machine and commit."""
        counts = sorted({point.n for point in self.points if point.n is not None})
        n = " to ".join(str(count) for count in sorted({counts[0], counts[-1]})) if counts else "0: planned, not run"
        runs = pandas.concat([one.runs for one in self.found]) if self.found else pandas.DataFrame()
        machines = ", ".join(sorted(set(runs["device_name"].dropna()))) if "device_name" in runs else "none"
        cores = f" ({os.cpu_count()} cores)" if "device_name" in runs else ""
        commits = sorted(set(runs["commit"].dropna())) if "commit" in runs else [read_commit() or "unknown"]
        bars = "; bars: smallest to largest" if counts and 1 < counts[0] < FEWEST else ""
        return f"n = {n}{bars}; machine: {machines}{cores}; commit: {', '.join(sorted({_short(commit) for commit in commits}))}"

    def _colour(self, series: str) -> str:
        return self._colours.setdefault(series, COLOURS[len(self._colours) % len(COLOURS)])

    def _repr_html_(self) -> str:
        drawn = io.StringIO()
        with matplotlib.rc_context(_STYLE):
            self._canvas.savefig(drawn, format="svg", metadata={"Date": None})
        svg = drawn.getvalue()
        text = html.escape(f"{self.caption} {self.source}.")
        drawing = svg[svg.index("<svg") :]
        below = f'<figcaption style="color: #333333">{text}</figcaption>'
        return f'<figure style="margin: 1em 0; background: #ffffff">{drawing}{below}</figure>'

    def __repr__(self) -> str:
        return "\n".join(textwrap.wrap(f"{self.name}: {self.caption} {self.source}.", 120))


def _bar(found: Interval) -> tuple[float, float]:
    """How far the error bar goes below and above the median."""
    low, high = (found.low, found.high) if found.n >= FEWEST else (found.smallest, found.largest)
    return max(0.0, found.median - low), max(0.0, high - found.median)


def _short(commit: str) -> str:
    """The short hash, with + for changed files."""
    return commit[:12] + "+" * commit.endswith("+")


def grouped(found: Runs, *, by: str, metric: str, order: Sequence[object]) -> list[list[float]]:
    """The finished runs' values of `metric`, a list for each value of `by` in `order`."""
    done = found.runs[found.runs["status"] == "done"]
    return [done[done[by] == value][metric].astype(float).tolist() for value in order]
