"""Starting ranks, stopping them, and finding out which failed first. Imports no torch."""

from ztk.launch.errors import RankError, RankFailure, failure_of, first_cause, log_path, read_failure, write_failure
from ztk.launch.external import Agreement, ExternalRank
from ztk.launch.ranks import run_ranks, worker_command

__all__ = [
    "Agreement",
    "ExternalRank",
    "RankError",
    "RankFailure",
    "failure_of",
    "first_cause",
    "log_path",
    "read_failure",
    "run_ranks",
    "worker_command",
    "write_failure",
]
