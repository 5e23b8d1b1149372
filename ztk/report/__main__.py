"""python -m ztk.report [--folder PATH] [--run_ops]: ds_report for ztk. The exit code is 1 if an op does not run."""

import argparse
import sys

from ztk.report.machine import describe_machine, render


def main(arguments: list[str] | None = None) -> int:
    """Prints the report."""
    parser = argparse.ArgumentParser(prog="python -m ztk.report", description="What this machine can run.")
    parser.add_argument("--folder", default=".", help="where offload files would be stored (default: here)")
    parser.add_argument("--run_ops", action="store_true", help="run every op once; on a GPU this compiles them")
    given = parser.parse_args(arguments)
    sections = describe_machine(folder=given.folder, runs_ops=given.run_ops)
    print(render(sections))
    return int(any("does not run" in fault for section in sections for fault in section.faults))


if __name__ == "__main__":
    sys.exit(main())
