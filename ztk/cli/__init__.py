"""The command line around Hydra: arguments, jobs, tables of jobs, exit codes. Imports no torch."""

from ztk.cli.command import main
from ztk.cli.session import Session

__all__ = ["Session", "main"]
