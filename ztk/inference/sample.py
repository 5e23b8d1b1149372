"""Draws a token from a row of logits: the sampling steps, and random numbers that depend only on their position."""

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ztk.inference.masks import NothingDrawn, masked, masks_tokens, refused_by
from ztk.inference.policy import SamplingParams
from ztk.inference.uniforms import uniforms
from ztk.kernels import select_rows

_FIRST, _MARGIN = 1024, 1e-9  # tokens that top-p sums first; see `_likeliest_mass`
_ROWS = 64  # that are sorted at once for a trainer, in double precision: half a GiB for 150,000 tokens
_LEAST_MASS = 1e-200  # of allowed tokens: below it, their probabilities are computed without the other tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawn:
    """A token, its raw and processed log-probability, and the likeliest tokens if requested. kept: as in `Completion`, int32 [kept]."""

    token: int
    logprob: float
    processed_logprob: float
    top: dict[int, float] | None
    kept: Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawSteps:
    """The steps of a draw after these tokens. mask: of `packed_mask`."""

    sampling: SamplingParams
    prompt: list[int]
    answer: list[int]
    mask: Tensor | None = None


def drawn_of(results: Tensor) -> list[Drawn]:
    """fp64 [3, R] of tokens and both log-probabilities, for which the host waits once."""
    return [
        Drawn(token=int(token), logprob=logprob, processed_logprob=processed, top=None)
        for token, logprob, processed in zip(*results.cpu().tolist(), strict=True)
    ]


def select(logits: Tensor, *, steps: list[DrawSteps], temperatures: list[float], keys: list[int]) -> list[Drawn]:
    """A token for each row of logits fp32 [R, V], drawn on their device after the sampling steps of each; keys: see `noise_key`."""
    lines = [penalised(line, steps=one) for line, one in zip(logits, steps, strict=True)]
    scores = torch.stack(lines) if any(changes_scores(one.sampling) for one in steps) else logits
    scores = masked(scores, masks=[one.mask for one in steps])

    def column(values: list, *, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.tensor(values, dtype=dtype).to(logits.device)

    asked = [one.sampling for one in steps]
    results = select_rows(
        logits,
        scores,
        column(temperatures),
        column(keys, dtype=torch.int64),
        column([one.top_k for one in asked], dtype=torch.int32),
        column([one.top_p for one in asked]),
        column([one.min_p for one in asked]),
    )
    return drawn_of(torch.stack([part.double() for part in results]))


def uniform(*parts: object) -> float:
    """A number in [0, 1) with 53 bits that depends on `parts` alone, on any machine."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def draws_plainly(sampling: SamplingParams) -> bool:
    """Whether only the temperature is used, and only the token's log-probabilities are requested, as in `ztk.kernels.draw_rows`."""
    is_cut = sampling.fp32_logprobs or sampling.vocabulary is not None or masks_tokens(sampling)
    return draws_together(sampling) and not is_cut


def draws_together(sampling: SamplingParams) -> bool:
    """Whether only the temperature and a packed mask are used, and only the token's log-probabilities are requested, including a trainer's,
    as in `draw_plain`."""
    cuts = sampling.top_k or sampling.top_p < 1 or sampling.min_p
    return sampling.token_mask is None and not (sampling.logprobs or cuts or penalises(sampling))


def penalises(sampling: SamplingParams) -> bool:
    """Whether scores of tokens are changed before the temperature."""
    counted = sampling.presence_penalty or sampling.frequency_penalty
    return bool(sampling.repetition_penalty != 1 or counted or sampling.logit_bias)


def changes_scores(sampling: SamplingParams) -> bool:
    """Whether `penalised` changes scores."""
    return penalises(sampling) or sampling.vocabulary is not None


def selects(sampling: SamplingParams) -> bool:
    """Whether no step needs the host: a mask of tokens, the likeliest tokens' log-probabilities, or a trainer's."""
    return sampling.token_mask is None and not sampling.logprobs and not sampling.fp32_logprobs


def noise_key(sampling: SamplingParams, *, sample: int, position: int) -> int:
    """A signed 64-bit number that decides the noise of one draw, from the seed, its key, the answer's number and the position."""
    digest = hashlib.blake2b(
        repr((sampling.seed, sampling.draw_key, sample, position)).encode(), digest_size=8
    ).digest()
    return int.from_bytes(digest, "little", signed=True)


def draw(logits: Tensor, *, steps: DrawSteps, sample: int) -> Drawn:
    """The next token. logits: fp32 [V] of the model, not NaN. sample: number of the answer.

    Raises:
        NothingDrawn: the token mask allows nothing, or fails.
    """
    sampling, position = steps.sampling, len(steps.prompt) + len(steps.answer)
    if draws_together(sampling):
        return draw_plain(logits.unsqueeze(0), draws=[(sampling, sample, position)], masks=[steps.mask])[0]
    raw = torch.log_softmax(logits.double(), dim=-1)
    scores = masked(penalised(logits.double(), steps=steps).unsqueeze(0), masks=[steps.mask])[0]
    scores = scores[: sampling.vocabulary]
    if sampling.temperature == 0:
        token = int(scores.argmax())
        processed = 0.0
    else:
        kept = _cut(torch.log_softmax(scores / sampling.temperature, dim=-1), sampling=sampling)
        sums = kept.exp().cumsum(-1)
        place = places_of([(sampling, sample, position)]).item() * float(sums[-1])
        token = int(torch.searchsorted(sums, place, right=True).clamp(max=len(sums) - 1))
        processed = float(kept[token] - math.log(float(sums[-1])))
    if sampling.fp32_logprobs:
        processed = float(fp32_logprobs(logits, temperature=sampling.temperature)[token])
    top = likeliest(raw, count=sampling.logprobs) if sampling.logprobs else None
    return Drawn(token=token, logprob=float(raw[token]), processed_logprob=processed, top=top)


def draw_plain(
    logits: Tensor, *, draws: list[tuple[SamplingParams, int, int]], masks: list[Tensor | None] | None = None
) -> list[Drawn]:
    """As `draw` from each row of logits fp32 [R, V] on the CPU, with the same bits, where `draws_together`; draws: of each row the sampling,
    the number of the answer and the position. masks: of each row. Logits that are not finite give a log-probability that is not."""
    masks = masks or [None] * len(draws)
    vocabularies = {sampling.vocabulary for sampling, _, _ in draws}
    if len(vocabularies) > 1:
        return _drawn_by_vocabulary(logits, draws=draws, masks=masks)
    scores = logits.double()
    raw = torch.log_softmax(scores, dim=-1)
    scores = scores[:, : vocabularies.pop()]
    refused = None if all(mask is None for mask in masks) else refused_by(masks, size=scores.shape[1])
    tokens, processed = torch.empty(len(draws), dtype=torch.int64), [0.0] * len(draws)
    cold = [row for row, (sampling, _, _) in enumerate(draws) if sampling.temperature == 0]
    if cold:
        own = scores if refused is None else scores[cold].masked_fill_(refused[cold], -math.inf)
        tokens[cold] = own.argmax(-1) if len(own) == len(cold) else own.argmax(-1)[cold]
    hot = [row for row, (of, _, _) in enumerate(draws) if of.temperature != 0 and not of.fp32_logprobs]
    if hot:
        tokens[hot], found = _drawn_hot(scores, raw=raw, refused=refused, draws=draws, hot=hot)
        for row, value in zip(hot, found, strict=True):
            processed[row] = value
    for row, token, value in _drawn_as_trainer(logits, draws=draws):
        tokens[row], processed[row] = token, value
    at = tokens.unsqueeze(1)
    # A row with an infinite logit has NaN among its log-probabilities, or their sum is.
    sums = logits.sum(-1).tolist()
    logprobs = raw.gather(1, at).squeeze(1).tolist()
    return [
        Drawn(token=token, logprob=logprob if math.isfinite(total) else math.nan, processed_logprob=after, top=None)
        for token, logprob, total, after in zip(tokens.tolist(), logprobs, sums, processed, strict=True)
    ]


def _drawn_hot(
    scores: Tensor,
    *,
    raw: Tensor,
    refused: Tensor | None,
    draws: list[tuple[SamplingParams, int, int]],
    hot: list[int],
) -> tuple[Tensor, list[float]]:
    """Of the rows `hot`, which have a temperature, the tokens int64 [rows] and the log-probabilities that they were drawn with. scores, raw:
    fp64 [R, V] before and after the softmax. refused: bool [R, V], the tokens that no draw takes.

    Probabilities of refused tokens become zero after the softmax: the exponential of -inf takes five times as long as a number's.
    """
    heat = torch.tensor([draws[row][0].temperature for row in hot], dtype=torch.float64).unsqueeze(1)
    is_every = len(hot) == len(draws)
    if is_every and scores.shape == raw.shape and bool((heat == 1).all()):
        kept = raw
    else:
        kept = torch.log_softmax((scores if is_every else scores[hot]) / heat, dim=-1)
    sums = kept.exp()
    if refused is not None:
        sums.masked_fill_(refused if is_every else refused[hot], 0.0)
    sums = sums.cumsum(-1)
    totals = sums[:, -1].tolist()
    if refused is not None and min(totals) < _LEAST_MASS:
        kept = kept.clone()
        for place in [place for place, total in enumerate(totals) if total < _LEAST_MASS]:
            own = scores[hot[place]].masked_fill(refused[hot[place]], -math.inf)
            kept[place] = torch.log_softmax(own / heat[place], dim=-1)
            sums[place] = kept[place].exp().cumsum(-1)
            totals[place] = float(sums[place, -1])
    wanted = (places_of([draws[row] for row in hot]) * torch.tensor(totals, dtype=torch.float64)).unsqueeze(1)
    drawn = torch.searchsorted(sums, wanted, right=True).clamp(max=sums.shape[1] - 1)
    values = kept.gather(1, drawn).squeeze(1).tolist()
    processed = [value - math.log(total) for value, total in zip(values, totals, strict=True)]
    return drawn.squeeze(1), processed


def _drawn_as_trainer(
    logits: Tensor, *, draws: list[tuple[SamplingParams, int, int]]
) -> Iterator[tuple[int, int, float]]:
    """Rows that are drawn from a trainer's fp32 probabilities, with token and log-probability."""
    by_heat: dict[float, list[int]] = {}
    for row, (sampling, _, _) in enumerate(draws):
        if sampling.fp32_logprobs:
            by_heat.setdefault(sampling.temperature, []).append(row)
    for temperature, rows in by_heat.items():
        every = fp32_logprobs(logits if len(rows) == len(draws) else logits[rows], temperature=temperature)
        tokens = choose(every, uniforms=places_of([draws[row] for row in rows])).unsqueeze(1)
        yield from zip(rows, tokens.squeeze(1).tolist(), every.gather(1, tokens).squeeze(1).tolist(), strict=True)


def _drawn_by_vocabulary(
    logits: Tensor, *, draws: list[tuple[SamplingParams, int, int]], masks: list[Tensor | None]
) -> list[Drawn]:
    """As `draw_plain`, for the rows of each vocabulary: sums over a cut row have other bits than sums over a full one."""
    found: dict[int, Drawn] = {}
    for size in {sampling.vocabulary for sampling, _, _ in draws}:
        rows = [row for row, (sampling, _, _) in enumerate(draws) if sampling.vocabulary == size]
        own = draw_plain(logits[rows], draws=[draws[row] for row in rows], masks=[masks[row] for row in rows])
        found.update(zip(rows, own, strict=True))
    return [found[row] for row in range(len(draws))]


def places_of(draws: list[tuple[SamplingParams, int, int]]) -> Tensor:
    """The random numbers of draws, in [0, 1): float64 [R]; draws: of each row the sampling, the number of the answer and the position."""
    counted = [row for row, (sampling, _, _) in enumerate(draws) if isinstance(sampling.draw_key, int)]
    if len(counted) == len(draws):
        keys, positions = (
            torch.tensor(column) for column in zip(*((of.draw_key, at) for of, _, at in draws), strict=True)
        )
        return uniforms(keys, positions=positions)
    places = [uniform(of.seed, of.draw_key, sample, at) for of, sample, at in draws]
    for row in counted:
        places[row] = places_of([draws[row]]).item()
    return torch.tensor(places, dtype=torch.float64)


def choose(logprobs: Tensor, *, uniforms: Tensor) -> Tensor:
    """The token at which the cumulative probability passes the draw: logprobs [S, V], uniforms float64 [S] -> int64 [S]."""
    cumulative = logprobs.double().exp().cumsum(dim=-1)
    chosen = torch.searchsorted(
        cumulative, (uniforms.to(cumulative.device) * cumulative[:, -1]).unsqueeze(1), right=True
    )
    return chosen.squeeze(1).clamp(max=logprobs.shape[-1] - 1)


def fp32_logprobs(logits: Tensor, *, temperature: float) -> Tensor:
    """log softmax(logits / temperature), as a trainer computes it: [..., V] -> float32 [..., V]."""
    scaled = logits.float() if temperature == 1.0 else logits.float() / temperature
    return torch.log_softmax(scaled, dim=-1)


def likeliest(logprobs: Tensor, *, count: int) -> dict[int, float]:
    """The `count` likeliest tokens of [V] log-probabilities, in falling order."""
    best = logprobs.topk(min(count, len(logprobs)))
    return dict(zip(best.indices.tolist(), best.values.tolist(), strict=True))


def penalised(scores: Tensor, *, steps: DrawSteps) -> Tensor:
    """Bias, penalties, mask and vocabulary: scores [V] of any dtype, on any device. Raises NothingDrawn as `draw`."""
    sampling, answer = steps.sampling, steps.answer
    if penalises(sampling):
        scores = scores.clone()
    if sampling.logit_bias:
        scores[_index(sampling.logit_bias, like=scores)] += _values(sampling.logit_bias.values(), like=scores)
    if sampling.repetition_penalty != 1:
        seen = _index(sorted(set(steps.prompt) | set(answer)), like=scores)
        part = scores[seen]
        scores[seen] = torch.where(part > 0, part / sampling.repetition_penalty, part * sampling.repetition_penalty)
    if answer and (sampling.presence_penalty or sampling.frequency_penalty):
        counts = Counter(answer)
        penalties = (sampling.presence_penalty + count * sampling.frequency_penalty for count in counts.values())
        scores[_index(counts, like=scores)] -= _values(penalties, like=scores)
    if sampling.token_mask is not None:
        scores = scores.masked_fill(~_allowed(sampling.token_mask, answer=answer, count=len(scores)), float("-inf"))
    if sampling.vocabulary is not None:
        scores = scores.index_fill(
            0, torch.arange(sampling.vocabulary, len(scores), device=scores.device), float("-inf")
        )
    return scores


def _allowed(mask: Callable[[list[int]], Tensor], *, answer: list[int], count: int) -> Tensor:
    """bool [count]. The mask is the caller's code: its errors end only this request."""
    try:
        allowed = mask(answer)
    except Exception as error:  # noqa: BLE001
        raise NothingDrawn(f"sampling.token_mask failed: {type(error).__name__}: {error}") from error
    if not isinstance(allowed, Tensor) or allowed.dtype != torch.bool or allowed.shape != (count,):
        shown = f"{allowed.dtype} {list(allowed.shape)}" if isinstance(allowed, Tensor) else type(allowed).__name__
        raise NothingDrawn(
            f"sampling.token_mask returned {shown}: must be bool [{count}], the tokens of the vocabulary"
        )
    if not allowed.any():
        raise NothingDrawn("sampling.token_mask allows no token: let it allow one, the end token for example")
    return allowed


def _index(tokens: Iterable[int], *, like: Tensor) -> Tensor:
    return torch.tensor(list(tokens)).to(like.device)


def _values(numbers: Iterable[float], *, like: Tensor) -> Tensor:
    return torch.tensor(list(numbers), dtype=like.dtype).to(like.device)


def _cut(logprobs: Tensor, *, sampling: SamplingParams) -> Tensor:
    """Log-probabilities [V] with those that top-k, top-p and min-p remove at -inf; not renormalised."""
    if sampling.top_k and sampling.top_k < len(logprobs):
        lowest = logprobs.topk(sampling.top_k).values[-1]
        logprobs = torch.log_softmax(logprobs.masked_fill(logprobs < lowest, float("-inf")), dim=-1)
    if sampling.top_p < 1:
        likely = _likeliest_mass(logprobs, mass=sampling.top_p)
        ordered, order = logprobs[likely].sort(descending=True, stable=True)
        before = ordered.exp().cumsum(-1) - ordered.exp()
        kept = likely[order[before < sampling.top_p]]
        logprobs = torch.full_like(logprobs, float("-inf")).index_copy_(0, kept, logprobs[kept])
    if sampling.min_p > 0:
        logprobs = logprobs.masked_fill(logprobs < logprobs.max() + math.log(sampling.min_p), float("-inf"))
    return logprobs


def _likeliest_mass(logprobs: Tensor, *, mass: float) -> Tensor:
    """Tokens int64 [N] in rising order, which are all that are as likely as the rarest of them and have more than `mass` together.

    Sorting them gives the beginning of the sorted vocabulary, equal values in the same order, so that top-p keeps the tokens and draws with
    the bits of the full sort. The margin is for rounding: sums of 2^20 probabilities differ by less than 1e-9.
    """
    count = _FIRST
    while count < len(logprobs):
        values = logprobs.topk(count, sorted=False).values
        found = float(values.exp().sum())
        if found > mass + _MARGIN:
            return (logprobs >= values.min()).nonzero().squeeze(1)
        count = count * 16 if found > mass / 8 else len(logprobs)
    return torch.arange(len(logprobs), device=logprobs.device)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """Selection of tokens in vLLM's order: the `top_k` likeliest (0: all), of these the likeliest that together have more than
    `top_p`, of these the ones with `min_p` of the likeliest one's probability. Ties with the last kept token are kept, too."""

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def keeps_all(self) -> bool:
        """Whether all tokens are kept."""
        return not (self.top_k or self.top_p < 1 or self.min_p)

    def kept(self, logprobs: Tensor) -> Tensor:
        """Of log-probabilities [R, V] after the temperature: bool [R, V]."""
        kept = torch.ones_like(logprobs, dtype=torch.bool)
        if 0 < self.top_k < logprobs.shape[1]:
            kept = logprobs >= logprobs.topk(self.top_k).values[:, -1:]
        if self.top_p < 1:
            p = logprobs.double().exp() * kept
            ordered = p.sort(-1, descending=True).values
            before = ordered.cumsum(-1) - ordered
            likely = before < self.top_p * ordered.sum(-1, keepdim=True)
            kept &= p >= torch.where(likely, ordered, math.inf).amin(-1, keepdim=True)
        if self.min_p > 0:
            kept &= logprobs >= logprobs.amax(-1, keepdim=True) + math.log(self.min_p)
        return kept

    def hide(self, logits: Tensor, *, temperature: float) -> tuple[Tensor, Tensor]:
        """Logits [R, V] with -inf for dropped tokens, and the mask of kept ones, bool [R, V]."""
        kept = self.kept(fp32_logprobs(logits, temperature=temperature))
        return logits.masked_fill(~kept, -math.inf), kept


KEEPS_ALL = Cut()


def cut_of(sampling: SamplingParams) -> Cut:
    """The sampling steps that leave tokens out."""
    return Cut(top_k=sampling.top_k, top_p=sampling.top_p, min_p=sampling.min_p)


def keeps(sampling: SamplingParams) -> bool:
    """Whether log-probabilities are a trainer's, over kept tokens, so that `draw_keeping` draws."""
    return sampling.fp32_logprobs and not cut_of(sampling).keeps_all


def draw_keeping(logits: Tensor, *, draws: list[tuple[SamplingParams, int, int]]) -> list[Drawn]:
    """A token for each row of logits fp32 [R, V], on their device; draws: of each row the sampling, the number of the answer and the position.
    Rows that are not finite get a log-probability that is not."""
    groups: dict[tuple[Cut, float], list[int]] = {}
    for row, (sampling, _, _) in enumerate(draws):
        groups.setdefault((cut_of(sampling), sampling.temperature), []).append(row)
    found: dict[int, Drawn] = {}
    for (cut, temperature), rows in groups.items():
        for first in range(0, len(rows), _ROWS):
            own = rows[first : first + _ROWS]
            places = places_of([draws[row] for row in own])
            drawn = _drawn(logits[own], cut=cut, temperature=temperature, places=places)
            found.update(zip(own, drawn, strict=True))
    return [found[row] for row in range(len(draws))]


def _drawn(logits: Tensor, *, cut: Cut, temperature: float, places: Tensor) -> list[Drawn]:
    """Of each row of logits [R, V] the token at its place in [0, 1) of the cumulative probability. places: float64 [R]."""
    hidden, kept = cut.hide(logits, temperature=temperature)
    processed = fp32_logprobs(hidden, temperature=temperature)
    tokens = choose(processed, uniforms=places).unsqueeze(1)
    logprobs = (torch.log_softmax(logits, dim=-1), processed)
    numbers = torch.cat([tokens.double(), *(part.gather(1, tokens).double() for part in logprobs)], dim=1).tolist()
    ids = kept.nonzero()[:, 1].to(torch.int32).cpu().split(kept.sum(1).tolist())
    return [
        Drawn(token=int(token), logprob=logprob, processed_logprob=processed, top=None, kept=own)
        for (token, logprob, processed), own in zip(numbers, ids, strict=True)
    ]
