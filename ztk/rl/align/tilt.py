"""The largest reward for a given divergence, in closed form, for prompts with one right answer."""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


class Frontier:
    """The best mean reward for a mean divergence from a first policy, and the least divergence for a mean reward.

    Among all policies with a given divergence, the best is the first policy tilted by exp(reward / beta) (Korbak et al. 2022, arXiv
    2205.11275). Let one answer to a prompt have reward 1 and all others 0, and p be its probability under the first policy. The tilted
    probability is q = p e / (p e + 1 - p), e = exp(1 / beta), and the divergence is q log(q / p) + (1 - q) log((1 - q) / (1 - p)). Both
    are averaged over prompts.
    """

    def __init__(self, right: Tensor) -> None:
        """right: p of each prompt, float32 or float64 [P].

        Raises:
            ValueError: a probability outside (0, 1): no divergence changes it, or none is needed.
        """
        if not bool(((right > 0) & (right < 1)).all()):
            raise ValueError("the probability of a right answer is 0 or 1: give the first policy warm_start steps")
        inverse = torch.linspace(0, 40, 4001, dtype=torch.float64)  # of beta
        logits = torch.logit(right.double()).unsqueeze(1) + inverse
        tilted, p = torch.sigmoid(logits), right.double().unsqueeze(1)
        others = logsigmoid(-logits) - torch.log1p(-p)  # log((1 - q) / (1 - p)), without cancellation
        kl = tilted * (logsigmoid(logits) - p.log()) + (1 - tilted) * others
        self.kl, self.reward = kl.mean(0).clamp(min=0.0), tilted.mean(0)  # float64 [4001] each, increasing

    def most(self, kl: float) -> float:
        """Returns the largest reward for a divergence in nats. A noisy estimate below 0 is taken as 0."""
        return _between(max(kl, 0.0), given=self.kl, found=self.reward)

    def least(self, reward: float) -> float:
        """Returns the least divergence in nats for a reward; 0 for one that the first policy has."""
        return _between(max(reward, float(self.reward[0])), given=self.reward, found=self.kl)


def _between(value: float, *, given: Tensor, found: Tensor) -> float:
    """Interpolates `found` linearly at the point where the increasing `given` is `value`."""
    index = int(torch.searchsorted(given, torch.tensor(value, dtype=torch.float64)).clamp(1, len(given) - 1))
    first, second = float(given[index - 1]), float(given[index])
    share = min(1.0, (value - first) / max(second - first, 1e-300))
    return float(found[index - 1] + share * (found[index] - found[index - 1]))
