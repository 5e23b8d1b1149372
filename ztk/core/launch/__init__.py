"""Starting ranks, stopping them, and finding out which failed first. Imports no torch."""

from ztk.core.launch.errors import (
    RankError,
    RankFailure,
    earlier_cause,
    failure_from,
    failure_of,
    failure_text,
    first_cause,
    forget_failure,
    log_path,
    memory_path,
    read_failure,
    write_failure,
)
from ztk.core.launch.external import ExternalRank, is_restart, quoted, remember_folder, restarted
from ztk.core.launch.processes import Child, run_children, start_process
from ztk.core.launch.ranks import allocator_settings, python_path, run_ranks, worker_command

__all__ = [
    "Child",
    "ExternalRank",
    "RankError",
    "RankFailure",
    "allocator_settings",
    "earlier_cause",
    "failure_from",
    "failure_of",
    "failure_text",
    "first_cause",
    "forget_failure",
    "is_restart",
    "log_path",
    "memory_path",
    "python_path",
    "quoted",
    "read_failure",
    "remember_folder",
    "restarted",
    "run_children",
    "run_ranks",
    "start_process",
    "worker_command",
    "write_failure",
]
