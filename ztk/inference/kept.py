"""Tokens kept by top-k, top-p and min-p, and draws from these tokens whose probabilities a trainer can compute."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ztk.inference.policy import SamplingParams
from ztk.inference.sample import Drawn, choose, fp32_logprobs, uniform

_ROWS = 64  # that are sorted at once, in double precision: half a GiB for 150,000 tokens


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
            places = [uniform(of.seed, of.draw_key, sample, at) for of, sample, at in map(draws.__getitem__, own)]
            drawn = _drawn(logits[own], cut=cut, temperature=temperature, places=places)
            found.update(zip(own, drawn, strict=True))
    return [found[row] for row in range(len(draws))]


def _drawn(logits: Tensor, *, cut: Cut, temperature: float, places: list[float]) -> list[Drawn]:
    """Of each row of logits [R, V] the token at its place in [0, 1) of the cumulative probability."""
    hidden, kept = cut.hide(logits, temperature=temperature)
    precise = torch.log_softmax(hidden.double() / temperature, dim=-1)
    tokens = choose(precise, uniforms=torch.tensor(places, dtype=torch.float64)).unsqueeze(1)
    logprobs = (torch.log_softmax(logits, dim=-1), fp32_logprobs(hidden, temperature=temperature))
    numbers = torch.cat([tokens.double(), *(part.gather(1, tokens).double() for part in logprobs)], dim=1).tolist()
    ids = kept.nonzero()[:, 1].to(torch.int32).cpu().split(kept.sum(1).tolist())
    return [
        Drawn(token=int(token), logprob=logprob, processed_logprob=processed, top=None, kept=own)
        for (token, logprob, processed), own in zip(numbers, ids, strict=True)
    ]
