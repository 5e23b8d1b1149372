"""Traces and memory of some steps: `profile/rank{r}.trace.json.gz` and `profile/rank{r}.memory.json` in the run folder, from every rank.

The trace has Chrome's format (https://ui.perfetto.dev): operations, kernels on a GPU, and the ranges of `ztk.core.runtime.ranges`.
Autograd gives an operation's backward the sequence number of its forward. The row `backward by module` uses it to name the module whose
gradient is computed. On a GPU, `rank{r}.memory.pickle` has the allocator's history for https://pytorch.org/memory_viz.
"""

import gzip
import json
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ztk.core.policies.profile import ProfilePolicy
from ztk.core.runtime import MemoryLedger, Tier
from ztk.core.runtime.ranges import Recording, named, recorded
from ztk.report.viewer import FOLDER

BACKWARD = "backward by module"
MODULE = "module "  # prefix of a module's range
_NODE = "autograd::engine::evaluate_function"
_GPU_ENTRIES = 200_000  # entries of the allocator's history

Event = dict[str, Any]


class StepProfiler:
    """Profiles the steps of a policy on this rank. Every rank writes its own files, without synchronization."""

    def __init__(
        self,
        policy: ProfilePolicy | None,
        *,
        folder: str,
        rank: int,
        device: torch.device,
        module: nn.Module | None,
        ledger: MemoryLedger,
    ) -> None:
        """folder: the run folder. module: model whose modules are named in the trace. ledger: its bytes are written next to the memory
        timeline.
        """
        self._policy, self._folder, self._rank, self._device = policy, Path(folder, FOLDER), rank, device
        self._module, self._ledger = module, ledger
        self._profiler: Any = None
        self._recording: Recording | None = None
        self._open, self._step = ExitStack(), ExitStack()

    def begin(self, step: int) -> None:
        """Begins `step`."""
        if self._policy is None or not self._policy.first <= step <= self._policy.last:
            return
        if self._profiler is None:
            self._start()
        self._step.enter_context(named(f"step {step}"))

    def is_last(self, step: int) -> bool:
        """Returns whether `close` must follow `step`."""
        return self._profiler is not None and self._policy is not None and step >= self._policy.last

    def end(self) -> None:
        """Ends the step."""
        self._step.close()

    def close(self) -> str | None:
        """Stops the trace, after its last step or when the run ends, and writes it. Returns a message, or None without a trace."""
        if self._profiler is None:
            return None
        self._step.close()
        try:
            return self._stop()
        except OSError as error:
            return f"the traces in {self._folder} were not written: {error}"

    def _start(self) -> None:
        from torch.profiler import ProfilerActivity, profile  # imported late: only for runs that profile

        on_gpu = self._device.type == "cuda"
        if on_gpu:
            torch.cuda.synchronize(self._device)
            torch.cuda.memory._record_memory_history(max_entries=_GPU_ENTRIES)
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        self._profiler = profile(activities=activities, profile_memory=True)
        self._profiler.start()
        self._recording = self._open.enter_context(recorded(self._module))

    def _stop(self) -> str:
        on_gpu, profiler, recording = self._device.type == "cuda", self._profiler, self._recording
        assert recording is not None
        if on_gpu:
            torch.cuda.synchronize(self._device)
        self._open.close()
        profiler.stop()
        self._profiler = self._recording = None
        self._folder.mkdir(parents=True, exist_ok=True)
        name = f"rank{self._rank}"
        document = _exported(profiler)
        events = document["traceEvents"]
        events += [*_elsewhere(recording, document=document), *backward_by_module(events)]
        with gzip.open(self._folder / f"{name}.trace.json.gz", "wt", encoding="utf-8") as file:
            json.dump(document, file)
        memory = _memory(profiler, device="cuda" if on_gpu else "cpu") | {
            "booked": {tier.label: self._ledger.by_category(tier) for tier in Tier}
        }
        (self._folder / f"{name}.memory.json").write_text(json.dumps(memory), encoding="utf-8")
        if on_gpu:
            torch.cuda.memory._dump_snapshot(str(self._folder / f"{name}.memory.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)
        run = self._folder.parent
        return (
            f"traces and memory of the profiled steps: {self._folder}\n"
            f"open the trace in Perfetto: python -m ztk.report profile {run}{self._memory_viewer() if on_gpu else ''}"
        )

    def _memory_viewer(self) -> str:
        pickle = self._folder / f"rank{self._rank}.memory.pickle"
        return f"\nopen the memory in memory_viz: python -m torch.cuda._memory_viz trace_plot {pickle} -o memory.html"


def _exported(profiler: Any) -> dict[str, Any]:
    """Returns the profiler's trace as JSON."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        return json.loads(path.read_text(encoding="utf-8"))


def _elsewhere(recording: Recording, *, document: dict[str, Any]) -> Iterator[Event]:
    """Yields ranges of threads that the profiler does not record. Times in a trace are microseconds since `baseTimeNanoseconds`."""
    base = document.get("baseTimeNanoseconds", 0)
    pid = next((event["pid"] for event in document["traceEvents"] if event.get("cat") == "cpu_op"), 0)
    for found in recording.elsewhere:
        start, stop = ((moment - base) / 1e3 for moment in (found.start, found.stop))
        yield _slice(found.name, pid=pid, tid=found.thread, start=start, stop=stop)


def backward_by_module(events: list[Event]) -> list[Event]:
    """Returns slices for a separate row that names the module whose backward runs. events: the trace's, including ranges of modules."""
    module_of = _forward_modules(events)
    slices: list[Event] = []
    last: str | None = None  # module of the last slice
    nodes = [event for event in events if event.get("ph") == "X" and event["name"].startswith(_NODE)]
    for node in sorted(nodes, key=lambda event: event["ts"]):
        number = node.get("args", {}).get("Sequence number")
        module = None if number is None else module_of.get(number)
        if module is None and "AccumulateGrad" in node["name"]:
            module = last  # an accumulated gradient belongs to the node that computed it
        if module is None:
            continue
        start, stop = node["ts"], node["ts"] + node["dur"]
        if module == last:
            slices[-1]["dur"] = stop - slices[-1]["ts"]
        else:
            slices.append(_slice(f"backward of {module}", pid=node["pid"], tid=BACKWARD, start=start, stop=stop))
            last = module
    return slices


def _slice(name: str, *, pid: Any, tid: str, start: float, stop: float) -> Event:
    """Makes a slice. Times in microseconds of the trace."""
    return {"ph": "X", "cat": "user_annotation", "name": name, "pid": pid, "tid": tid, "ts": start, "dur": stop - start}


def _forward_modules(events: list[Event]) -> dict[int, str]:
    """Returns autograd's sequence number -> the innermost module in whose forward it was assigned.

    The last of recomputed forwards counts.
    """
    found: dict[int, str] = {}
    threads: dict[Any, list[Event]] = {}
    for event in events:
        is_range = event.get("ph") == "X" and event.get("cat") in ("user_annotation", "cpu_op")
        if is_range and not event["name"].startswith(_NODE):
            threads.setdefault(event["tid"], []).append(event)
    for inside in threads.values():
        running: list[tuple[float, str]] = []  # end and name of the running modules, outermost first
        for event in sorted(inside, key=lambda event: (event["ts"], -event["dur"])):
            while running and running[-1][0] <= event["ts"]:
                running.pop()
            if event["name"].startswith(MODULE):
                running.append((event["ts"] + event["dur"], event["name"].removeprefix(MODULE)))
            number = event.get("args", {}).get("Sequence number", -1)
            if running and number >= 0:
                found[number] = running[-1][1]
    return found


def _memory(profiler: Any, *, device: str) -> dict[str, Any]:
    """Returns the course of the allocated bytes of `device`, and their peak.

    `allocated` includes bytes from before the first step on a GPU. On a CPU, it counts from the start of the profile.
    """
    timeline, modules, start = [], [], None
    for node in _nodes(profiler.profiler.kineto_results.experimental_event_tree(), module=""):
        event, module = node
        fields = event.extra_fields
        if start is None:
            start = event.start_time_ns
        if type(fields).__name__.endswith("Allocation") and fields.device.type == device:
            timeline.append([(event.start_time_ns - start) / 1e3, fields.alloc_size, fields.total_allocated])
            modules.append(module)
    order = sorted(range(len(timeline)), key=lambda number: timeline[number][0])
    peak = max(order, key=lambda number: timeline[number][2], default=None)
    return {
        "device": device,
        "columns": ["microseconds", "bytes", "allocated"],
        "peak_bytes": None if peak is None else timeline[peak][2],
        "peak_module": None if peak is None else modules[peak],
        "timeline": [timeline[number] for number in order],
    }


def _nodes(nodes: Iterable[Any], *, module: str) -> Iterator[tuple[Any, str]]:
    """Yields the events of a tree with their innermost modules."""
    for node in nodes:
        inner = node.name.removeprefix(MODULE) if node.name.startswith(MODULE) else module
        yield node, inner
        yield from _nodes(node.children, module=inner)
