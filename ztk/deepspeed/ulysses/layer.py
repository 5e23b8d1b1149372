"""`deepspeed.sequence.layer`: attention between two all-to-alls, for models that divide their sequences themselves.

Jacobs et al. 2023, https://arxiv.org/abs/2309.14509. Results have the dtype of their inputs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from ztk.core.runtime.pending import Handle
from ztk.parallel.sequence.exchange import to_heads, to_sequence
from ztk.parallel.sequence.ulysses import key_repeats


@dataclass(frozen=True, slots=True)
class GroupExchange:
    """Adapts a process group of torch.distributed to the interface of `ztk.parallel.sequence.exchange`."""

    group: dist.ProcessGroup | None

    @property
    def size(self) -> int:
        return dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    def all_to_all(self, source: Tensor, *, out: Tensor, label: str) -> Handle:
        """Sends chunk i of `source` to rank i. `out` receives the chunks in order of ranks."""
        del label
        dist.all_to_all_single(out, source, group=self.group)
        return Handle()


class DistributedAttention(nn.Module):
    """Calls `local_attention(query, key, value, ...)` with all tokens of some heads, where each rank has all heads of some tokens.

    sequence_process_group: the ranks that share a sequence, in the order of its parts.
    scatter_idx, gather_idx: must be 2 (heads) and the sequence's dimension according to `batch_dim_idx`, or 0.
    sp_stream: accepted and ignored; results are the same without overlap.
    num_kv_heads: accepted and read from the key.

    Raises ValueError for other dimensions.
    """

    def __init__(
        self,
        local_attention: Callable,
        sequence_process_group: dist.ProcessGroup | None,
        scatter_idx: int = 2,
        gather_idx: int = 0,
        sp_stream: object = None,
        num_kv_heads: int | None = None,
    ) -> None:
        super().__init__()
        del sp_stream, num_kv_heads
        if scatter_idx != 2 or gather_idx not in (0, 1):
            raise ValueError(
                f"scatter_idx={scatter_idx}, gather_idx={gather_idx}: heads are dimension 2 and tokens 0 or 1; leave both out"
            )
        self.local_attn, self.spg = local_attention, sequence_process_group
        self.scatter_idx, self.gather_idx = scatter_idx, gather_idx
        self._exchange = GroupExchange(sequence_process_group)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        batch_dim_idx: int,
        rotary_pos_emb: None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """query, key, value: [B, T / n, H, D], or with batch_dim_idx=1 [T / n, B, H, D]. The result has the query's layout.

        Key heads are repeated if there are fewer than the ranks need. If the local attention folds heads into one dimension, [.., T, H /
        n * D], the result does so too.

        Raises ValueError for a number of heads that the ranks do not divide, and for rotary_pos_emb: rotate before the call, by positions
        in the full sequence.
        """
        if rotary_pos_emb is not None:
            raise ValueError("rotary_pos_emb: rotate query and key before the call, by positions in the full sequence")
        if batch_dim_idx not in (0, 1):
            raise ValueError(f"batch_dim_idx={batch_dim_idx}: must be 0 for [B, T, H, D] or 1 for [T, B, H, D]")
        tokens_first = batch_dim_idx == 1
        query, key, value = (x.transpose(0, 1) if tokens_first else x for x in (query, key, value))
        parts = gather_heads(query, key=key, value=value, exchange=self._exchange)
        out = self.local_attn(*(x.transpose(0, 1) if tokens_first else x for x in parts), *args, **kwargs)
        out = scatter_heads(out.transpose(0, 1) if tokens_first else out, exchange=self._exchange)
        return out.transpose(0, 1) if tokens_first else out


def gather_heads(
    query: Tensor, *, key: Tensor, value: Tensor, exchange: GroupExchange
) -> tuple[Tensor, Tensor, Tensor]:
    """Converts [B, T / n, H, D] each -> [B, T, H / n, D]. Key heads are repeated as often as the ranks need."""
    repeats = key_repeats(heads=query.shape[2], key_heads=key.shape[2], ranks=exchange.size)
    key, value = (x.repeat_interleave(repeats, dim=2) if repeats > 1 else x for x in (key, value))
    query, key, value = (
        to_heads(x, comm=exchange, label=label) for x, label in ((query, "query"), (key, "key"), (value, "value"))
    )
    return query, key, value


def scatter_heads(out: Tensor, *, exchange: GroupExchange) -> Tensor:
    """Converts [B, T, H / n, D] -> [B, T / n, H, D], or [B, T, H / n * D] -> [B, T / n, H * D]."""
    if out.ndim == 4:
        return to_sequence(out, comm=exchange, label="attention")
    return to_sequence(out.unsqueeze(-1), comm=exchange, label="attention").squeeze(-1)
