"""A torch optimizer that steps full parameters of all groups, as torch would call it.

Every rank makes the same step: the engine gives the caller's own parameter objects their full fp32 values and gradients, and calls the step
of the optimizer's class once. So a step may read across parameters and groups, rebind a parameter's memory, keep states of any shape, move
parameters between groups, and call a closure. States stay in the object, in full on every rank.
"""

import copy
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ztk.optim.elementwise import needs_closure
from ztk.optim.schedule import GroupSchedule
from ztk.optim.states import StateFormat
from ztk.optim.torch_step import group_of, rate_of

_REPLACED = ("step", "add_param_group", "zero_grad")  # by `ScriptOptimizer`, on the object
# Attributes of torch's base class, and of its schedulers, that carry no state of a step.
_TORCHS = {"defaults", "state", "param_groups", *_REPLACED}
_PLAIN = (type(None), bool, int, float, str)


class WholeStep:
    """The step of a torch optimizer over full parameters. state_names, format: no state is stored by element. options: written into a
    checkpoint's description. needs_closure: its step evaluates the loss again."""

    state_names: tuple[str, ...] = ()

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        parameters: Mapping[str, nn.Parameter],
        lr_table: Tensor | None = None,
        schedule: GroupSchedule | None = None,
    ) -> None:
        """parameters: the trained parameters by name. lr_table, schedule: as for `TorchStep`.

        Raises ValueError for an optimizer that lacks a parameter, and with an lr_table for one that has no `lr`.
        """
        group_of(optimizer, parameters=parameters)
        if lr_table is not None and any("lr" not in group for group in optimizer.param_groups):
            raise ValueError(
                f"optimizer={type(optimizer).__name__}: its parameter groups have no lr, and lr_table would change it: leave the schedule out"
            )
        self.optimizer, self.name = optimizer, type(optimizer).__name__
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._parameters = dict(parameters)
        self._lr_table, self._schedule, self._rate = lr_table, schedule, rate_of(optimizer)
        self.format = StateFormat.float32(())
        self.options = {"class": self.name}
        self.needs_closure = needs_closure(optimizer)
        self.state = optimizer.state
        nothing: dict[str, Any] = {"groups": [], "attributes": {}, "classes": {}}
        self._first = nothing | {"inner": dict.fromkeys(_inner(optimizer), nothing)}
        self._first = copy.deepcopy(self.pack())

    @property
    def rate(self) -> float:
        """The learning rate of the first group, before an lr_table multiplies it. 0 for a class without a rate."""
        return self._rate

    @property
    def has_modes(self) -> bool:
        """Whether the optimizer has `train()` and `eval()`, which change the weights for evaluation, as schedule-free ones."""
        return all(callable(getattr(self.optimizer, name, None)) for name in ("train", "eval"))

    def set_mode(self, name: str) -> None:
        """Calls `train()` or `eval()`. The parameters must be full."""
        with self.as_torchs():
            getattr(self.optimizer, name)()

    def step(self, *, update: int, closure: Callable[[], Any] | None = None) -> None:
        """Calls the step. update: its number, from 1 on, for the schedule. The parameters must be full and have their gradients.

        Raises RuntimeError for a step that needs a closure and gets none, and with an lr_table for one that changes `lr` itself.
        """
        if self.needs_closure and closure is None:
            raise RuntimeError(
                f"optimizer={self.name}: its step needs a closure that computes the loss again: call engine.train_batch(micro_batches), or "
                "engine.step(closure)"
            )
        groups = self.optimizer.param_groups
        before = [group.get("lr") for group in groups]
        self._follow_schedule(update)
        if self._lr_table is not None:
            multiplier = float(self._lr_table[min(update, len(self._lr_table)) - 1])
            for group in groups:
                group["lr"] = group["lr"] * multiplier
        given = [group.get("lr") for group in groups]
        with self.as_torchs():
            type(self.optimizer).step(self.optimizer, *(() if closure is None else (closure,)))
        if self._lr_table is None:
            self._rate = rate_of(self.optimizer)
            return
        for group, rate, own in zip(groups, given, before, strict=False):
            if group.get("lr") is not rate and group.get("lr") != rate:
                raise RuntimeError(
                    f"optimizer={self.name}: its step changes lr by itself, and the schedule multiplies it: leave the schedule out"
                )
            group["lr"] = own
        self._rate = rate_of(self.optimizer)

    def _follow_schedule(self, update: int) -> None:
        if self._schedule is not None:
            for group, values in zip(self.optimizer.param_groups, self._schedule.values(update), strict=False):
                group.update(values)

    @contextmanager
    def as_torchs(self) -> Iterator[None]:
        """Context in which the object has its states and its class's methods, which an engine replaces for the script."""
        own = vars(self.optimizer)
        taken = {name: own.pop(name) for name in _REPLACED if name in own}
        shown, self.optimizer.state = self.optimizer.state, self.state
        try:
            yield
        finally:
            is_shown = shown is self.state
            self.state = self.optimizer.state
            self.optimizer.state = self.state if is_shown else shown
            own |= taken

    def check_groups(self) -> None:
        """Raises ValueError if a group holds a parameter that the engine does not train."""
        for number, group in enumerate(self.optimizer.param_groups):
            for parameter in group["params"]:
                if parameter.requires_grad and id(parameter) not in self._names:
                    raise ValueError(
                        f"optimizer.param_groups[{number}] holds a parameter of shape {tuple(parameter.shape)} that the engine does not "
                        "train: it must belong to the model and require a gradient when the engine is built"
                    )

    # States

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors in states and attributes, each with a description."""
        for owner, state in self._states():
            for key, value in state.items():
                for tensor in _tensors(value):
                    yield (
                        f"state {key}" if owner is self.optimizer else f"state {key} of {type(owner).__name__}",
                        tensor,
                    )
        for key, value in vars(self.optimizer).items():
            if key not in _TORCHS:
                for tensor in _tensors(value):
                    yield f"attribute {key}", tensor

    def _states(self) -> Iterator[tuple[torch.optim.Optimizer, dict[str, Any]]]:
        for owner in (self.optimizer, *_inner(self.optimizer).values()):
            for state in (self.state if owner is self.optimizer else owner.state).values():
                yield owner, state

    # For checkpoints

    def pack(self) -> dict[str, Any]:
        """States by name of the parameter, and the values of groups and of attributes, the class's among them, that differ from the first
        ones. Holds the object's own tensors.

        Raises ValueError for a state that a checkpoint cannot hold.
        """
        packed = self._pack(self.optimizer, state=self.state, first=self._first)
        inner = {
            name: self._pack(one, state=one.state, first=self._first["inner"][name])
            for name, one in _inner(self.optimizer).items()
        }
        return packed | {"inner": inner}

    def _pack(self, optimizer: torch.optim.Optimizer, *, state: Mapping, first: Mapping[str, Any]) -> dict[str, Any]:
        states: dict[str, Any] = {}
        for key, value in state.items():
            name = self._names.get(id(key)) if isinstance(key, Tensor) else None
            if isinstance(key, Tensor) and name is None:
                continue  # of a frozen parameter
            for part, held in value.items() if isinstance(value, Mapping) else ((key, value),):
                if fault := _unsaved(held) if isinstance(part, str) else "under a key that is no string":
                    raise ValueError(
                        f"optimizer={self.name}: its state {part} is {fault}, which a checkpoint cannot hold"
                    )
            states[f"parameter {name}" if name else f"key {key}"] = dict(value) if isinstance(value, Mapping) else value
        groups = []
        for number, group in enumerate(optimizer.param_groups):
            before = first["groups"][number] if number < len(first["groups"]) else {}
            params = [self._names[id(p)] for p in group["params"] if id(p) in self._names]
            groups.append(_differing(group, before=before) | {"params": params})
        return {
            "states": states,
            "groups": groups,
            "attributes": _differing(_attributes(optimizer), before=first["attributes"]),
            "classes": {
                name: _differing(_attributes(cls), before=first["classes"].get(name, {}))
                for name, cls in _classes(optimizer).items()
            },
        }

    def unpack(self, packed: Mapping[str, Any] | None, *, keep: Collection[str] = ()) -> None:
        """Sets states, groups and attributes. packed: a result of `pack`, with tensors of its own. If None, as when it was built.

        keep: names of parameters whose states stay.
        """
        packed = copy.deepcopy(self._first) if packed is None else packed
        is_shown = self.optimizer.state is self.state
        self.state = self._unpack(self.optimizer, packed=packed, state=self.state, first=self._first, keep=keep)
        if is_shown:
            self.optimizer.state = self.state
        for name, one in _inner(self.optimizer).items():
            one.state = self._unpack(
                one, packed=packed["inner"][name], state=one.state, first=self._first["inner"][name], keep=keep
            )

    def _unpack(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        packed: Mapping[str, Any],
        state: Mapping,
        first: Mapping[str, Any],
        keep: Collection[str],
    ) -> defaultdict:
        kept = {p: own for p, own in state.items() if isinstance(p, Tensor) and self._names.get(id(p)) in keep}
        states: defaultdict = defaultdict(dict)
        for key, value in packed["states"].items():
            kind, name = key.split(" ", 1)
            owner = self._parameters[name] if kind == "parameter" else name
            states[owner] = dict(value) if isinstance(value, Mapping) else value
        states.update(kept)
        groups = optimizer.param_groups
        others = [p for group in groups for p in group["params"] if id(p) not in self._names]
        groups.extend({"params": []} for _ in range(len(packed["groups"]) - len(groups)))
        del groups[len(packed["groups"]) :]
        for number, (group, saved) in enumerate(zip(groups, packed["groups"], strict=True)):
            known = [self._parameters[name] for name in saved["params"]]
            before = first["groups"][number] if number < len(first["groups"]) else {}
            changed = _differing(group, before=before).keys() & before.keys()
            group.update({key: copy.deepcopy(before[key]) for key in changed if key != "params"})
            group.update({key: value for key, value in saved.items() if key != "params"})
            if [id(p) for p in group["params"] if id(p) in self._names] != [id(p) for p in known]:
                group["params"] = known + (others if number == 0 else [])
        vars(optimizer).update(copy.deepcopy(dict(first["attributes"])) | packed["attributes"])
        for name, cls in _classes(optimizer).items():
            for key, value in (copy.deepcopy(first["classes"][name]) | packed["classes"].get(name, {})).items():
                setattr(cls, key, value)
        return states


def _classes(optimizer: torch.optim.Optimizer) -> dict[str, type]:
    """Its classes outside of torch by number in the order of inheritance: a step may change their attributes."""
    return {
        str(n): cls for n, cls in enumerate(type(optimizer).__mro__[:-1]) if not cls.__module__.startswith("torch.")
    }


def _attributes(owner: torch.optim.Optimizer | type) -> dict[str, Any]:
    """Attributes of an object or a class, without torch's and Python's own."""
    ignored = ("__", "_optimizer_", "_zero_grad", "_warned", "_opt_called")
    return {key: value for key, value in vars(owner).items() if key not in _TORCHS and not key.startswith(ignored)}


def _differing(values: Mapping[str, Any], *, before: Mapping[str, Any]) -> dict[str, Any]:
    """The values that a checkpoint can hold and that are other ones than in `before`."""
    return {
        key: value
        for key, value in values.items()
        if key != "params" and not _unsaved(value) and (key not in before or not _same(value, before[key]))
    }


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor) or isinstance(second, Tensor):
        is_like = isinstance(first, Tensor) and isinstance(second, Tensor) and first.dtype == second.dtype
        return is_like and torch.equal(first, second)
    if type(first) is not type(second):
        return False
    if isinstance(first, Mapping):
        return first.keys() == second.keys() and all(_same(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple | deque):
        return len(first) == len(second) and all(map(_same, first, second))
    return first == second


def _inner(optimizer: torch.optim.Optimizer) -> dict[str, torch.optim.Optimizer]:
    """Optimizers in its attributes, which it steps itself."""
    return {key: value for key, value in vars(optimizer).items() if isinstance(value, torch.optim.Optimizer)}


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple | deque):
        for item in value:
            yield from _tensors(item)


def _unsaved(value: Any) -> str:
    """The kind of the first value inside that a checkpoint cannot hold, or ""."""
    if isinstance(value, Tensor):
        return (
            "a parameter"
            if isinstance(value, nn.Parameter)
            else ""
            if value.layout is torch.strided
            else "a sparse tensor"
        )
    if isinstance(value, Mapping):
        keys = next(
            (f"a dict with a key of type {type(key).__name__}" for key in value if not isinstance(key, str)), ""
        )
        return keys or next(filter(None, map(_unsaved, value.values())), "")
    if type(value) in (list, tuple, deque):
        return next(filter(None, map(_unsaved, value)), "")
    return "" if type(value) in _PLAIN else f"a {type(value).__name__}"
