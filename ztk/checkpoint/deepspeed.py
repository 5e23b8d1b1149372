"""Reads checkpoints of DeepSpeed's `save_checkpoint` at ZeRO stages 1 to 3. DeepSpeed is not needed.

Layout of a folder `global_stepN` (as of 0.19, unchanged for years; see DeepSpeed's own utils/zero_to_fp32.py):
    *_model_states.pt   names and shapes of the parameters per group, frozen parameters, buffers, counters
    *_optim_states.pt   one per rank: fp32 master weights and moments, flat
Stages 1 and 2 concatenate the parameters of a group and cut the result into one partition per rank. Stage 3 cuts every parameter into
equal parts with padding at the end; each rank's file contains its parts in order. Values keep the dtype of the files.
"""

import pickle
import re
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ztk.checkpoint.errors import CheckpointError
from ztk.checkpoint.folder import read_pointer
from ztk.checkpoint.manifest import BUFFER
from ztk.checkpoint.sources import RANGE_ELEMENTS, Key
from ztk.optim.states import FROZEN, MASTER

_MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")


class DeepSpeedSource:
    """Master weights, moments, frozen parameters and buffers of one `global_stepN` folder. Files stay memory-mapped."""

    def __init__(self, path: Path) -> None:
        """path: the folder, or its parent that contains `latest`.

        Raises:
            CheckpointError: the checkpoint is incomplete or of an unknown kind.
        """
        self._path = _step_folder(path)
        try:
            self._read()
        except (AttributeError, IndexError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{self._path} is not laid out as DeepSpeed writes checkpoints ({type(error).__name__}: {error})"
            ) from error

    def _read(self) -> None:
        models = [_load(file) for file in _files(self._path, suffix="_model_states.pt")]
        optims = [_load(file)["optimizer_state_dict"] for file in _files(self._path, suffix="_optim_states.pt")]
        self._model, first = models[0], optims[0]
        if "zero_stage" not in first:
            raise CheckpointError(
                f"{self._path} was saved without ZeRO; import its mp_rank_00_model_states.pt as a state_dict"
            )
        self._stage = int(first["zero_stage"])
        world = first["partition_count"]
        world = max(world) if isinstance(world, (list, tuple)) else world
        if world != len(optims):
            raise CheckpointError(
                f"{self._path} was saved by {world} ranks and has {len(optims)} *_optim_states.pt files"
            )
        self._parts: dict[Key, list[Tensor]] = {}
        self._shapes: dict[Key, tuple[int, ...]] = {}
        for kind, flats in _flat_states(optims, stage=self._stage).items():
            (self._add_full_parameters if self._stage == 3 else self._add_groups)(kind, flats=flats, optim=first)
        for name in self._model.get("buffer_names") or ():
            self._add(BUFFER, name=name, shape=self._model["module"][name].shape, parts=[self._model["module"][name]])
        self.tied = {str(name): str(other) for name, other in dict(self._model.get("shared_params") or {}).items()}
        self._add_frozen(models)
        self.step = int(self._model["global_steps"])
        self.control = self._control(first)
        self.dynamic_loss_scale = bool(first.get("dynamic_loss_scale", False))

    def shapes(self) -> dict[Key, tuple[int, ...]]:
        return self._shapes

    def ranges(self, key: Key) -> Iterator[Tensor]:
        for part in self._parts[key]:
            yield from part.split(RANGE_ELEMENTS)

    def _add(self, kind: str, *, name: str, shape, parts: list[Tensor]) -> None:
        left, cut = prod(shape), []
        for part in parts:  # the rest is padding
            cut.append(part.reshape(-1)[:left])
            left -= cut[-1].numel()
        if left:
            raise CheckpointError(f"{self._path}: {left} elements of {kind} of {name} are in no file")
        self._shapes[kind, name], self._parts[kind, name] = tuple(shape), cut

    def _add_groups(self, kind: str, *, flats: list[list[Tensor]], optim: dict) -> None:
        """Adds the states of stages 1 and 2. flats[r][g]: rank r's partition of group g."""
        paddings = optim.get("param_alignment_paddings")
        for number, shapes in enumerate(self._model["param_shapes"]):
            partitions, offset = [rank[number] for rank in flats], 0
            for index, (name, shape) in enumerate(shapes.items()):
                span = range(offset, offset + prod(shape))
                self._add(kind, name=name, shape=shape, parts=list(_cut(partitions, span=span)))
                offset = span.stop + (paddings[number][index] if paddings else 0)

    def _add_full_parameters(self, kind: str, *, flats: list[list[Tensor]], optim: dict) -> None:
        """Adds the states of stage 3. flats[r][g]: rank r's sub-group g. A parameter's part may span two sub-groups."""
        offset = 0
        for name, shape in ((name, shape) for shapes in self._model["param_shapes"] for name, shape in shapes.items()):
            span = range(offset, offset - (-prod(shape) // len(flats)))
            parts = [part for groups in flats for part in _cut(groups, span=span)]
            self._add(kind, name=name, shape=shape, parts=parts)
            offset = span.stop

    def _add_frozen(self, models: list[dict]) -> None:
        fragments = [model.get("frozen_param_fragments") or {} for model in models]
        for name, shape in (self._model.get("frozen_param_shapes") or {}).items():
            self._add(FROZEN, name=name, shape=shape, parts=[found[name] for found in fragments])
        if self._stage < 3:  # stage 1 lists no frozen parameters, but the module contains all parameters in full
            known = {name for _, name in self._shapes} | set(self.tied)
            for name, value in self._model["module"].items():
                if name not in known and isinstance(value, Tensor):
                    self._add(FROZEN, name=name, shape=value.shape, parts=[value])

    def _control(self, optim: dict) -> dict[str, float]:
        """Returns the scalars of the step control that DeepSpeed saves."""
        scaler, skipped = optim.get("loss_scaler"), int(self._model.get("skipped_steps") or 0)
        return {
            "step": float(self.step - skipped),
            "skipped_steps": float(skipped),
            "loss_scale": float(getattr(scaler, "cur_scale", 1.0)),
            "hysteresis_left": float(getattr(scaler, "cur_hysteresis", 1)),
            "good_steps": _good_steps(scaler),
        }


def _good_steps(scaler: object) -> float:
    """Returns `good_steps` of `ztk.kernels.State` from the number of steps since the last overflow.

    DeepSpeed's loss scale grows after every `scale_window` such steps.
    """
    stable = getattr(scaler, "cur_iter", 0) - getattr(scaler, "last_overflow_iter", -1) - 1
    # pyrefly: ignore[missing-attribute]  # DeepSpeed's scaler
    return float((stable - 1) % scaler.scale_window) if stable > 0 else -1.0


def _step_folder(path: Path) -> Path:
    pointer = path / "latest"
    if not pointer.is_file():
        return path
    return path / read_pointer(pointer)


def _files(folder: Path, *, suffix: str) -> list[Path]:
    """Returns the files in the order of ranks.

    Raises:
        CheckpointError: there is none, or the checkpoint uses tensor, pipeline or expert parallelism.
    """
    found = [file for file in folder.iterdir() if file.name.endswith(suffix)]
    if not found:
        raise CheckpointError(f"{folder} has no *{suffix} file")
    others = [file.name for file in found if "mp_rank_00" not in file.name or file.name.startswith("layer_")]
    if others:
        raise CheckpointError(
            f"{folder} was saved with tensor, pipeline or expert parallelism ({others[0]}), which is not read"
        )
    return sorted(found, key=lambda file: [int(digits) for digits in re.findall(r"\d+", file.name)])


def _flat_states(optims: list[dict], *, stage: int) -> dict[str, list[list[Tensor]]]:
    """Returns the flat states by kind, rank and group."""
    if stage not in (1, 2, 3):
        raise CheckpointError(f"ZeRO stage {stage} of DeepSpeed is not supported")
    master, states = (
        ("fp32_flat_groups", "optimizer_state_dict")
        if stage == 3
        else ("single_partition_of_fp32_groups", "base_optimizer_state")
    )
    found = {MASTER: [optim[master] for optim in optims]}
    by_rank = [optim.get(states) for optim in optims]
    if all(isinstance(state, dict) and "state" in state for state in by_rank):
        for kind in _MOMENTS:
            groups = [[state["state"][g] for g in sorted(state["state"])] for state in by_rank]
            if all(isinstance(group.get(kind), Tensor) for rank in groups for group in rank):
                found[kind] = [[group[kind] for group in rank] for rank in groups]
    return found


def _cut(tensors: list[Tensor], *, span: range) -> Iterator[Tensor]:
    """Yields elements `span` of the concatenated tensors."""
    start = 0
    for tensor in tensors:
        first, last = max(span.start, start), min(span.stop, start + tensor.numel())
        if first < last:
            yield tensor.reshape(-1)[first - start : last - start]
        start += tensor.numel()


# Reading pickles that refer to DeepSpeed's classes


class _Opaque:
    """Stands in for any class that is not torch's. Keeps the pickled state and runs no code."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)

    def __int__(self) -> int:
        return int(self.args[0])  # pickle calls an enum class with the member's value


_ALLOWED = {
    ("collections", "OrderedDict"),
    ("torch", "Size"),
    ("torch", "Tensor"),
    ("torch._tensor", "_rebuild_from_type_v2"),
    ("torch._utils", "_rebuild_tensor_v2"),
    ("torch._utils", "_rebuild_parameter"),
    ("torch._utils", "_rebuild_parameter_with_state"),
    ("torch.serialization", "_get_layout"),
    ("builtins", "set"),
}


class _SafePickle:
    """The pickle module for `torch.load`. It creates only tensors and containers and never runs code from the file."""

    __name__ = "ztk.checkpoint.deepspeed"

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            storage = module == "torch" and name.endswith("Storage") and "." not in name
            dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
            if storage or dtype or (module, name) in _ALLOWED:
                return super().find_class(module, name)
            return _Opaque


def _load(file: Path) -> dict:
    try:
        # torch.load would pass a TorchScript archive to torch.jit.load, which runs the archive's __setstate__.
        if "constants.pkl" in torch._C.PyTorchFileReader(str(file)).get_all_records():
            raise CheckpointError("it is a TorchScript archive, which contains code and is not read")
        loaded = torch.load(file, map_location="cpu", mmap=True, weights_only=False, pickle_module=_SafePickle)
    except Exception as error:  # zip, pickle and value errors all mean a damaged file
        raise CheckpointError(f"{file} is damaged or not a file of torch.save: {error}") from error
    if not isinstance(loaded, dict):
        raise CheckpointError(
            f"{file} holds a {type(loaded).__name__.lstrip('_')} instead of a dict, as DeepSpeed writes it"
        )
    return loaded
