"""Vocabulary-parallel cross entropy: every rank has some columns of the logits, and they are never gathered.

Each rank exchanges three numbers per row: the maximum of its own columns, the sum of their exponentials below it, and the target's logit
(zero if another rank has that column).
The backward needs no communication and writes over the logits: see `ztk.kernels.sharded_cross_entropy`. The loss has the
dtype fp32.
"""

from torch import Tensor, nn

from ztk.core.runtime import Comm
from ztk.core.runtime.differentiable import through
from ztk.kernels import sharded_cross_entropy
from ztk.nn.loss import IGNORED
from ztk.parallel.tensor.collectives import gather_last


class VocabularyParallelLoss(nn.Module):
    """Replaces `ztk.nn.loss.LanguageLoss`: logits [B, T, own columns] and targets [B, T] -> mean cross entropy. Without targets it returns the
    full logits [B, T, V].

    sizes: columns per rank, in rank order. z_loss: the same as in `LanguageLoss`, in training mode.
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
        it may run once, and the logits must not be used otherwise.
    targets: int64 [N], columns of the full logits; rows with `ignore_index` do not count.
    """

    def exchange(statistics: Tensor) -> Tensor:
        return through(
            statistics, forward=lambda x: comm.gather(x, label="cross entropy"), backward=lambda d_out: d_out[comm.rank]
        )

    return sharded_cross_entropy(
        logits, targets, first=first, exchange=exchange, ignore_index=ignore_index, z_loss=z_loss
    )
