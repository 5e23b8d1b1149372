"""Results of a step from which tokens are drawn: logits, or over blocks the tokens themselves, drawn by a kernel that writes no logits."""

import math
from collections.abc import Iterable
from itertools import islice

import torch
from torch import Tensor

from ztk.inference.graphs import DecodeGraphs
from ztk.inference.masks import NothingDrawn, packed_mask
from ztk.inference.model import InferenceModel
from ztk.inference.parallel import Computing
from ztk.inference.requests import Sequence, Work
from ztk.inference.sample import (
    Drawn,
    draw_keeping,
    draw_plain,
    drawn_of,
    draws_plainly,
    draws_together,
    keeps,
    noise_key,
    select,
    selects,
)
from ztk.inference.steps import Span

_PLAIN, _SELECTED, _KEPT, _WRITTEN = "plain", "selected", "kept", "written"
Lines = Tensor | list[Drawn | NothingDrawn]  # of one work: logits fp32 [rows, V] on the CPU, or drawn tokens


def lines_of(
    tokens: list[int],
    *,
    computing: Computing,
    works: list[Work],
    needed: list[list[int]],
    spans: list[Span],
    graphs: DecodeGraphs | None,
) -> list[Lines]:
    """Computes a step, and draws from the rows of each work that are `needed`, or returns their logits.

    Which of the two depends on the sequence alone, so that its tokens do not depend on its neighbours.
    """
    rows = [span.row + row for span, own in zip(spans, needed, strict=True) for row in own]
    counts = list(map(len, needed))
    if not computing.model.placement.has_blocks:
        logits = computing.logits(tokens, spans=spans, rows=rows)
        return _drawn_together(logits, works=works, counts=counts)
    kinds = [_kind(work, count=count) for work, count in zip(works, counts, strict=True)]
    fits_graphs = set(kinds) == {_PLAIN} and len(tokens) == len(works) and not any(span.adapter for span in spans)
    if graphs is not None and fits_graphs:
        drawn = graphs.run(tokens, spans=spans, **_heat([(work, 0) for work in works]))
        return [[one] for one in drawn]
    return _drawn_on_device(
        tokens, computing=computing, works=works, kinds=kinds, counts=counts, spans=spans, rows=rows
    )


def _drawn_on_device(
    tokens: list[int],
    *,
    computing: Computing,
    works: list[Work],
    kinds: list[str],
    counts: list[int],
    spans: list[Span],
    rows: list[int],
) -> list[Lines]:
    """As `lines_of`, where the device draws: without logits where the model can, or from them."""
    model = computing.model
    drawing = model if isinstance(model, InferenceModel) and model.can_draw and _PLAIN in kinds else None
    if drawing is None:
        x, places = computing.logits(tokens, spans=spans, rows=rows), _split(range(len(rows)), counts=counts)
    else:
        x = drawing.forward(torch.tensor(tokens), spans=spans, cache=computing.cache)
        places = _split(rows, counts=counts)
    found: list[Lines] = [torch.empty(0, model.description.vocab_size)] * len(works)
    for kind in set(kinds):
        which = [number for number, own in enumerate(kinds) if own == kind and counts[number]]
        if not which:
            continue
        own = [counts[number] for number in which]
        chosen = x[[place for number in which for place in places[number]]]
        draws = [(works[number], offset) for number in which for offset in range(counts[number])]
        if kind == _PLAIN and drawing is not None:
            parts: list = _split(_plain(chosen, model=drawing, draws=draws), counts=own)
        else:
            logits = chosen if drawing is None else drawing.logits(chosen)
            if kind == _WRITTEN:
                parts = list(logits.cpu().split(own))
            elif kind == _KEPT:
                parts = _split(_keeping(logits, draws=draws), counts=own)
            else:
                parts = _split(_selected(logits, draws=draws), counts=own)
        for number, part in zip(which, parts, strict=True):
            found[number] = part
    return found


def _plain(x: Tensor, *, model: InferenceModel, draws: list[tuple[Work, int]]) -> list[Drawn]:
    """By the temperature alone, from rows of the model's forward."""
    heat, device = _heat(draws), model.placement.device
    temperatures = torch.tensor(heat["temperatures"], dtype=torch.float32).to(device)
    keys = torch.tensor(heat["keys"], dtype=torch.int64).to(device)
    return drawn_of(model.draw(x, temperatures=temperatures, keys=keys))


def _selected(logits: Tensor, *, draws: list[tuple[Work, int]]) -> list[Drawn | NothingDrawn]:
    """By a kernel, from a row of logits fp32 [R, V] for each draw after the first drafts of a work, so many each."""
    found: dict[int, Drawn | NothingDrawn] = {}
    steps = {}
    for row, (work, offset) in enumerate(draws):
        drafts = work.tokens[len(work.tokens) - work.drafts :][:offset]
        try:
            steps[row] = work.sequence.draw_steps(drafts, vocabulary=logits.shape[1])
        except NothingDrawn as error:
            found[row] = error
    if len(steps) < len(draws):
        logits, draws = logits[list(steps)], [draws[row] for row in steps]
    if steps:
        found.update(zip(steps, select(logits, steps=list(steps.values()), **_heat(draws)), strict=True))
    return [found[row] for row in range(len(found))]


def _split(items: Iterable, *, counts: list[int]) -> list[list]:
    each = iter(items)
    return [list(islice(each, count)) for count in counts]


def _drawn_together(logits: Tensor, *, works: list[Work], counts: list[int]) -> list[Lines]:
    """Draws from logits fp32 [R, V], `counts` rows of each work, for all single rows at once, with the results of `draw`. Keeps the logits
    if a sequence draws several rows, uses other steps, or draws nothing, or if they are not finite."""
    found: list[Lines] = list(logits.split(counts))
    for number, (work, count, own) in enumerate(zip(works, counts, logits.split(counts), strict=True)):
        if _kind(work, count=count) == _KEPT:
            found[number] = _keeping(own, draws=[(work, offset) for offset in range(count)])
    plain = [
        number
        for number, work in enumerate(works)
        if counts[number] == 1 and not _scores(work) and draws_together(work.sequence.sampling)
    ]
    if not plain:
        return found
    at = [sum(counts[:number]) for number in plain] if len(plain) < len(works) else None
    chosen = logits if at is None else logits[at]
    sequences = [works[number].sequence for number in plain]
    draws = [(one.sampling, one.sample, len(one.tokens)) for one in sequences]
    masks = [_mask(one, vocabulary=logits.shape[1]) for one in sequences]
    drawn = draw_plain(chosen, draws=draws, masks=[None if isinstance(mask, NothingDrawn) else mask for mask in masks])
    for number, own, mask in zip(plain, drawn, masks, strict=True):
        if math.isfinite(own.logprob):
            found[number] = [mask if isinstance(mask, NothingDrawn) else own]
    return found


def _keeping(logits: Tensor, *, draws: list[tuple[Work, int]]) -> list[Drawn]:
    """From the tokens that are kept, a row of logits fp32 [R, V] for each draw after the first drafts of a work."""
    each = [(work.sequence, len(work.sequence.tokens) + offset) for work, offset in draws]
    return draw_keeping(logits, draws=[(of.sampling, of.sample, position) for of, position in each])


def _mask(sequence: Sequence, *, vocabulary: int) -> Tensor | NothingDrawn | None:
    """The mask of the next draw, or the reason why there is none."""
    try:
        return packed_mask(sequence.sampling, state=sequence.state, answer=sequence.answer, size=vocabulary)
    except NothingDrawn as error:
        return error


def _heat(draws: list[tuple[Work, int]]) -> dict[str, list]:
    """Temperatures and keys of draws after the first drafts of a work, so many each."""
    each = [(work.sequence, len(work.sequence.tokens) + offset) for work, offset in draws]
    keys = [noise_key(of.sampling, sample=of.sample, position=position) for of, position in each]
    return {"temperatures": [of.sampling.temperature for of, _ in each], "keys": keys}


def is_finite(lines: Lines) -> bool:
    """Whether all logits fp32 [rows, V], or all log-probabilities of drawn tokens, are finite."""
    if isinstance(lines, Tensor):
        return bool(lines.isfinite().all())
    return all(isinstance(line, NothingDrawn) or math.isfinite(line.logprob) for line in lines)


def _kind(work: Work, *, count: int) -> str:
    """How these rows of the work are sampled: with the temperature only, with selection steps in a kernel, from returned tokens, or on the
    host from logits. Depends on nothing but the sequence."""
    sampling = work.sequence.sampling
    if not count or _scores(work):
        return _WRITTEN
    if keeps(sampling):
        return _KEPT
    if not selects(sampling):
        return _WRITTEN
    return _PLAIN if draws_plainly(sampling) else _SELECTED


def _scores(work: Work) -> bool:
    """Whether the prompt's own tokens are scored."""
    return work.sequence.limit == 0 or work.sequence.sampling.prompt_logprobs
