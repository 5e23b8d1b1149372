"""A region: a function whose activations are not saved; the backward runs it again from its inputs.

It uses torch's checkpoint without reentrant autograd and decides how the inputs are stored. Checkpoint saves them by
autograd, so hooks on saved tensors apply to them. Inputs that need gradients go to an `InputStore`; masks, positions and tables are
the same tensors in every block and stay where they are. A region inside a region saves nothing: the outer one repeats all of it.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint, noop_context_fn

from ztk.core.policies.recompute import RecomputeMode, RecomputePolicy
from ztk.core.runtime import Comm, MemoryLedger
from ztk.core.runtime.planned import place_of
from ztk.core.runtime.saved_tensors import PackedOutside, active_hooks
from ztk.parallel.recompute import selective
from ztk.parallel.recompute.inputs import InputStore

Contexts = Callable[[], tuple[Any, Any]]  # makes the contexts around a forward and around its repetition


class Regions:
    """Runs functions as regions under one policy.

    num_regions: number of regions between a forward and its backward, for the contiguous buffer.
    around: returns further contexts around a forward and its repetition, for example for other random states than torch's.
    comm: communicates between the tensor-parallel ranks for `partition_inputs`. ledger: counts the saved inputs.
    """

    def __init__(
        self,
        policy: RecomputePolicy,
        *,
        num_regions: int = 1,
        comm: Comm | None = None,
        ledger: MemoryLedger | None = None,
        around: Contexts | None = None,
    ) -> None:
        self._policy, self._around = policy, around
        self._store = InputStore(policy, num_regions=num_regions, comm=comm, ledger=ledger)

    def run(self, function: Callable, *, args: tuple = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Calls `function(*args, **kwargs)`, recomputed in the backward. Without gradients, or with mode `none`, it is a plain call."""
        kwargs = dict(kwargs or {})
        if not torch.is_grad_enabled() or self._policy.mode is RecomputeMode.none:
            return function(*args, **kwargs)
        leaves, spec = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        rest = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        is_tensor = [isinstance(leaf, Tensor) for leaf in leaves]

        def run(*tensors: Tensor) -> Any:
            given = iter(tensors)
            leaves = [next(given) if own else leaf for own, leaf in zip(is_tensor, rest, strict=True)]
            args, kwargs = tree_unflatten(leaves, spec)
            with _within.one_more():
                return function(*args, **kwargs)

        with self._saving(tensors):
            return checkpoint(
                run,
                *tensors,
                use_reentrant=False,
                preserve_rng_state=self._policy.preserve_rng,
                context_fn=self._contexts,
            )

    def _contexts(self) -> tuple[Any, Any]:
        """The contexts around the forward and around its repetition."""
        pairs = [make() for make in (self._around, self._selective()) if make is not None]
        return tuple(map(_Together, zip(*pairs, strict=True))) if pairs else noop_context_fn()

    def _selective(self) -> Contexts | None:
        return selective.contexts if self._policy.mode is RecomputeMode.selective else None

    @contextmanager
    def _saving(self, tensors: list[Tensor]) -> Iterator[None]:
        """Context that saves inputs that need gradients in the store, and leaves other tensors to the outer hooks."""
        if _within.depth:
            yield
            return
        places = {_identity(tensor): number for number, tensor in enumerate(t for t in tensors if t.requires_grad)}
        outer = active_hooks()

        def pack(tensor: Tensor) -> object:
            place = places.get(_identity(tensor))
            if place is not None and self._store.copies_inputs:
                return self._store.save(tensor, place=place)
            packed = outer[0](tensor) if outer else tensor
            if packed is tensor and place is not None:
                return self._store.save(tensor, place=place)
            return PackedOutside(packed=packed, unpack=outer[1] if outer else None)

        with saved_tensors_hooks(pack, lambda saved: saved.restore()):
            yield


class _Within(threading.local):
    """depth: number of regions that this thread is inside of."""

    depth = 0

    @contextmanager
    def one_more(self) -> Iterator[None]:
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1


_within = _Within()


def _identity(tensor: Tensor) -> tuple:
    """An identity that is equal for a tensor and its detached alias."""
    return place_of(tensor), tensor.dtype, tensor.shape, tensor.stride()


class _Together:
    """Several contexts as one. The backwards of a graph that is kept enter it once each."""

    def __init__(self, contexts: Iterable[AbstractContextManager]) -> None:
        self._contexts = tuple(contexts)
        self._entered: list[ExitStack] = []

    def __enter__(self) -> None:
        with ExitStack() as stack:
            for context in self._contexts:
                stack.enter_context(context)
            self._entered.append(stack.pop_all())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return self._entered.pop().__exit__(kind, error, trace)
