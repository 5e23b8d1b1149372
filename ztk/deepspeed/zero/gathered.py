"""`GatheredParameters`: temporarily unshards parameters, and writes changes back."""

import functools
from collections.abc import ItemsView, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from ztk.deepspeed.engine.owners import Owner, owner_of
from ztk.optim.states import MASTER
from ztk.zero.buckets.bucket import Bucket
from ztk.zero.parameters.partitioned import partitioned_of
from ztk.zero.parameters.released import forget_saved

_modifiers: WeakIdKeyDictionary = WeakIdKeyDictionary()  # parameter -> open contexts with a modifier_rank
_accepted: WeakIdKeyDictionary = (
    WeakIdKeyDictionary()
)  # parameter -> its version when its values were last written back

_TRANSFORMED = (
    "torch.func.grad, vjp, jacrev and hessian inside deepspeed.zero.GatheredParameters, which lets graphs made inside run backward after it: "
    "enter it inside torch.no_grad(), or copy the weights in it and pass the copies by torch.func.functional_call after it"
)


class GatheredParameters:
    """Unshards parameters on every rank inside the context.

    Entering and leaving are collective calls; contexts may be nested and may overlap.

    Results computed with an engine's parameters inside can be differentiated afterwards.

    params: a parameter or parameters, in any order, of an engine or built under `zero.Init`. Other parameters are ignored.
    modifier_rank: the rank, among those that share the parameters, whose changes are written back to all ranks, including master weights.
    In 16 bit, an unchanged value keeps its fp32 master. Without it, parameters must not change inside. Stage 3 checks this at the end:
    each rank compares its own slice, and counts writes to the parameters themselves.
    fwd_module: the module whose forward uses them; recorded as by `register_external_parameter`.
    """

    def __init__(
        self,
        params: nn.Parameter | Iterable[nn.Parameter],
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        """Entries of `params` that are None (a layer without a bias) are ignored."""
        given = [params] if isinstance(params, torch.Tensor) or params is None else list(params)
        self._params = _ordered(given) if enabled else []
        self._versions: dict[nn.Parameter, int] = {}
        self._modifier_rank, self._saving = modifier_rank, ExitStack()
        if fwd_module is not None:
            for parameter in self._params:
                register_external_parameter(fwd_module, parameter)

    def __enter__(self) -> None:
        forget_saved()
        pin(self._params)
        self._versions = {parameter: parameter._version for parameter in self._params}
        if self._modifier_rank is not None:
            _count_modifiers(self._params, by=1)
        for hooks in dict.fromkeys(owner.engine.zero.hooks for owner in _buckets(self._params).values()):
            self._saving.enter_context(hooks.saved_tensors())

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        """Raises RuntimeError for parameters that were changed without modifier_rank, and for torch.func's refusal of saved tensor hooks."""
        self._saving.close()
        if self._modifier_rank is not None:
            _count_modifiers(self._params, by=-1)
        if kind is not None:
            unpin(self._params, source=None)
            if isinstance(error, RuntimeError) and "support saved tensor hooks" in str(error):
                raise RuntimeError(_TRANSFORMED) from error
        elif self._modifier_rank is not None:
            unpin(self._params, source=self._modifier_rank)
            _accepted.update((parameter, parameter._version) for parameter in self._params)
        else:
            unpin_unchanged(self._params, versions=self._versions)


def pin(parameters: Sequence[nn.Parameter]) -> None:
    """Unshards the parameters. A collective call."""
    for parameter in _ordered(parameters):
        if (partitioned := partitioned_of(parameter)) is not None:
            partitioned.pin()
    for bucket, owner in _buckets(parameters).items():
        owner.engine.zero.gathering.pin(bucket)


def unpin(parameters: Sequence[nn.Parameter], *, source: int | None) -> None:
    """Undoes `pin`. A collective call. source: the rank whose values are written back first, or None if they have not changed."""
    buckets = _buckets(parameters)
    try:
        if source is not None:
            _take_over(parameters, source=source)
    finally:
        for parameter in _ordered(parameters):
            if (partitioned := partitioned_of(parameter)) is not None:
                partitioned.unpin(source=source)
        for bucket, owner in buckets.items():
            owner.engine.zero.gathering.unpin(bucket)


def unpin_unchanged(parameters: Sequence[nn.Parameter], *, versions: Mapping[nn.Parameter, int] | None = None) -> None:
    """Undoes `pin` of unchanged parameters. A collective call.

    versions: the parameters' versions when they were pinned, if known.

    Raises RuntimeError on a rank that finds changes, which would be lost.
    """
    changed = [_name(parameter) for parameter in parameters if _is_changed(parameter, versions=versions or {})]
    for bucket in _buckets(parameters):
        bucket.residency.accept_writes()  # reported here, so the next step must not report it again
    unpin(parameters, source=None)
    if changed:
        raise RuntimeError(
            f"{', '.join(changed[:5])}{' ...' * (len(changed) > 5)}: written inside GatheredParameters without modifier_rank, so the values "
            "would be lost: pass modifier_rank=0 to make rank 0's everybody's (or partition(has_been_updated=True) after all_gather())"
        )


def _is_changed(parameter: nn.Parameter, *, versions: Mapping[nn.Parameter, int]) -> bool:
    """Returns whether the parameter was written since it was pinned, without an open context that writes it back."""
    if parameter in _modifiers:
        return False
    now = parameter._version
    if now not in (versions.get(parameter, now), _accepted.get(parameter)) and _is_partitioned(parameter):
        return True
    if (partitioned := partitioned_of(parameter)) is not None:
        return partitioned.is_changed
    owner = owner_of(parameter)
    return owner is not None and owner.engine.zero.is_changed(owner.bucket, name=owner.name)


def _is_partitioned(parameter: nn.Parameter) -> bool:
    """Returns whether the parameter is sharded (stage 3), so that a rank's writes are lost when it is resharded."""
    owner = owner_of(parameter)
    return partitioned_of(parameter) is not None or (owner is not None and owner.bucket.traits.shards_parameters)


def _name(parameter: nn.Parameter) -> str:
    owner = owner_of(parameter)
    return f"a parameter of shape {tuple(parameter.shape)}" if owner is None else f"parameter {owner.name}"


def _count_modifiers(parameters: Sequence[nn.Parameter], *, by: int) -> None:
    for parameter in parameters:
        count = _modifiers.pop(parameter, 0) + by
        if count:
            _modifiers[parameter] = count


def _take_over(parameters: Sequence[nn.Parameter], *, source: int) -> None:
    changed: dict[Bucket, dict[str, torch.Tensor]] = {}
    owners = {}
    names = {owner.name for parameter in _ordered(parameters) if (owner := owner_of(parameter)) is not None}
    for bucket in _buckets(parameters):
        bucket.residency.bring_back(names)
    for parameter in _ordered(parameters):
        owner = owner_of(parameter)
        if owner is not None:
            owner.bucket.comm.broadcast(parameter.data, source=source, label=owner.name).wait()
            changed.setdefault(owner.bucket, {})[owner.name] = parameter.data
            owners[owner.bucket] = owner
    for bucket, values in changed.items():
        owners[bucket].engine.zero.named_state.write(bucket, values=values, kind=MASTER)
        bucket.residency.accept_writes()


def _ordered(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Returns the sharded parameters without duplicates, in an order that is the same on all ranks, even if theirs differs because of a
    set.
    """
    found = {}
    for parameter in parameters:
        if parameter is None:
            continue
        partitioned, owner = partitioned_of(parameter), owner_of(parameter)
        if partitioned is not None:
            found[0, partitioned.number] = parameter
        elif owner is not None:
            found[1, owner.number] = parameter
    return [found[key] for key in sorted(found)]


def _buckets(parameters: Iterable[nn.Parameter]) -> dict[Bucket, Owner]:
    """Returns the engines' sharded buckets with these parameters."""
    owners = [owner for parameter in _ordered(parameters) if (owner := owner_of(parameter)) is not None]
    return {owner.bucket: owner for owner in owners if owner.bucket.traits.shards_parameters}


class GatherReplacedLayerParams:
    """Makes `param.data` the full tensor on every rank inside the context if ranks hold parts of it.

    Entering and leaving are collective calls.

    params: a parameter or parameters of any shape. Parameters that ranks hold in full do not change; at stage 3 all are unsharded.
    module: the model or layer; accepted and ignored. Writes inside are lost: load weights with `engine.load_module_state_dict`.
    """

    def __init__(self, params: torch.Tensor | Iterable[torch.Tensor], module: nn.Module, enabled: bool = True) -> None:
        given = [params] if isinstance(params, torch.Tensor) else [param for param in params if param is not None]
        self.module, self.enabled, self.params = module, enabled, given if enabled else []
        self._own: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._open = ExitStack()

    def __enter__(self) -> None:
        self._open.enter_context(GatheredParameters(self.params))
        for param in self.params:
            owner = owner_of(param)
            full = None if owner is None else _full(param, owner=owner)
            if full is not None:
                self._own.append((param, param.data))
                param.data = full

    def __exit__(self, *error: object) -> None:
        for param, own in self._own:
            param.data = own
        self._own.clear()
        self._open.close()


def _full(param: torch.Tensor, *, owner: Owner) -> torch.Tensor | None:
    """Returns the full tensor, or None if this rank has it."""
    part = owner.engine.zero.state.part_of(owner.name, bucket=owner.bucket)
    if part.is_full:
        return None
    comm, numel = owner.engine.process.mesh.comm("tp"), 1
    for extent in part.full_shape:
        numel *= extent
    flat = torch.zeros(-(-numel // comm.size) * comm.size, dtype=param.dtype, device=param.device)
    full = flat[:numel].view(part.full_shape)
    if part.replica == 0:
        part.of(full).copy_(param.detach())
    comm.all_reduce(flat, label=owner.name).wait()
    return full


# DeepSpeed needs a list of parameters that a module uses although another one owns them. ztk gathers a parameter wherever it is read, so
# the register has no effect; it is only validated and readable.

_external: WeakKeyDictionary[nn.Module, dict[int, nn.Parameter]] = (
    WeakKeyDictionary()
)  # module -> {id of the parameter: parameter}


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Records that `module`'s forward uses `parameter`. Raises RuntimeError for arguments of other types."""
    _check_external(module, parameter)
    _external.setdefault(module, {})[id(parameter)] = parameter


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Undoes `register_external_parameter`. Raises RuntimeError if the parameter is not registered."""
    _check_external(module, parameter)
    if _external.get(module, {}).pop(id(parameter), None) is None:
        raise RuntimeError(
            f"a parameter of shape {tuple(parameter.shape)} is not a registered external parameter of {type(module).__name__}; "
            "register_external_parameter(module, parameter) comes first"
        )


def external_parameters(module: nn.Module) -> ItemsView[int, nn.Parameter]:
    """Returns the parameters registered for `module`: pairs of an id and a parameter."""
    return _external.get(module, {}).items()


def _check_external(module: object, parameter: object) -> None:
    if not isinstance(module, nn.Module):
        raise RuntimeError(f"module: must be a torch.nn.Module, not {type(module).__name__}")
    if not isinstance(parameter, nn.Parameter):
        raise RuntimeError(f"parameter: must be a torch.nn.Parameter, not {type(parameter).__name__}")


# Objects that libraries use around generation at stage 3, to gather everything and to remove and restore hooks.


class DeepSpeedZeRoOffload:
    """`engine.optimizer.parameter_offload` at stage 3, for TRL.

    ztk has no hooks to remove: parameters in `GatheredParameters` stay gathered during any forward.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.forward_hooks: list = []
        self.backward_hooks: list = []
        self.param_coordinator = _Coordinator()
        module.ds_external_parameters = functools.partial(external_parameters, module)

    def _register_deepspeed_module(self, module: nn.Module) -> None:
        if module is not self.module:
            raise ValueError(f"{type(module).__name__} is not the engine's module")


class _Coordinator:
    """Records the order of uses. ztk always follows the current order, so there is nothing to reset."""

    def is_invalid_trace(self) -> bool:
        return True


@contextmanager
def unwrap_model_for_generation(model: nn.Module) -> Iterator[nn.Module]:
    """Unshards all parameters of the engine `model` inside the context, for many forwards without training."""
    with GatheredParameters(model.parameters()):
        yield model
