"""Detects changes of parameters by a script between steps, and takes them over or refuses them with the correct call.

A bucket whose parameters are full on every rank keeps them as views of its buffer. A script may write them in place, through `.data`, or
give them other memory (`p.data = x`). The optimizer reads master weights, which are separate for 16-bit parameters and offloaded states, so
such values must be copied there. Writes in place raise a parameter's version, other memory has another address, and the class of an
engine's parameters records reads of `.data`. Checking these three takes about half a microsecond per parameter and step; values are
compared only if one of them changed. `agreement` then compares the values between ranks.

Sharded parameters (stage 3) are checked when they are released: writes while they were gathered would be lost.
"""

from collections.abc import Callable, Container, Iterator

import torch
from torch import Tensor, nn

from ztk.core.runtime.buffers import references
from ztk.core.runtime.planned import place_of
from ztk.zero.agreement import WriteAgreement
from ztk.zero.buckets.bucket import Bucket
from ztk.zero.buckets.context import ZeroContext
from ztk.zero.buckets.layout import Placement
from ztk.zero.parameters.released import restore
from ztk.zero.parameters.watched import part_from, take_data_mark, viewers
from ztk.zero.update.piece_states import PieceStates


class ParameterWrites:
    """Finds changes of the parameters of `buckets` since the last call."""

    def __init__(
        self, buckets: list[Bucket], *, model: nn.Module, context: ZeroContext, finish_update: Callable[[], None]
    ) -> None:
        """finish_update: waits for the last optimizer step and its writes."""
        self._buckets, self._states, self._finish_update = buckets, PieceStates(context), finish_update
        self.agreement = WriteAgreement(buckets, model=model, context=context)
        names = {parameter: placement.name for _, parameter, placement in _places(buckets)}
        self._slots = [
            (module, key, parameter, names[parameter])
            for module in model.modules()
            for key, parameter in module._parameters.items()
            if parameter in names
        ]
        self._model, self._tree = model, _tree(model)
        self._known = {id(parameter): parameter for parameter in model.parameters()}
        self._trained = [
            (parameter, bucket.traits.trainable, placement.name) for bucket, parameter, placement in _places(buckets)
        ]
        self._versions = {bucket: [parameter._version for parameter in bucket.parameters] for bucket in buckets}

    def take_over(self) -> None:
        """Takes over a script's writes: moves other memory back into the bucket and updates master weights.

        Raises ValueError for a parameter of another dtype or shape, or that shares memory with another one. Raises RuntimeError for one
        that was replaced by another object in the model, for one of a module that was added to the model later, and for one that got other
        memory while a script has a view of the old memory.
        """
        with torch._C.DisableTorchFunctionSubclass(), torch.inference_mode(False):
            self._check_replaced()
            self._check_modules()
            for bucket in self._buckets:
                if bucket.full is not None and not bucket.traits.shards_parameters and bucket.residency.is_shown:
                    changed = dict(self._changed(bucket))
                    if changed:
                        self.agreement.note(changed)
                        self._refresh(bucket, changed=changed)

    def mark_updated(self, bucket: Bucket | None = None, *, names: Container[str] | None = None) -> None:
        """Records that the engine changed trained parameters, so that the backward of an earlier graph raises, as after torch's own
        optimizers.

        Kernels do not raise versions, so this does. If parameters are sharded, `ModelHooks` compares instead. bucket: the only one that
        changed.
        names: names of its parameters that changed.
        """
        with torch._C.DisableTorchFunctionSubclass():  # versions may be read while values are pending
            for changed in self._buckets if bucket is None else (bucket,):
                if changed.traits.trainable and not changed.traits.shards_parameters:
                    parameters, versions = changed.parameters, self._versions[changed]
                    if names is not None:
                        places = changed.layout.placements
                        parameters = [p for p, place in zip(parameters, places, strict=True) if place.name in names]
                    torch.autograd.graph.increment_version(parameters)
                    versions[:] = [parameter._version for parameter in changed.parameters]
            self.agreement.forget(names)

    def check_structure(self) -> None:
        """Raises RuntimeError if a step would ignore a parameter that requires a gradient, or values were lost."""
        with torch._C.DisableTorchFunctionSubclass():
            for parameter, is_trained, name in self._trained:
                if not is_trained and parameter.requires_grad:
                    raise RuntimeError(
                        f"parameter {name} requires a gradient now, but it was frozen when the engine was built and has no "
                        "optimizer states: let it require one at first, and freeze it by requires_grad_(False) after; or destroy() the "
                        "engine and initialize again"
                    )
            lost = dict.fromkeys(name for bucket in self._buckets for name in bucket.residency.lost)
            for bucket in self._buckets:
                bucket.residency.lost.clear()
        if lost:
            raise RuntimeError(
                f"{', '.join(list(lost)[:5])}: written while gathered for a forward (zero stage 3), so the values are lost. Write inside "
                "deepspeed.zero.GatheredParameters(parameter, modifier_rank=0), or normalise a copy in the forward; stages 0 to 2 keep such "
                "writes"
            )

    def _check_replaced(self) -> None:
        for module, key, parameter, name in self._slots:
            now = module._parameters[key] if key in module._parameters else None  # noqa: SIM401  # a scripted module's has no get()
            if now is not parameter and now is not None and now.requires_grad:
                raise RuntimeError(
                    f"parameter {name} was replaced by another object (load_state_dict(assign=True), or an assignment), which the "
                    "engine does not train: use load_state_dict without assign, or engine.load_checkpoint; or destroy() the engine "
                    "and initialize again"
                )

    def _check_modules(self) -> None:
        """Checks for new modules: modules may leave the model, but added ones would not be trained."""
        if all(_children(module) == children for module, children in self._tree):
            return
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad and id(parameter) not in self._known:
                raise RuntimeError(
                    f"parameter {name} came into the model after the engine was built, which does not train it: put it in before "
                    "initialize, or destroy() the engine and initialize again; freeze it by requires_grad_(False) if it "
                    "is not to be trained"
                )
        self._tree = _tree(self._model)

    def frozen_names(self) -> frozenset[str]:
        """Trained parameters with requires_grad_(False): a step leaves them and their states unchanged."""
        with torch._C.DisableTorchFunctionSubclass():
            return frozenset(
                name for parameter, is_trained, name in self._trained if is_trained and not parameter.requires_grad
            )

    def _changed(self, bucket: Bucket) -> Iterator[tuple[str, bool]]:
        """(name, whether the write is certain); it is uncertain if `.data` was only read."""
        assert bucket.full is not None
        (storage, first), size, versions = place_of(bucket.full), bucket.full.element_size(), self._versions[bucket]

        def is_viewed() -> bool:
            return bucket.residency.is_viewed

        for index, (parameter, place) in enumerate(zip(bucket.parameters, bucket.layout.placements, strict=True)):
            version, is_marked = parameter._version, take_data_mark(parameter, is_viewed=is_viewed)
            is_moved = place_of(parameter) != (storage, first + place.offset * size) and place.numel > 0
            is_written = is_moved or version != versions[index]
            if is_moved:
                self._bring_back(bucket, parameter=parameter, place=place, is_marked=is_marked)
            elif not (is_written or is_marked):
                continue
            versions[index] = version
            yield place.name, is_written

    def _bring_back(self, bucket: Bucket, *, parameter: nn.Parameter, place: Placement, is_marked: bool) -> None:
        """Copies the values in a parameter's other memory into the bucket. is_marked: its `.data` was read."""
        # pyrefly: ignore[missing-attribute]  # a descriptor of the class at run time
        value = torch.Tensor.data.__get__(parameter)
        bucket.residency.check_fits(value, placement=place)
        for other, parameter_of_other, placed in _places(self._buckets):
            if parameter_of_other is not parameter and other.full is not None and _overlaps(value, parameter_of_other):
                raise ValueError(
                    f"parameters {place.name} and {placed.name} share memory now (by .data): a tie must be one parameter in both "
                    "modules, before initialize (a.weight = b.weight)"
                )
        own = bucket.full[place.offset : place.stop].view(place.shape)
        if not part_from(parameter, memory=own) or (is_marked and _is_shown_elsewhere(bucket, own=own)):
            raise RuntimeError(
                f"parameter {place.name}: got other memory (p.data = x) while a script has a view or a numpy array of the old one (as "
                "p.data.view(-1)), which would show the new values: keep a clone(), or write by p.data.copy_(x)"
            )
        own.copy_(value)
        restore(parameter, value=own)

    def _refresh(self, bucket: Bucket, *, changed: dict[str, bool]) -> None:
        """Updates master weights, see `PieceStates.follow`. changed: the result of `_changed`."""
        for piece in bucket.pieces:
            places = {f.name: (f.place, changed[f.name]) for f in piece.fragments if f.name in changed}
            if places and self._states.follows(piece):
                self._finish_update()
                self._states.follow(bucket, piece=piece, places=places.values())


def _tree(model: nn.Module) -> list[tuple[nn.Module, tuple]]:
    return [(module, _children(module)) for module in model.modules()]


def _children(module: nn.Module) -> tuple:
    """Its child modules and its number of parameters, which `_check_replaced` iterates over."""
    return (*module._modules.values(), len(module._parameters))


def _places(buckets: list[Bucket]) -> Iterator[tuple]:
    for bucket in buckets:
        for parameter, placement in zip(bucket.parameters, bucket.layout.placements, strict=True):
            yield bucket, parameter, placement


def _is_shown_elsewhere(bucket: Bucket, *, own: Tensor) -> bool:
    """Whether a numpy array, or a tensor made from an entry of a state dict, shares the bucket's memory without a recorded read of `.data`.

    own: the parameter's place there, in its shape.
    """
    known = viewers(bucket.parameters, memory=own)
    if known is None:
        return False  # views hold the storage too, and cannot be distinguished from arrays or matched to a parameter
    storage = own.untyped_storage()._cdata
    inside = sum(parameter.untyped_storage()._cdata == storage for parameter in bucket.parameters)
    return references(own) > known + inside + 3  # the buffer, `own`, and the storage object that `references` reads


def _overlaps(value: Tensor, other: Tensor) -> bool:
    start, stop = value.data_ptr(), value.data_ptr() + value.nbytes
    is_full = other.numel() and other.untyped_storage().nbytes() >= other.nbytes and value.device == other.device
    return bool(is_full) and start < other.data_ptr() + other.nbytes and other.data_ptr() < stop
