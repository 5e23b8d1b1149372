"""Bounds on rounding errors, found by experiment: the computation in fp64 with an error of fp32's size in every operation.

Two correct fp32 implementations differ by their order of summation, by fused multiplications and by the last bit of exp or tanh. Each acts as
if an operation had read its inputs and written its result with a relative error of about u = eps / 2. `Bounds` adds such errors to an fp64
computation at random (Monte Carlo arithmetic: Parker, "Monte Carlo Arithmetic", UCLA CSD-970002, 1997). Cancellation, division by a small
number and every other amplification of errors then have the same effect as in the real computation, on any processor. A gradient that is zero
in exact arithmetic gets a bound from the terms that cancel in it.

One error per operation leaves out the partial sums of a sum of n terms: n roundings with independent signs, sqrt(n) times one
(Higham and Mary, "A New Approach to Probabilistic Rounding Error Analysis", SIAM J. Sci. Comput. 41, 2019). `Bounds` takes n.
"""

import functools
import math
import random
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

# Operations that move or make values and round nothing (torch also clones a tensor that it has yet to conjugate).
EXACT = {
    "_to_copy",
    "cat",
    "clone",
    "copy_",
    "index",
    "masked_fill",
    "neg",
    "new_zeros",
    "ones_like",
    "select_backward",
    "slice_backward",
}
ERRORS = 1 << 20  # drawn once per run and read from random places on: to draw each would take most of the time


class _Rounding(TorchDispatchMode):
    """Every operation on fp64 tensors reads its inputs and writes its result with a relative error; views and copies are exact."""

    def __init__(self, *, unit: float, seed: int) -> None:
        super().__init__()
        self._places = random.Random(seed)
        self._errors = 1 + unit * torch.randn(
            ERRORS, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
        )

    def _off(self, value: Tensor) -> Tensor:
        if value.dtype not in (torch.float64, torch.complex128):
            return value
        place = self._places.randrange(ERRORS - value.numel())
        return value * self._errors[place : place + value.numel()].view(value.shape)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        written = _written_arguments(func)
        if written is None:
            return func(*args, **kwargs)
        args = [a if i in written else tree_map_only(Tensor, self._off, a) for i, a in enumerate(args)]
        result = func(*args, **kwargs)
        if not written:
            return tree_map_only(Tensor, self._off, result)
        for i in written:
            tree_map_only(Tensor, lambda value: value.copy_(self._off(value)), args[i])
        return result


@functools.cache
def _written_arguments(func) -> tuple[int, ...] | None:
    """The places of the arguments that an operation writes to; None if it rounds nothing."""
    is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
    if is_view or func.overloadpacket.__name__ in EXACT:
        return None
    return tuple(i for i, a in enumerate(func._schema.arguments) if a.alias_info is not None and not a.kwarg_only)


def rms(x: Tensor) -> float:
    """Root mean square of all elements."""
    return x.detach().double().pow(2).mean().sqrt().item()


class Bounds:
    """The exact values of a computation and how far a correct implementation in `dtype` may be from them.

    `compute()` returns named fp64 tensors of any shape, from inputs that it does not change; `longest_sum` is the number of terms of the
    longest sum in it; `samples` runs with errors stand for all the ways to round.
    """

    def __init__(
        self,
        *,
        compute: Callable[[], dict[str, Tensor]],
        longest_sum: int,
        samples: int = 4,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.exact = {name: value.detach().clone() for name, value in compute().items()}
        self._factor = math.sqrt(longest_sum)
        self._errors: dict[str, list[Tensor]] = {name: [] for name in self.exact}
        for seed in range(samples):
            with _Rounding(unit=torch.finfo(dtype).eps / 2, seed=seed):
                found = compute()
            for name, value in found.items():
                self._errors[name].append(value.detach() - self.exact[name])

    def rms(self, name: str) -> float:
        """The bound of a tensor's root mean square error."""
        return self._factor * max(rms(error) for error in self._errors[name])

    def elements(self, name: str) -> Tensor:
        """The bound of each element's error: needs samples enough that not all of them happen to be small at some element."""
        return self._factor * torch.stack(self._errors[name]).abs().amax(0)

    def check(self, name: str, found: Tensor) -> None:
        """Raises AssertionError if the root mean square error is more than rounding can make it."""
        error, bound = rms(found.detach().double() - self.exact[name]), self.rms(name)
        assert error <= bound, f"{name}: rms error {error:.2e}, rounding makes at most {bound:.2e}"

    def check_elements(self, name: str, found: Tensor) -> None:
        """Raises AssertionError if one element's error is more than rounding can make it."""
        excess = (found.detach().double() - self.exact[name]).abs() - self.elements(name)
        assert excess.max() <= 0, f"{name}: {int((excess > 0).sum())} elements, the worst by {excess.max():.2e}"
