"""The small state of an optimizer in a checkpoint: step counts, products and group values, without tensors of the parameters' size.

It is the same for all ranges of a parameter, so it is saved once, grouped by equal values, and any number of ranks can load it.
"""

import json
import math
from collections.abc import Collection
from typing import Any

import torch

from ztk.checkpoint.errors import CheckpointError
from ztk.checkpoint.manifest import Manifest
from ztk.optim import TorchStep
from ztk.optim.torch_step import Progress
from ztk.train.engine import Engine


def gather_progress(engine: Engine) -> dict[str, Any] | None:
    """Returns JSON values: the "class" of the engine's torch optimizer, its "parameters" and its "groups". None for ztk's own.

    Collective.
    """
    step = engine.zero.optimizer
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
    here = step.options["class"] if isinstance(step, TorchStep) else None
    there = None if manifest.torch_optimizer is None else manifest.torch_optimizer["class"]
    if here != there:
        here, there = (name or "ztk's own update" for name in (here, there))
        raise CheckpointError(
            f"{manifest.path} was saved with {there} as its optimizer, and this run has {here}: use the "
            "optimizer it was saved with, or load it with weights_only=True"
        )


def restore_progress(engine: Engine, *, manifest: Manifest | None, keep: Collection[str]) -> None:
    """Restores the values of `gather_progress` and `gather_missed`.

    manifest: the checkpoint's, or None to restart. keep: parameters whose state must not change.
    """
    own = {placement.name for bucket in engine.zero.buckets for placement in bucket.layout.placements}
    missed = {} if manifest is None else manifest.missed_updates
    engine.zero.missed_updates.restore(
        {name: count for name, count in missed.items() if name in own}, keep=frozenset(keep)
    )
    step = engine.zero.optimizer
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
