"""Compares the code and the clocks of the nodes: a node with other code would train another model without an error."""

import hashlib
import importlib.metadata
import logging
import platform
import socket
import sys
import sysconfig
import time
from pathlib import Path

from ztk.core.runtime.process import Process

logger = logging.getLogger(__name__)
_CLOCK_SECONDS = 5.0  # more than a busy node needs to answer after a barrier
_PACKAGES = ("torch", "triton", "numpy", "transformers")  # compared by their versions


def check_sources(process: Process) -> None:
    """Compares this rank's modules with rank 0's, if the ranks are on several nodes. A collective call.

    Modules that both have imported are compared by the bytes of their files, libraries by their versions.

    Raises:
        ValueError: a module or a version differs. Names them and both hosts.
    """
    if process.local_world_size == process.world_size:
        return
    own, host = sources(), socket.gethostname()
    first_host, first = process.comm.broadcast_object((host, own), label="sources")
    differ = sorted(name for name in own.keys() & first.keys() if own[name] != first[name])
    if differ:
        shown = ", ".join(f"{name} {own[name]} for {first[name]}" if " " in name else name for name in differ[:5])
        raise ValueError(
            f"rank {process.rank} on {host} runs other code than rank 0 on {first_host}: {shown}"
            f"{', ...' if len(differ) > 5 else ''}; install the same files on all nodes, or start from a shared folder"
        )


def check_clocks(process: Process) -> None:
    """Rank 0 warns if the clocks of the nodes differ by more than five seconds, if there are several. A collective call.

    The first cause of a failure is the earliest error by these clocks.
    """
    if process.local_world_size == process.world_size:
        return
    process.comm.barrier()
    found = process.comm.collect_objects((time.time(), socket.gethostname()), label="clocks")
    if found is None:
        return
    (early, behind), (late, ahead) = min(found), max(found)
    if late - early > _CLOCK_SECONDS:
        logger.warning(
            "The clock of %s is %.0f s ahead of the clock of %s: set both by NTP, or the first error of a failure may be another rank's",
            ahead,
            late - early,
            behind,
        )


def sources() -> dict[str, str]:
    """Name of each imported module outside of the standard library and of installed packages, and of ztk's -> the hash of its file.

    `version of NAME` -> the version of a library or of Python.
    """
    found = {"version of python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[f"version of {name}"] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    libraries = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        is_own = name.partition(".")[0] == "ztk"
        if name == "__main__" or not isinstance(file, str) or not file.endswith(".py"):
            continue
        if is_own or not file.startswith(libraries):
            try:
                found[name] = hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16]
            except OSError:  # a module of an archive or of a test
                continue
    return found
