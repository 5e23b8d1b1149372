"""One step of all sequences: planned, computed, drawn. An error ends the sequence that it belongs to.

[Note: Whose error it is]
Nothing of a step counts before its logits are computed: keys and values that a failed step has written are at the places where the next
attempt writes again. So after an error in the products or draws of several sequences, each is computed once more, alone, and sequences that
fail alone end with the error. Exactness makes the others' tokens the same. An error while one sequence takes its token is its own.
Nothing can be computed any more after an error of a device, or if another rank waits for a product that this one has not made: those
errors are raised, and `lost` is true. An error in `Scheduler.plan` belongs to no sequence: it is raised, and `reset` ends all of them.
"""

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice

import torch
from torch import Tensor

from ztk.core.runtime.comm import CommMismatch, PeerLost
from ztk.inference.cache import Span
from ztk.inference.graphs import DecodeGraphs
from ztk.inference.masks import NothingDrawn
from ztk.inference.model import InferenceModel
from ztk.inference.parallel import Computing
from ztk.inference.policy import Output, PromptLogprob
from ztk.inference.ranks import Ranks
from ztk.inference.requests import Sequence, Work
from ztk.inference.sample import (
    Draw,
    Drawn,
    column,
    draw,
    draw_rows,
    drawn_of,
    draws_plainly,
    likeliest,
    select,
    selects,
)
from ztk.inference.schedule import Scheduler

_LOGGER = logging.getLogger(__name__)
_PLAIN, _SELECTED, _ROWS, _WRITTEN = "plain", "selected", "rows", "written"
Lines = Tensor | list[Drawn | NothingDrawn]  # of one work: logits fp32 [rows, V] on the CPU, or drawn tokens


class Stepper:
    """Computes the sequences of `scheduler`. sequences: each open request's. graphs: replaced by `Generator.load`.

    rows: most tokens of a step.
    """

    def __init__(
        self,
        computing: Computing,
        *,
        scheduler: Scheduler,
        graphs: DecodeGraphs | None,
        ranks: Ranks | None,
        rows: int,
    ) -> None:
        self._computing, self.graphs, self.sequences = computing, graphs, dict[int, list[Sequence]]()
        self._scheduler, self._ranks, self._rows = scheduler, ranks, rows
        self.lost = False
        self.version: str | None = None  # of the weights, in every output

    def step(self) -> list[Output]:
        """Computes one step and returns the tokens drawn, and the errors of sequences that have ended by one.

        Raises:
            PeerLost: a rank that shares the model is gone.
        """
        works = self._scheduler.plan()
        if not works:
            return []
        needed, began = [self._rows_with_logits(work) for work in works], time.perf_counter()
        try:
            lines = self._lines(works, needed=needed)
        except Exception as error:
            self._raise_if_lost(error)
            return self._one_by_one(works, needed=needed, error=error)
        self._scheduler.measured(works, seconds=time.perf_counter() - began)
        return [
            output
            for work, own, part in zip(works, needed, lines, strict=True)
            for output in self._taken(work, rows=own, lines=part)
        ]

    def cancel(self, number: int) -> None:
        """Ends a request. Unknown and ended ones are ignored."""
        for sequence in self.sequences.pop(number, []):
            if sequence.finish_reason is None:
                self._scheduler.finish(sequence, reason="cancelled")

    def reset(self) -> None:
        """Ends all requests, and forgets the keys and values of ended ones, too."""
        for sequence in (one for sequences in self.sequences.values() for one in sequences):
            sequence.finish_reason = sequence.finish_reason or "cancelled"
        self.sequences.clear()
        self._scheduler.reset()

    # Parts

    def _lines(self, works: list[Work], *, needed: list[list[int]]) -> list[Lines]:
        tokens, spans = [], []
        for work in works:
            of, length = work.sequence, len(work.tokens)
            spans.append(Span(slot=of.slot, start=work.start, length=length, row=len(tokens), adapter=of.adapter))
            tokens += work.tokens
        step = {"spans": spans, "computing": self._computing, "graphs": self.graphs}
        return lines_of(tokens, works=works, needed=needed, **step)

    def _raise_if_lost(self, error: Exception) -> None:
        """Raises `error` if no further step can be computed after it."""
        hung_up = self._ranks is not None and self._ranks.hung_up
        if hung_up or isinstance(error, PeerLost | CommMismatch | torch.AcceleratorError):
            self.lost = True
            raise error

    def _one_by_one(self, works: list[Work], *, needed: list[list[int]], error: Exception) -> list[Output]:
        """Repeats the step with each sequence alone: see [Note: Whose error it is]."""
        if len(works) == 1:
            return [self._ended_by(error, sequence=works[0].sequence)]
        outputs: list[Output] = []
        for work, rows in zip(works, needed, strict=True):
            try:
                [lines] = self._lines([work], needed=[rows])
            except Exception as own:  # noqa: BLE001
                self._raise_if_lost(own)
                outputs.append(self._ended_by(own, sequence=work.sequence))
            else:
                outputs += self._taken(work, rows=rows, lines=lines)
        return outputs

    def _taken(self, work: Work, *, rows: list[int], lines: Lines) -> list[Output]:
        outputs: list[Output] = []
        try:
            outputs.extend(self._take(work, rows=rows, lines=lines))
        except Exception as error:  # noqa: BLE001
            self._raise_if_lost(error)
            if work.sequence.finish_reason is None:
                outputs.append(self._ended_by(error, sequence=work.sequence))
        return outputs

    def _rows_with_logits(self, work: Work) -> list[int]:
        """Rows of the work whose next token is drawn or scored."""
        sequence, stop = work.sequence, work.start + len(work.tokens)
        if work.drafts:
            return list(range(len(work.tokens)))
        if sequence.sampling.prompt_logprobs and work.start < sequence.prompt_length and not sequence.drawn:
            return list(range(len(work.tokens)))
        return [len(work.tokens) - 1] if stop == len(sequence.tokens) else []

    def _take(self, work: Work, *, rows: list[int], lines: Lines) -> Iterator[Output]:
        """Draws from the rows of one work. Drafts are accepted while they equal the drawn tokens."""
        sequence = work.sequence
        if not is_finite(lines):
            yield self._broken(sequence)
            return
        self._scheduler.slots.advance(
            sequence, computed=min(work.start + len(work.tokens) - work.drafts, len(sequence.tokens))
        )
        for row, line in zip(rows, lines, strict=True):
            position = work.start + row
            if isinstance(line, Tensor) and position + 1 < sequence.prompt_length:
                raw = torch.log_softmax(line.double(), -1)
                top = likeliest(raw, count=sequence.sampling.logprobs) if sequence.sampling.logprobs else {}
                token = sequence.tokens[position + 1]
                rank = int((line >= line[token]).sum())
                sequence.prompt_logprobs.append(PromptLogprob(float(raw[token]), top, rank))
                continue
            if sequence.limit == 0:
                self._scheduler.finish(sequence, reason="length")
                self._forget_if_done(sequence.request_id)
                return
            is_first = len(sequence.tokens) == sequence.prompt_length
            try:
                drawn = self._drawn(line, sequence=sequence)
            except NothingDrawn as error:
                yield self._failed(sequence, error=str(error), is_by_request=True)
                return
            sequence.tokens.append(drawn.token)
            sequence.drawn.append(drawn)
            reason = self._reason_to_stop(sequence)
            if reason is not None:
                self._scheduler.finish(sequence, reason=reason)
            yield Output(
                request_id=sequence.request_id,
                sample=sequence.sample,
                token=drawn.token,
                logprob=drawn.logprob,
                processed_logprob=drawn.processed_logprob,
                finish_reason=reason,
                top_logprobs=drawn.top,
                prompt_logprobs=sequence.prompt_logprobs if is_first and sequence.sampling.prompt_logprobs else None,
                version=self.version,
                kept=drawn.kept,
            )
            if reason is not None or row + 1 >= len(work.tokens) or work.tokens[row + 1] != drawn.token:
                break
            self._scheduler.slots.advance(sequence, computed=position + 2)  # the draft's keys belong to this token
        if sequence.finish_reason is not None:
            self._forget_if_done(sequence.request_id)

    @staticmethod
    def _drawn(line: Tensor | Drawn | NothingDrawn, *, sequence: Sequence) -> Drawn:
        if isinstance(line, NothingDrawn):
            raise line
        if isinstance(line, Drawn):
            return line
        return draw(line, by=sequence.draw([], vocabulary=len(line)))

    @staticmethod
    def _reason_to_stop(sequence: Sequence) -> str | None:
        if sequence.tokens[-1] in sequence.sampling.stop_token_ids:
            return "stop"
        if sequence.state is not None and sequence.state.advance(sequence.answer):
            return "stop"
        return "length" if len(sequence.tokens) - sequence.prompt_length >= sequence.limit else None

    def _broken(self, sequence: Sequence) -> Output:
        """Ends a sequence whose logits are not finite. The layer is found by computing it once more, alone."""
        where = {"slot": sequence.slot, "adapter": sequence.adapter}
        found = self._computing.first_broken(sequence.tokens, rows=self._rows, **where)
        layers = self._computing.model.description.layers
        where = "in the head" if found is None else f"after layer {found} of {layers}"
        text = f"the logits are not finite, first {where}: check the weights (NaN or inf in them, or an overflow of the stored dtype)"
        return self._failed(sequence, error=text)

    def _ended_by(self, error: Exception, *, sequence: Sequence) -> Output:
        """Ends a sequence by an unexpected error."""
        _LOGGER.error("request %d ends by an error in its step", sequence.request_id, exc_info=error)
        sequence.cause = error
        return self._failed(sequence, error=f"its step failed: {type(error).__name__}: {error}")

    def _failed(self, sequence: Sequence, *, error: str, is_by_request: bool = False) -> Output:
        """Ends only this sequence."""
        self._scheduler.finish(sequence, reason="error", error=error)
        self._forget_if_done(sequence.request_id)
        return Output(
            request_id=sequence.request_id,
            sample=sequence.sample,
            token=None,
            logprob=float("nan"),
            processed_logprob=float("nan"),
            finish_reason="error",
            error=error,
            is_by_request=is_by_request,
        )

    def _forget_if_done(self, number: int) -> None:
        """Drops a request when all its answers have ended; callers that wait for it hold its sequences."""
        if all(sequence.finish_reason is not None for sequence in self.sequences.get(number, [])):
            self.sequences.pop(number, None)


# Results of a step: drawn tokens, or logits from which `Stepper` draws one after the other.


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

    Which of the two, and how, depends on the sequence alone, so that its tokens do not depend on its neighbours.
    """
    model, counts = computing.model, list(map(len, needed))
    rows = [span.row + row for span, own in zip(spans, needed, strict=True) for row in own]
    on_host, size = not model.placement.by_kernels, model.description.vocab_size
    kinds = [_kind(work, count=count, on_host=on_host) for work, count in zip(works, counts, strict=True)]
    if len(tokens) > len(works) or any(span.adapter for span in spans):
        graphs = None
    draws_here = graphs is not None or _PLAIN in kinds
    drawing = model if isinstance(model, InferenceModel) and model.can_draw and draws_here else None
    if drawing is None:
        x, places = computing.logits(tokens, spans=spans, rows=rows), _split(range(len(rows)), counts=counts)
    else:
        if graphs is None:
            x = drawing.forward(torch.tensor(tokens), spans=spans, cache=computing.cache)
        else:
            x = graphs.run(tokens, spans=spans)
        places = _split(rows, counts=counts)
    found: list[Lines] = [torch.empty(0, size)] * len(works)
    for kind in set(kinds):
        which = [number for number, own in enumerate(kinds) if own == kind and counts[number]]
        if not which:
            continue
        own, chosen = [counts[number] for number in which], [place for number in which for place in places[number]]
        part = x if len(chosen) == len(x) else x[chosen]
        if drawing is not None and kind != _PLAIN:
            part = drawing.logits(part)
        if kind == _WRITTEN:
            parts: list = list(part.cpu().split(own))
        else:
            by = {_SELECTED: select, _ROWS: draw_rows, _PLAIN: select if drawing is None else _drawing_of(drawing)}
            draws = [(works[number], offset) for number in which for offset in range(counts[number])]
            parts = _split(_draws(part, draws=draws, by=by[kind], vocabulary=size), counts=own)
        for number, lines in zip(which, parts, strict=True):
            found[number] = lines
    return found


def _kind(work: Work, *, count: int, on_host: bool) -> str:
    """How these rows of the work are sampled: with the temperature only, with selection steps in a kernel, from all rows' logits at once, or
    one after the other from returned logits. Depends on nothing but the sequence."""
    sampling = work.sequence.sampling
    if not count or _scores(work) or (on_host and count > 1):
        return _WRITTEN
    if on_host or sampling.fp32_logprobs:
        return _ROWS
    if not selects(sampling):
        return _WRITTEN
    return _PLAIN if draws_plainly(sampling) else _SELECTED


def _drawing_of(model: InferenceModel) -> Callable[..., list[Drawn]]:
    """A function from rows [R, C] of the model's forward, and the draws with a temperature alone, to their tokens."""

    def drawn(x: Tensor, *, draws: list[Draw]) -> list[Drawn]:
        temperatures = column([one.sampling.temperature for one in draws], device=x.device)
        keys = column([one.noise_key for one in draws], dtype=torch.int64, device=x.device)
        return drawn_of(model.draw(x, temperatures=temperatures, keys=keys))

    return drawn


def _draws(
    rows: Tensor, *, draws: list[tuple[Work, int]], by: Callable[..., list[Drawn]], vocabulary: int
) -> list[Drawn | NothingDrawn]:
    """Draws from a row of rows [R, any] after the first drafts of each work, so many each, by a function of the rows and their draws."""
    found: dict[int, Drawn | NothingDrawn] = {}
    ready: dict[int, Draw] = {}
    for row, (work, offset) in enumerate(draws):
        drafts = work.tokens[len(work.tokens) - work.drafts :][:offset]
        try:
            ready[row] = work.sequence.draw(drafts, vocabulary=vocabulary)
        except NothingDrawn as error:
            found[row] = error
    own = rows if len(ready) == len(draws) else rows[list(ready)]
    found.update(zip(ready, by(own, draws=list(ready.values())) if ready else [], strict=True))
    return [found[row] for row in range(len(draws))]


def _split(items: Iterable, *, counts: list[int]) -> list[list]:
    each = iter(items)
    return [list(islice(each, count)) for count in counts]


def is_finite(lines: Lines) -> bool:
    """Whether all logits fp32 [rows, V], or all log-probabilities of drawn tokens, are finite."""
    if isinstance(lines, Tensor):
        return bool(lines.isfinite().all())
    return all(isinstance(line, NothingDrawn) or math.isfinite(line.logprob) for line in lines)


def _scores(work: Work) -> bool:
    """Whether the prompt's own tokens are scored."""
    return work.sequence.limit == 0 or work.sequence.sampling.prompt_logprobs
