"""Computes a long sequence in tiles. Each tile is recomputed in the backward, so that memory is needed for one tile only.

DeepSpeed's three names on top of torch's activation checkpointing. Autograd accumulates the gradients of weights over the tiles, so
`compute_params`, with which DeepSpeed detects complete gradients, is accepted and ignored. Results have the dtype of the function's
results.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def sequence_tiled_compute(
    fn: Callable[..., Tensor],
    seqlen: int,
    shards: int,
    kwargs_to_shard: Mapping[str, Tensor],
    kwargs_to_pass: Mapping[str, Any],
    grad_requiring_tensor_key: str | None,
    compute_params: Iterable | None = None,
    output_unshard_dimension: int = 1,
    output_reduction: str | None = "mean",
) -> Tensor:
    """Runs fn(**tiles, **kwargs_to_pass) on each of `shards` ranges of the sequence, dimension 1 of all tensors [B, T, ..] in
    kwargs_to_shard.

    output_unshard_dimension: where results are joined; 0 stacks losses. output_reduction: "mean", "sum" or None, of the joined results.

    Raises ValueError for another reduction.
    """
    del grad_requiring_tensor_key, compute_params
    if output_reduction not in ("mean", "sum", None):
        raise ValueError(f"output_reduction={output_reduction!r}: must be mean, sum or None")
    size = -(-seqlen // shards)
    tiles = [
        {name: value[:, start : start + size] for name, value in kwargs_to_shard.items()}
        for start in range(0, seqlen, size)
    ]
    parts = [checkpoint(fn, **tile, **kwargs_to_pass, use_reentrant=False) for tile in tiles]
    joined = torch.stack(parts) if output_unshard_dimension == 0 else torch.cat(parts, dim=output_unshard_dimension)
    return joined if output_reduction is None else getattr(joined, output_reduction)()


class TiledMLP:
    """An MLP with the forward `TiledMLP.apply(fn, self, x, shards, compute_params)`."""

    @staticmethod
    def apply(
        fn: Callable[[Any, Tensor], Tensor], self: Any, x: Tensor, shards: int, compute_params: Iterable | None = None
    ) -> Tensor:
        """Runs fn(self, x) over `shards` ranges of x [.., T, C]."""
        del compute_params
        return torch.cat([checkpoint(fn, self, tile, use_reentrant=False) for tile in x.chunk(shards, dim=-2)], dim=-2)


class TiledFusedLogitsLoss:
    """A loss over tiles of tokens that avoids materializing all logits."""

    @staticmethod
    def apply(
        fn: Callable[..., Tensor],
        self: Any,
        x: Tensor,
        y: Tensor,
        mask: Tensor | None,
        shards: int,
        compute_params: Iterable | None,
        output_reduction: str,
    ) -> Tensor:
        """Returns the mean or sum of fn(self, x, y[, mask]) over `shards` ranges of the flattened tokens: x [B, T, ..], y [B, T, ..],
        mask [B, T].

        Raises ValueError for other shapes and for another reduction.
        """
        del compute_params
        if output_reduction not in ("mean", "sum"):
            raise ValueError(f"output_reduction={output_reduction!r}: must be mean or sum")
        if x.ndim < 2 or y.ndim < 2 or x.shape[:2] != y.shape[:2] or (mask is not None and mask.shape != x.shape[:2]):
            shapes = f"x {tuple(x.shape)}, y {tuple(y.shape)}" + (
                f", mask {tuple(mask.shape)}" if mask is not None else ""
            )
            raise ValueError(f"{shapes}: must begin with the same [B, T]")
        tensors = (x, y) if mask is None else (x, y, mask)
        tiles = zip(*(value.flatten(0, 1).chunk(shards, dim=0) for value in tensors), strict=True)
        losses = torch.stack([checkpoint(fn, self, *tile, use_reentrant=False) for tile in tiles])
        return losses.mean() if output_reduction == "mean" else losses.sum()
