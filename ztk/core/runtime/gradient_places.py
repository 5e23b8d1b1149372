"""Where the gradient of a parameter belongs: an operation that knows writes it there, and nobody copies it.

`ztk.zero` offers the place in a bucket's flat buffer, `ztk.nn` takes it in the backward of matrix products. Gradients have their parameter's
dtype.
"""

from collections.abc import Callable

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

_offered: WeakIdKeyDictionary = WeakIdKeyDictionary()  # beside the parameters: what is an attribute goes into files


def offer_place(parameter: Tensor, *, place: Callable[[], Tensor | None]) -> None:
    """`place()` is called in a backward: it returns a view with the shape of `parameter` that nobody else holds, for all of its gradient, or
    None if the gradient must be a tensor of its own. A view that was taken is returned to autograd as the gradient.
    """
    _offered[parameter] = place


def withdraw_place(parameter: Tensor) -> None:
    """Undoes `offer_place` of `parameter`, of any shape. Idempotent."""
    _offered.pop(parameter, None)


def place_offered(parameter: Tensor) -> Callable[[], Tensor | None] | None:
    """What was offered for `parameter`, of any shape; None: nothing."""
    return _offered.get(parameter)
