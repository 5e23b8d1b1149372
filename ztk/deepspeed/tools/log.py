"""The logger. It writes to standard output unless the program has configured logging itself."""

import logging
import sys
from collections.abc import Sequence

import torch.distributed as dist

logger = logging.getLogger("ztk.deepspeed")


def show_messages(level: str | None) -> None:
    """Called by `initialize`. level: `log_level` in the configuration, info by default."""
    if not logger.hasHandlers():
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("[ztk] %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False
    if level is not None or logger.level == logging.NOTSET:
        logger.setLevel((level or "info").upper())


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Logs on the `ranks`. [-1] means all, None only before the ranks are connected."""
    connected = dist.is_available() and dist.is_initialized()
    rank = dist.get_rank() if connected else -1
    wanted = ranks and (ranks[0] == -1 or rank in ranks)
    if wanted or not connected:
        logger.log(level, "[Rank %d] %s", rank, message)


def print_dist(message: str, ranks: Sequence[int] | None = None) -> None:
    """Prints on the `ranks`, like `log_dist` but regardless of the log level."""
    connected = dist.is_available() and dist.is_initialized()
    rank = dist.get_rank() if connected else -1
    if not connected or (ranks and (ranks[0] == -1 or rank in ranks)):
        sys.stdout.write(f"[Rank {rank}] {message}\n")
