"""Computes which share of a trace's copies and collectives overlaps with computing, from intervals of Chrome trace events.

overlap = overlap_of(events, seconds=0.3, steps=3, host_seconds=0.2)
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

Event = dict[str, Any]
BACKWARD = 2 / 3  # of the kernels' time, without recomputation: two of the three products of each weight
Spans = list[tuple[float, float]]  # microseconds, in order, none touching the next


@dataclass(frozen=True, kw_only=True, slots=True)
class Overlap:
    """Seconds per step. compute: kernels without collectives. to_device, from_device: copies. wire: collectives. host: the update in main
    memory.

    step: time from start to end. hidden: share of copies and collectives during which kernels compute; None without copies and collectives.
    of_longest: the step divided by the longest of compute, copies, wire, and the backward followed by the host's update, which a clipped
    step cannot start earlier; None for a trace without GPU work.
    """

    step: float
    compute: float
    to_device: float
    from_device: float
    wire: float
    host: float
    hidden: float | None
    of_longest: float | None


def overlap_of(events: Iterable[Event], *, seconds: float, steps: int, host_seconds: float = 0.0) -> Overlap:
    """The overlap per step. events: a trace of `steps` steps that took `seconds` in total, and `host_seconds` of updates on the host."""
    known = [event for event in events if event.get("ph") == "X"]
    compute = spans(known, keep=lambda event: _is_kernel(event) and not _is_collective(event))
    wire = spans(known, keep=lambda event: _is_kernel(event) and _is_collective(event))
    to_device, from_device = (spans(known, keep=_copies(way)) for way in ("HtoD", "DtoH"))
    moved = merged([*wire, *to_device, *from_device])
    lanes = [length(lane) for lane in (compute, wire, to_device, from_device)]
    longest = max(*lanes, BACKWARD * lanes[0] + 1e6 * host_seconds)
    return Overlap(
        step=seconds / steps,
        compute=length(compute) / 1e6 / steps,
        to_device=length(to_device) / 1e6 / steps,
        from_device=length(from_device) / 1e6 / steps,
        wire=length(wire) / 1e6 / steps,
        host=host_seconds / steps,
        hidden=length(common(moved, compute)) / length(moved) if moved else None,
        of_longest=seconds * 1e6 / longest if any(lanes) else None,
    )


def spans(events: Iterable[Event], *, keep: Callable[[Event], bool]) -> Spans:
    """The intervals in which at least one of the kept events runs."""
    return merged([(event["ts"], event["ts"] + event["dur"]) for event in events if keep(event)])


def merged(given: Spans) -> Spans:
    """The union of intervals in any order."""
    found: Spans = []
    for start, stop in sorted(given):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], stop)
        else:
            found.append((start, stop))
    return found


def common(first: Spans, second: Spans) -> Spans:
    """The intersection of two results of `merged`."""
    found, i, j = [], 0, 0
    while i < len(first) and j < len(second):
        start, stop = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if start < stop:
            found.append((start, stop))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return found


def length(given: Spans) -> float:
    """Microseconds."""
    return sum(stop - start for start, stop in given)


def _is_kernel(event: Event) -> bool:
    return event.get("cat") == "kernel" or (event.get("cat") == "gpu_memcpy" and "DtoD" in event["name"])


def _is_collective(event: Event) -> bool:
    return "nccl" in event["name"].lower()


def _copies(way: str) -> Callable[[Event], bool]:
    return lambda event: event.get("cat") == "gpu_memcpy" and way in event["name"]
