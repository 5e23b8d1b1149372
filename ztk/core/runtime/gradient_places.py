"""Lets a backward write a parameter's gradient directly into its bucket, without a copy.

`ztk.zero` offers a view of the bucket's flat buffer; `ztk.nn` writes to it in the backward of matrix products. Gradients have their
parameter's dtype.
"""

from collections.abc import Callable

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

_offered: WeakIdKeyDictionary = (
    WeakIdKeyDictionary()
)  # not attributes of the parameters: attributes would be saved with them


def offer_place(parameter: Tensor, *, place: Callable[[], Tensor | None]) -> None:
    """Registers `place()`, which is called in a backward. It returns an unshared view with the shape of `parameter` for the whole gradient,
    or None if the gradient must be a separate tensor. The backward returns the view to autograd as the gradient.
    """
    _offered[parameter] = place


def withdraw_place(parameter: Tensor) -> None:
    """Undoes `offer_place` of `parameter`, of any shape. Idempotent."""
    _offered.pop(parameter, None)


def place_offered(parameter: Tensor) -> Callable[[], Tensor | None] | None:
    """The `place` registered for `parameter` (any shape), or None."""
    return _offered.get(parameter)
