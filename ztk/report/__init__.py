"""The record of a run: its folder, live display, tables and plots, and functions that read it back.

Names are imported lazily: the process that starts the ranks writes failed summaries without torch, pandas or matplotlib, and a rank does
not load pandas.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ztk.core.policies.train import TrackerPolicy
    from ztk.report.folder import RunFolder, read_rows, write_failed_summary
    from ztk.report.gauges import Gauges
    from ztk.report.history import Runs, load
    from ztk.report.kernels import KernelPolicy
    from ztk.report.plot import plot_run
    from ztk.report.reporter import Reporter, ReportPolicy

_HOMES = {
    "Gauges": "gauges",
    "KernelPolicy": "kernels",
    "ReportPolicy": "reporter",
    "Reporter": "reporter",
    "RunFolder": "folder",
    "Runs": "history",
    "TrackerPolicy": "tracker",
    "load": "history",
    "plot_run": "plot",
    "read_rows": "folder",
    "write_failed_summary": "folder",
}

__all__ = [
    "Gauges",
    "KernelPolicy",
    "ReportPolicy",
    "Reporter",
    "RunFolder",
    "Runs",
    "TrackerPolicy",
    "load",
    "plot_run",
    "read_rows",
    "write_failed_summary",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
