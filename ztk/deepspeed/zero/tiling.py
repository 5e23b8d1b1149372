"""`deepspeed.zero.TiledLinear`: a linear layer as a grid of small ones, which stage 3 gathers one at a time."""

from typing import Any

import torch
from torch import Tensor, nn

from ztk.deepspeed.tools.helpers import partition_uniform


class TiledLinear(nn.Module):
    """out_splits rows of in_splits linear layers each. The sum over a row is a part of the output.

    linears: `linears[o][i]` has the weight [rows of part o, columns of part i]; the last of a row has the bias.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        input_is_already_split: bool = False,
        combine_out_splits: bool = True,
        linear_cls: type[nn.Module] = nn.Linear,
        init_linear: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        """input_is_already_split: the forward takes a list of parts. combine_out_splits: the forward returns one tensor, else a list of
        parts.
        init_linear: the initial weights. kwargs: for `linear_cls`.

        Raises ValueError for more splits than features.
        """
        super().__init__()
        for name, splits, features in (
            ("in_splits", in_splits, in_features),
            ("out_splits", out_splits, out_features),
        ):
            if not 1 <= splits <= features:
                raise ValueError(f"{name}={splits}: must be from 1 to the number of features, {features}")
        self.in_features, self.out_features, self.use_bias = in_features, out_features, bias
        self.in_splits, self.out_splits = in_splits, out_splits
        self.input_is_already_split, self.combine_out_splits = input_is_already_split, combine_out_splits
        self.in_parts = partition_uniform(in_features, in_splits)
        self.out_parts = partition_uniform(out_features, out_splits)
        self.linears = nn.ModuleList(
            nn.ModuleList(
                linear_cls(stop - start, below - above, bias=bias and index == in_splits - 1, **kwargs)
                for index, (start, stop) in enumerate(zip(self.in_parts, self.in_parts[1:], strict=False))
            )
            for above, below in zip(self.out_parts, self.out_parts[1:], strict=False)
        )
        if init_linear is not None:
            self.copy_params_from(init_linear)

    def forward(self, input_: Any) -> Any:
        """input_: [..., in_features], or its parts. Returns [..., out_features], or its parts."""
        parts = self._input_parts(input_)
        outputs = [self._sum_of_row(row, parts=parts) for row in self.linears]
        return self._combine_output_splits(outputs) if self.combine_out_splits else outputs

    @torch.no_grad()
    def copy_params_from(self, other: Any) -> None:
        """Copies the weight [out_features, in_features] and the bias of `other`.

        Gathers sharded parameters, in which case it is a collective call. Raises ValueError for another shape, or a bias on one side
        only.
        """
        from ztk.deepspeed.zero.gathered import GatheredParameters

        weight, bias = other.weight, getattr(other, "bias", None)
        if tuple(weight.shape) != (self.out_features, self.in_features) or (bias is not None) != self.use_bias:
            raise ValueError(
                f"a layer of {tuple(weight.shape)} with{'' if bias is not None else 'out'} bias cannot fill a TiledLinear of "
                f"({self.out_features}, {self.in_features}) with{'' if self.use_bias else 'out'} bias"
            )
        with GatheredParameters([weight, bias]):
            for row, above, below in zip(self.linears, self.out_parts, self.out_parts[1:], strict=False):
                assert isinstance(row, nn.ModuleList)
                for tile, start, stop in zip(row, self.in_parts, self.in_parts[1:], strict=False):
                    own = dict(tile.named_parameters())
                    with GatheredParameters(own.values(), modifier_rank=0):
                        own["weight"].copy_(weight[above:below, start:stop])
                        if "bias" in own:
                            own["bias"].copy_(bias[above:below])

    def _input_parts(self, input_: Any) -> list[Tensor]:
        if not self.input_is_already_split:
            sizes = [stop - start for start, stop in zip(self.in_parts, self.in_parts[1:], strict=False)]
            return list(input_.split(sizes, dim=-1))
        if len(input_) != self.in_splits:
            raise ValueError(f"the input has {len(input_)} parts, and in_splits={self.in_splits}")
        return list(input_)

    def _sum_of_row(self, row: Any, *, parts: list[Tensor]) -> Any:
        total = None
        for tile, part in zip(row, parts, strict=True):
            total = self._reduce_local_output(total, tile(part))
        return total

    def _reduce_local_output(self, current: Any, new: Any) -> Any:
        return new if current is None else current + new

    def _combine_output_splits(self, outputs: list) -> Any:
        return torch.cat(outputs, dim=-1)


class TiledLinearReturnBias(TiledLinear):
    """For layers that return (output, bias or None), like Megatron's."""

    def _reduce_local_output(self, current: Any, new: Any) -> Any:
        if current is None:
            return new
        (total, bias), (output, own) = current, new
        return total + output, own if bias is None else bias if own is None else bias + own

    def _combine_output_splits(self, outputs: list) -> Any:
        parts, biases = zip(*outputs, strict=True)
        return torch.cat(parts, dim=-1), None if biases[0] is None else torch.cat(biases, dim=-1)
