"""A torch optimizer of a script whose parameters an engine trains.

Its groups and options apply; the engine keeps its states and runs its step. A script that uses the object as before would lose
data: each such use is forwarded, or raises an error that names the correct call.
"""

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from types import MethodType
from typing import Any

import torch

_ELSEWHERE = (
    "optimizer.state{access}: the states are sharded and the engine has them, so this would have no effect. {way}"
)
_WALKED = "optimizer.state is empty (read by {access}): the states are sharded and the engine has them. {way}"
_NEW_GROUP = (
    "a parameter group was added after {build}: the engine's buffers are laid out for the groups it was built of. Give all groups to "
    "{build}, and freeze parameters that train later by requires_grad_(False) after it; or {again}"
)
_REPLACED = (
    "optimizer.step was replaced, and the engine's step does not call it: derive a class from {name} and change its step, use "
    "register_step_pre_hook and register_step_post_hook, or call the function around engine.step()"
)
_RECORDED = ("lr", "betas", "eps", "weight_decay", "momentum", "nesterov")
_SCHEDULER = "_wrapped_by_lr_sched"  # torch's mark of a step that a scheduler has wrapped


class StateElsewhere(defaultdict):
    """Replaces `optimizer.state`. It has no entries, as libraries that iterate over it expect.

    way: a sentence that names the calls to use. warn: called once if a script iterates over it when it would have entries. If omitted,
    there is no warning.
    """

    def __init__(self, *, way: str, warn: Callable[[str], None] | None = None) -> None:
        super().__init__(dict)
        self._way, self.warn = way, warn
        self.has_stepped = False

    def __missing__(self, key: Any) -> dict:
        raise RuntimeError(_ELSEWHERE.format(access="[p]", way=self._way))

    def __setitem__(self, key: Any, value: Any) -> None:
        raise RuntimeError(_ELSEWHERE.format(access="[p] = ...", way=self._way))

    def clear(self) -> None:
        """Raises RuntimeError: the states would stay."""
        raise RuntimeError(_ELSEWHERE.format(access=".clear()", way=self._way))

    def pop(self, key: Any, *default: Any) -> Any:
        """Raises RuntimeError: the states would stay."""
        raise RuntimeError(_ELSEWHERE.format(access=".pop(p)", way=self._way))

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Raises RuntimeError: the entries would never be read."""
        raise RuntimeError(_ELSEWHERE.format(access=".update(...)", way=self._way))

    def __deepcopy__(self, memo: dict) -> "StateElsewhere":
        return self

    # Iteration finds nothing, which is correct before the first step

    def __iter__(self) -> Iterator:
        self._note("iteration")
        return super().__iter__()

    def __len__(self) -> int:
        self._note("len")
        return super().__len__()

    def __contains__(self, key: object) -> bool:
        self._note("in")
        return super().__contains__(key)

    def get(self, key: Any, *default: Any) -> Any:
        """The default."""
        self._note("get")
        return super().get(key, *default)

    def keys(self) -> Any:
        """The keys of an empty dict."""
        self._note("keys")
        return super().keys()

    def values(self) -> Any:
        """The values of an empty dict."""
        self._note("values")
        return super().values()

    def items(self) -> Any:
        """The items of an empty dict."""
        self._note("items")
        return super().items()

    def _note(self, access: str) -> None:
        if self.has_stepped and self.warn is not None:
            warn, self.warn = self.warn, None
            warn(_WALKED.format(access=access, way=self._way))


def check_same(state: object, *, expected: StateElsewhere) -> None:
    """Raises RuntimeError if a script has replaced `expected` by another object."""
    if state is not expected:
        raise RuntimeError(_ELSEWHERE.format(access=" = ...", way=expected._way))


class FixedGroups:
    """The parameters of an optimizer's groups, which must not change while an engine trains them. Call `check` before every step."""

    def __init__(self, optimizer: torch.optim.Optimizer, *, names: Mapping[int, str], build: str, again: str) -> None:
        """names: parameters' names by id(). build, again: the calls that build an engine, and that build another one."""
        self._optimizer, self.names, self._build, self._again = optimizer, names, build, again
        self._groups = optimizer.param_groups
        self._parameters = [list(group["params"]) for group in self._groups]

    def refuse_group(self, *_: Any, **__: Any) -> None:
        """Replaces `add_param_group`. Raises ValueError."""
        raise ValueError(_NEW_GROUP.format(build=self._build, again=self._again))

    def check(self) -> None:
        """Raises ValueError if groups hold other parameters than when the engine was built, or are in another list."""
        if self._optimizer.param_groups is not self._groups:
            raise ValueError(
                "optimizer.param_groups was replaced by another list, which the engine does not read: change the groups in place "
                "(param_groups[0]['lr'] = 0.1)"
            )
        if len(self._groups) > len(self._parameters):
            self.refuse_group()
        for number, known in enumerate(self._parameters):
            now = self._groups[number]["params"] if number < len(self._groups) else []
            if len(now) == len(known) and all(map(_is, now, known)):
                continue
            here, before = {id(p) for p in now}, {id(p) for p in known}
            if gone := [p for p in known if id(p) not in here]:
                raise ValueError(
                    f"parameter {self._name(gone[0])} was taken out of param_groups[{number}] after {self._build}, and the engine continues "
                    f"to train it: freeze it by requires_grad_(False), which a step leaves alone; or {self._again}"
                )
            new = [p for p in now if id(p) not in before]
            raise ValueError(
                f"param_groups[{number}]['params'] has changed after {self._build}"
                + (f": parameter {self._name(new[0])} came into it" if new else ", its order or number")
                + f". The engine trains the parameters that it was built of: give all of them to {self._build}, and freeze those that train "
                f"later by requires_grad_(False) after it; or {self._again}"
            )

    def _name(self, parameter: torch.Tensor) -> str:
        return self.names.get(id(parameter), f"of shape {tuple(parameter.shape)}")


def _is(first: object, second: object) -> bool:
    return first is second


class ScriptOptimizer:
    """Refuses uses of `optimizer` that the engine has taken over, until `release`.

    `check` runs before every step and raises for changes by a script. zero_grad: replaces its `zero_grad`.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        groups: FixedGroups | None,
        state: StateElsewhere,
        instead: str,
        zero_grad: Callable[[], None],
    ) -> None:
        """groups: the groups that must not change. None for an optimizer of full parameters, whose own step runs its hooks, too.
        state: replaces the optimizer's state, if that is empty. instead: names the calls that save and load its states.

        Raises ValueError for an optimizer whose `step` a script has replaced.
        """
        check_step(optimizer)
        self.optimizer, self.groups, self._state = optimizer, groups, state
        self._own = {
            name: vars(optimizer)[name] for name in ("step", "add_param_group", "zero_grad") if name in vars(optimizer)
        }
        self._handles = [
            optimizer.register_state_dict_pre_hook(_refusing(f"state_dict() of {instead}")),
            optimizer.register_load_state_dict_pre_hook(_refusing(f"load_state_dict() of {instead}")),
        ]
        self._methods: dict[str, Any] = {
            "step": MethodType(_stepping(self, own=self._own.get("step")), optimizer),
            "zero_grad": lambda set_to_none=True: zero_grad(),
        }
        if groups is not None:
            self._methods["add_param_group"] = groups.refuse_group
        vars(optimizer).update(self._methods)
        self._shows_no_state = not optimizer.state
        if self._shows_no_state:  # states set in its constructor are taken over by its step
            optimizer.state = state
        self.is_released = False

    def describe(self) -> dict[str, Any]:
        """Its class as "name", and its first group's values of the options that ztk's optimizers have, None for options it lacks."""
        group = self.optimizer.param_groups[0]
        found = {key: group.get(key) for key in _RECORDED}
        found["lr"] = group.get("initial_lr", found["lr"])  # set by a scheduler
        plain = {key: float(value) if isinstance(value, torch.Tensor) else value for key, value in found.items()}
        return {"name": type(self.optimizer).__name__} | plain

    def check(self) -> None:
        """Raises ValueError or RuntimeError for a step, groups or states that a script has replaced."""
        if self.groups is not None:
            self.groups.check()
        if vars(self.optimizer).get("step") is not self._methods["step"]:
            raise ValueError(_REPLACED.format(name=type(self.optimizer).__name__))
        if self._shows_no_state:
            check_same(self.optimizer.state, expected=self._state)

    @contextmanager
    def inside_hooks(self) -> Iterator[None]:
        """Context that calls the optimizer's step hooks before and after, unless its own step does. Raises ValueError for a hook that
        returns arguments."""
        with nullcontext() if self.groups is None else inside_hooks(self.optimizer):
            yield
        self.mark_stepped()

    def mark_stepped(self) -> None:
        """Records a step of the engine."""
        # pyrefly: ignore[missing-attribute]  # torch's own mark
        self.optimizer._opt_called = True  # a torch scheduler warns if its optimizer has not stepped before it
        self._state.has_stepped = True

    def release(self) -> None:
        """Restores the optimizer for the script when the engine ends."""
        self.is_released = True
        while self._handles:
            self._handles.pop().remove()
        own = vars(self.optimizer)
        for name, method in self._methods.items():
            if own.get(name) is method:
                del own[name]
                own |= {name: self._own[name]} if name in self._own else {}
        if self._shows_no_state:
            self.optimizer.state, self._shows_no_state = defaultdict(dict), False


def check_step(optimizer: torch.optim.Optimizer) -> None:
    """Raises ValueError if a script has replaced the `step` of the object. A scheduler's wrapper, which records calls, is accepted."""
    step = vars(optimizer).get("step")
    while step is not None and hasattr(step, _SCHEDULER):
        step = getattr(step, "__wrapped__", None)
    if step is not None and unhooked(step) is not unhooked(type(optimizer).step):
        raise ValueError(_REPLACED.format(name=type(optimizer).__name__))


def unhooked(step: Any) -> Any:
    """The function inside torch's wrapper, which profiles and calls hooks."""
    step = getattr(step, "__func__", step)
    while getattr(step, "hooked", False) and hasattr(step, "__wrapped__"):
        step = step.__wrapped__
    return step


@contextmanager
def inside_hooks(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Context that calls the optimizer's own step hooks before and after. Raises ValueError for a hook that returns arguments."""
    for hook in list(getattr(optimizer, "_optimizer_step_pre_hooks", {}).values()):
        if hook(optimizer, (), {}) is not None:
            raise ValueError(
                "a pre-step hook of the optimizer returned other arguments, and the engine's step has none"
            )
    yield
    for hook in list(getattr(optimizer, "_optimizer_step_post_hooks", {}).values()):
        hook(optimizer, (), {})


def _refusing(call: str) -> Callable:
    def refuse(*_: Any) -> None:
        raise RuntimeError(call)

    return refuse


def _stepping(owner: ScriptOptimizer, *, own: Callable | None) -> Callable:
    """own: the step that the object had before, a scheduler's wrapper. None if it uses its class's."""

    @functools.wraps(type(owner.optimizer).step)
    def step(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        if owner.is_released:
            return type(optimizer).step(optimizer, *args, **kwargs) if own is None else own(*args, **kwargs)
        raise RuntimeError("optimizer.step(): call engine.step() instead, which updates the parameters")

    setattr(step, _SCHEDULER, True)  # a scheduler then neither wraps it nor warns about the order
    return step
