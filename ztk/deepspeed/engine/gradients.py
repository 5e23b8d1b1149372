"""`p.grad` of an engine's parameters.

At stage 0 it is the averaged gradient without loss scale, available from the backward to the step and created from the engine's buffer on
access. A script may clip it, change it in place or assign it, and the step uses the result. Unchanged elements keep their bits in the
buffer. Before the last micro-batch it is this rank's local sum so far. From stage 1 on, gradients are sharded and `p.grad` is None, as in
DeepSpeed; the first read warns with the alternatives, and an assignment raises.
"""

import functools
import inspect
import sys

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from ztk.deepspeed.engine.owners import Owner, owner_of
from ztk.deepspeed.tools.log import logger
from ztk.train.engine import Engine
from ztk.zero.buckets.gradient import gradient_of
from ztk.zero.parameters.released import change_class

_HINT = (
    "p.grad is None: at ZeRO stages 1 to 3 gradients are sharded, so clip_grad_norm_ and changes of p.grad do nothing. Set gradient_clipping "
    "in the configuration; deepspeed.utils.safe_get_full_grad(p) and safe_set_full_grad(p, value) read and change a gradient"
)
_REFUSED = (
    "p.grad = a tensor: at ZeRO stages 1 to 3 gradients are sharded, so the step would not use it, and the next backward would add to it. Use "
    "deepspeed.utils.safe_set_full_grad(p, value) after the backward, or stage 0"
)
_CLIPPED = (
    "torch.nn.utils.clip_grad_value_ at ZeRO stages 1 to 3: gradients are sharded and p.grad is None. Set gradient_clipping in the "
    "configuration, which clips the norm; or clamp each gradient after the backward: deepspeed.utils.safe_set_full_grad(p, "
    "deepspeed.utils.safe_get_full_grad(p).clamp(-c, c)); or use stage 0"
)
_CLIPS_BY_VALUE = {clip.__code__ for clip in (nn.utils.clip_grad_value_, inspect.unwrap(nn.utils.clip_grad_value_))}
_shown: WeakIdKeyDictionary = WeakIdKeyDictionary()  # parameter -> (the script's tensor, the buffer's values)
_warned: WeakIdKeyDictionary = WeakIdKeyDictionary()  # the first parameter of engines that have warned


class _WithGradient:
    """Mixed into the class of an engine's parameters."""

    @property
    def grad(self) -> Tensor | None:
        # pyrefly: ignore[missing-attribute]  # a descriptor of the class at run time
        own = torch.Tensor.grad.__get__(self)
        if own is not None:
            return own
        return _shown[self][0] if self in _shown else _show(self)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        # pyrefly: ignore[missing-attribute]  # a descriptor of the class at run time
        is_autograds = torch.Tensor.grad.__get__(self) is not None  # in a hook, before the engine takes the gradient
        if is_autograds or (self not in _shown and _show(self) is None):
            if value is not None and not is_autograds and _is_sharded(self):
                raise RuntimeError(_REFUSED)
            # pyrefly: ignore[missing-attribute]  # a descriptor of the class at run time
            torch.Tensor.grad.__set__(self, value)
            return
        # pyrefly: ignore[missing-attribute]  # mixed into nn.Parameter
        if value is not None and value.shape != self.shape:
            raise RuntimeError(
                # pyrefly: ignore[missing-attribute]  # mixed into nn.Parameter
                f"p.grad = a tensor of shape {tuple(value.shape)}: the parameter has {tuple(self.shape)}"
            )
        _shown[self] = value, _shown[self][1]

    @grad.deleter
    def grad(self) -> None:
        self.grad = None


def show_gradients(model: nn.Module) -> None:
    """Adds the `grad` property to the parameters of an engine."""
    for parameter in model.parameters():
        if not isinstance(parameter, _WithGradient):
            change_class(parameter, make=_with_gradient)


def take_changes(engine: Engine) -> None:
    """Writes the script's changes to `p.grad` into the engine's buffers and updates the norm."""
    if not _shown:
        return
    for bucket in engine.zero.buckets:
        if bucket.gradient.full is None:
            continue
        shown = {index: _shown.pop(p) for index, p in enumerate(bucket.parameters) if p in _shown}
        changes = {}
        for index, (value, before) in shown.items():
            value = torch.zeros_like(before) if value is None else value.detach().to(before)
            is_same = (value == before) | (value.isnan() & before.isnan())
            if not bool(is_same.all()):
                scaled = value.float() * divisor_of(engine, is_reduced=bucket.gradient.is_reduced)
                changes[index] = functools.partial(_changed, value=scaled, is_same=is_same)
        unused = [index for index, (value, _) in shown.items() if value is None]  # for `skip_unused`
        engine.zero.reduction.rewrite(bucket, changes=changes, unused=unused)


def _changed(place: Tensor, *, value: Tensor, is_same: Tensor) -> Tensor:
    return torch.where(is_same, place, value.to(place.dtype))


def take_assigned(engine: Engine) -> None:
    """Takes gradients that the script assigned to `p.grad` without an engine backward, at stage 0 (torch.autograd.grad of several losses,
    meta learning).

    They count as this rank's local gradients and are averaged. A collective call if any parameter has one.
    """
    if engine.zero.policy.stage > 0 or engine.has_gradients:
        return
    assigned = {
        (bucket, index): gradient_of(parameter).detach().float() * divisor_of(engine, is_reduced=False)
        for bucket in engine.zero.buckets
        for index, parameter in enumerate(bucket.parameters)
        if bucket.traits.trainable and gradient_of(parameter) is not None
    }
    if assigned:
        engine.zero.reduction.reduce_given(assigned)


def forget_gradients(engine: Engine) -> None:
    """Forgets the tensors that scripts hold, after gradients were dropped."""
    for bucket in engine.zero.buckets if _shown else ():
        for parameter in bucket.parameters:
            _shown.pop(parameter, None)


def _show(parameter: nn.Parameter) -> Tensor | None:
    owner = owner_of(parameter)
    if owner is None or not owner.is_trained:
        return None
    engine = owner.engine
    if engine.zero.policy.stage > 0:
        if _is_clipped_by_value():
            raise RuntimeError(_CLIPPED)
        _warn_once(engine, owner=owner)
        return None
    engine.zero.reduction.settle()
    value = _of_buffer(owner)
    if value is None:
        return None
    value = value.to(parameter.dtype)
    _shown[parameter] = value, value.clone()
    return value


def _is_clipped_by_value() -> bool:
    """Returns whether torch's `clip_grad_value_` is reading `p.grad`, possibly in a comprehension."""
    frame = sys._getframe(3)  # the caller of `_show` and the property
    return frame.f_code in _CLIPS_BY_VALUE or (frame.f_back is not None and frame.f_back.f_code in _CLIPS_BY_VALUE)


def _is_sharded(parameter: nn.Parameter) -> bool:
    owner = owner_of(parameter)
    return owner is not None and owner.is_trained and owner.engine.zero.policy.stage > 0


def local_gradient(owner: Owner) -> Tensor | None:
    """Returns this rank's local sum of a gradient that is not reduced yet, or None, in the shape of the parameter, fp32."""
    return None if owner.bucket.gradient.is_reduced else _of_buffer(owner)


def _of_buffer(owner: Owner) -> Tensor | None:
    gradient, index = owner.bucket.gradient, [place.name for place in owner.bucket.layout.placements].index(owner.name)
    value = gradient.read(index)
    return None if value is None else value.float() / divisor_of(owner.engine, is_reduced=gradient.is_reduced)


def divisor_of(engine: Engine, *, is_reduced: bool = True) -> Tensor:
    """Returns the ratio of a gradient in the engine's buffer to the averaged, unscaled one, a scalar."""
    return engine.control.loss_scale * (engine.control.gradient_divisor if is_reduced else engine.accumulation_steps)


def _warn_once(engine: Engine, *, owner: Owner) -> None:
    first = engine.zero.buckets[0].parameters[0]
    if first in _warned or not engine.has_gradients or engine.process.rank:
        return
    _warned[first] = True
    logger.warning("%s (read of parameter %s)", _HINT, owner.name)


@functools.cache
def _with_gradient(cls: type) -> type:
    return type(f"Graded{cls.__name__}", (_WithGradient, cls), {"__module__": __name__})
