"""Main memory as Linux counts it, in bytes, under the kernel's names (proc_meminfo(5), proc_pid_status(5))."""

from pathlib import Path


def machine_memory() -> dict[str, int]:
    """Memory of the machine: `MemTotal`, `MemAvailable` (available to a new program), `SwapFree` and others. Empty on other systems."""
    return _read(Path("/proc/meminfo"))


def process_memory() -> dict[str, int]:
    """Memory of this process: `VmRSS` (resident now), `VmHWM` (peak resident) and others. Empty on other systems."""
    found = _read(Path("/proc/self/status"))
    if found:
        found["VmHWM"] = max(found["VmHWM"], found["VmRSS"])  # the kernel updates it late
    return found


def _read(path: Path) -> dict[str, int]:
    lines = (line.split() for line in (path.read_text().splitlines() if path.is_file() else ()))
    return {words[0].rstrip(":"): 1024 * int(words[1]) for words in lines if words[2:] == ["kB"]}
