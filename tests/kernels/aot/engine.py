"""The launches of the inference engine over blocks, from steps on tensors without memory.

The engine of a GPU machine computes prompts, decodes with and without CUDA graphs, and compares steps of several sizes when it opens.
"""

from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

import torch

from tests.kernels.aot.record import Launching
from ztk.inference.cache import Cache, Span
from ztk.inference.describe import describe
from ztk.inference.model import InferenceModel
from ztk.inference.placement import Placement
from ztk.inference.weights import WeightReader, collect
from ztk.kernels.shared.cached_attention import BLOCK
from ztk.nn import Decoder, DecoderConfig

META = torch.device("meta")


def steps(longest: int, *, sequences: int) -> Iterator[list[tuple[int, int]]]:
    """First position and number of rows for each sequence of a step. longest: tokens of a sequence."""
    last = longest - 1
    yield [(0, 1)]
    yield [(last, 1)]
    yield [(last, 1)] * sequences
    yield [(0, min(longest, 130))]
    yield [(0, longest)] * 2
    yield [(last, 1), (0, longest - 1)]


def run_engine(config: DecoderConfig, *, dtype: torch.dtype, longest: int, sequences: int) -> None:
    """Runs the launchers of `steps`. Called inside `noting`."""
    config = replace(config, layers=1)  # the others launch the same
    with META:
        module = Decoder(config).to(dtype)
    module.materialise_buffers("cpu")
    subject, place = describe(module), Placement(device=META, dtype=dtype, by_kernels=True)
    with mock.patch.object(WeightReader, "_tensor", lambda reader, name: reader._state[name].detach()):  # no values
        weights = collect(dict(module.named_parameters()), description=subject.description, placement=place)
    engine, width = InferenceModel(subject, weights=weights, placement=place), -(-longest // BLOCK)
    cache = Cache(subject.description, slots=sequences, blocks=sequences * width, width=width, device=META, dtype=dtype)
    cache.tables[:] = [list(range(width)) for _ in range(sequences)]
    with torch.inference_mode(), Launching():
        cache.copy([(0, 1)])
        for rows in steps(longest, sequences=sequences):
            spans, count = [], 0
            for slot, (start, length) in enumerate(rows):
                spans.append(Span(slot=slot, start=start, length=length, row=count))
                count += length
            x = engine.forward(torch.zeros(count, dtype=torch.int64), spans=spans, cache=cache)
            engine.logits(x)
            heat, keys = (torch.empty(count, dtype=kind, device=META) for kind in (torch.float32, torch.int64))
            engine.draw(x, temperatures=heat, keys=keys)
