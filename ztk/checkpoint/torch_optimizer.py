"""The state of torch optimizers in a checkpoint.

Elementwise ones: the small state, which is step counts, products and group values, without tensors of the parameters' size. It is the same
for all ranges of a parameter, so it is saved once, grouped by equal values, and any number of ranks can load it.

Optimizers of full parameters: states, groups and attributes as a tree of JSON values under "whole", with tensors in rank 0's file.
"""

import json
import math
from collections import deque
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from ztk.checkpoint.errors import CheckpointError
from ztk.checkpoint.manifest import OPTIMIZER, Manifest
from ztk.checkpoint.reader import StateReader
from ztk.core.precision.names import DTYPE_NAMES, DTYPES
from ztk.optim import TorchStep, WholeStep
from ztk.optim.torch_step import Progress
from ztk.train.engine import Engine


def gather_progress(engine: Engine) -> dict[str, Any] | None:
    """Returns JSON values: the "class" of the engine's torch optimizer, its "parameters" and its "groups". None for ztk's own.

    Collective.
    """
    step = engine.zero.optimizer
    if isinstance(step, WholeStep):
        return {**step.options, "parameters": [], "groups": {}, "whole": pack_whole(engine)[0]}
    if not isinstance(step, TorchStep):
        return None
    engine.zero.finish_update()
    own = {
        name: json.dumps({"scalars": _encode_all(progress.scalars), "rows": progress.rows}, sort_keys=True)
        for name, progress in step.progress().items()
    }
    groups = {str(number): _encode_all(values) for number, values in step.group_values().items()}
    by_value: dict[str, list[str]] = {}
    seen: set[str] = set()
    merged: dict[str, Any] = {}
    for of_rank, groups_of_rank in engine.process.comm.gather_objects((own, groups)):
        merged = {**groups_of_rank, **merged}
        for name, text in of_rank.items():
            if name not in seen:
                seen.add(name)
                by_value.setdefault(text, []).append(name)
    parameters = [{**json.loads(text), "params": names} for text, names in by_value.items()]
    return {**step.options, "parameters": parameters, "groups": merged}


def gather_missed(engine: Engine) -> dict[str, int]:
    """Returns parameter -> number of updates that it missed, over all ranks. Collective."""
    missed: dict[str, int] = {}
    for of_rank in engine.process.comm.gather_objects(engine.zero.missed_updates.counts):
        missed |= of_rank
    return dict(sorted(missed.items()))


def check_progress(engine: Engine, *, manifest: Manifest) -> None:
    """Raises CheckpointError unless the checkpoint's optimizer has the class of the engine's optimizer."""
    step = engine.zero.optimizer
    here = step.options["class"] if isinstance(step, TorchStep | WholeStep) else None
    there = None if manifest.torch_optimizer is None else manifest.torch_optimizer["class"]
    if here != there:
        here, there = (name or "ztk's own update" for name in (here, there))
        raise CheckpointError(
            f"{manifest.path} was saved with {there} as its optimizer, and this run has {here}: use the "
            "optimizer it was saved with, or load it with weights_only=True"
        )
    was_whole = manifest.torch_optimizer is not None and "whole" in manifest.torch_optimizer
    if was_whole != isinstance(step, WholeStep):
        raise CheckpointError(
            f"{manifest.path} was saved with {there} {'stepping full parameters' if was_whole else 'declared elementwise'}: "
            f"{'leave elementwise=true out' if was_whole else 'set optimizer.elementwise=true'} here, too, or load it with weights_only=True"
        )


def restore_progress(engine: Engine, *, manifest: Manifest | None, reader: StateReader, keep: Collection[str]) -> None:
    """Restores the values of `gather_progress` and `gather_missed`.

    manifest: the checkpoint's, or None to restart. reader: reads its tensors. keep: parameters whose state must not change.
    """
    own = {placement.name for bucket in engine.zero.buckets for placement in bucket.layout.placements}
    missed = {} if manifest is None else manifest.missed_updates
    engine.zero.missed_updates.restore(
        {name: count for name, count in missed.items() if name in own}, keep=frozenset(keep)
    )
    step = engine.zero.optimizer
    if isinstance(step, WholeStep):
        whole = None if manifest is None or manifest.torch_optimizer is None else manifest.torch_optimizer["whole"]
        device = engine.zero.whole_device

        def read(name: str, numel: int) -> Tensor:
            return reader.read(name=name, kind=OPTIMIZER, start=0, stop=numel)

        with engine.zero.whole_states():
            step.unpack(None if whole is None else _decode_tree(whole, read=read, device=device), keep=keep)
        return
    if not isinstance(step, TorchStep):
        return
    engine.zero.finish_update()
    saved: dict[str, Any] = {"parameters": [], "groups": {}}
    if manifest is not None and manifest.torch_optimizer is not None:
        saved = manifest.torch_optimizer
    progress = {
        name: Progress(scalars=decode_all(entry["scalars"]), rows=tuple(entry["rows"]))
        for entry in saved["parameters"]
        for name in entry["params"]
    }
    groups = {int(number): decode_all(values) for number, values in saved["groups"].items()}
    step.restore(progress, group_values=groups, keep=frozenset(keep))


def decode_all(values: dict[str, Any]) -> dict[str, Any]:
    """Decodes numbers, strings and tensors of one element."""
    return {name: _decode(value) for name, value in values.items()}


def _encode_all(values: dict[str, Any]) -> dict[str, Any]:
    return {name: _encode(value) for name, value in values.items()}


def _encode(value: Any) -> dict[str, Any]:
    """Encodes a value for JSON, which has no tensors and no infinity."""
    if isinstance(value, torch.Tensor):
        item = _encode(value.item())
        return {**item, "dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    return {"value": value}


def _decode(value: dict[str, Any]) -> Any:
    item = float(value["float"]) if "float" in value else value["value"]
    if "dtype" in value:
        return torch.tensor(item, dtype=getattr(torch, value["dtype"])).view(value["shape"])
    return item


def pack_whole(engine: Engine, *, copies: bool = False) -> tuple[Any, dict[str, Tensor]]:
    """Returns the state of an optimizer of full parameters as JSON values, and its tensors by their names there.

    copies: the tensors stay valid after the call, also if their memory is on a disk between steps.
    Raises ValueError for a state that a checkpoint cannot hold.
    """
    tensors: dict[str, Tensor] = {}
    with engine.zero.whole_states() as step:
        tree = _encode_tree(step.pack(), tensors=tensors, device=engine.zero.whole_device)
        if copies:
            tensors = {name: value.clone() for name, value in tensors.items()}
    return tree, tensors


def _encode_tree(value: Any, *, tensors: dict[str, Tensor], device: torch.device) -> dict[str, Any]:
    """A container becomes an object with its kind, so that no key of the user's is taken for one of ztk's."""
    if isinstance(value, Tensor):
        if value.dtype not in DTYPE_NAMES:
            raise ValueError(f"a state of the optimizer is {value.dtype}, which a checkpoint cannot hold")
        name = str(len(tensors))
        tensors[name] = value.detach().contiguous()
        place = {"on_device": value.device == device and device.type != "cpu"}
        return {"tensor": name, "dtype": DTYPE_NAMES[value.dtype], "shape": list(value.shape), **place}
    if isinstance(value, Mapping):
        items = {key: _encode_tree(item, tensors=tensors, device=device) for key, item in value.items()}
        return {"dict": items}
    for kind in (list, tuple, deque):
        if type(value) is kind:
            items = [_encode_tree(item, tensors=tensors, device=device) for item in value]
            return {kind.__name__: items} | ({"maxlen": value.maxlen} if isinstance(value, deque) else {})
    return _encode(value)


def _decode_tree(value: dict[str, Any], *, read: Callable[[str, int], Tensor], device: torch.device) -> Any:
    def inner(item: dict[str, Any]) -> Any:
        return _decode_tree(item, read=read, device=device)

    if "tensor" in value:
        shape = value["shape"]
        found = torch.empty(shape, dtype=DTYPES[value["dtype"]])
        if found.numel():
            found.copy_(read(value["tensor"], found.numel()).view(shape))
        return found.to(device) if value["on_device"] else found
    if "dict" in value:
        return {key: inner(item) for key, item in value["dict"].items()}
    if "list" in value:
        return list(map(inner, value["list"]))
    if "tuple" in value:
        return tuple(map(inner, value["tuple"]))
    if "deque" in value:
        return deque(map(inner, value["deque"]), maxlen=value["maxlen"])
    return _decode(value)


def states_of_parameters(manifest: Manifest, *, reader: StateReader) -> dict[str, dict[str, Any]]:
    """Returns the states of an optimizer of full parameters by parameter, as its class keeps them."""
    assert manifest.torch_optimizer is not None

    def read(name: str, numel: int) -> Tensor:
        return reader.read(name=name, kind=OPTIMIZER, start=0, stop=numel)

    packed = _decode_tree(manifest.torch_optimizer["whole"], read=read, device=torch.device("cpu"))
    kinds = ((key.split(" ", 1), state) for key, state in packed["states"].items())
    return {name: state for (kind, name), state in kinds if kind == "parameter"}
