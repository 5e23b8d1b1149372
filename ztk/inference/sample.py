"""Draws a token from a row of logits: the sampling steps, and random numbers that depend only on their position."""

import hashlib
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ztk.inference.masks import masks_tokens, refused_by
from ztk.inference.policy import SamplingParams
from ztk.inference.uniforms import uniforms
from ztk.kernels import select_rows

_FIRST = 1024  # tokens that top-p sorts first
_ROWS = 64  # that are drawn at once, in double precision: 80 MB a tensor for 150,000 tokens
_LEAST_MASS = 1e-200  # of allowed tokens: below it, their probabilities are computed without the other tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Draw:
    """The draw of the token after `tokens`, which are a prompt of `prompt_length` tokens and the answer so far. sample: number of the answer.
    mask: the result of `packed_mask`."""

    sampling: SamplingParams
    tokens: list[int]
    prompt_length: int
    sample: int = 0
    mask: Tensor | None = None

    @property
    def noise_key(self) -> int:
        """A signed 64-bit number that decides the noise, from the seed, its key, the answer's number and the position."""
        return int.from_bytes(_digest(self.parts), "little", signed=True)

    @property
    def parts(self) -> tuple:
        """Everything that its random number depends on, unless the key is an integer: see `places_of`."""
        return self.sampling.seed, self.sampling.draw_key, self.sample, len(self.tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawn:
    """A token, its raw and processed log-probability, and the likeliest tokens if requested. kept: the same as in `Completion`, int32
    [kept]."""

    token: int
    logprob: float
    processed_logprob: float
    top: dict[int, float] | None
    kept: Tensor | None = None


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

    def kept(self, probabilities: Tensor) -> Tensor:
        """Of probabilities float64 [R, V] after the temperature, with any sum: bool [R, V]."""
        least = probabilities.new_zeros(len(probabilities), 1)
        if 0 < self.top_k < probabilities.shape[1]:
            least = probabilities.topk(self.top_k).values[:, -1:]
        if self.top_p < 1:
            counted = probabilities.masked_fill(probabilities < least, 0.0) if self.top_k else probabilities
            least = torch.maximum(least, _least_of_mass(counted, part=self.top_p))
        if self.min_p > 0:
            least = torch.maximum(least, self.min_p * probabilities.amax(-1, keepdim=True))
        return probabilities >= least

    def hide(self, logits: Tensor, *, temperature: float) -> tuple[Tensor, Tensor]:
        """Logits [R, V] with -inf for dropped tokens, and the mask of kept ones, bool [R, V]."""
        kept = self.kept(fp32_logprobs(logits, temperature=temperature).double().exp())
        return logits.masked_fill(~kept, -math.inf), kept


KEEPS_ALL = Cut()


def cut_of(sampling: SamplingParams) -> Cut:
    """The sampling steps that leave tokens out."""
    return Cut(top_k=sampling.top_k, top_p=sampling.top_p, min_p=sampling.min_p)


def penalises(sampling: SamplingParams) -> bool:
    """Whether scores of tokens are changed before the temperature."""
    counted = sampling.presence_penalty or sampling.frequency_penalty
    return bool(sampling.repetition_penalty != 1 or counted or sampling.logit_bias)


def draws_plainly(sampling: SamplingParams) -> bool:
    """Whether only the temperature is used, as in `ztk.kernels.draw_rows`."""
    is_limited = sampling.vocabulary is not None or masks_tokens(sampling)
    return cut_of(sampling).keeps_all and not is_limited and not penalises(sampling)


def selects(sampling: SamplingParams) -> bool:
    """Whether no step needs the host: a mask that is the caller's code, or the likeliest tokens' log-probabilities."""
    return sampling.token_mask is None and not sampling.logprobs


# Draws


def select(logits: Tensor, *, draws: list[Draw]) -> list[Drawn]:
    """A token for each row of logits fp32 [R, V], drawn on their device by a kernel, where `selects` is true."""
    scores, asked = logits, [one.sampling for one in draws]
    if any(penalises(one.sampling) or _is_limited(one) for one in draws):
        scores = logits.clone()
        _penalise(scores, draws=draws)
        _hide(scores, draws=draws, by=-math.inf)
    device = logits.device
    results = select_rows(
        logits,
        scores,
        column([one.temperature for one in asked], device=device),
        column([one.noise_key for one in draws], dtype=torch.int64, device=device),
        column([one.top_k for one in asked], dtype=torch.int32, device=device),
        column([one.top_p for one in asked], device=device),
        column([one.min_p for one in asked], device=device),
    )
    return drawn_of(torch.stack([part.double() for part in results]))


def column(values: list, *, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """A value for each row, [R] on the device. The host does not wait for a GPU that is still computing the rows."""
    return torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def drawn_of(results: Tensor) -> list[Drawn]:
    """fp64 [3, R] of tokens and both log-probabilities, for which the host waits once."""
    return [
        Drawn(token=int(token), logprob=logprob, processed_logprob=processed, top=None)
        for token, logprob, processed in zip(*results.cpu().tolist(), strict=True)
    ]


def draw(logits: Tensor, *, by: Draw) -> Drawn:
    """Draws one token like `draw_rows`, from logits fp32 [V] on the CPU."""
    return draw_rows(logits.unsqueeze(0), draws=[by])[0]


def draw_rows(logits: Tensor, *, draws: list[Draw]) -> list[Drawn]:
    """The next token of each row of logits fp32 [R, V]: on the CPU, or on any device where all draws are a trainer's (`fp32_logprobs`).

    A row's result does not depend on the others. Logits that are not finite give a log-probability that is not.
    """
    groups: dict[object, list[int]] = {}
    for row, one in enumerate(draws):
        of = one.sampling
        kind = (of.temperature, cut_of(of)) if of.fp32_logprobs else of.temperature == 0
        groups.setdefault(kind, []).append(row)
    found: dict[int, Drawn] = {}
    for rows in (some[first : first + _ROWS] for some in groups.values() for first in range(0, len(some), _ROWS)):
        own = logits if len(rows) == len(draws) else logits[rows]
        found.update(zip(rows, _drawn(own, draws=[draws[row] for row in rows]), strict=True))
    return [found[row] for row in range(len(draws))]


def _drawn(logits: Tensor, *, draws: list[Draw]) -> list[Drawn]:
    """Does the work of `draw_rows` for draws that are all greedy, all with a temperature, or all a trainer's with the same steps."""
    scores, first = logits.double(), draws[0].sampling
    raw, kept = torch.log_softmax(scores, dim=-1), [None] * len(draws)
    if first.fp32_logprobs:
        tokens, processed, kept = _as_trainer(logits, draws=draws)
    else:
        is_changed = _penalise(scores, draws=draws)
        if first.temperature == 0:
            _hide(scores, draws=draws, by=-math.inf)
            tokens, processed = scores.argmax(-1), [0.0] * len(draws)
        else:
            tokens, processed = _in_double(scores, raw=None if is_changed else raw, draws=draws)
    # A row with an infinite logit has NaN among its log-probabilities, or their sum is.
    values = raw.gather(1, tokens.unsqueeze(1)).squeeze(1)
    values = torch.where(logits.sum(-1).isfinite(), values, math.nan)
    return [
        Drawn(
            token=token,
            logprob=logprob,
            processed_logprob=after,
            top=likeliest(raw[row], count=one.sampling.logprobs) if one.sampling.logprobs else None,
            kept=own,
        )
        for row, (one, token, logprob, after, own) in enumerate(
            zip(draws, tokens.tolist(), values.tolist(), processed, kept, strict=True)
        )
    ]


def _in_double(scores: Tensor, *, raw: Tensor | None, draws: list[Draw]) -> tuple[Tensor, list[float]]:
    """Tokens int64 [R] and the log-probabilities that they were drawn with, from scores fp64 [R, V]. raw: their log-softmax, if known.

    Probabilities of refused tokens become zero after the softmax: the exponential of -inf takes five times as long as a number's.
    """
    heat = torch.tensor([one.sampling.temperature for one in draws], dtype=torch.float64).unsqueeze(1)
    is_raw = raw is not None and bool((heat == 1).all())
    every = raw if is_raw else torch.log_softmax(scores / heat, dim=-1)
    probabilities = every.exp()
    _hide(probabilities, draws=draws, by=0.0)
    sums = _cut_sums(probabilities, draws=draws)
    totals = sums[:, -1].tolist()
    if min(totals) < _LEAST_MASS:
        every = every.clone()
        _hide(scores, draws=draws, by=-math.inf)
        for row in [row for row, total in enumerate(totals) if total < _LEAST_MASS]:
            every[row] = torch.log_softmax(scores[row] / heat[row], dim=-1)
            sums[row] = _cut_sums(every[row : row + 1].exp(), draws=[draws[row]])
            totals[row] = float(sums[row, -1])
    wanted = (places_of(draws) * torch.tensor(totals, dtype=torch.float64)).unsqueeze(1)
    tokens = torch.searchsorted(sums, wanted, right=True).clamp(max=sums.shape[1] - 1)
    pairs = zip(every.gather(1, tokens).squeeze(1).tolist(), totals, strict=True)
    return tokens.squeeze(1), [value - math.log(total) if total else math.nan for value, total in pairs]


def _cut_sums(probabilities: Tensor, *, draws: list[Draw]) -> Tensor:
    """Cumulative sums of the kept ones of probabilities fp64 [R, V], in their memory."""
    for row, one in enumerate(draws):
        cut, own = cut_of(one.sampling), probabilities[row : row + 1]
        if not cut.keeps_all:
            own.masked_fill_(~cut.kept(own), 0.0)
    return probabilities.cumsum_(-1)


def _as_trainer(logits: Tensor, *, draws: list[Draw]) -> tuple[Tensor, list[float], list[Tensor | None]]:
    """Tokens int64 [R] from a trainer's fp32 probabilities of logits [R, V], their log-probabilities, and the kept tokens if not all are.
    Temperature and cut are the first draw's."""
    cut, temperature = cut_of(draws[0].sampling), draws[0].sampling.temperature
    ids = [None] * len(draws)
    if not cut.keeps_all:
        logits, kept = cut.hide(logits, temperature=temperature)
        ids = list(kept.nonzero()[:, 1].to(torch.int32).cpu().split(kept.sum(1).tolist()))
    every = fp32_logprobs(logits, temperature=temperature)
    tokens = choose(every, uniforms=places_of(draws))
    return tokens, every.gather(1, tokens.unsqueeze(1)).squeeze(1).tolist(), ids


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


# Random numbers


def places_of(draws: list[Draw]) -> Tensor:
    """The random numbers of draws, in [0, 1): float64 [R]."""
    counted = [row for row, one in enumerate(draws) if isinstance(one.sampling.draw_key, int)]
    places = torch.tensor(
        [0.0 if isinstance(one.sampling.draw_key, int) else uniform(*one.parts) for one in draws], dtype=torch.float64
    )
    if counted:
        keys = torch.tensor([draws[row].sampling.draw_key for row in counted])
        places[counted] = uniforms(keys, positions=torch.tensor([len(draws[row].tokens) for row in counted]))
    return places


def uniform(*parts: object) -> float:
    """A number in [0, 1) with 53 bits that depends on `parts` alone, on any machine."""
    return (int.from_bytes(_digest(parts), "little") >> 11) * 2.0**-53


def _digest(parts: tuple) -> bytes:
    return hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()


# Steps


def penalised(scores: Tensor, *, draw: Draw) -> Tensor:
    """Scores [V] of any dtype, on any device, after bias and penalties."""
    sampling, answer = draw.sampling, draw.tokens[draw.prompt_length :]
    scores = scores.clone()
    if sampling.logit_bias:
        scores[_index(sampling.logit_bias, like=scores)] += _values(sampling.logit_bias.values(), like=scores)
    if sampling.repetition_penalty != 1:
        seen = _index(sorted(set(draw.tokens)), like=scores)
        part = scores[seen]
        scores[seen] = torch.where(part > 0, part / sampling.repetition_penalty, part * sampling.repetition_penalty)
    if answer and (sampling.presence_penalty or sampling.frequency_penalty):
        counts = Counter(answer)
        penalties = (sampling.presence_penalty + count * sampling.frequency_penalty for count in counts.values())
        scores[_index(counts, like=scores)] -= _values(penalties, like=scores)
    return scores


def _penalise(scores: Tensor, *, draws: list[Draw]) -> bool:
    """Changes the rows of scores [R, V] that have a bias or a penalty. Returns whether there are some."""
    changed = [row for row, one in enumerate(draws) if penalises(one.sampling)]
    for row in changed:
        scores[row] = penalised(scores[row], draw=draws[row])
    return bool(changed)


def _is_limited(draw: Draw) -> bool:
    return draw.mask is not None or draw.sampling.vocabulary is not None


def _hide(values: Tensor, *, draws: list[Draw], by: float) -> None:
    """Writes `by` in place of the tokens that the draw of each row of values [R, V] may not take."""
    masks = [one.mask for one in draws]
    if any(mask is not None for mask in masks):
        values.masked_fill_(refused_by(masks, size=values.shape[1], device=values.device), by)
    for row, one in enumerate(draws):
        if one.sampling.vocabulary is not None:
            values[row, one.sampling.vocabulary :] = by


def _index(tokens: Iterable[int], *, like: Tensor) -> Tensor:
    return torch.tensor(list(tokens)).to(like.device)


def _values(numbers: Iterable[float], *, like: Tensor) -> Tensor:
    return torch.tensor(list(numbers), dtype=like.dtype).to(like.device)


def _least_of_mass(probabilities: Tensor, *, part: float) -> Tensor:
    """The least of the largest probabilities of each row [R, V] that together have more than `part` of its sum: [R, 1].

    As many are sorted as that takes, and not the whole vocabulary.
    """
    wanted, count = part * probabilities.sum(-1, keepdim=True), _FIRST
    while True:
        ordered = probabilities.topk(min(count, probabilities.shape[1])).values
        is_counted = ordered.cumsum(-1) - ordered < wanted
        if count >= probabilities.shape[1] or not is_counted[:, -1].any():
            return torch.where(is_counted, ordered, math.inf).amin(-1, keepdim=True)
        count *= 16
