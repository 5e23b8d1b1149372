"""Records the objects that a torch optimizer's step reads in addition to its groups and states, to detect access to parameters.

A step over shards runs on substitutes of the script's parameters, so `p in self.no_decay`, `self.scale[id(p)]` and
`for p in model.parameters()` would find none of them. During a trial step, the attributes that it reads are recorded, together with the
globals and closures of the functions that run.
"""

import functools
import sys
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType, ModuleType
from typing import Any

from torch import Tensor, nn

_GIVEN = frozenset(("param_groups", "state", "defaults"))  # attributes that are separate in a step over ranges
_SKIPPED = ("torch.", "ztk.")
_COLLECTIVES = ("torch.distributed.distributed_c10d", "ztk.deepspeed.collectives.comm")
_ASKING = ("_", "is_", "get_")  # prefixes of functions that do not communicate
_DEPTH = 6


class Reads:
    """parameters: of the script. of: the optimizer's class."""

    def __init__(self, parameters: Iterable[nn.Parameter], *, of: type) -> None:
        self._ids = {id(parameter) for parameter in parameters}
        self._of = of
        self._found: dict[str, Any] = {}
        self._sent = ""

    @contextmanager
    def watch(self, *, skip: bool) -> Iterator[type]:
        """Yields the class to run the step with. skip: the step is torch's own, which reads nothing else."""
        if skip:
            yield self._of
            return
        before = sys.getprofile()
        sys.setprofile(self._note)
        try:
            yield _noting(self._of, found=self._found)
        finally:
            sys.setprofile(before)

    def fault(self) -> str | None:
        """Why the steps so far cannot run over substitutes, or None."""
        if self._sent:
            return (
                f"its step calls {self._sent}() of torch.distributed, and a rank steps over ranges of parameters that other ranks do not have: "
                "the engine averages gradients, so leave it out"
            )
        return next((self.words(name) for name, value in self._found.items() if self.holds(value)), None)

    @staticmethod
    def words(holder: str) -> str:
        """The text of a fault. holder: the object that holds parameters."""
        return (
            f"its step reads {holder}, which holds parameters of the model or their id(), and a rank steps over ranges of parameters, which "
            "are other objects: mark parameters by an attribute that the step reads (p.no_decay = True), or give them a parameter group of "
            "their own"
        )

    def holds(self, value: Any, *, depth: int = _DEPTH) -> bool:
        """Whether a parameter, or its id(), can be reached from `value`."""
        if isinstance(value, Tensor | int | weakref.ref):
            value = value() if isinstance(value, weakref.ref) else value
            return (value if type(value) is int else id(value)) in self._ids
        if depth == 0 or value is None or isinstance(value, str | bytes | float | ModuleType | type):
            return False
        if isinstance(value, Mapping):
            inner = [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple | set | frozenset | deque | weakref.WeakSet):
            inner = list(value)
        elif isinstance(value, nn.Module):
            inner = list(value.parameters())
        elif isinstance(value, functools.partial):
            inner = [value.args, value.keywords]
        elif callable(value) or not hasattr(value, "__dict__"):  # the closure of a function is recorded when it runs
            inner = []
        else:
            inner = list(vars(value).values())
        return any(self.holds(item, depth=depth - 1) for item in inner)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        """Records the globals and the closure of a function that is called."""
        if event != "call":
            return
        module, code = str(frame.f_globals.get("__name__", "")), frame.f_code
        if module in _COLLECTIVES and not code.co_name.startswith(_ASKING):
            self._sent = self._sent or code.co_name
        if module == "torch" or module.startswith(_SKIPPED):
            return
        for name in code.co_names:
            if name in frame.f_globals:
                value = frame.f_globals[name]
                self._found[name] = value
                if isinstance(value, ModuleType | type) and not str(getattr(value, "__name__", "")).startswith("torch"):
                    inside = vars(value)
                    self._found |= {f"{name}.{key}": inside[key] for key in code.co_names if key in inside}
        for name in code.co_freevars:
            if name in frame.f_locals:
                self._found[name] = frame.f_locals[name]


def _noting(of: type, *, found: dict[str, Any]) -> type:
    """A subclass of `of` whose objects record their attribute reads in `found`."""

    def __getattribute__(self: Any, name: str) -> Any:
        value = super(noting, self).__getattribute__(name)
        if not name.startswith("__") and name not in _GIVEN:
            found[f"self.{name}"] = value
        return value

    noting = type(of)(of.__name__, (of,), {"__getattribute__": __getattribute__, "__module__": of.__module__})
    return noting
