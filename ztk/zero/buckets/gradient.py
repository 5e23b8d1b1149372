"""The gradient of one bucket: collected from autograd in a flat buffer, with the state of its reduction."""

import functools
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from ztk.core.runtime.planned import place_of
from ztk.kernels import sum_of_squares
from ztk.zero.buckets.layout import BucketLayout

# Autograd's own gradient of a parameter; subclasses may override `grad` for scripts.
# pyrefly: ignore[missing-attribute]  # a descriptor of the class at run time
gradient_of, set_gradient = torch.Tensor.grad.__get__, torch.Tensor.grad.__set__


class BucketGradient:
    """The gradient half of a bucket.

    full: [layout.size], this rank's local gradient, or None.
    squares: float64 [1], the sum of squares of the reduced shard. None until this step's gradient is reduced.
    is_launched: its reduction has started in this backward. is_final: this step's gradient is reduced, in `full` (stages 0 and 1).
    used: numbers of the parameters that got a gradient since the last step.
    has_earlier: the stored shard contains gradients of earlier micro-batches of this step.
    """

    def __init__(self, parameters: list[nn.Parameter], *, layout: BucketLayout) -> None:
        self.parameters, self._layout = parameters, layout
        self.full: Tensor | None = None
        self.squares: Tensor | None = None
        self.is_launched = self.is_final = self.has_earlier = False
        self._written = [False] * len(parameters)  # whether `full` holds the parameter's gradient
        self.used: set[int] = set()
        self._arrived: set[int] = set()  # parameters whose gradient arrived in this backward
        self._placed: set[int] = (
            set()
        )  # parameters whose place was handed out in this backward, for autograd's operation to write

    def place(self, index: int, *, acquire: Callable[[], Tensor]) -> Tensor | None:
        """A view, in the parameter's shape, into which an operation may write the step's first gradient of parameter `index`. None if a
        gradient exists already or the view was handed out. Autograd may add to it in place before `accept`.

        acquire: returns the buffer [layout.size] if there is none yet.
        """
        if self.full is None:
            self._begin(acquire())
        if self._written[index] or index in self._placed:
            return None
        self._placed.add(index)
        return self._view(index)

    def accept(self, index: int, *, acquire: Callable[[], Tensor]) -> None:
        """Moves the new gradient of parameter `index` into the flat buffer. Copies the first one unless it was written in place, and adds
        later ones.

        acquire: returns the buffer [layout.size] if there is none yet.
        """
        parameter = self.parameters[index]
        autograds = gradient_of(parameter)
        if autograds.layout is not torch.strided:  # from Embedding(sparse=True)
            autograds = autograds.to_dense()
        if self.full is None:
            self._begin(acquire())
        place = self._view(index)
        if self._written[index]:
            place.add_(autograds)
        elif index not in self._placed or place_of(autograds) != place_of(place):
            place.copy_(autograds)
        self._written[index] = True
        set_gradient(parameter, None)
        self._arrived.add(index)
        self.used.add(index)

    def _begin(self, buffer: Tensor) -> None:
        """Sets `buffer` [layout.size] as the local gradient."""
        self.full = buffer
        self.restart()
        for gap in self._layout.gaps():
            self.full[gap.start : gap.stop].zero_()

    def _view(self, index: int) -> Tensor:
        """The view of parameter `index` in the buffer, in its shape."""
        assert self.full is not None
        placement = self._layout.placements[index]
        return self.full[placement.offset : placement.stop].view(placement.shape)

    def read(self, index: int) -> Tensor | None:
        """The gradient of parameter `index`, reduced or local, as a view of the buffer in the parameter's shape, or None."""
        return self._view(index) if self.full is not None and (self.is_reduced or self._written[index]) else None

    @property
    def is_reduced(self) -> bool:
        """Whether this step's gradient is the sum over the ranks."""
        return self.squares is not None

    def record_squares(self, parts: Iterable[Tensor]) -> None:
        """Sets this rank's share of the squared norm: the sum of squares of `parts` [n], the parts of the final reduced shard that this
        rank counts."""
        before = self.squares  # the new sum stays on its device
        counted = [sum_of_squares(part).to(part.device if before is None else before.device) for part in parts]
        self.squares = functools.reduce(torch.add, counted) if counted else torch.zeros_like(before)

    @property
    def has_local(self) -> bool:
        """Whether the buffer holds a local gradient."""
        return self.full is not None and any(self._written)

    @property
    def is_complete(self) -> bool:
        """Whether every parameter's gradient has arrived in this backward."""
        return len(self._arrived) == len(self.parameters)

    def begin_backward(self) -> None:
        """Starts a backward: no gradient has arrived in it."""
        self._arrived.clear()
        self._placed.clear()

    def reopen(self, *, own: range, prescale: float) -> None:
        """Prepares reduced gradients for a further backward that adds to them. Each rank keeps the sums of its own shard only, so that the
        next reduction counts them once.

        own: the rank's shard of the buffer. prescale: factor of the next reduction.
        """
        assert self.full is not None and self.is_final
        self.full[: own.start].zero_()
        self.full[own.stop :].zero_()
        if prescale != 1.0:
            self.full[own.start : own.stop].div_(prescale)
        self._written = [True] * len(self.parameters)
        self.squares, self.is_final = None, False

    def fill_missing(self, *, acquire: Callable[[], Tensor]) -> None:
        """Sets the gradient of unused parameters to zero."""
        if self.full is None:
            self.full = acquire().zero_()
            return
        for written, placement in zip(self._written, self._layout.placements, strict=True):
            if not written:
                self.full[placement.offset : placement.stop].zero_()

    def take(self) -> Tensor | None:
        """Hands the buffer to the caller. The next gradient starts a new one."""
        full, self.full = self.full, None
        return full

    def restart(self) -> None:
        """Keeps the buffer and discards its content."""
        self._written = [False] * len(self.parameters)
        self._placed.clear()

    def finish_step(self) -> None:
        """Resets all state for the next step."""
        self.squares = None
        self.is_launched = self.is_final = self.has_earlier = False
        self.used.clear()
        self.restart()
