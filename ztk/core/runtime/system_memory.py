"""Main memory as Linux counts it, in bytes, under the kernel's names (proc_meminfo(5), proc_pid_status(5))."""

from pathlib import Path

CONTROL_GROUP = Path("/sys/fs/cgroup")


def machine_memory() -> dict[str, int]:
    """Memory of the machine: `MemTotal`, `MemAvailable` (available to a new program), `SwapFree` and others. Empty on other systems."""
    return _read(Path("/proc/meminfo"))


def process_memory() -> dict[str, int]:
    """Memory of this process: `VmRSS` (resident now), `VmHWM` (peak resident) and others. Empty on other systems."""
    found = _read(Path("/proc/self/status"))
    if found:
        found["VmHWM"] = max(found["VmHWM"], found["VmRSS"])  # the kernel updates it late
    return found


def memory_limit() -> int | None:
    """The limit of this process's control group, such as a container's or a Slurm job's. None without one, or with version 1."""
    file = CONTROL_GROUP / "memory.max"
    text = file.read_text().strip() if file.is_file() else "max"
    return None if text == "max" else int(text)


def process_limit() -> int | None:
    """The number of processes and threads that the control group may have. None without a limit, or with version 1."""
    file = CONTROL_GROUP / "pids.max"
    text = file.read_text().strip() if file.is_file() else "max"
    return None if text == "max" else int(text)


def available_memory() -> int:
    """Bytes that this process may still take: the machine's, or the rest up to the control group's limit.

    The page cache counts as free in both: a model that was just read or packed fills it.
    """
    free, limit = machine_memory()["MemAvailable"], memory_limit()
    if limit is None:
        return free
    held = dict(line.split() for line in (CONTROL_GROUP / "memory.stat").read_text().splitlines())
    cached = int(held["inactive_file"]) + int(held["active_file"])
    return min(free, limit - int((CONTROL_GROUP / "memory.current").read_text()) + cached)


def _read(path: Path) -> dict[str, int]:
    lines = (line.split() for line in (path.read_text().splitlines() if path.is_file() else ()))
    return {words[0].rstrip(":"): 1024 * int(words[1]) for words in lines if words[2:] == ["kB"]}
