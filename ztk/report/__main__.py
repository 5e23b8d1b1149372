"""Reports on this machine and on runs.

python -m ztk.report [--folder PATH] [--run_ops] [--run]
    Describes this machine, like ds_report, and what to do about each line that is not right. The exit code is 1 if an op or a run fails.
python -m ztk.report compare FOLDER [FOLDER ...] [--baseline WORDS] [--metrics NAME,..] [--format markdown|latex|csv]
    Compares arms of experiments with a baseline.
python -m ztk.report html FOLDER [--to FILE] [--live [SECONDS]]
    Writes one HTML file with tables and plots of the runs, and keeps it up to date with --live.
python -m ztk.report profile RUN [--rank RANK]
    Opens the trace of a run with train.profile in Perfetto.
"""

import argparse
import re
import sys

from ztk.core.launch.output import is_lost, lasting_output


def main(arguments: list[str] | None = None) -> int:
    """Describes this machine, compares runs, or writes their page."""
    words = sys.argv[1:] if arguments is None else arguments
    commands = {"compare": _compare, "html": _html, "profile": _profile}
    with lasting_output() as output:
        try:
            code = commands[words[0]](words[1:]) if words and words[0] in commands else _machine(words)
            return code or int(is_lost(output))
        except ValueError as error:
            print(error, file=sys.stderr)
            return 2


def _machine(words: list[str]) -> int:
    from ztk.report.machine import (
        describe_machine,
        render,
    )  # imported late: it imports torch, which a comparison does not need

    parser = argparse.ArgumentParser(
        prog="python -m ztk.report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", default=".", help="where offload files would be stored (default: here)")
    parser.add_argument("--run_ops", action="store_true", help="run every op once; on a GPU this compiles them")
    parser.add_argument("--run", action="store_true", help="measure the disk, and train two ranks with each launcher")
    given = parser.parse_args(words)
    sections = describe_machine(folder=given.folder, runs_ops=given.run_ops, runs=given.run)
    print(render(sections))
    return int(any(re.search("do(es)? not (run|train)", fault) for section in sections for fault in section.faults))


def _compare(words: list[str]) -> int:
    from ztk.report.compare import METRICS, TableFormat, compare, render

    parser = argparse.ArgumentParser(
        prog="python -m ztk.report compare", description="Ratios of pairs to a baseline, with 95 % intervals."
    )
    parser.add_argument("folders", nargs="+", metavar="FOLDER", help="a run, a sweep, or a folder of runs")
    parser.add_argument(
        "--baseline", help="overrides of the arm to compare with, as in 'zero=stage0' (default: the first)"
    )
    usual = f"default: {','.join(METRICS)}; final_loss where no run has a validation loss"
    parser.add_argument("--metrics", help=f"keys of summary.json ({usual})")
    parser.add_argument("--format", default="markdown", choices=[form.value for form in TableFormat])
    given = parser.parse_args(words)
    found = compare(given.folders, baseline=given.baseline, metrics=given.metrics and given.metrics.split(","))
    print(render(found, form=TableFormat(given.format)))
    return 0


def _profile(words: list[str]) -> int:
    import webbrowser

    from ztk.report.viewer import PERFETTO, PORT, open_trace

    parser = argparse.ArgumentParser(
        prog="python -m ztk.report profile",
        description=f"Opens a trace in {PERFETTO}, which fetches it from 127.0.0.1:{PORT}.",
    )
    parser.add_argument("folder", metavar="RUN", help="the folder of a run with train.profile=START:STOP")
    parser.add_argument("--rank", type=int, default=0, help="whose trace (default: 0)")
    given = parser.parse_args(words)

    def show(address: str) -> None:
        print(f"opens {address}", flush=True)
        webbrowser.open(address)

    open_trace(given.folder, rank=given.rank, show=show)
    return 0


def _html(words: list[str]) -> int:
    from ztk.report.html.page import NAME, SECONDS, choose_target, follow, write_report

    parser = argparse.ArgumentParser(
        prog="python -m ztk.report html", description="One HTML file about runs; it loads nothing from the network."
    )
    parser.add_argument("folder", metavar="FOLDER", help="a run, a sweep, or a folder of runs")
    parser.add_argument("--to", metavar="FILE", help=f"the file to write (default: {NAME} in the folder)")
    parser.add_argument(
        "--live",
        type=float,
        nargs="?",
        const=SECONDS,
        metavar="SECONDS",
        help=f"follow running jobs: rewrite the file as they change, at most every SECONDS (default: {SECONDS:g})",
    )
    given = parser.parse_args(words)
    if given.live is None:
        written = write_report(given.folder, to=given.to)
    else:
        print(f"follows {given.folder}; open {choose_target(given.folder, to=given.to)}", flush=True)
        written = follow(given.folder, to=given.to, seconds=given.live)
    print(f"{written} ({written.stat().st_size / 1e6:.1f} MB)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
