"""How fast layers are read, and how long a pass computes: measured when a model is opened, for the plan."""

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from ztk.inference.cache import Cache
from ztk.inference.model import InferenceModel
from ztk.inference.plan import Rates
from ztk.inference.policy import SamplingParams
from ztk.inference.probe import random_rows
from ztk.inference.sample import draw
from ztk.inference.steps import Span, Step
from ztk.inference.stream import StreamedLayers

_READ_SECONDS = 0.3  # at least, and every buffer of the ring once
_FEW, _MANY = 2, 64  # rows
_SLOTS = 4  # of a cache that the plan does not count: rows share them, which reads the same keys
_AT = 256  # position at most of the rows that are measured
_ROUNDS = 3
_DRAWS = 4


def measure(model: InferenceModel, *, layers: StreamedLayers, positions: int) -> Rates:
    """The rates of this machine for this model. positions: tokens of a sequence; half of them are before the rows that are measured."""
    with torch.inference_mode():
        few, many = (_pass_seconds(model, rows=rows, at=min(positions // 2, _AT)) for rows in (_FEW, _MANY))
        drawing = _seconds(lambda: _draw(model)) / _DRAWS
    per_row = max(1e-9, (many - few) / (_MANY - _FEW))
    return Rates(link=_link(layers), pass_seconds=max(0.0, few - _FEW * per_row), row_seconds=per_row + drawing)


def _link(layers: StreamedLayers) -> float:
    """Bytes per second of reads that nothing computes beside."""
    layers.settle()
    before, started = layers.counters.read_bytes, time.perf_counter()
    while time.perf_counter() - started < _READ_SECONDS:
        for _ in layers:
            if time.perf_counter() - started >= _READ_SECONDS:
                break
    layers.settle()
    return (layers.counters.read_bytes - before) / (time.perf_counter() - started)


def _pass_seconds(model: InferenceModel, *, rows: int, at: int) -> float:
    """Of all layers and the head for `rows` sequences with one row each, by the layers in memory in turn."""
    of, held = model.description, itertools.cycle(model.weights.layers.held)
    cache = Cache(replace(of, layers=1, windows=of.windows[:1], tables=of.tables[:1]), slots=_SLOTS)
    cache.reserve(at + 1)
    spans = [Span(slot=row % _SLOTS, start=at, length=1, row=row) for row in range(rows)]
    tokens, x = torch.zeros(rows, dtype=torch.int64), random_rows(rows, columns=of.dim)

    def block() -> None:
        model.block(x, layer=next(held), number=0, step=step, cache=cache)

    step = Step(spans, group=of.heads // of.kv_heads)
    ends = _seconds(lambda: model.logits(model.norm(model.embed(tokens, step=step), by=model.weights.norm)))
    return of.layers * _seconds(block) + ends


def _draw(model: InferenceModel) -> None:
    line = random_rows(1, columns=model.description.vocab_size)[0]
    for _ in range(_DRAWS):
        draw(line, sampling=SamplingParams(), prompt=[0], answer=[], sample=0)


def _seconds(run: Callable[[], object]) -> float:
    """The median, after one run that is not counted."""
    run()
    found = []
    for _ in range(_ROUNDS):
        started = time.perf_counter()
        run()
        found.append(time.perf_counter() - started)
    return statistics.median(found)
