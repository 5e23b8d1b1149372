"""Base classes of ztk's autograd functions. They raise errors that name a way out where torch's would name its internals.

[Note: Transforms]
`torch.func`, forward-mode differentiation and torch.export need operations that torch can differentiate or export itself. An op therefore
hands over to its reference inside of them (`library.needs_reference`), and everything that works in plain torch works. Functions without
a reference raise.
A kernel's backward has no derivative, so it raises under `create_graph=True`. `once_differentiable` is not enough: it refuses neither if the
gradient of the output requires none, as of `rms_norm(x).sum()`, nor in `torch.autograd.grad(_, inputs)`, which does not run nodes that do
not lead to `inputs`. The second derivative would lack a term, without an error.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ztk.kernels.launch.private import innermost_transform, transforms

_is_compiling, _records = torch.compiler.is_compiling, torch.is_grad_enabled
_TRANSFORMS = {
    "Grad": "torch.func.grad (also vjp, jacrev and hessian)",
    "Jvp": "torch.func.jvp (also jacfwd, linearize and hessian)",
    "Vmap": "torch.vmap",
    "Functionalize": "torch.func.functionalize",
}
BY_REFERENCE = (
    "Run the forward with ztk.kernels.set_backend('reference') (kernels=reference): it consists of torch's own operations, which have "
    "derivatives of any order"
)


def is_transformed() -> bool:
    """Whether `torch.func`, forward-mode differentiation or torch.export is active. See [Note: Transforms]."""
    if _is_compiling():  # first: torch.compile cannot trace the others
        return torch.compiler.is_exporting()
    return transforms() or forward_ad._current_level >= 0


class Function(torch.autograd.Function):
    """An autograd function without rules for `torch.func` and forward-mode differentiation: `apply` raises RuntimeError for them."""

    INSTEAD = "Use torch.autograd.grad or backward, which the function supports"  # in errors: a way that works

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """Calls the function like torch does. Tensors have any shape and dtype."""
        if (transforms() or forward_ad._current_level >= 0) and (transform := _transform_of(args)):
            raise RuntimeError(f"{cls.__module__} has no rule for {transform}. {cls.INSTEAD}")
        return super().apply(*args)


class OnceFunction(Function):
    """A `Function` whose backward has no derivative. With `create_graph=True` the backward raises RuntimeError."""

    INSTEAD = BY_REFERENCE

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "backward" in cls.__dict__:
            cls.backward = staticmethod(_once(cls.backward, cls=cls))


def _once(backward: Callable, *, cls: type[OnceFunction]) -> Callable:
    @functools.wraps(backward)
    def checked(ctx: Any, *gradients: Tensor | None) -> Any:
        if _records() and not _is_compiling():
            raise RuntimeError(
                f"{cls.__module__} has no second derivative, so its backward cannot run with create_graph=True. {cls.INSTEAD}"
            )
        return backward(ctx, *gradients)

    return checked


def _transform_of(args: tuple) -> str | None:
    """The active transform that concerns `args`, in a user's words. None for forward-mode differentiation of other tensors."""
    innermost = innermost_transform()
    if innermost is not None:
        return _TRANSFORMS.get(innermost.key().name, "this transform of torch.func")
    tensors = [value for value in args if isinstance(value, Tensor)]
    has_tangent = any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors)
    return "torch.autograd.forward_ad" if has_tangent else None
