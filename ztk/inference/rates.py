"""Measures the rates of reading and computing layers when a model is opened, for the plan."""

import itertools
import math
import statistics
import time
from collections.abc import Callable

import torch

from ztk.inference.cache import Span
from ztk.inference.capacity import Rates
from ztk.inference.device_stream import DeviceLayers
from ztk.inference.model import InferenceModel
from ztk.inference.module_stream import StreamedModuleModel
from ztk.inference.policy import SamplingParams
from ztk.inference.probe import random_rows
from ztk.inference.sample import Draw, draw
from ztk.inference.stream import BUFFERS, StreamedLayers

_READ_SECONDS = 0.3  # at least, and every buffer of the ring once
_FEW, _MANY = 2, 64  # rows
_AT = 256  # position at most of the rows that are measured
_ROUNDS = 3
_DRAWS = 4


@torch.inference_mode()
def measure(
    model: InferenceModel | StreamedModuleModel, *, layers: StreamedLayers | DeviceLayers, positions: int
) -> Rates:
    """The rates of this machine for this model, over `layers` afterwards. positions: tokens of a sequence; half of them are before the rows
    that are measured, which share its keys.

    A model that runs its own modules computes complete passes, another one the layers in memory.
    """
    at, count, is_own = min(positions // 2, _AT), layers.file.count, isinstance(model, InferenceModel)
    cache, held = model.scratch(at + 1), layers.held
    held = held if is_own else list(itertools.islice(itertools.cycle(held), count))

    def run(rows: int) -> None:
        spans = [Span(slot=0, start=at, length=1, row=row) for row in range(rows)]
        found = model.own_logits(torch.zeros(rows, dtype=torch.int64), spans=spans, cache=cache, rows=list(range(rows)))
        found[:1, :1].cpu()  # a GPU has ended then

    def each(rows: int) -> tuple[float, float]:
        """Seconds of a layer, and of everything else."""
        ends = 0.0
        if is_own:
            model.stream([])
            ends = _seconds(lambda: run(rows))
        model.stream(held)
        return max(0.0, _seconds(lambda: run(rows)) - ends) / len(held), ends

    (layer, ends), (more, more_ends) = each(_FEW), each(_MANY)
    few, many = layer * count + ends, more * count + more_ends
    drawing, link = _seconds(lambda: _draw(model)) / _DRAWS, _link(layers)
    wanted = max(2 * BUFFERS, math.ceil(_READ_SECONDS / max(layer, layers.file.nbytes / link)))
    if model.ranks is not None:
        wanted = max(model.ranks.gather(wanted))  # ranks compute together
    together = min(wanted, count) if is_own else count
    rounds = -(-wanted // together) if is_own else _ROUNDS
    seconds, nbytes = _streamed(lambda: run(_FEW), model=model, layers=layers, together=together, rounds=rounds)
    serial = _not_hidden(seconds, reading=nbytes / link, computing=rounds * (together * layer + ends))
    model.stream(layers)
    per_row = max(1e-9, (many - few) / (_MANY - _FEW))
    return Rates(link=link, pass_seconds=max(0.0, few - _FEW * per_row), row_seconds=per_row + drawing, serial=serial)


def _streamed(
    run: Callable[[], None],
    *,
    model: InferenceModel | StreamedModuleModel,
    layers: StreamedLayers | DeviceLayers,
    together: int,
    rounds: int,
) -> tuple[float, int]:
    """Seconds and bytes read of `rounds` runs over `together` layers each, which are read meanwhile."""
    following = itertools.chain.from_iterable(itertools.repeat(layers))
    layers.settle()
    before, started = layers.counters.read_bytes, time.perf_counter()
    for _ in range(rounds):
        model.stream(itertools.islice(following, together))
        run()
    layers.settle()
    return time.perf_counter() - started, layers.counters.read_bytes - before


def _not_hidden(seconds: float, *, reading: float, computing: float) -> float:
    """Fraction of the shorter of the two that did not overlap, if both took `seconds` together."""
    return min(1.0, max(0.0, (seconds - max(reading, computing)) / max(1e-9, min(reading, computing))))


def _link(layers: StreamedLayers | DeviceLayers) -> float:
    """Bytes per second of reads without concurrent compute."""
    layers.settle()
    before, started = layers.counters.read_bytes, time.perf_counter()
    while time.perf_counter() - started < _READ_SECONDS:
        for _ in layers:
            if time.perf_counter() - started >= _READ_SECONDS:
                break
    layers.settle()
    return (layers.counters.read_bytes - before) / (time.perf_counter() - started)


def _draw(model: InferenceModel | StreamedModuleModel) -> None:
    line = random_rows(1, columns=model.description.vocab_size)[0]
    for _ in range(_DRAWS):
        draw(line, by=Draw(sampling=SamplingParams(), tokens=[0], prompt_length=1))


def _seconds(run: Callable[[], object]) -> float:
    """The median, after one run that is not counted."""
    run()
    found = []
    for _ in range(_ROUNDS):
        started = time.perf_counter()
        run()
        found.append(time.perf_counter() - started)
    return statistics.median(found)
