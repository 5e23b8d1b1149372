"""Chains of eager elementwise operations in a step, from the operations that a plan runs.

An elementwise operation reads and writes its tensors once. Two in a row could be one kernel; this module lists chains of three and more.
Storages carry the length of a chain: a result has one more than the longest of its operands, and an operation of any other kind starts at zero.
"""

import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import ztk
from ztk.planner.trace import STEPS
from ztk.planner.tracker import StepTracker, is_work, written

PACKAGE = Path(ztk.__file__).parent
SMALL = 4096  # bytes: scalars and rows of them are latency, whatever computes them
_COPIES = {torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default, torch.ops.aten.clone.default}
_ALSO = {"aten::add_", "aten::mul_", "aten::div_"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Chain:
    """operations: in order, with the function of ztk that runs each, or autograd's node."""

    operations: tuple[str, ...]
    places: tuple[str, ...]

    def __str__(self) -> str:
        return " -> ".join(f"{name} [{place}]" for name, place in zip(self.operations, self.places, strict=True))


@dataclass(eq=False)
class EagerChains(TorchDispatchMode):
    """found: the chains that no operation continued, longer than `allowed`, each once. seen: how many elementwise operations there were.

    is_active: False: operations pass.
    """

    allowed: int = 2
    found: dict[Chain, None] = field(default_factory=dict)
    seen: int = 0
    is_active: bool = True
    sees_everything = True  # also operations that ZeRO hides from modes

    def __post_init__(self) -> None:
        super().__init__()
        self._chains: dict[int, tuple[Tensor, Chain]] = {}  # by storage, with a tensor that keeps its identity

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        out = func(*args, **kwargs)
        results = [value for value in tree_leaves(out) if isinstance(value, Tensor)]
        if not self.is_active or func.is_view or not is_work(func):
            return out
        changed = [*results, *written(func, args=args)]
        if not _is_elementwise(func) or max((tensor.nbytes for tensor in changed), default=0) <= SMALL:
            for tensor in changed:
                self._chains.pop(tensor.untyped_storage()._cdata, None)
            return out
        self.seen += 1
        reads = given[1:] if func is torch.ops.aten.copy_.default else given
        before = [self._chains[key][1] for tensor in reads if (key := tensor.untyped_storage()._cdata) in self._chains]
        longest = max(before, key=lambda chain: len(chain.operations), default=Chain(operations=(), places=()))
        chain = Chain(operations=(*longest.operations, func.name()), places=(*longest.places, _place()))
        for tensor in changed:
            self._chains[tensor.untyped_storage()._cdata] = (tensor, chain)
        if len(chain.operations) > self.allowed:
            self.found.pop(longest, None)
            self.found[chain] = None
        return out


@contextmanager
def chains_of_last_steps() -> Iterator[EagerChains]:
    """Yields the last step of each rank planned inside."""
    chains, restarts = EagerChains(is_active=False), Counter()
    restart, unwatch = StepTracker.restart, StepTracker.unwatch

    def begin(tracker: StepTracker) -> None:
        restarts[id(tracker)] += 1
        chains.is_active = restarts[id(tracker)] == STEPS
        restart(tracker)

    def end(tracker: StepTracker) -> None:
        chains.is_active = False
        del restarts[id(tracker)]
        unwatch(tracker)

    with mock.patch.multiple(StepTracker, restart=begin, unwatch=end), chains:
        yield chains


def _is_elementwise(func: torch._ops.OpOverload) -> bool:
    if func.namespace != "aten":
        return False
    return torch.Tag.pointwise in func.tags or func in _COPIES or func.name().split(".")[0] in _ALSO


def _place() -> str:
    """The innermost function of ztk that is no kernel's, or autograd."""
    for frame in reversed(traceback.extract_stack(limit=40)):
        path = Path(frame.filename)
        if path.is_relative_to(PACKAGE) and not path.is_relative_to(PACKAGE / "planner"):
            return f"{'.'.join(path.relative_to(PACKAGE).with_suffix('').parts)}.{frame.name}"
    return "autograd"
