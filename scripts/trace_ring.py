"""Profiles ring attention and draws the overlap of computing with the exchange of keys and values as lanes.

    python scripts/trace_ring.py --to FOLDER                              2 and 4 ranks, a forward and a backward, seconds
    python scripts/trace_ring.py --to FOLDER --ranks 4 --tokens 8192

Each rank has two lanes: blocks of attention on the training thread, and exchanges on the communication thread. An exchange begins when the
thread takes it up and ends when this rank has sent and received. The share is the part of the exchange time in which the rank computes. Writes
FOLDER/ring-cpN.json, torch's trace of rank 0 for a browser, and FOLDER/ring-cpN.svg. Compares counted bytes with the formula of
`ztk.parallel.sequence.ring`; exit code 1 if they differ. With fewer cores than ranks, the ranks also wait for each other.
"""

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import matplotlib.pyplot as plt
import torch
from torch.profiler import ProfilerActivity, profile, record_function

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.bench import markdown, parser_of
from scripts.gpu_trace import Spans, common, length, merged
from tests.ranks import RankPool
from ztk.core.runtime import Process, Topology
from ztk.parallel.sequence import ring

HEADS, KEY_HEADS, HEAD_DIM = 8, 4, 64
COMPUTE, EXCHANGE = "compute", "exchange"
COLOURS = {COMPUTE: "tab:blue", EXCHANGE: "tab:orange"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Lanes:
    """The lanes of one rank, in milliseconds. elements: number sent around the ring in a forward and a backward."""

    spans: dict[str, Spans]
    elements: int

    @property
    def share(self) -> float:
        """The part of the exchange time in which the rank computes."""
        exchange, compute = (merged(self.spans[name]) for name in (EXCHANGE, COMPUTE))
        return length(common(exchange, compute)) / length(exchange)


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--to", type=Path, required=True, help="folder for traces and pictures")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--tokens", type=int, default=4096, help="of the full sequence, a multiple of twice the ranks")
    options = parser.parse_args()
    options.to.mkdir(parents=True, exist_ok=True)
    faults, rows = 0, []
    for world in options.ranks:
        pool = RankPool(world)
        try:
            lanes = pool.run(traced, tokens=options.tokens, trace=str(options.to / f"ring-cp{world}.json"))
        finally:
            pool.close()
        draw(lanes, path=options.to / f"ring-cp{world}.svg")
        formula = 6 * (world - 1) * options.tokens // world * KEY_HEADS * HEAD_DIM
        faults += any(each.elements != formula for each in lanes)
        shares = ", ".join(f"{each.share:.0%}" for each in lanes)
        rows.append((str(world), shares, f"{lanes[0].elements:,}", f"{formula:,}"))
    print(markdown(("ranks", "overlapped, by rank", "elements sent per rank", "formula"), rows))
    return 1 if faults else 0


def traced(process: Process, *, tokens: int, trace: str) -> Lanes:
    """On a rank: profiles one forward and backward after one of warm-up."""
    comm = process.arrange(Topology(context=process.world_size)).mesh.comm("cp")
    shapes = [(1, tokens // comm.size, heads, HEAD_DIM) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    query, key, value = (
        torch.randn(shape, generator=torch.Generator().manual_seed(comm.rank)).requires_grad_() for shape in shapes
    )

    def run() -> None:
        ring.ring_attention(query, key=key, value=value, comm=comm, label="trace").sum().backward()

    with ExitStack() as stack:
        for name in ("attention_block", "attention_block_backward"):
            stack.enter_context(mock.patch.object(ring, name, _recorded(COMPUTE, getattr(ring, name))))
        transport = comm._transport  # runs on the communication thread
        exchange = _recorded(EXCHANGE, transport.all_to_all_uneven)
        stack.enter_context(mock.patch.object(transport, "all_to_all_uneven", exchange))
        run()
        comm.counters.reset()
        comm.barrier()
        every_thread = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
        with profile(activities=[ProfilerActivity.CPU], experimental_config=every_thread) as found:
            run()
    if comm.rank == 0:
        found.export_chrome_trace(trace)
    spans: dict[str, Spans] = {COMPUTE: [], EXCHANGE: []}
    for event in found.events() or ():
        if event.name in spans:
            spans[event.name].append((event.time_range.start / 1e3, event.time_range.end / 1e3))
    return Lanes(spans=spans, elements=comm.counters.elements["ring"])


def _recorded(name: str, function: Callable) -> Callable:
    def call(*args: Any, **kwargs: Any) -> Any:
        with record_function(name):
            return function(*args, **kwargs)

    return call


def draw(lanes: Sequence[Lanes], *, path: Path) -> None:
    """Draws two lanes per rank; time starts at the first span."""
    figure, axes = plt.subplots(figsize=(10, 0.7 * len(lanes) + 1))
    for rank, each in enumerate(lanes):
        first = min(start for spans in each.spans.values() for start, _ in spans)
        for lane, (name, spans) in enumerate(each.spans.items()):
            bars = [(start - first, stop - start) for start, stop in spans]
            place = rank + 0.4 * lane
            axes.broken_barh(bars, (place, 0.36), color=COLOURS[name], edgecolor="white", label=None if rank else name)
    axes.set_yticks([rank + 0.38 for rank in range(len(lanes))], [f"rank {rank}" for rank in range(len(lanes))])
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds of a forward and a backward")
    axes.legend(loc="upper right")
    figure.savefig(path, bbox_inches="tight")
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
