"""The command line on top of Hydra: arguments, jobs, tables of jobs, exit codes. Does not import torch."""

from ztk.cli.command import main
from ztk.cli.session import Session

__all__ = ["Session", "main"]
