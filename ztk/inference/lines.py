"""What the rows of a step are drawn from: logits, or over blocks the tokens themselves, drawn by a kernel that writes no logits."""

import math
from collections.abc import Iterable
from itertools import islice

import torch
from torch import Tensor

from ztk.inference.block_cache import BlockCache
from ztk.inference.block_model import BlockModel
from ztk.inference.cache import Cache
from ztk.inference.graphs import DecodeGraphs
from ztk.inference.model import InferenceModel
from ztk.inference.module_model import ModuleModel
from ztk.inference.over_blocks import OverBlocks
from ztk.inference.ranks import Ranks, computing
from ztk.inference.sample import Drawn, DrawSteps, draw_plain, draws_plainly, draws_together, noise_key, selects
from ztk.inference.schedule import Sequence, Work
from ztk.inference.steps import Span

_PLAIN, _SELECTED, _WRITTEN = "plain", "selected", "written"


def lines_of(
    tokens: list[int],
    *,
    model: InferenceModel | ModuleModel | OverBlocks,
    works: list[Work],
    needed: list[list[int]],
    spans: list[Span],
    cache: Cache | BlockCache,
    graphs: DecodeGraphs | None,
    ranks: Ranks | None,
) -> list[Tensor | list[Drawn]]:
    """Computes a step. For each work, whose rows `needed` draw or are scored: logits fp32 [rows, V] on the CPU, or what was drawn.

    Which of the two depends on the sequence alone, so that its tokens do not depend on its neighbours.
    """
    rows = [[span.row + row for row in own] for span, own in zip(spans, needed, strict=True)]
    if not isinstance(model, OverBlocks):
        assert isinstance(cache, Cache), "the model computes over slabs"
        flat = [row for own in rows for row in own]
        with computing(ranks):
            logits = model.step_logits(torch.tensor(tokens), spans=spans, cache=cache, rows=flat)
        return _drawn_together(logits, works=works, counts=[len(own) for own in rows])
    assert isinstance(cache, BlockCache), "the model computes over blocks"
    kinds = [_kind(work, rows=own) for work, own in zip(works, rows, strict=True)]
    if graphs is not None and set(kinds) == {_PLAIN} and len(tokens) == len(works):
        sequences = [work.sequence for work in works]
        drawn = graphs.run(tokens, spans=spans, **_heat([(one, len(one.tokens)) for one in sequences]))
        return [[one] for one in drawn]
    # Other steps end with logits, of which ranks compute parts.
    drawing = model if isinstance(model, BlockModel) and model.ranks is None else None
    if drawing is None:
        flat = [row for own in rows for row in own]
        with computing(ranks):
            x = model.step_logits(torch.tensor(tokens), spans=spans, cache=cache, rows=flat)
        rows = _split(range(len(flat)), counts=[len(own) for own in rows])
    else:
        x = drawing.forward(torch.tensor(tokens), spans=spans, cache=cache)
    found: list[Tensor | list[Drawn]] = [torch.empty(0, model.description.vocab_size)] * len(works)
    for kind in set(kinds):
        which = [number for number, own in enumerate(kinds) if own == kind]
        chosen = x[[row for number in which for row in rows[number]]]
        counts = [len(rows[number]) for number in which]
        places = [
            (works[number], offset) for number, count in zip(which, counts, strict=True) for offset in range(count)
        ]
        if not places:
            continue
        heat = _heat([(work.sequence, len(work.sequence.tokens) + offset) for work, offset in places])
        if kind == _PLAIN and drawing is not None:
            parts: list = _split(drawing.draw(chosen, **heat), counts=counts)
        else:
            logits = chosen if drawing is None else drawing.logits(chosen)
            steps = [_steps(work, offset=offset) for work, offset in places]
            if kind == _WRITTEN:
                parts = list(logits.cpu().split(counts))
            else:
                parts = _split(model.select(logits, steps=steps, **heat), counts=counts)
        for number, part in zip(which, parts, strict=True):
            found[number] = part
    return found


def _steps(work: Work, *, offset: int) -> DrawSteps:
    """Of the draw after the first `offset` drafts of the work."""
    sequence = work.sequence
    answer = [*sequence.answer, *work.tokens[len(work.tokens) - work.drafts :][:offset]]
    return DrawSteps(sampling=sequence.sampling, prompt=sequence.tokens[: sequence.prompt_length], answer=answer)


def _split(items: Iterable, *, counts: list[int]) -> list[list]:
    each = iter(items)
    return [list(islice(each, count)) for count in counts]


def _drawn_together(logits: Tensor, *, works: list[Work], counts: list[int]) -> list[Tensor | list[Drawn]]:
    """Of logits fp32 [R, V], `counts` rows of each work: what `draw` draws from a single row, for all at once; the logits, where a sequence
    draws several rows, by other steps, or not at all, or where they are not finite."""
    found: list[Tensor | list[Drawn]] = list(logits.split(counts))
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
    for number, drawn in zip(plain, draw_plain(chosen, draws=draws), strict=True):
        if math.isfinite(drawn.logprob):
            found[number] = [drawn]
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


def _kind(work: Work, *, rows: list[int]) -> str:
    """How the work's rows become tokens, which the sequence alone decides: every row draws one by nothing but the temperature, or by steps
    that a kernel makes, or the host needs the logits."""
    sampling = work.sequence.sampling
    if not rows or _scores(work) or not selects(sampling):
        return _WRITTEN
    return _PLAIN if draws_plainly(sampling) else _SELECTED


def _scores(work: Work) -> bool:
    """The prompt's own tokens are scored."""
    return work.sequence.limit == 0 or work.sequence.sampling.prompt_logprobs
