"""An elementwise torch optimizer over shards: its own step runs on the ranges of parameters that a rank holds.

Every range is a flat fp32 parameter of an object of the optimizer's class. States with an element per element of the parameter are rows of
the store, as for ztk's own optimizers. The rest, such as `step`, is kept here, once per parameter: each range starts a step from the values
after the last step, and all ranges end with the same values. A parameter has states from its first update on, created by the class itself.
A parameter that a step skips keeps its weights, states and step count.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ztk.kernels import Control
from ztk.optim.alone import attributes_of, fill, initial_state, options_of, stand_in, step_alone
from ztk.optim.elementwise import Kept, check_elementwise, merged
from ztk.optim.schedule import GroupSchedule
from ztk.optim.states import StateFormat


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """The states of a parameter outside the store. scalars: name -> value. rows: names of the rows that exist in the store."""

    scalars: dict[str, Any]
    rows: tuple[str, ...]


class TorchStep:
    """Runs a torch optimizer's step over pieces of shards.

    state_names: names of the rows that a store keeps for it, in fp32, which represents narrower dtypes exactly. options: written into a
    checkpoint's description.

    Call `begin_step`, then `step` for every piece, in any thread. A state that the check at the start did not find (one that only large
    parameters get, or that belongs to an option that was off before) raises RuntimeError at the first step that creates it.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        parameters: Mapping[str, nn.Parameter],
        devices: Sequence[torch.device | str] = ("cpu",),
        lr_table: Tensor | None = None,
        schedule: GroupSchedule | None = None,
    ) -> None:
        """parameters: the trained parameters by name. devices: where steps run, one or two. lr_table: fp32 [steps], multiplies every
        group's `lr`, one value per update; after the last one it stays constant. schedule: sets the groups' values instead.

        Reads the optimizer's groups at every step and empties its states. Raises ValueError for an optimizer that is not elementwise (see
        `check_elementwise`), lacks a parameter or has made steps. With an lr_table, also for one that changes `lr` itself or has none.
        """
        name_of = {id(parameter): name for name, parameter in parameters.items()}
        self._optimizer = optimizer
        self._group_of = group_of(optimizer, parameters=parameters)
        self._initial = _initial_states(optimizer, name_of=name_of)
        of_parameters = {id(parameters[name]): state for name, state in self._initial.items()}
        found = [check_elementwise(optimizer, initial=of_parameters, device=torch.device(one)) for one in devices]
        self._kept: Kept = merged(found, optimizer=optimizer)
        self._parameters, self._attributes = dict(parameters), {}
        for number, group in enumerate(optimizer.param_groups if lr_table is not None else ()):
            if "lr" not in group or "lr" in self._kept.group_values[number]:
                why = "its step changes lr by itself" if "lr" in group else "its parameter groups have no lr"
                raise ValueError(
                    f"optimizer={type(optimizer).__name__}: {why}, and lr_table would change it: leave the schedule out"
                )
        self._lr_table, self._schedule, self._rate = lr_table, schedule, rate_of(optimizer)
        self._is_scheduled = False  # the groups have the values of the current step
        optimizer.state.clear()  # full tensors that are not used
        self.state_names = tuple(self._kept.rows)
        self.format = StateFormat.float32(self.state_names)
        self.options = {"class": type(optimizer).__name__}
        self._before: dict[str, Progress] = {}
        self._after: dict[str, Progress] = {}
        self._groups: list[dict[str, Any]] = []
        self._values_before: dict[int, dict[str, Any]] = {}  # values of groups that a step changes
        self._values_after: dict[int, dict[str, Any]] = {}

    def begin_step(self) -> None:
        """Reads the current options of the groups and attributes of parameters. Call it between steps, in the training thread."""
        self._before |= self._after
        self._after = {}
        self._values_before |= self._values_after
        self._values_after = {}
        self._groups = [options_of(group) for group in self._optimizer.param_groups]
        self._rate = rate_of(self._optimizer)
        self._attributes = {name: attributes_of(parameter) for name, parameter in self._parameters.items()}
        self._is_scheduled = False

    def step(
        self, master: Tensor, *, grad: Tensor, rows: Mapping[str, Tensor], control: Tensor, places: Mapping[str, slice]
    ) -> None:
        """Updates `master` and `rows` in place.

        master: float32 [n]; grad: scaled and summed, [n]; rows: state -> float32 [n]; control: one row of the control table; places:
        parameter
        -> its range of the piece. Elements outside of `places` do not change.

        Raises RuntimeError for a state of another kind than before.
        """
        self._follow_schedule(control)
        # A step may read other groups, so all are there, also those without a parameter in this piece.
        groups = [
            {**options, **copy.deepcopy(self._values_before.get(number, {})), "params": []}
            for number, options in enumerate(self._groups)
        ]
        states: dict[nn.Parameter, dict[str, Any]] = {}
        of_name: dict[str, nn.Parameter] = {}
        for name, place in places.items():
            parameter = stand_in(master[place], attributes=self._attributes[name])
            parameter.grad = grad[place].to(torch.float32) * control[Control.grad_coefficient]
            groups[self._group_of[name]]["params"].append(parameter)
            of_name[name] = parameter
            if name in self._before:
                states[parameter] = self._state(self._before[name], rows=rows, place=place)
            elif name in self._initial:
                states[parameter] = fill(self._initial[name], parameter=parameter)
        if not of_name:
            return
        step_alone(self._optimizer, groups=groups, states=states)
        for name, parameter in of_name.items():
            if parameter.data_ptr() != master[places[name]].data_ptr():  # p.data = x, or p.set_(x)
                master[places[name]].copy_(parameter.data)
            self._after[name] = self._take(name, state=states.get(parameter, {}), rows=rows, place=places[name])
        for number, group in enumerate(groups):
            changed = self._kept.group_values[number]
            if changed and group["params"]:
                self._values_after[number] = {key: group[key] for key in changed if key in group}

    def _follow_schedule(self, control: Tensor) -> None:
        """Sets the groups' values, once per step."""
        if self._is_scheduled:
            return
        self._is_scheduled = True
        if self._schedule is not None:
            for group, values in zip(self._groups, self._schedule.values(int(control[Control.step])), strict=True):
                group.update(values)
            self._rate = float(self._groups[0].get("lr", 0.0))
        elif self._lr_table is not None:
            update = min(int(control[Control.step]), len(self._lr_table)) - 1
            for group in self._groups:
                group["lr"] = group["lr"] * float(self._lr_table[update])

    @property
    def rate(self) -> float:
        """The learning rate of the first group in the last step, or in the first one before any step; no lr_table multiplies it. 0 for
        a class without a rate."""
        return self._rate

    # For checkpoints

    @property
    def changing_values(self) -> tuple[frozenset[str], ...]:
        """Per parameter group, the names of its values that a step changes."""
        return self._kept.group_values

    def progress(self) -> dict[str, Progress]:
        """Progress of each parameter that this rank has updated. Call it after the last update has ended."""
        return self._before | self._after

    def group_values(self) -> dict[int, dict[str, Any]]:
        """By number of the group, the values that steps have changed. Call it after the last update has ended."""
        return self._values_before | self._values_after

    def restore(
        self, progress: Mapping[str, Progress], *, group_values: Mapping[int, dict[str, Any]], keep: frozenset[str]
    ) -> None:
        """Restores progress. Parameters without an entry start anew, except those in `keep`."""
        kept = {name: own for name, own in self.progress().items() if name in keep}
        self._before, self._after = {**progress, **kept}, {}
        self._values_before, self._values_after = dict(group_values), {}

    # One range

    def _state(self, progress: Progress, *, rows: Mapping[str, Tensor], place: slice) -> dict[str, Any]:
        """The states of a range: rows are views where their dtype allows."""
        state = {name: rows[name][place].to(self._kept.rows[name]) for name in progress.rows}
        for name, value in progress.scalars.items():
            state[name] = own = copy.deepcopy(value)
            if name in self._kept.on_device and isinstance(own, Tensor) and rows:
                state[name] = own.to(next(iter(rows.values())).device)
        return state

    def _take(self, name: str, *, state: dict[str, Any], rows: Mapping[str, Tensor], place: slice) -> Progress:
        """Writes a range's states back to the rows and returns the other states."""
        scalars, present = {}, []
        for key, value in state.items():
            if value is None or (key in self._kept.scalars and not (isinstance(value, Tensor) and value.numel() > 1)):
                scalars[key] = value
                continue
            dtype = self._kept.rows.get(key)
            row = rows[key][place] if dtype is not None else None
            if row is None or not isinstance(value, Tensor) or value.dtype != dtype or value.numel() != row.numel():
                found_kind = (
                    f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
                )
                raise RuntimeError(
                    f"optimizer={type(self._optimizer).__name__}: keeps the state {key} ({found_kind}) for {name}, which it did not "
                    "keep when training began: options that bring further states (momentum, amsgrad, centered) must be on then, and one "
                    "that keeps other states for large parameters cannot run over shards"
                )
            if value.dtype != row.dtype or value.data_ptr() != row.data_ptr():
                row.copy_(value.view(-1))
            present.append(key)
        return Progress(scalars=scalars, rows=tuple(present))


def group_of(optimizer: torch.optim.Optimizer, *, parameters: Mapping[str, nn.Parameter]) -> dict[str, int]:
    """The number of each parameter's group. Raises ValueError for a parameter that `optimizer` does not hold."""
    name_of = {id(parameter): name for name, parameter in parameters.items()}
    found = {
        name_of[id(parameter)]: number
        for number, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
        if id(parameter) in name_of
    }
    if missing := [name for name in parameters if name not in found]:
        raise ValueError(
            f"optimizer: does not hold {', '.join(missing[:3])}, which require a gradient: pass them to it, or freeze them"
        )
    return found


def rate_of(optimizer: torch.optim.Optimizer) -> float:
    """The learning rate of the first group."""
    rate = optimizer.param_groups[0].get("lr", 0.0)
    return float(rate) if isinstance(rate, int | float | Tensor) else 0.0


def _initial_states(optimizer: torch.optim.Optimizer, *, name_of: Mapping[int, str]) -> dict[str, dict[str, Any]]:
    """States set by the constructor, by parameter. Raises ValueError for states of a step."""
    found = {}
    for parameter, state in optimizer.state.items():
        made = initial_state(state, parameter=parameter)
        if made is None:
            raise ValueError("optimizer: has made steps already, and ztk cannot take its states over; pass a fresh one")
        if id(parameter) in name_of and made:
            found[name_of[id(parameter)]] = made
    return found
