"""The communication log: every logged call with its size, its seconds and its bandwidth.

Bandwidths are in Gbit/s. `algbw` is the operation's data divided by its time. `busbw` is the traffic of a link, which can be compared
with the hardware for any number of ranks n: an all-reduce of s bytes moves 2 (n - 1) / n s over each link, and a gather or scatter of s
bytes per rank moves (n - 1) s (method of nccl-tests, https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md).
"""

import datetime
from dataclasses import dataclass, field

import torch.distributed as dist

from ztk.deepspeed.tools.log import logger
from ztk.deepspeed.tools.timers import trim_mean

_PARTS = ("all_gather", "all_gather_into_tensor", "reduce_scatter", "reduce_scatter_tensor")
_SUMS = ("all_reduce", "all_reduce_coalesced", "inference_all_reduce")
_EXCHANGES = ("all_to_all", "all_to_all_single")
_COLUMNS = ("Comm. Op", "Message Size", "Count", "Total Latency(ms)", "Avg Latency(ms)")
_BANDWIDTHS = ("tput_avg (Gbps)", "busbw_avg (Gbps)")
_STRAGGLER = ("Total comm lat(ms)", "Total straggler(ms)", "Avg comm lat(ms)", "Avg straggler(ms)")


@dataclass(kw_only=True, slots=True)
class LogSwitches:
    """Selects the logged calls: none unless enabled; then all operations, or the named ones and calls with prof=True. debug: logs the
    caller.
    """

    enabled: bool = False
    verbose: bool = False
    prof_all: bool = True
    debug: bool = False
    prof_ops: tuple[str, ...] = ()

    def wants(self, name: str, *, prof: bool) -> bool:
        """Returns whether to log a call of operation `name`. prof: the call's own argument."""
        return self.enabled and (prof or self.prof_all or name in self.prof_ops)


@dataclass(frozen=True, kw_only=True, slots=True)
class Bandwidth:
    """In Gbit/s."""

    algbw: float
    busbw: float


def bandwidth(operation: str, *, nbytes: int, seconds: float, ranks: int) -> Bandwidth:
    """Returns the bandwidth of one call. nbytes: size of one rank's input."""
    if seconds <= 0:
        return Bandwidth(algbw=0.0, busbw=0.0)
    data, wire = nbytes, 1.0
    if operation in _PARTS:
        data, wire = nbytes * ranks, (ranks - 1) / ranks
    elif operation in _SUMS:
        data, wire = 2 * nbytes, (ranks - 1) / ranks
    elif operation in _EXCHANGES:
        wire = (ranks - 1) / ranks
    algbw = 8e-9 * data / seconds
    return Bandwidth(algbw=algbw, busbw=algbw * wire)


@dataclass(kw_only=True, slots=True)
class Calls:
    """The calls of one operation with one size. seconds: per call."""

    operation: str
    nbytes: int
    ranks: int
    seconds: list[float] = field(default_factory=list)

    def metrics(self) -> dict[str, object]:
        """Returns count, milliseconds, bandwidths in Gbit/s and bytes, by name."""
        rates = [bandwidth(self.operation, nbytes=self.nbytes, seconds=s, ranks=self.ranks) for s in self.seconds]
        return {
            "count": len(self.seconds),
            "total_latency_ms": 1000 * sum(self.seconds),
            "avg_latency_ms": 1000 * trim_mean(self.seconds),
            "tput_avg_gbps": trim_mean([rate.algbw for rate in rates]),
            "busbw_avg_gbps": trim_mean([rate.busbw for rate in rates]),
            "msg_size_bytes": self.nbytes,
            "msg_size_str": size_text(self.nbytes),
        }


class CommsLog:
    """This rank's logged calls, by name and size."""

    def __init__(self) -> None:
        self.switches = LogSwitches()
        self.records: dict[str, dict[int, Calls]] = {}

    def append(self, name: str, *, operation: str, nbytes: int, seconds: float, ranks: int) -> None:
        calls = self.records.setdefault(name, {}).setdefault(
            nbytes, Calls(operation=operation, nbytes=nbytes, ranks=ranks)
        )
        calls.seconds.append(seconds)
        if self.switches.verbose and dist.get_rank() == 0:
            rate = bandwidth(operation, nbytes=nbytes, seconds=seconds, ranks=ranks)
            logger.info(
                "comm op: %s | time (ms): %.2f | msg size: %s | algbw (Gbps): %.2f | busbw (Gbps): %.2f",
                *(name, 1000 * seconds, size_text(nbytes), rate.algbw, rate.busbw),
            )

    def count(self) -> int:
        """Returns the number of logged calls."""
        return sum(len(calls.seconds) for sizes in self.records.values() for calls in sizes.values())

    def summary(self) -> dict[str, dict[int, dict]]:
        return {
            name: {size: sizes[size].metrics() for size in sorted(sizes)} for name, sizes in list(self.records.items())
        }

    def stragglers(self) -> dict[str, dict[int, dict]]:
        """Returns for each call the time on the fastest rank and the additional time here, which is spent waiting for other ranks.

        A collective call. Only includes operations that all ranks have called equally often.
        """
        own = {
            name: {size: calls.seconds for size, calls in sizes.items()} for name, sizes in list(self.records.items())
        }
        everyone: list[dict] = [{}] * dist.get_world_size()
        dist.all_gather_object(everyone, own)
        found: dict[str, dict[int, dict]] = {}
        for name, sizes in own.items():
            for size, seconds in sorted(sizes.items()):
                columns = [other.get(name, {}).get(size, ()) for other in everyone]
                if len({len(column) for column in columns}) > 1:
                    continue
                fastest = [min(call) for call in zip(*columns, strict=True)]
                late = [mine - least for mine, least in zip(seconds, fastest, strict=True)]
                found.setdefault(name, {})[size] = {
                    "count": len(seconds),
                    "total_comm_lat_ms": 1000 * sum(fastest),
                    "total_straggler_ms": 1000 * sum(late),
                    "avg_comm_lat_ms": 1000 * trim_mean(fastest),
                    "avg_straggler_ms": 1000 * trim_mean(late),
                    "msg_size_bytes": size,
                    "msg_size_str": size_text(size),
                }
        return found

    def result(self, *, stragglers: dict | None) -> dict[str, object]:
        """Returns the dictionary of DeepSpeed's `log_summary(return_dict=True)`."""
        return {
            "summary": self.summary(),
            "straggler_analysis": stragglers,
            "metadata": {
                "world_size": dist.get_world_size(),
                "rank": dist.get_rank(),
                "timestamp": datetime.datetime.now().isoformat(),
            },
        }


def table(result: dict[str, object]) -> str:
    """Formats the result for printing."""
    lines = [_row(*_COLUMNS, *_BANDWIDTHS)]
    keys = ("count", "total_latency_ms", "avg_latency_ms", "tput_avg_gbps", "busbw_avg_gbps")
    lines += _rows(result["summary"], keys=keys)
    if result["straggler_analysis"] is not None:
        title = "Breakdown with straggler effect"
        lines += ["_" * len(title), title, "-" * len(title), _row(*_COLUMNS[:3], *_STRAGGLER)]
        keys = ("count", "total_comm_lat_ms", "total_straggler_ms", "avg_comm_lat_ms", "avg_straggler_ms")
        lines += _rows(result["straggler_analysis"], keys=keys)
    return "\n".join(lines)


def _rows(part: dict, *, keys: tuple[str, ...]) -> list[str]:
    lines = []
    for name, sizes in part.items():
        lines.append(name)
        for metrics in sizes.values():
            cells = [metrics[key] if key == "count" else f"{metrics[key]:.2f}" for key in keys]
            lines.append(_row("", metrics["msg_size_str"], *cells))
    return lines


def _row(*cells: object) -> str:
    return "".join(f"{cell!s:<20}" for cell in cells).rstrip()


def size_text(nbytes: float) -> str:
    """Formats bytes like `16.0 MB`, in steps of 1024."""
    if not nbytes:
        return "0B"
    for unit in ("B", "KB", "MB", "GB"):
        if nbytes < 1024:
            return f"{round(nbytes, 2)} {unit}"
        nbytes /= 1024
    return f"{round(nbytes, 2)} TB"
