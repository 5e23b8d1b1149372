"""Hands over the gradient of a layer's input before the layer computes the gradient of its weight.

`ztk.parallel.tensor` sums input gradients over ranks. It registers for an input, and the backward of matrix products in `ztk.nn` passes it
the gradient, so that the sum overlaps with the weight's product. Gradients have the dtype of the input.
"""

from collections.abc import Callable

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

# Takes the gradient of an input, which it owns, and returns the tensor that the layer returns to autograd instead.
Taker = Callable[[Tensor], Tensor | None]

_offered: WeakIdKeyDictionary = WeakIdKeyDictionary()


def offer_to_take(x: Tensor, *, attach: Callable[[], Taker]) -> None:
    """Registers `attach` for `x` (any shape). A layer that hands over its input gradient calls `attach` in its forward on `x`."""
    _offered[x] = attach


def taker_of(x: Tensor) -> Taker | None:
    """The taker registered for `x` (any shape), or None. Called in the forward of a layer."""
    attach = _offered.get(x) if _offered else None
    return None if attach is None else attach()
