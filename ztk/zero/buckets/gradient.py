"""The gradient of one bucket: from autograd into a flat buffer, and how far its reduction is."""

import functools
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from ztk.core.runtime.planned import place_of
from ztk.kernels import sum_of_squares
from ztk.zero.buckets.layout import BucketLayout

# What autograd has left in a parameter; a subclass may show scripts something else.
# pyrefly: ignore[missing-attribute]  # a descriptor of the class at run time
gradient_of, set_gradient = torch.Tensor.grad.__get__, torch.Tensor.grad.__set__


class BucketGradient:
    """The gradient half of a bucket.

    full: [layout.size], this rank's local gradient; None: there is none.
    squares: float64 [1], the sum of squares of the reduced shard; None: this step's gradient is not reduced yet.
    is_launched: its reduction has started in this backward. is_final: this step's gradient is reduced, in `full` (stages 0 and 1).
    used: numbers of the parameters that got a gradient since the last step.
    has_earlier: the stored shard contains gradients of earlier micro-batches of this step.
    """

    def __init__(self, parameters: list[nn.Parameter], *, layout: BucketLayout) -> None:
        self.parameters, self._layout = parameters, layout
        self.full: Tensor | None = None
        self.squares: Tensor | None = None
        self.is_launched = self.is_final = self.has_earlier = False
        self._written = [False] * len(parameters)  # whose gradient is in `full`
        self.used: set[int] = set()
        self._arrived: set[int] = set()  # whose gradient came in this backward
        self._placed: set[int] = (
            set()
        )  # whose place was given away in this backward, to be written by autograd's operation

    def place(self, index: int, *, acquire: Callable[[], Tensor]) -> Tensor | None:
        """Where an operation may write the first gradient of parameter `index` in this step, in its shape; None: there is one already, or the
        place was given away. What autograd adds to it before `accept` may be added in place.

        acquire: returns the buffer [layout.size] if there is none yet.
        """
        if self.full is None:
            self._begin(acquire())
        if self._written[index] or index in self._placed:
            return None
        self._placed.add(index)
        return self._view(index)

    def accept(self, index: int, *, acquire: Callable[[], Tensor]) -> None:
        """Moves the fresh gradient of parameter `index` into the flat buffer: copies the first one unless it is there, adds later ones.

        acquire: returns the buffer [layout.size] if there is none yet.
        """
        parameter = self.parameters[index]
        autograds = gradient_of(parameter)
        if autograds.layout is not torch.strided:  # of Embedding(sparse=True)
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
        """`buffer` [layout.size] is the local gradient from now on."""
        self.full = buffer
        self.restart()
        for gap in self._layout.gaps():
            self.full[gap.start : gap.stop].zero_()

    def _view(self, index: int) -> Tensor:
        """The place of parameter `index` in the buffer, in its shape."""
        assert self.full is not None
        placement = self._layout.placements[index]
        return self.full[placement.offset : placement.stop].view(placement.shape)

    def read(self, index: int) -> Tensor | None:
        """The gradient of parameter `index`, reduced or local, as a view of the buffer in the parameter's shape; None if there is none."""
        return self._view(index) if self.full is not None and (self.is_reduced or self._written[index]) else None

    @property
    def is_reduced(self) -> bool:
        """This step's gradient is the sum over the ranks."""
        return self.squares is not None

    def record_squares(self, parts: Iterable[Tensor]) -> None:
        """Sets this rank's share of the squared norm: the sum of squares of `parts` [n], the final reduced shard or those parts of it that
        this rank counts."""
        before = self.squares  # the new sum stays on its device
        counted = [sum_of_squares(part).to(part.device if before is None else before.device) for part in parts]
        self.squares = functools.reduce(torch.add, counted) if counted else torch.zeros_like(before)

    @property
    def has_local(self) -> bool:
        """A parameter's local gradient is in the buffer."""
        return self.full is not None and any(self._written)

    @property
    def is_complete(self) -> bool:
        """Every parameter's gradient has arrived in this backward."""
        return len(self._arrived) == len(self.parameters)

    def begin_backward(self) -> None:
        """A backward starts: no gradient has arrived in it."""
        self._arrived.clear()
        self._placed.clear()

    def reopen(self, *, own: range, prescale: float) -> None:
        """Gradients of a further backward may be added to reduced ones: each rank keeps the sums of its own shard, so that the next
        reduction counts them once.

        own: the rank's shard of the buffer. prescale: what the reduction will multiply the buffer by.
        """
        assert self.full is not None and self.is_final
        self.full[: own.start].zero_()
        self.full[own.stop :].zero_()
        if prescale != 1.0:
            self.full[own.start : own.stop].div_(prescale)
        self._written = [True] * len(self.parameters)
        self.squares, self.is_final = None, False

    def fill_missing(self, *, acquire: Callable[[], Tensor]) -> None:
        """Sets the gradient of parameters that were not used to zero."""
        if self.full is None:
            self.full = acquire().zero_()
            return
        for written, placement in zip(self._written, self._layout.placements, strict=True):
            if not written:
                self.full[placement.offset : placement.stop].zero_()

    def take(self) -> Tensor | None:
        """Gives the buffer to the caller; the next gradient starts a new one."""
        full, self.full = self.full, None
        return full

    def restart(self) -> None:
        """Keeps the buffer and forgets its content."""
        self._written = [False] * len(self.parameters)
        self._placed.clear()

    def finish_step(self) -> None:
        """The step is over: the next gradient starts anew."""
        self.squares = None
        self.is_launched = self.is_final = self.has_earlier = False
        self.used.clear()
        self.restart()
