"""Tests whether a torch optimizer is elementwise and finds its states, by stepping it on a few parameters.

A rank holds a flat range of a parameter, and its shard is updated in pieces. So an optimizer can run over shards only if it updates every
element as it would in the full parameter, in its shape and together with other parameters. Three steps over parameters of one, two and four
dimensions are compared bit by bit with three steps over flat ranges of them, each range with a separate object. This detects norms (LAMB),
matrices (Muon, Shampoo), factored moments (Adafactor) and random numbers. A class may distinguish parameters by an attribute that the
script has set: the parameters of the trial, and all ranges later, have the attributes of the script's parameters. A class that
distinguishes them in another way (by identity, or by position in the group) is refused, because ranges are other objects, and a piece has
some of them.

One parameter has 23,040 elements and sides above 128, because some classes treat large parameters differently: 8-bit states begin at 4,096
elements (bitsandbytes, torchao), factored moments of some at sides of 128. A change at larger sizes is detected only if it changes a
state, in the first step: see `TorchStep`.
"""

import copy
import inspect
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ztk.optim.alone import attributes_of, fill, options_of, stand_in, step_alone
from ztk.optim.reads import Reads

GRADIENTS = (1.0, 1e-3, 1e4)  # scale of each step's gradients, to detect clipping
# Shape -> elements of a range of it, multiples of 64, because torch's vector loops round their remainders differently.
CUTS: dict[tuple[int, ...], int] = {(320,): 64, (8, 32): 128, (2, 2, 4, 16): 192, (160, 144): 2560}
SHAPES = tuple(CUTS)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int8, torch.bool)  # exact in fp32
RESERVED = ("master", "parameter", "gradient", "buffer", "rng")  # kinds of state in a checkpoint
# Attributes that `step_alone` sets, and attributes that torch's own optimizers set in their first step and that carry no state.
_MARKS = (
    "param_groups",
    "state",
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_need_device_dtype_check_for_fused",
    "_warned_capturable_if_run_uncaptured",
)
_OFFERED = "use AdamW, Adam, SGD, Lion or another elementwise optimizer"


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """The states of an optimizer.

    rows: name -> dtype of the states with an element per element of the parameter. scalars: names of the other states, which all ranges of
    one parameter share. on_device: names in `scalars` whose values are tensors on the parameter's device. group_values: per parameter
    group, the names of its values that a step changes.
    """

    rows: dict[str, torch.dtype]
    scalars: frozenset[str]
    on_device: frozenset[str]
    group_values: tuple[frozenset[str], ...]


def probe(
    optimizer: torch.optim.Optimizer,
    *,
    initial: Mapping[int, dict[str, Any]],
    device: torch.device,
    model: Iterable[nn.Parameter] = (),
) -> Kept:
    """Returns the states of `optimizer`, with the current options of its parameter groups.

    initial: by number of the group, the states that a parameter has before its first step, see `initial_state`. device: where it will run.
    model: further parameters that a step must not access, in addition to those in its groups.

    Raises ValueError, with the reason, for an optimizer that cannot run over shards: one that needs a closure, wraps another one, raises in
    its step, is not elementwise, distinguishes parameters by identity or position, or has states that a shard or a checkpoint cannot hold.
    """
    name = type(optimizer).__name__
    reason = _unfit(optimizer)
    if reason:
        raise ValueError(f"optimizer={name}: {reason}; {_OFFERED}")
    rows: dict[str, torch.dtype] = {}
    scalars, on_device, group_values = set(), set(), []
    own = {id(p): p for group in optimizer.param_groups for p in group["params"]} | {id(p): p for p in model}
    for number, group in enumerate(optimizer.param_groups):
        likes = [attributes_of(p) for p in group["params"] if p.requires_grad] or [{}]
        found = _Found(rows=rows, scalars=scalars, on_device=on_device, initial=initial.get(number, {}))
        reads = Reads(own.values(), of=type(optimizer))
        try:
            with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
                subject = _Subject(optimizer, options=options_of(group), initial=found.initial, device=device)
                group_values.append(_probe_group(subject, likes=likes, found=found, reads=reads))
                if len(likes) > 1 and not _is_torchs(optimizer):
                    _check_places(subject, likes=likes)
        except Unfit as error:
            raise ValueError(f"optimizer={name}: {error}; {_OFFERED}") from None
        except Exception as error:
            if reason := reads.fault():  # it raises because it found none of its parameters
                raise ValueError(f"optimizer={name}: {reason}; {_OFFERED}") from error
            raise ValueError(
                f"optimizer={name}: its step raises {type(error).__name__} ({error}) on flat fp32 parameters ({device.type}) with gradients "
                f"and without a closure, as a rank holds them of a sharded model; {_OFFERED}"
            ) from error
    return Kept(rows=rows, scalars=frozenset(scalars), on_device=frozenset(on_device), group_values=tuple(group_values))


def merged(found: Sequence[Kept], *, optimizer: torch.optim.Optimizer) -> Kept:
    """The states of an optimizer that steps on several devices. found: of each device.

    Raises ValueError for one that has other states on another device.
    """
    first = found[0]
    for other in found[1:]:
        if (other.rows, other.scalars, other.group_values) != (first.rows, first.scalars, first.group_values):
            raise ValueError(
                f"optimizer={type(optimizer).__name__}: it keeps {_names(first)} for parameters on one device and {_names(other)} on the "
                f"other, and offload.optimizer_fraction below 1 steps on both; leave it out, or {_OFFERED}"
            )
    return replace(first, on_device=frozenset.intersection(*(one.on_device for one in found)))


def _names(kept: Kept) -> str:
    return ", ".join(sorted({*kept.rows, *kept.scalars})) or "no state"


class Unfit(Exception):
    """The reason why an optimizer cannot run over shards."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Found:
    """States found in the groups so far. initial: the states of a new parameter of the current group."""

    rows: dict[str, torch.dtype]
    scalars: set[str]
    on_device: set[str]
    initial: Mapping[str, Any]


def _unfit(optimizer: torch.optim.Optimizer) -> str | None:
    """The reason for a refusal that needs no step, or None."""
    parameters = list(inspect.signature(type(optimizer).step).parameters.values())[1:]
    required = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if isinstance(optimizer, torch.optim.LBFGS) or required:
        return "its step needs a closure that computes the loss again, and a step comes after the backward here"
    for attribute, value in vars(optimizer).items():
        if isinstance(value, torch.optim.Optimizer):
            return f"it wraps another optimizer ({attribute}), whose states would not be sharded: pass that one"
    return None


def _is_torchs(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its whole step is torch's."""
    return type(optimizer).__module__.startswith("torch.optim.")


@dataclass(frozen=True, slots=True)
class _Subject:
    """The optimizer under trial, with the options of one group and the states of a new parameter of it."""

    optimizer: torch.optim.Optimizer
    options: dict[str, Any]
    initial: Mapping[str, Any]
    device: torch.device

    def run(self, values: Sequence[Tensor], *, likes: Sequence[Mapping[str, Any]]) -> "_Run":
        """likes: the attributes of each parameter."""
        return _Run(self, values=values, likes=likes)


def _probe_group(
    subject: _Subject, *, likes: Sequence[Mapping[str, Any]], found: _Found, reads: Reads
) -> frozenset[str]:
    """Adds the states of one group to `found` and returns the group's values that a step changes. Raises Unfit.

    likes: the attributes of the group's parameters. The parameters of the trial cover as many different ones as possible.
    """
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator) for shape in SHAPES]
    gradients = [[size * torch.randn(shape, generator=generator) for shape in SHAPES] for size in GRADIENTS]
    likes = _different(likes, count=len(SHAPES))
    if not _is_torchs(subject.optimizer) and (reason := _held(subject.options, reads=reads)):
        raise Unfit(reason)
    attributes = _fingerprint(vars(subject.optimizer))
    full = subject.run(values, likes=likes)
    changed: dict[str, Any] = {}
    for row in gradients:
        with reads.watch(skip=_is_torchs(subject.optimizer)) as cls:
            changed = full.step(row, cls=cls)
    if reason := reads.fault():
        raise Unfit(reason)
    if differing := [key for key, value in _fingerprint(changed).items() if attributes.get(key) != value]:
        raise Unfit(
            f"its step changes its attribute {differing[0]}, which is not sharded or saved: keep it in state[parameter] or in the group"
        )
    states = [full.states[parameter] for parameter in full.parameters]
    _sort(states, parameters=full.parameters, found=found)
    for index, value in enumerate(values):
        cut = CUTS[tuple(value.shape)]
        for start in range(0, value.numel(), cut):
            place = slice(start, start + cut)
            part = subject.run([value.view(-1)[place]], likes=[likes[index]])
            for row in gradients:
                part.step([row[index].view(-1)[place]])
            _compare(part, full=full, index=index, place=place, found=found)
    changed_values = {
        key: value
        for key, value in full.group.items()
        if key != "params" and not _same(value, subject.options.get(key))
    }
    for key, value in changed_values.items():
        if not _is_scalar(value):
            raise Unfit(
                f"its step changes {key} of the group, a {type(value).__name__}, which a checkpoint cannot hold"
            )
    return frozenset(changed_values)


def _held(options: Mapping[str, Any], *, reads: Reads) -> str | None:
    """The fault of an option that holds parameters, or None. A step receives all options of its group, even if it does not read them."""
    return next((reads.words(f"the group's {key}") for key, value in options.items() if reads.holds(value)), None)


def _different(likes: Sequence[Mapping[str, Any]], *, count: int) -> list[Mapping[str, Any]]:
    """`count` attribute sets, as many different ones as there are."""
    kinds = {tuple(_fingerprint(own).items()): own for own in likes}
    return [own for own, _ in zip(itertools.cycle(kinds.values()), range(count), strict=False)]


def _check_places(subject: _Subject, *, likes: Sequence[Mapping[str, Any]]) -> None:
    """Steps as many parameters as the group has, in order, in two halves and backwards, because a piece has some of them in its own order.
    Raises Unfit if the results differ."""
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(64, generator=generator) for _ in likes]
    gradients = [torch.randn(64, generator=generator) for _ in likes]
    full = subject.run(values, likes=likes)
    full.step(gradients)
    for order in (range(0, len(likes), 2)[::-1], range(1, len(likes), 2)[::-1]):
        part = subject.run([values[index] for index in order], likes=[likes[index] for index in order])
        part.step([gradients[index] for index in order])
        for index, own in zip(order, part.parameters, strict=True):
            if not torch.equal(_bits(own), _bits(full.parameters[index])):
                raise Unfit(
                    "its step treats parameters by their place in the group, or by the others in it, and a rank holds some of them at a time: "
                    "mark parameters by an attribute (p.lr_scale = 0.1), or give them a parameter group of their own"
                )


class _Run:
    """Parameters, their states and their group, stepped by a class."""

    def __init__(self, subject: _Subject, *, values: Sequence[Tensor], likes: Sequence[Mapping[str, Any]]) -> None:
        self._optimizer, self._device, initial = subject.optimizer, subject.device, subject.initial
        self.parameters = [
            stand_in(value.to(self._device, copy=True), attributes=_copied(own))
            for value, own in zip(values, likes, strict=True)
        ]
        self.group = {**options_of(subject.options), "params": self.parameters}
        self.states: dict[nn.Parameter, dict[str, Any]] = (
            {parameter: fill(initial, parameter=parameter) for parameter in self.parameters} if initial else {}
        )

    def step(self, gradients: list[Tensor], *, cls: type | None = None) -> dict[str, Any]:
        """Steps with copies of `gradients`, which a class may change in place."""
        attributes = [_fingerprint(vars(parameter)) for parameter in self.parameters]
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient.to(self._device, copy=True)
        of_optimizer = step_alone(self._optimizer, groups=[self.group], states=self.states, cls=cls)
        for parameter, before in zip(self.parameters, attributes, strict=True):
            self.states.setdefault(parameter, {})
            after = _fingerprint(vars(parameter))
            if changed := [key for key in after.keys() | before.keys() if after.get(key) != before.get(key)]:
                raise Unfit(
                    f"its step sets the attribute {changed[0]} of a parameter, which is not sharded or saved: keep it in state[parameter]"
                )
        return of_optimizer


def _copied(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the attributes, so that a trial does not change the script's objects."""
    made = {}
    for name, value in attributes.items():
        try:
            made[name] = copy.deepcopy(value)
        except Exception:  # share objects that cannot be copied
            made[name] = value
    return made


def _sort(states: list[dict[str, Any]], *, parameters: list[nn.Parameter], found: _Found) -> None:
    """Sorts states into rows, with a value per element, and scalars. Raises Unfit for others."""
    for state, parameter in zip(states, parameters, strict=True):
        for name, value in state.items():
            if name in RESERVED or not isinstance(name, str):
                raise Unfit(f"it keeps a state called {name!r}, a name that ztk uses itself: give it another one")
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                if value.dtype not in DTYPES:
                    raise Unfit(
                        f"its state {name} is {str(value.dtype).removeprefix('torch.')}, and shards keep fp32 or narrower"
                    )
                if name in found.scalars or found.rows.setdefault(name, value.dtype) != value.dtype:
                    raise Unfit(f"its state {name} is of another kind in another parameter")
            elif _is_scalar(value):
                if value is None:  # another group may have a tensor here
                    continue
                found.scalars.add(name)
                on_device = isinstance(value, Tensor) and value.device == parameter.device
                if on_device and parameter.device.type != "cpu":
                    found.on_device.add(name)
            else:
                description = (
                    f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
                )
                raise Unfit(
                    f"it is not elementwise: its state {name} is {description} for a parameter of shape {tuple(parameter.shape)}, "
                    "and a rank holds a flat range of a parameter"
                )


def _compare(part: _Run, *, full: _Run, index: int, place: slice, found: _Found) -> None:
    """Raises Unfit unless a range of a parameter was updated like the same range of the full one."""
    (own,), parameter = part.parameters, full.parameters[index]
    pairs = {"the weights": (own, parameter)}
    state, of_full = part.states[own], full.states[parameter]
    if set(state) != set(of_full):
        raise Unfit(f"it is not elementwise: it keeps {sorted(state)} or {sorted(of_full)} depending on the shape")
    pairs |= {f"its state {name}": (state[name], of_full[name]) for name in state if name in found.rows}
    for quantity, (ours, theirs) in pairs.items():
        if theirs is None and ours is None:
            continue
        if not torch.equal(_bits(ours), _bits(theirs.detach().reshape(-1)[place])):
            raise Unfit(
                f"it is not elementwise: {quantity} depend on the other elements or on the shape of a parameter (or on random numbers), and a "
                "rank holds a flat range of a parameter"
            )
    for name in state:
        if name in found.scalars and not _same(state[name], of_full[name]):
            raise Unfit(f"it is not elementwise: its state {name} depends on which elements a rank holds")
    for name, value in part.group.items():
        if name != "params" and not _same(value, full.group.get(name)):
            raise Unfit(f"it is not elementwise: its step sets {name} of the group by the elements that a rank holds")


def _is_scalar(value: Any) -> bool:
    """Whether a checkpoint's JSON can hold it."""
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex()
    return value is None or isinstance(value, bool | int | float | str)


def _bits(tensor: Tensor) -> Tensor:
    """The bytes of a tensor: NaN equals NaN, and 0 does not equal -0."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


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
        yield (tuple(value.shape), value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
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
