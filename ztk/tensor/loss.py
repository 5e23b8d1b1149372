"""Vocabulary-parallel cross entropy: every rank has some columns of the logits, and they are never gathered.

Each rank exchanges two numbers per row: the log-sum-exp of its own columns, and the target's logit (zero if another rank has that column).
The backward needs no communication: d_logits = (exp(logits - lse) (1 + 2 z lse) - onehot) / number of targets, written over the logits; z is
the weight of the z-loss, see `ztk.nn.LanguageLoss`. The loss has the dtype fp32.
"""

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ztk.nn.loss import IGNORED
from ztk.runtime import Comm
from ztk.tensor.collectives import gather_last

_CHUNK = 1 << 22  # logits in fp32 at one time: 16 MB


class VocabularyParallelLoss(nn.Module):
    """Replaces `ztk.nn.LanguageLoss`: logits [B, T, own columns] and targets [B, T] -> mean cross entropy. Without targets it returns the
    full logits [B, T, V].

    sizes: columns per rank, in rank order. z_loss: as in `LanguageLoss`, in training mode.
    """

    def __init__(self, comm: Comm, *, sizes: tuple[int, ...], z_loss: float = 0.0) -> None:
        super().__init__()
        self._comm, self._sizes, self.z_loss = comm, sizes, z_loss

    def forward(self, logits: Tensor, targets: Tensor | None = None) -> Tensor:
        if targets is None:
            return gather_last(logits, comm=self._comm, sizes=self._sizes, label="logits")
        first = sum(self._sizes[: self._comm.rank])
        return vocabulary_parallel_cross_entropy(
            logits.flatten(0, 1),
            targets=targets.flatten(),
            first=first,
            comm=self._comm,
            z_loss=self.z_loss if self.training else 0.0,
        )


def vocabulary_parallel_cross_entropy(
    logits: Tensor, *, targets: Tensor, first: int, comm: Comm, ignore_index: int = IGNORED, z_loss: float = 0.0
) -> Tensor:
    """Mean cross entropy plus z_loss * mean of lse^2, fp32 scalar, the same bits on all ranks.

    logits: [N, own columns], the columns from `first` on of the full logits [N, V]. The backward writes their gradient into their memory:
        it may run once, and nothing else may need the logits then.
    targets: int64 [N], columns of the full logits; rows with `ignore_index` do not count.
    """
    return _CrossEntropy.apply(logits, targets, first, comm, (ignore_index, z_loss))


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits: Tensor, targets: Tensor, first: int, comm: Comm, options: tuple[int, float]) -> Tensor:
        ignore_index, z_loss = options
        N, V = logits.shape
        counts = targets != ignore_index
        local = targets - first
        here = counts & (local >= 0) & (local < V)
        index = torch.where(here, local, 0)
        statistics = logits.new_empty(comm.size, 2, N, dtype=torch.float32)
        own = statistics[comm.rank]
        for rows in _chunks(N, width=V):
            own[0, rows] = logits[rows].float().logsumexp(dim=1)
        own[1] = torch.where(here, logits.gather(1, index.unsqueeze(1)).squeeze(1).float(), 0.0)
        comm.all_gather(statistics.view(-1), label="cross entropy").wait()
        lse = statistics[:, 0].logsumexp(dim=0)  # [N]
        total = counts.sum().clamp(min=1)
        ctx.save_for_backward(logits, lse, index, here, counts, total)
        ctx.is_spent, ctx.z_loss = False, z_loss
        loss = lse - statistics[:, 1].sum(dim=0)
        if z_loss:
            loss.addcmul_(lse, lse, value=z_loss)
        return torch.where(counts, loss, 0.0).sum() / total

    @staticmethod
    @once_differentiable
    def backward(ctx, d_loss: Tensor) -> tuple:
        if ctx.is_spent:
            raise RuntimeError("vocabulary_parallel_cross_entropy: an earlier backward has written over its logits")
        ctx.is_spent = True
        logits, lse, index, here, counts, total = ctx.saved_tensors
        weight = torch.where(counts, d_loss / total, 0.0)  # [N]
        for rows in _chunks(*logits.shape):
            d_rows = (logits[rows].float() - lse[rows, None]).exp_()
            if ctx.z_loss:
                d_rows.mul_(1 + 2 * ctx.z_loss * lse[rows, None])
            d_rows[torch.arange(len(d_rows), device=d_rows.device), index[rows]] -= here[rows].float()
            logits[rows] = d_rows.mul_(weight[rows, None]).to(logits.dtype)
        return logits, None, None, None, None


def _chunks(rows: int, width: int) -> list[slice]:
    step = max(1, _CHUNK // max(1, width))
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]
