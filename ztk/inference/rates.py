"""Measures the rates of reading and computing layers when a model is opened, for the plan."""

import itertools
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from ztk.inference.model import InferenceModel
from ztk.inference.module_stream import StreamedModuleModel
from ztk.inference.parts import Values
from ztk.inference.plan import Rates
from ztk.inference.policy import SamplingParams
from ztk.inference.probe import random_rows
from ztk.inference.sample import DrawSteps, draw
from ztk.inference.slab_cache import SlabCache
from ztk.inference.steps import Span
from ztk.inference.stream import BUFFERS, StreamedLayers
from ztk.inference.weights import Layer

_READ_SECONDS = 0.3  # at least, and every buffer of the ring once
_FEW, _MANY = 2, 64  # rows
_SLOTS = 4  # of a cache that the plan does not count: rows share them, which reads the same keys
_AT = 256  # position at most of the rows that are measured
_ROUNDS = 3
_DRAWS = 4


def measure(model: InferenceModel, *, layers: StreamedLayers[Layer], positions: int) -> Rates:
    """The rates of this machine for this model. positions: tokens of a sequence; half of them are before the rows that are measured."""
    at = min(positions // 2, _AT)
    with torch.inference_mode():
        trial = _Trial(model, rows=_FEW, at=at)
        few, many = (_pass_seconds(one) for one in (trial, _Trial(model, rows=_MANY, at=at)))
        drawing = _seconds(lambda: _draw(model)) / _DRAWS
        link = _link(layers)
        serial = _serial(trial, layers=layers, link=link)
    return _rates(few=few, many=many, drawing=drawing, link=link, serial=serial)


def measure_modules(model: StreamedModuleModel, *, layers: StreamedLayers[Values], positions: int) -> Rates:
    """As `measure`, for a model that runs its own modules: in complete passes over the layers in memory, with the cache of one sequence."""
    at, count = min(positions // 2, _AT), layers.file.count
    cache = model.scratch(at + 1)

    def run(rows: int) -> None:
        spans = [Span(slot=0, start=at, length=1, row=row) for row in range(rows)]
        model.own_logits(torch.zeros(rows, dtype=torch.int64), spans=spans, cache=cache, rows=list(range(rows)))

    with torch.inference_mode():
        model.use(list(itertools.islice(itertools.cycle(layers.held), count)))
        few, many = (_seconds(partial(run, rows)) for rows in (_FEW, _MANY))
        drawing = _seconds(lambda: _draw(model)) / _DRAWS
        model.stream(layers)
        link = _link(layers)
        run(_FEW)
        layers.settle()
        before, started = layers.counters.read_bytes, time.perf_counter()
        for _ in range(_ROUNDS):
            run(_FEW)
        layers.settle()
        seconds = time.perf_counter() - started
    reading = (layers.counters.read_bytes - before) / link
    serial = _not_hidden(seconds, reading=reading, computing=_ROUNDS * few)
    return _rates(few=few, many=many, drawing=drawing, link=link, serial=serial)


def _rates(*, few: float, many: float, drawing: float, link: float, serial: float) -> Rates:
    """few, many: seconds of passes of `_FEW` and `_MANY` rows. drawing: seconds of a row's draw."""
    per_row = max(1e-9, (many - few) / (_MANY - _FEW))
    return Rates(link=link, pass_seconds=max(0.0, few - _FEW * per_row), row_seconds=per_row + drawing, serial=serial)


def _not_hidden(seconds: float, *, reading: float, computing: float) -> float:
    """Fraction of the shorter of the two that did not overlap, if both took `seconds` together."""
    return min(1.0, max(0.0, (seconds - max(reading, computing)) / max(1e-9, min(reading, computing))))


class _Trial:
    """Steps of `rows` rows. Rows after the first `_SLOTS` read the keys of another row."""

    def __init__(self, model: InferenceModel, *, rows: int, at: int) -> None:
        self.model, of = model, model.description
        cache = SlabCache(replace(of, layers=1, windows=of.windows[:1], tables=of.tables[:1]), slots=_SLOTS)
        cache.reserve(at + 1)
        spans = [Span(slot=row % _SLOTS, start=at, length=1, row=row) for row in range(rows)]
        self._step = cache.step(spans)
        self._tokens, self._x = torch.zeros(rows, dtype=torch.int64), random_rows(rows, columns=of.dim)

    def block(self, layer: Layer) -> None:
        """One layer."""
        self.model.block(self._x, layer=layer, number=0, step=self._step)

    def ends(self) -> None:
        """Embedding and head."""
        model = self.model
        model.logits(model.ops.norm(model.embed(self._tokens, step=self._step), by=model.weights.norm))


def _link(layers: StreamedLayers) -> float:
    """Bytes per second of reads without concurrent compute."""
    layers.settle()
    before, started = layers.counters.read_bytes, time.perf_counter()
    while time.perf_counter() - started < _READ_SECONDS:
        for _ in layers:
            if time.perf_counter() - started >= _READ_SECONDS:
                break
    layers.settle()
    return (layers.counters.read_bytes - before) / (time.perf_counter() - started)


def _serial(trial: _Trial, *, layers: StreamedLayers[Layer], link: float) -> float:
    """Fraction of the shorter of reading and computing that does not overlap, measured by computing layers as they are read."""
    held, ranks = itertools.cycle(trial.model.weights.layers.held), trial.model.ranks
    own = _seconds(lambda: trial.block(next(held)))
    count = max(2 * BUFFERS, math.ceil(_READ_SECONDS / max(own, layers.file.nbytes / link)))
    if ranks is not None:
        count = max(ranks.gather(count))  # ranks compute together
    layers.settle()
    before, started = layers.counters.read_bytes, time.perf_counter()
    for layer in itertools.islice(itertools.chain.from_iterable(itertools.repeat(layers)), count):
        trial.block(layer)
    layers.settle()
    seconds = time.perf_counter() - started
    reading = (layers.counters.read_bytes - before) / link
    return _not_hidden(seconds, reading=reading, computing=count * own)


def _pass_seconds(trial: _Trial) -> float:
    """Seconds of all layers and the head, cycling through the layers in memory."""
    held = itertools.cycle(trial.model.weights.layers.held)
    return trial.model.description.layers * _seconds(lambda: trial.block(next(held))) + _seconds(trial.ends)


def _draw(model: InferenceModel | StreamedModuleModel) -> None:
    line = random_rows(1, columns=model.description.vocab_size)[0]
    for _ in range(_DRAWS):
        draw(line, steps=DrawSteps(sampling=SamplingParams(), prompt=[0], answer=[]), sample=0)


def _seconds(run: Callable[[], object]) -> float:
    """The median, after one run that is not counted."""
    run()
    found = []
    for _ in range(_ROUNDS):
        started = time.perf_counter()
        run()
        found.append(time.perf_counter() - started)
    return statistics.median(found)
