"""Decoding on a GPU as one CUDA graph per number of rows, captured when it is needed first.

A decode step launches about ten kernels per layer, which the host takes longer to launch than the GPU to run. A graph has them all, from
the embedding to the last norm. Inputs that change from step to step (tokens, positions, places and tiles) are copied into its buffers
first. Draws follow outside of the graph, by the same code as without one, so sequences with different ways of sampling share it; the host
launches them while the graph runs. Rows are padded to a power of two: padding has no place in the
cache, a tile without positions, which is zero, and no result. A graph reads the cache's tables up to a power of two blocks, so that longer
sequences rarely need another graph.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ztk.inference.base import Model
from ztk.inference.cache import Cache, Span, Step
from ztk.inference.model import InferenceModel
from ztk.kernels import TILE_COLUMNS, make_tiles
from ztk.kernels.launch.grids import next_power_of_2
from ztk.kernels.shared.cached_attention import BLOCK

# From a function to a graph with `replay` of its launches, and the tensor of any shape into which the graph writes. Tests replace
# `CudaCapture`.
Capture = Callable[[Callable[[], Tensor]], tuple[Any, Tensor]]


class CudaCapture:
    """Graphs of `torch.cuda`; all share one pool of memory, because one runs at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, compute: Callable[[], Tensor]) -> tuple[Any, Tensor]:
        """Captures `compute`, whose result has any shape. The first run is outside of the graph: kernels are compiled in it."""
        compute()
        graph = torch.cuda.CUDAGraph()
        # By default, a call that is unsafe in a capture ends it, from any thread. Other threads query events and copy
        # meanwhile: the watchdogs of collectives, ours and NCCL's, and stores in main memory.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            results = compute()
        return graph, results


@dataclass(frozen=True, kw_only=True, slots=True)
class _Captured:
    """A graph and its buffers: tokens int64 [rows] and the step's; results [rows, C]."""

    graph: Any
    tokens: Tensor
    step: Step
    results: Tensor


class DecodeGraphs:
    """Forwards of steps in which each sequence has one row of the base."""

    def __init__(self, model: InferenceModel, *, cache: Cache, capture: Capture) -> None:
        self._model, self._cache, self._capture = model, cache, capture
        of = model.description
        self._group = of.heads // of.kv_heads
        self._captured: dict[tuple[int, int], _Captured] = {}  # by rows and blocks of a table

    @property
    def captured(self) -> int:
        """Graphs so far."""
        return len(self._captured)

    def run(self, tokens: list[int], *, spans: list[Span]) -> Tensor:
        """Computes one row per span, whose places are in the cache's tables: the last norm's output [rows, C], valid until the next run."""
        rows, slots = len(spans), [span.slot for span in spans]
        size, width = next_power_of_2(rows), next_power_of_2(max(len(self._cache.tables[slot]) for slot in slots))
        found = self._captured.get((size, width))
        if found is None:
            found = self._captured[size, width] = self._new(size, width=width)
        places = [self._place(span) for span in spans]
        tiles = make_tiles([(span.slot, span.start, 1, row) for row, span in enumerate(spans)], group=self._group)
        padding = size - rows
        _fill(found.tokens, tokens + [0] * padding)
        _fill(found.step.positions, [span.start for span in spans] + [0] * padding)
        _fill(found.step.places, places + [-1] * padding)
        self._cache.on_device.update(slots)
        _fill(found.step.tiles, tiles + [[0, 0, row, 0, 0] for row in range(rows, size)])
        found.graph.replay()
        return found.results[:rows]

    def _place(self, span: Span) -> int:
        return self._cache.tables[span.slot][span.start // BLOCK] * BLOCK + span.start % BLOCK

    def _new(self, rows: int, *, width: int) -> _Captured:
        """A graph over buffers of padding alone."""

        def empty(*shape: int, dtype: torch.dtype, value: int = 0) -> Tensor:
            return torch.full(shape, value, dtype=dtype, device=self._model.placement.device)

        tokens = empty(rows, dtype=torch.int64)
        step = Step(
            cache=self._cache,
            positions=empty(rows, dtype=torch.int64),
            places=empty(rows, dtype=torch.int64, value=-1),
            tables=self._cache.on_device.tensor[:, :width],
            tiles=empty(rows, TILE_COLUMNS, dtype=torch.int32),
            split=True,
        )
        graph, results = self._capture(lambda: self._model.compute(tokens, step=step))
        return _Captured(graph=graph, tokens=tokens, step=step, results=results)


def _fill(buffer: Tensor, values: list) -> None:
    """Copies from page-locked memory, so that the host does not wait. The buffer is unused: the previous step has ended."""
    source = torch.tensor(values, dtype=buffer.dtype, pin_memory=buffer.device.type == "cuda")
    buffer.copy_(source, non_blocking=True)


def graphs_of(model: Model, *, cache: Cache) -> DecodeGraphs | None:
    """Graphs of decoding, if one rank computes the model on a GPU and all layers are there. Ranks that share a model begin each step with a
    broadcast, which cannot be captured, and the host waits for layers that are streamed."""
    if not isinstance(model, InferenceModel) or not model.can_draw or model.placement.device.type != "cuda":
        return None
    if not isinstance(model.weights.layers, list):
        return None
    return DecodeGraphs(model, cache=cache, capture=CudaCapture())
