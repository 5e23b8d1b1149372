"""What the rows of a step are drawn from: logits, or over blocks the tokens themselves, drawn by a kernel that writes no logits."""

import math

import torch
from torch import Tensor

from ztk.inference.block_cache import BlockCache
from ztk.inference.block_model import BlockModel
from ztk.inference.cache import Cache
from ztk.inference.graphs import DecodeGraphs
from ztk.inference.model import InferenceModel
from ztk.inference.sample import Drawn, draws_plainly, noise_key
from ztk.inference.schedule import Sequence, Work
from ztk.inference.steps import Span


def lines_of(
    tokens: list[int],
    *,
    model: InferenceModel | BlockModel,
    works: list[Work],
    needed: list[list[int]],
    spans: list[Span],
    cache: Cache | BlockCache,
    graphs: DecodeGraphs | None,
) -> list[Tensor | list[Drawn]]:
    """Computes a step. For each work, whose rows `needed` draw or are scored: logits fp32 [rows, V] on the CPU, or what was drawn.

    Which of the two depends on the sequence alone, so that its tokens do not depend on its neighbours.
    """
    rows = [[span.row + row for row in own] for span, own in zip(spans, needed, strict=True)]
    if not isinstance(model, BlockModel):
        assert isinstance(cache, Cache), "the model computes over slabs"
        flat = [row for own in rows for row in own]
        logits = model.step_logits(torch.tensor(tokens), spans=spans, cache=cache, rows=flat)
        return list(logits.split([len(own) for own in rows]))
    assert isinstance(cache, BlockCache), "the model computes over blocks"
    plain = [_is_drawn(work, rows=own) for work, own in zip(works, rows, strict=True)]
    if graphs is not None and all(plain) and len(tokens) == len(works):
        sequences = [work.sequence for work in works]
        drawn = graphs.run(tokens, spans=spans, **_heat([(one, len(one.tokens)) for one in sequences]))
        return [[one] for one in drawn]
    x = model.forward(torch.tensor(tokens), spans=spans, cache=cache)
    written = [row for own, is_plain in zip(rows, plain, strict=True) if not is_plain for row in own]
    logits = model.logits(x[written]).cpu() if written else torch.empty(0, model.description.vocab_size)
    places = [
        (row, work.sequence, len(work.sequence.tokens) + offset)
        for work, own, is_plain in zip(works, rows, plain, strict=True)
        if is_plain
        for offset, row in enumerate(own)
    ]
    chosen = [row for row, _, _ in places]
    drawn = model.draw(x[chosen], **_heat([(of, position) for _, of, position in places])) if places else []
    found: list[Tensor | list[Drawn]] = []
    for own, is_plain in zip(rows, plain, strict=True):
        if is_plain:
            found.append(drawn[: len(own)])
            drawn = drawn[len(own) :]
        else:
            found.append(logits[: len(own)])
            logits = logits[len(own) :]
    return found


def _heat(draws: list[tuple[Sequence, int]]) -> dict[str, list]:
    """Temperatures and keys of draws, each of a sequence at a position."""
    keys = [noise_key(of.sampling, sample=of.sample, position=position) for of, position in draws]
    return {"temperatures": [of.sampling.temperature for of, _ in draws], "keys": keys}


def is_finite(lines: Tensor | list[Drawn]) -> bool:
    """No logit of fp32 [rows, V], or no log-probability of what was drawn, is NaN or infinite."""
    if isinstance(lines, Tensor):
        return bool(lines.isfinite().all())
    return all(math.isfinite(line.logprob) for line in lines)


def _is_drawn(work: Work, *, rows: list[int]) -> bool:
    """Every row of the work draws a token, by nothing but the temperature."""
    sequence = work.sequence
    scores = sequence.limit == 0 or sequence.sampling.prompt_logprobs
    return bool(rows) and not scores and draws_plainly(sequence.sampling)
