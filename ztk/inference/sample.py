"""From a row of logits to a token: the sampling steps, and draws that depend on their place alone."""

import hashlib
import math
from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor

from ztk.inference.policy import SamplingParams


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawn:
    """A token, its raw and processed log-probability, and the likeliest tokens if asked for."""

    token: int
    logprob: float
    processed_logprob: float
    top: dict[int, float] | None


def uniform(*parts: object) -> float:
    """A number in [0, 1) with 53 bits that depends on `parts` alone, on any machine."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def draws_plainly(sampling: SamplingParams) -> bool:
    """No step but the temperature, and no log-probabilities but those of the token: what `ztk.kernels.draw_rows` draws."""
    cuts = sampling.top_k or sampling.top_p < 1 or sampling.min_p
    penalties = sampling.repetition_penalty != 1 or sampling.presence_penalty or sampling.frequency_penalty
    others = sampling.logit_bias or sampling.token_mask is not None or sampling.logprobs or sampling.fp32_logprobs
    return not (cuts or penalties or others)


def noise_key(sampling: SamplingParams, *, sample: int, position: int) -> int:
    """A signed number of 64 bits that decides the noise of one draw: of the seed, its key, the number of the answer and the position."""
    digest = hashlib.blake2b(
        repr((sampling.seed, sampling.draw_key, sample, position)).encode(), digest_size=8
    ).digest()
    return int.from_bytes(digest, "little", signed=True)


def draw(logits: Tensor, *, sampling: SamplingParams, prompt: list[int], answer: list[int], sample: int) -> Drawn:
    """The next token after prompt and answer. logits: fp32 [V] of the model, not NaN. sample: number of the answer.

    Raises:
        ValueError: the token mask allows nothing.
    """
    raw = torch.log_softmax(logits.double(), dim=-1)
    scores = _processed(logits.double(), sampling=sampling, prompt=prompt, answer=answer)
    if sampling.temperature == 0:
        token = int(scores.argmax())
        processed = 0.0
    else:
        kept = _cut(torch.log_softmax(scores / sampling.temperature, dim=-1), sampling=sampling)
        sums = kept.exp().cumsum(-1)
        place = uniform(sampling.seed, sampling.draw_key, sample, len(prompt) + len(answer)) * float(sums[-1])
        token = int(torch.searchsorted(sums, place, right=True).clamp(max=len(sums) - 1))
        processed = float(kept[token] - math.log(float(sums[-1])))
    if sampling.fp32_logprobs:
        processed = float(fp32_logprobs(logits, temperature=sampling.temperature)[token])
    top = likeliest(raw, count=sampling.logprobs) if sampling.logprobs else None
    return Drawn(token=token, logprob=float(raw[token]), processed_logprob=processed, top=top)


def fp32_logprobs(logits: Tensor, *, temperature: float) -> Tensor:
    """log softmax(logits / temperature), as a trainer computes it: [..., V] -> float32 [..., V]."""
    scaled = logits.float() if temperature == 1.0 else logits.float() / temperature
    return torch.log_softmax(scaled, dim=-1)


def likeliest(logprobs: Tensor, *, count: int) -> dict[int, float]:
    """The `count` likeliest tokens of [V] log-probabilities, in falling order."""
    best = logprobs.topk(min(count, len(logprobs)))
    return dict(zip(best.indices.tolist(), best.values.tolist(), strict=True))


def _processed(scores: Tensor, *, sampling: SamplingParams, prompt: list[int], answer: list[int]) -> Tensor:
    """Bias, penalties and mask."""
    if sampling.logit_bias:
        scores = scores.clone()
        for token, bias in sampling.logit_bias.items():
            scores[token] += bias
    if sampling.repetition_penalty != 1:
        seen = torch.tensor(sorted(set(prompt) | set(answer)))
        part = scores[seen]
        scores = scores.clone()
        scores[seen] = torch.where(part > 0, part / sampling.repetition_penalty, part * sampling.repetition_penalty)
    if answer and (sampling.presence_penalty or sampling.frequency_penalty):
        scores = scores.clone()
        for token, count in Counter(answer).items():
            scores[token] -= sampling.presence_penalty + count * sampling.frequency_penalty
    if sampling.token_mask is not None:
        allowed = sampling.token_mask(answer)
        if not allowed.any():
            raise ValueError("sampling.token_mask allows no token: let it allow one, the end token for example")
        scores = scores.masked_fill(~allowed, float("-inf"))
    return scores


def _cut(logprobs: Tensor, *, sampling: SamplingParams) -> Tensor:
    """Log-probabilities [V] with those that top-k, top-p and min-p remove at -inf; not renormalised."""
    if sampling.top_k and sampling.top_k < len(logprobs):
        lowest = logprobs.topk(sampling.top_k).values[-1]
        logprobs = torch.log_softmax(logprobs.masked_fill(logprobs < lowest, float("-inf")), dim=-1)
    if sampling.top_p < 1:
        ordered, order = logprobs.sort(descending=True, stable=True)
        before = ordered.exp().cumsum(-1) - ordered.exp()
        logprobs = logprobs.index_fill(0, order[before >= sampling.top_p], float("-inf"))
    if sampling.min_p > 0:
        logprobs = logprobs.masked_fill(logprobs < logprobs.max() + math.log(sampling.min_p), float("-inf"))
    return logprobs
