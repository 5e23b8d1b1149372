"""Replaces the forward of a module instance so that copies of the module stay correct.

A function in `module.__dict__` is copied by reference: a copy of the module (`copy.deepcopy`, `torch.save`, an averaged model) would run
its forward with the first module's weights, without any error.
"""

import copy
import functools
import inspect
from collections.abc import Callable
from types import CodeType
from typing import Any

from torch import nn


def replace_forward(module: nn.Module, *, by: Callable, refusal: str = "") -> None:
    """Sets `module.forward` to `by`.

    A copy of the module has the original forward, bound to the copy. With `refusal`, copying raises RuntimeError with that text.
    """
    module.forward = OwnForward(module.forward, run=by, refusal=refusal)


class OwnForward:
    """Callable that runs `run` and has the signature of `before`. A copy of it is `before`."""

    def __init__(self, before: Callable, *, run: Callable, refusal: str = "") -> None:
        functools.update_wrapper(self, before)
        self.before, self._run, self._refusal = before, run, refusal

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(*args, **kwargs)

    @property
    def __code__(self) -> CodeType:  # torch.export names its program by it
        return inspect.unwrap(self.before).__code__

    def __deepcopy__(self, memo: dict) -> Callable:
        return copy.deepcopy(self._original(), memo)

    def __reduce__(self) -> tuple:
        before = self._original()
        module = getattr(before, "__self__", None)
        is_of_class = isinstance(module, nn.Module) and getattr(before, "__func__", None) is type(module).forward
        return (_of_class, (module,)) if is_of_class else (_same, (before,))

    def _original(self) -> Callable:
        if self._refusal:
            raise RuntimeError(self._refusal)
        return self.before


def has_own_forward(module: nn.Module) -> bool:
    """Whether the module's forward differs from its class's forward, beyond a wrapper of `replace_forward`."""
    forward = module.forward
    while isinstance(forward, OwnForward):
        forward = forward.before
    return getattr(forward, "__func__", None) is not type(module).forward


def _of_class(module: nn.Module) -> Callable:
    return type(module).forward.__get__(module)


def _same(forward: Callable) -> Callable:
    return forward
