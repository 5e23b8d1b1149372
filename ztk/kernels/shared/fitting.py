"""Steps, scales and zeros of int4 weights.

[Note: Fitting int4]
The least and the greatest weight of a group set its first scale and zero. Each of `_SHARES` of that range then gives steps, to which a line is
fitted by least squares. The group keeps the scale and zero, as bf16 stores them, with the smallest sum of squared errors: outliers are clipped
where that helps the other weights. The search needs no data, treats every group alone and gives the same bits every time.

[Note: Compensated errors]
GPTQ (Frantar et al. 2022, https://arxiv.org/abs/2210.17323). The inputs of a weight are rounded one after the other, and the inputs after
them compensate the error as far as the second moments H = sum of x x^T of the inputs allow. With U the upper Cholesky factor of the inverse
of H, input i has the error e = (w[i] - stored[i]) / U[i, i], a later input j becomes w[j] - e U[i, j], and the sum of e^2 is the squared
change of the outputs. The scale and zero of a group are fitted when its first input is reached, as in [Note: Fitting int4] with the factors
1 / U[i, i]^2 on the squared errors.

H gets 1 % of its mean diagonal, so that it has an inverse even if there are few inputs, or some are always zero. The computation is in
float64, so that its result does not depend on how many outputs are computed at once: a rank has the steps of a single one.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

GROUP = 32  # inputs that share a scale and a zero
_SHARES = (1.0, 0.93, 0.86)  # of a group's range
_GROUPS = 1 << 15  # that are fitted at once, in the processor's cache
_DAMPING = 0.01  # of the mean diagonal
_AT_ONCE = 128  # inputs between two products with all later ones, a multiple of GROUP


def fit_weight(weight: Tensor, *, moments: Tensor | None) -> tuple[Tensor, Tensor]:
    """float32 weight [.., K], in a multiple of GROUP -> steps uint8 [.., K / GROUP, GROUP] of 0 to 15, and scales [.., K / GROUP, 2].

    moments: float64 [n, n] of the inputs of one weight [N, K], the sum of x x^T; inputs that it has not are zero, and so are the weights of
    those that it has in addition. Without it, or where it is zero, the weights' own errors are minimised, with it those of the outputs.
    """
    if moments is None or not moments.any():
        return fit_int4(weight.unflatten(-1, (-1, GROUP)))
    extra = weight.shape[-1] - moments.shape[-1]
    damped = torch.nn.functional.pad(moments, (0, extra, 0, extra)).to(weight.device)
    damped.diagonal().add_(_DAMPING * moments.diagonal().mean().item())
    return _compensate(weight, damped=damped)


def fit_int4(groups: Tensor) -> tuple[Tensor, Tensor]:
    """float32 groups of weights [.., GROUP] -> steps uint8 of 0 to 15, and scale and zero bfloat16 [.., 2]. See [Note: Fitting int4]."""
    steps = torch.empty(groups.shape, dtype=torch.uint8, device=groups.device)
    scales = torch.empty(*groups.shape[:-1], 2, dtype=torch.bfloat16, device=groups.device)
    if groups.is_meta:  # no values to fit
        return steps, scales
    parts = zip(*(part.flatten(0, -2).split(_GROUPS) for part in (groups, steps, scales)), strict=True)
    for weights, own_steps, own_scales in parts:
        scale, zero = _best_line(weights)
        own_steps.copy_(_steps_of(weights, scale=scale, zero=zero))
        own_scales.copy_(torch.cat([scale, zero], dim=-1))
    return steps, scales


def _best_line(weights: Tensor, *, importance: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """weights [n, GROUP] -> scale and zero [n, 1] with the smallest error, with the values of bfloat16. importance [GROUP]: factors on the
    squared errors, 1 by default."""
    (scale, zero), *others = _lines(weights, importance=importance)
    least = _error(weights, scale=scale, zero=zero, importance=importance)
    for other_scale, other_zero in others:
        error = _error(weights, scale=other_scale, zero=other_zero, importance=importance)
        is_better = error < least
        least = torch.where(is_better, error, least)
        scale, zero = torch.where(is_better, other_scale, scale), torch.where(is_better, other_zero, zero)
    return scale, zero


def _lines(weights: Tensor, *, importance: Tensor | None) -> Iterator[tuple[Tensor, Tensor]]:
    """The range of each group, then the line through the steps of every share of it."""
    least, greatest = weights.aminmax(dim=-1, keepdim=True)
    total = GROUP if importance is None else importance.sum()
    middle, mean = (least + greatest) / 2, _sum(weights, importance=importance) / total
    # Increased by twice the largest rounding error of bf16, so that 15 rounded steps cover the range.
    full = (greatest - least) / 15 * (1 + 2.0**-7)
    yield _as_stored(full, least + 8 * full)
    for share in _SHARES:
        scale, zero = _as_stored(full * share, middle + full * (share / 2))
        away = _steps_of(weights, scale=scale, zero=zero) - 8
        centre = _sum(away, importance=importance) / total
        away -= centre
        slope = _sum(away * (weights - mean), importance=importance) / _sum(away.square(), importance=importance)
        slope = torch.where(slope > 0, slope, scale)  # all weights on one step: NaN
        yield _as_stored(slope, mean - slope * centre)


def _as_stored(scale: Tensor, zero: Tensor) -> tuple[Tensor, Tensor]:
    dtype = scale.dtype
    return scale.clamp(min=torch.finfo(torch.bfloat16).tiny).bfloat16().to(dtype), zero.bfloat16().to(dtype)


def _steps_of(weights: Tensor, *, scale: Tensor, zero: Tensor) -> Tensor:
    """The steps of 0 to 15 next to the weights, in their dtype."""
    return ((weights - zero) / scale).round_().add_(8).clamp_(0, 15)


def _error(weights: Tensor, *, scale: Tensor, zero: Tensor, importance: Tensor | None) -> Tensor:
    """Sum of squares [n, 1]."""
    away = _steps_of(weights, scale=scale, zero=zero).sub_(8).mul_(scale).add_(zero).sub_(weights)
    return _sum(away.square_(), importance=importance)


def _sum(values: Tensor, *, importance: Tensor | None) -> Tensor:
    """[n, GROUP] -> [n, 1]."""
    return (values if importance is None else values * importance).sum(-1, keepdim=True)


def _compensate(weight: Tensor, *, damped: Tensor) -> tuple[Tensor, Tensor]:
    """weight [out, in] and damped moments float64 [in, in] -> steps and scales as of `fit_int4`. See [Note: Compensated errors]."""
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    factor, wide = torch.linalg.cholesky(inverse, upper=True), weight.double()
    out, columns = wide.shape
    steps = torch.empty(out, columns // GROUP, GROUP, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(out, columns // GROUP, 2, dtype=torch.bfloat16, device=weight.device)
    for start in range(0, columns, _AT_ONCE):
        stop = min(start + _AT_ONCE, columns)
        own = wide[:, start:stop].t().contiguous()  # the weights of an input next to each other
        within = factor[start:stop, start:stop]
        errors = torch.empty_like(own)
        for first in range(0, stop - start, GROUP):
            last, group = first + GROUP, (start + first) // GROUP
            importance = within.diagonal()[first:last].pow(-2)
            scale, zero = (part.squeeze(1) for part in _best_line(own[first:last].t(), importance=importance))
            scales[:, group] = torch.stack([scale, zero], dim=1).bfloat16()
            for i in range(first, last):
                chosen = _steps_of(own[i], scale=scale, zero=zero)
                steps[:, group, i - first] = chosen.to(torch.uint8)
                errors[i] = (own[i] - chosen.sub_(8).mul_(scale).add_(zero)) / within[i, i]
                own[i + 1 :].addr_(within[i, i + 1 :], errors[i], alpha=-1)
        wide[:, stop:].addmm_(errors.t(), factor[start:stop, stop:], alpha=-1)
    return steps, scales
