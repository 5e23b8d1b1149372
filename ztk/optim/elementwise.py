"""Elementwise torch optimizers, which run over flat ranges of parameters: which classes are, and the states that they keep.

A class is elementwise if it updates every element of a parameter from that element's own weight, gradient and states. Torch's own classes
in `TORCHS` are, as `tests/optim/test_torch_step.py` shows. A user declares the same of another class by the attribute `elementwise = True`.
Every other optimizer steps full parameters, see `ztk.optim.whole_step`.

`check_elementwise` compares steps over full parameters of the real groups with steps over ranges of them, bit by bit. It finds a wrong
declaration that acts in the first steps, and the names of the states.
"""

import copy
import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ztk.optim.alone import attributes_of, fill, lend, options_of, stand_in, step_alone, take_back

DECLARED, CLOSURE = "elementwise", "needs_closure"  # attributes of an optimizer or of its class
TORCHS = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.ASGD,
)  # derived classes are not: their step may differ
SCALES = (1.0, 1e-3, 1e4)  # of each step's gradients, so that clipping acts
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int8, torch.bool)  # exact in fp32
RESERVED = ("master", "parameter", "gradient", "buffer", "rng")  # kinds of state in a checkpoint
_CUT = 64  # elements: torch's vector loops round their remainders differently
_LARGEST, _TOTAL = 1 << 15, 1 << 22  # elements of a parameter, and of all of them, in a check
# Attributes that `step_alone` sets, and attributes that torch's own optimizers set in their first step and that carry no state.
_MARKS = (
    "param_groups",
    "state",
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_need_device_dtype_check_for_fused",
    "_warned_capturable_if_run_uncaptured",
)


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `optimizer` has a class of `TORCHS`, or is declared elementwise."""
    return type(optimizer) in TORCHS or getattr(optimizer, DECLARED, False) is True


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its step requires a closure: it has a parameter without a default, or the attribute `needs_closure = True`."""
    parameters = list(inspect.signature(type(optimizer).step).parameters.values())[1:]
    required = any(p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)
    return required or getattr(optimizer, CLOSURE, False) is True


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """The states of an elementwise optimizer.

    rows: name -> dtype of the states with an element per element of the parameter. scalars: names of the other states, which all ranges of
    one parameter share. on_device: names in `scalars` whose values are tensors on the parameter's device. group_values: per parameter
    group, the names of its values that a step changes.
    """

    rows: dict[str, torch.dtype]
    scalars: frozenset[str]
    on_device: frozenset[str]
    group_values: tuple[frozenset[str], ...]


def merged(found: Sequence[Kept], *, optimizer: torch.optim.Optimizer) -> Kept:
    """The states of an optimizer that steps on several devices. found: each device's states.

    Raises ValueError for one that has other states on another device.
    """
    first = found[0]
    for other in found[1:]:
        if (other.rows, other.scalars, other.group_values) != (first.rows, first.scalars, first.group_values):
            raise ValueError(
                f"optimizer={type(optimizer).__name__}: it keeps {_names(first)} for parameters on one device and {_names(other)} on the "
                "other, and offload.optimizer_fraction below 1 steps on both; leave it out, or use AdamW, Adam, SGD or Lion"
            )
    return replace(first, on_device=frozenset.intersection(*(one.on_device for one in found)))


def _names(kept: Kept) -> str:
    return ", ".join(sorted({*kept.rows, *kept.scalars})) or "no state"


class _NotElementwise(Exception):
    """The reason why an optimizer cannot run over ranges."""


def check_elementwise(
    optimizer: torch.optim.Optimizer, *, initial: Mapping[int, dict[str, Any]], device: torch.device
) -> Kept:
    """Returns the states of `optimizer` after a few steps over copies of its parameters with other values.

    initial: by id() of a parameter, its states before its first step, see `initial_state`. device: where the steps run.

    Raises ValueError, with the reason, for an optimizer that is not elementwise in these steps, or whose states a shard or a checkpoint
    cannot hold. Parameters of more than 32,768 elements have fewer rows in the check.
    """
    name, is_declared = type(optimizer).__name__, type(optimizer) not in TORCHS
    fix = (
        f"leave {DECLARED}=true out, and the optimizer steps full parameters"
        if is_declared
        else "use another optimizer"
    )
    if needs_closure(optimizer):
        raise ValueError(
            f"optimizer={name}: its step needs a closure, and a step over ranges of parameters has none; {fix}"
        )
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            return _checked(optimizer, initial=initial, device=device, compares=is_declared)
    except _NotElementwise as error:
        raise ValueError(f"optimizer={name}: {error}; {fix}") from None
    except Exception as error:
        raise ValueError(
            f"optimizer={name}: its step raises {type(error).__name__} ({error}) on flat fp32 parameters ({device.type}) with gradients and "
            f"without a closure, as a rank holds them of a sharded model; {fix}"
        ) from error


def _checked(
    optimizer: torch.optim.Optimizer, *, initial: Mapping[int, dict[str, Any]], device: torch.device, compares: bool
) -> Kept:
    generator = torch.Generator().manual_seed(0)
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    full = _Run(optimizer, device=device, initial=initial)
    gradients: list[dict[int, Tensor]] = [{} for _ in SCALES]
    values: dict[int, Tensor] = {}
    for number, parameter in enumerate(full.originals):
        shape = _reduced(tuple(parameter.shape), limit=max(256, min(_LARGEST, _TOTAL // max(count, 1))))
        values[number] = torch.randn(shape, generator=generator)
        for of_step, scale in zip(gradients, SCALES, strict=True):
            of_step[number] = scale * torch.randn(shape, generator=generator)
    options = [options_of(group) for group in optimizer.param_groups]
    attributes = _fingerprint(vars(optimizer))
    changed: dict[str, Any] = {}
    with full.lending(values):
        for of_step in gradients:
            changed = full.step(of_step)
    if compares and (differing := [k for k, v in _fingerprint(changed).items() if attributes.get(k) != v]):
        raise _NotElementwise(
            f"its step changes its attribute {differing[0]}, which is not sharded or saved: keep it in state[parameter] or in the group"
        )
    rows, scalars, on_device = _sorted_states(full)
    group_values = tuple(
        frozenset(key for key in group if key != "params" and not _same(group[key], before.get(key)))
        for group, before in zip(full.groups, options, strict=True)
    )
    for group, keys in zip(full.groups, group_values, strict=True):
        for key in keys:
            if not _is_scalar(group[key]):
                raise _NotElementwise(
                    f"its step changes {key} of the group, a {type(group[key]).__name__}, which a checkpoint cannot hold"
                )
    kept = Kept(rows=rows, scalars=frozenset(scalars), on_device=frozenset(on_device), group_values=group_values)
    if compares:
        for ranges in _passes(values):
            part = _Run(optimizer, device=device, initial=initial)
            part.add({number: values[number].reshape(-1)[place] for number, place in ranges.items()})
            for of_step in gradients:
                part.step({number: of_step[number].reshape(-1)[place] for number, place in ranges.items()})
            _compare(part, full=full, ranges=ranges, kept=kept)
    return kept


def _reduced(shape: tuple[int, ...], *, limit: int) -> tuple[int, ...]:
    """`shape` with fewer indices in its first dimensions, so that it has at most `limit` elements. (1,) for a scalar, as its range has."""
    sizes = list(shape) or [1]
    for dimension in range(len(sizes)):
        rest = math.prod(sizes) // max(sizes[dimension], 1)
        sizes[dimension] = max(min(sizes[dimension], 1), min(sizes[dimension], limit // max(rest, 1)))
    return tuple(sizes)


def _passes(values: Mapping[int, Tensor]) -> Iterator[dict[int, slice]]:
    """Ranges of flat parameters, each element in one pass: first ranges at even and at odd positions, the latter backwards, and the rest."""
    first = {}
    for number, value in values.items():
        half = value.numel() // 2
        first[number] = half // _CUT * _CUT if half >= _CUT else value.numel()
    numbers = list(values)
    yield {number: slice(0, first[number]) for number in numbers[::2]}
    yield {number: slice(0, first[number]) for number in numbers[1::2][::-1]}
    yield {number: slice(first[number], None) for number in numbers if first[number] < values[number].numel()}


class _Run:
    """Copies of an optimizer's groups and parameters, stepped by its class. originals: its parameters, in the order of the groups."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, *, device: torch.device, initial: Mapping[int, dict[str, Any]]
    ) -> None:
        self._optimizer, self._device, self._initial = optimizer, device, initial
        self.originals = [p for group in optimizer.param_groups for p in group["params"]]
        self._group_of = [number for number, group in enumerate(optimizer.param_groups) for _ in group["params"]]
        self.groups = [{**options_of(group), "params": []} for group in optimizer.param_groups]
        self.parameters: dict[int, nn.Parameter] = {}
        self.states: dict[nn.Parameter, dict[str, Any]] = {}

    @contextmanager
    def lending(self, values: Mapping[int, Tensor]) -> Iterator[None]:
        """Context in which the optimizer's own parameters have the given values (any shape), because a step may know them by identity. On
        exit `parameters` and `states` have copies in their place."""
        if any(original.is_meta for original in self.originals):
            self.add(values)
            yield
            return
        kept = [dict(vars(original)) for original in self.originals]
        with torch._C.DisableTorchFunctionSubclass(), torch.inference_mode(False):
            lent = []
            try:
                for number, original in enumerate(self.originals):
                    lent.append(lend(original, value=values[number].to(self._device, copy=True), gradient=None))
                    self._put(number, original)
                yield
            finally:
                states = self.states
                self.states = {}
                for number, (original, before) in enumerate(zip(self.originals, lent, strict=False)):
                    value = take_back(original, lent=before)
                    vars(original).clear()
                    vars(original).update(kept[number])
                    self.parameters[number] = stand_in(value, attributes={})
                    self.states[self.parameters[number]] = states.get(original, {})

    def add(self, values: Mapping[int, Tensor]) -> None:
        """Adds a copy of parameter `number` with the given values (any shape), by number."""
        for number, value in values.items():
            original = self.originals[number]
            self._put(number, stand_in(value.to(self._device, copy=True), attributes=_copied(attributes_of(original))))

    def _put(self, number: int, parameter: nn.Parameter) -> None:
        original = self.originals[number]
        self.parameters[number] = parameter
        if original.requires_grad:
            self.groups[self._group_of[number]]["params"].append(parameter)
        if id(original) in self._initial:
            self.states[parameter] = fill(self._initial[id(original)], parameter=parameter)

    def step(self, gradients: Mapping[int, Tensor]) -> dict[str, Any]:
        """Steps with copies of `gradients`, which a class may change in place. Returns the attributes of the stepped object."""
        before = {number: _fingerprint(vars(parameter)) for number, parameter in self.parameters.items()}
        for number, parameter in self.parameters.items():
            parameter.grad = gradients[number].to(self._device, copy=True)
        of_optimizer = step_alone(self._optimizer, groups=self.groups, states=self.states)
        for number, parameter in self.parameters.items():
            self.states.setdefault(parameter, {})
            after = _fingerprint(vars(parameter))
            if changed := [k for k in after.keys() | before[number].keys() if after.get(k) != before[number].get(k)]:
                raise _NotElementwise(
                    f"its step sets the attribute {changed[0]} of a parameter, which is not sharded or saved: keep it in state[parameter]"
                )
        return of_optimizer


def _copied(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the attributes, so that a check does not change the script's objects."""
    made = {}
    for name, value in attributes.items():
        try:
            made[name] = copy.deepcopy(value)
        except Exception:  # share objects that cannot be copied
            made[name] = value
    return made


def _sorted_states(full: _Run) -> tuple[dict[str, torch.dtype], set[str], set[str]]:
    """Sorts states into rows, with a value per element, and scalars. Raises _NotElementwise for others."""
    rows: dict[str, torch.dtype] = {}
    scalars, on_device = set(), set()
    for parameter in full.parameters.values():
        for name, value in full.states[parameter].items():
            if name in RESERVED or not isinstance(name, str):
                raise _NotElementwise(
                    f"it keeps a state called {name!r}, a name that ztk uses itself: give it another one"
                )
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                if value.dtype not in DTYPES:
                    dtype = str(value.dtype).removeprefix("torch.")
                    raise _NotElementwise(f"its state {name} is {dtype}, and shards keep fp32 or narrower")
                if name in scalars or rows.setdefault(name, value.dtype) != value.dtype:
                    raise _NotElementwise(f"its state {name} is of another kind in another parameter")
            elif value is None:  # another group may have a tensor here
                continue
            elif _is_scalar(value) and name not in rows:
                scalars.add(name)
                if isinstance(value, Tensor) and value.device == parameter.device and parameter.device.type != "cpu":
                    on_device.add(name)
            else:
                kind = f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
                raise _NotElementwise(
                    f"it is not elementwise: its state {name} is {kind} for a parameter of shape {tuple(parameter.shape)}, and a rank holds "
                    "a flat range of a parameter"
                )
    return rows, scalars, on_device


def _compare(part: _Run, *, full: _Run, ranges: Mapping[int, slice], kept: Kept) -> None:
    """Raises _NotElementwise unless the ranges of parameters were updated like the same ranges of the full ones."""
    for number, place in ranges.items():
        own, parameter = part.parameters[number], full.parameters[number]
        state, of_full = part.states[own], full.states[parameter]
        if set(state) != set(of_full):
            raise _NotElementwise(
                f"it is not elementwise: it keeps {sorted(map(str, state))} or {sorted(map(str, of_full))} depending on the shape"
            )
        pairs = {"the weights": (own, parameter)}
        pairs |= {f"its state {name}": (state[name], of_full[name]) for name in state if name in kept.rows}
        for quantity, (ours, theirs) in pairs.items():
            if theirs is None and ours is None:
                continue
            if not torch.equal(_bits(ours), _bits(theirs.detach().reshape(-1)[place])):
                raise _NotElementwise(
                    f"it is not elementwise: {quantity} depend on other elements, on other parameters, on the place in the group or on the "
                    "shape of a parameter (or on random numbers), and a rank holds a flat range of a parameter"
                )
        for name in state:
            if name in kept.scalars and not _same(state[name], of_full[name]):
                raise _NotElementwise(f"it is not elementwise: its state {name} depends on which elements a rank holds")
    for number, group in enumerate(part.groups):
        for name, value in group.items() if group["params"] else ():
            if name != "params" and not _same(value, full.groups[number].get(name)):
                raise _NotElementwise(
                    f"it is not elementwise: its step sets {name} of the group by the elements that a rank holds"
                )


def _is_scalar(value: Any) -> bool:
    """Whether a checkpoint's JSON can hold it."""
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex()
    return value is None or isinstance(value, bool | int | float | str)


def _bits(tensor: Tensor) -> Tensor:
    """The bytes of a tensor: NaN equals NaN, and 0 does not equal -0."""
    return tensor.detach().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return first.dtype == second.dtype and torch.equal(_bits(first), _bits(second))
    if isinstance(first, float) and isinstance(second, float) and math.isnan(first):
        return math.isnan(second)
    try:
        return type(first) is type(second) and bool(first == second)
    except Exception:  # compare by identity
        return first is second


def _fingerprint(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Attributes by value if they have one, else by identity, without torch's own marks."""
    return {name: tuple(_values(value)) for name, value in attributes.items() if name not in _MARKS}


def _values(value: Any) -> Iterator[Any]:
    if isinstance(value, Tensor):
        yield (tuple(value.shape), _bits(value).cpu().numpy().tobytes())
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield repr(key)
            yield from _values(item)
    elif isinstance(value, list | tuple):
        yield len(value)
        for item in value:
            yield from _values(item)
    elif value is None or isinstance(value, bool | int | float | str):
        yield repr(value)
    else:
        yield id(value)
