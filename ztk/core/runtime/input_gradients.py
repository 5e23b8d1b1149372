"""Who wants to know the gradient of a layer's input before the layer computes the gradient of its weight.

`ztk.parallel.tensor` sums input gradients over ranks: it offers to take them, and `ztk.nn` hands them over in the backward of matrix
products, so that the sum is under way while the weight's product runs. Gradients have the dtype of the input.
"""

from collections.abc import Callable

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

# Of an input's gradient, which nobody else holds: what the layer returns to autograd in its place.
Taker = Callable[[Tensor], Tensor | None]

_offered: WeakIdKeyDictionary = WeakIdKeyDictionary()


def offer_to_take(x: Tensor, *, attach: Callable[[], Taker]) -> None:
    """A layer that is given `x`, of any shape, and whose backward hands over its gradient, calls `attach` in its forward."""
    _offered[x] = attach


def taker_of(x: Tensor) -> Taker | None:
    """Who takes the gradient of `x`, of any shape, in the backward of the layer that asks now, in its forward; None: nobody."""
    attach = _offered.get(x) if _offered else None
    return None if attach is None else attach()
