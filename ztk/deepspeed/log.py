"""One logger; it writes to standard output unless the program has set up logging itself."""

import logging
import sys

logger = logging.getLogger("ztk.deepspeed")


def show_messages(level: str | None) -> None:
    """Called by `initialize`. level: of `log_level` in the configuration; None: info."""
    if not logger.hasHandlers():
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("[ztk] %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False
    if level is not None or logger.level == logging.NOTSET:
        logger.setLevel((level or "info").upper())
