"""save_checkpoint and load_checkpoint with DeepSpeed's tags, on top of layout-independent checkpoints.

[Note: Folder]
    save_dir/latest                     the tag to resume from
    save_dir/zero_to_fp32.py            script that exports full fp32 weights
    save_dir/TAG/step-000120/           a checkpoint of `ztk.checkpoint`
    save_dir/TAG/latest                 its name
Saving a tag again writes the new checkpoint before it removes the old one. Weights have the model's compute dtype.
"""

import base64
import io
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ztk import checkpoint
from ztk.checkpoint.errors import CheckpointError, SaveFailed, agreed
from ztk.checkpoint.folder import read_pointer
from ztk.checkpoint.full import is_cut
from ztk.checkpoint.model import persistent_buffers
from ztk.checkpoint.sources import reason_of
from ztk.core.policies.records import replace_file
from ztk.deepspeed import zero_to_fp32
from ztk.deepspeed.config import Settings
from ztk.deepspeed.engine.offloading import StateOffload
from ztk.deepspeed.engine.owners import owner_of
from ztk.deepspeed.tools.log import logger
from ztk.deepspeed.zero.gathered import GatheredParameters
from ztk.train.engine import Engine

if TYPE_CHECKING:
    from ztk.deepspeed.optimizers.sharded import ShardedOptimizer

LATEST = "latest"


class Saving:
    """The engine's methods for checkpoints and full weights. All are collective calls, unless documented as local.

    Weights have the model's compute dtype.
    """

    engine: Engine
    module: nn.Module
    optimizer: "ShardedOptimizer | None"
    settings: Settings
    _states: StateOffload
    lr_scheduler: Any
    global_samples: int
    micro_steps: int
    since_step: int

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike,
        tag: str | None = None,
        client_state: dict | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Writes `save_dir/tag/` (default tag: global_stepN), the tag into `save_dir/latest`, and the script zero_to_fp32.py next to it.

        client_state: plain values and tensors, which `load_checkpoint` returns.
        exclude_frozen_parameters: saves only trained parameters. Loading then needs a model with the other weights.

        Raises SaveFailed on all ranks if any fails, and ValueError for an empty save_dir, a tag that is not a folder name, or a
        client_state that cannot be read back safely.
        """
        self._states.need(operation="save_checkpoint")
        folder, comm, is_default = _folder(save_dir), self.engine.comm, tag is None
        tag = f"global_step{self.engine.global_steps}" if tag is None else str(tag)
        if not tag or Path(tag).name != tag or tag == ".." or tag != tag.strip():
            raise ValueError(f"tag={tag!r}: must be the name of a folder, without a path and without spaces around it")
        _check_tag(tag, comm=comm, validation=self.settings.tag_validation)
        with agreed(comm, error=SaveFailed):
            if comm.rank == 0:
                claim_tag(self, folder=folder, tag=tag, is_default=is_default)
                if self.since_step:
                    logger.warning(
                        "save_checkpoint after %d of %d micro-batches of a step: their gradients are not saved, a run that resumes begins "
                        "the step anew",
                        self.since_step,
                        self.settings.batch.accumulation,
                    )
        scheduler = self.lr_scheduler
        state = {
            "client_state": client_state or {},
            "lr_scheduler": scheduler.state_dict() if hasattr(scheduler, "state_dict") else None,
            "param_groups": None if self.optimizer is None else self.optimizer.groups_state(),
            "global_samples": self.global_samples,
        }
        checkpoint.save(
            self.engine,
            folder=folder / tag,
            extra={"deepspeed": _encode(state)},
            keep=1,
            trained_only=exclude_frozen_parameters,
        )
        with agreed(comm, error=SaveFailed):
            if comm.rank == 0:
                zero_to_fp32.leave_script(folder)
                if save_latest:
                    claim_latest(self, folder=folder)
                    replace_file(folder / LATEST, text=tag)
        return True

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable | None = None,
    ) -> tuple[str | None, dict]:
        """Sets the engine's state from a checkpoint saved at any stage and number of ranks. Returns (folder, client_state).

        tag: defaults to the content of `load_dir/latest`. Returns (None, {}) if that does not exist.
        load_module_strict: with False, and load_module_only or load_optimizer_states=False, loads the names that model and checkpoint
        share. Optimizer states always require matching names.
        custom_load_fn: called on every rank as custom_load_fn(src=full fp32 weights by name, dst=module) with all parameters unsharded,
        instead of loading weights by name. Rank 0's result counts. Raises ValueError if ranks hold parts of the model.

        Raises CheckpointError on all ranks for a checkpoint that is missing, damaged or of another model.
        """
        self._states.need(operation="load_checkpoint")
        folder, engine = Path(load_dir), self.engine
        optimizer_states = load_optimizer_states and not load_module_only
        if custom_load_fn is not None:
            _check_custom(engine, operation="load_checkpoint")
        if tag is None:
            pointer = folder / LATEST
            tag = engine.comm.gather_objects(read_pointer(pointer) if pointer.is_file() else None)[0]
            if tag is None:
                logger.warning("%s has no file `latest`: nothing is loaded; give a tag to name a checkpoint", folder)
                return None, {}
        if self.optimizer is not None:
            engine.discard_gradients()  # of an unfinished step; they belong to the old weights
            self.since_step = 0
        # A custom function sets the weights; the rest of the state must still fit.
        strict = (load_module_strict and custom_load_fn is None) or optimizer_states
        report = checkpoint.load(engine, path=folder / str(tag), weights_only=not optimizer_states, strict=strict)
        if custom_load_fn is not None:
            full = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(folder, str(tag))
            # pyrefly: ignore[bad-assignment]  # lazy tensors are read by the function
            self.load_module_state_dict({"module": full}, custom_load_fn=custom_load_fn)
        state: dict[str, Any] = dict.fromkeys(("lr_scheduler", "param_groups", "global_samples"))
        state["client_state"] = {}
        if isinstance(report.extra, dict) and "deepspeed" in report.extra:
            state = _decode(report.extra["deepspeed"])
        if not load_module_only:
            engine.resume_at(report.step)
            self.micro_steps, self.since_step = engine.micro_steps, 0
            samples = state["global_samples"]
            self.global_samples = report.step * self.settings.batch.train if samples is None else samples
        if optimizer_states and self.optimizer is not None and state["param_groups"] is not None:
            self.optimizer.load_groups_state(state["param_groups"])
        scheduler = state["lr_scheduler"] if load_lr_scheduler_states and not load_module_only else None
        if scheduler is not None and hasattr(self.lr_scheduler, "load_state_dict"):
            self.lr_scheduler.load_state_dict(scheduler)
        return str(report.path.parent), state["client_state"]

    def save_16bit_model(
        self,
        save_dir: str | os.PathLike,
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Writes the weights in the model's dtype as one state_dict file.

        Returns False and writes nothing at stage 3, unless `stage3_gather_16bit_weights_on_model_save` is set. Raises ValueError for an
        empty save_dir.
        """
        self._states.need(operation="save_16bit_model")
        path, comm = _folder(save_dir) / save_filename, self.engine.comm
        if self.settings.zero.shards_parameters and not self.settings.gathers_on_save:
            logger.warning(
                "%s is not saved: set zero_optimization.stage3_gather_16bit_weights_on_model_save to true", path
            )
            return False
        state = self._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters)
        with agreed(comm, error=SaveFailed):
            if comm.rank == 0:
                path.parent.mkdir(parents=True, exist_ok=True)
                torch.save(state, path)
        return True

    save_fp16_model = save_16bit_model  # its old name

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor] | None:
        """Returns the full weights in main memory on rank 0, None on other ranks; at every stage."""
        return checkpoint.full_state_dict(self.engine, exclude_frozen=exclude_frozen_parameters)

    _consolidated_16bit_state_dict = _zero3_consolidated_16bit_state_dict

    def module_state_dict(
        self,
        destination: dict | None = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Tensor]:
        """Returns the module's state_dict.

        At stage 3, and if ranks hold parts of the model, it has the full model's weights, in full shapes in the main memory of every
        rank. Otherwise the call is local.

        Raises ValueError for keep_vars if full weights are copies.
        """
        if self.settings.zero.shards_parameters or is_cut(self.engine):
            if keep_vars:
                raise ValueError(
                    "keep_vars=True: at stage 3, and where ranks hold parts of the model, full weights are copies; use "
                    "zero.GatheredParameters"
                )
            full = checkpoint.full_state_dict(self.engine, everywhere=True, exclude_frozen=exclude_frozen_parameters)
            assert full is not None
            made = {} if destination is None else destination
            made |= {f"{prefix}{name}": value for name, value in full.items()}
            return made
        # pyrefly: ignore[bad-specialization]  # torch takes None, its annotation does not
        state: Any = self.module.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        for name, parameter in self.module.named_parameters():
            if exclude_frozen_parameters and not parameter.requires_grad:
                state.pop(f"{prefix}{name}", None)
        return state

    def load_module_state_dict(
        self,
        checkpoint: Mapping[str, Mapping[str, Tensor]],
        strict: bool = True,
        custom_load_fn: Callable | None = None,
        fetch_z3_params: bool = False,
    ) -> None:
        """Loads `checkpoint["module"]`, weights by name in their full shapes, into the module, including master weights.

        Rank 0's values count. One module's parameters are unsharded at a time, or all of them for custom_load_fn, which is called as
        custom_load_fn(src=..., dst=module). If ranks hold parts of the model, each takes its own part of `checkpoint["module"]`, which
        must have the full weights on every rank, and custom_load_fn is not available.

        fetch_z3_params: accepted and ignored; sharded parameters are always unsharded.

        Raises ValueError for other shapes, for custom_load_fn if ranks hold parts, and, if strict, for different names.
        """
        del fetch_z3_params
        state, module, comm = checkpoint["module"], self.module, self.engine.comm
        if custom_load_fn is not None:
            _check_custom(self.engine, operation="load_module_state_dict")
            with GatheredParameters(module.parameters(), modifier_rank=0):
                custom_load_fn(src=state, dst=module)
            return
        expected = {
            name for own in comm.gather_objects(list(_names(module))) for name in own
        }  # names in the full model
        missing, unexpected = sorted(expected - set(state)), sorted(set(state) - expected)
        if strict and (missing or unexpected):
            raise ValueError(
                f"load_module_state_dict: missing {', '.join(missing[:5]) or 'nothing'}, unexpected "
                f"{', '.join(unexpected[:5]) or 'nothing'}; strict=False loads the common names"
            )
        own, errors = _own_part(self.engine, state=state)
        for prefix, part in module.named_modules():
            prefix = f"{prefix}." if prefix else ""
            parameters = list(part.parameters(recurse=False))
            with GatheredParameters(parameters, modifier_rank=0), torch.no_grad():
                # pyrefly: ignore[missing-attribute]  # every parameter of the engine has an owner
                if any(owner.bucket.comm.rank == 0 for owner in map(owner_of, parameters)):
                    part._load_from_state_dict(dict(own), prefix, {}, False, [], [], errors)
        if errors := [error for rank in comm.gather_objects(errors) for error in rank]:
            raise ValueError(f"load_module_state_dict: {errors[0]}")
        for name, buffer in persistent_buffers(module, every_name=True):  # every rank has its own copy
            if name in state:
                buffer.data.copy_(state[name])


def _own_part(engine: Engine, *, state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """Returns `state` reduced to this rank's parts of full parameters, and a list of errors."""
    own, errors = dict(state), []
    for name, parameter in engine.module.named_parameters(remove_duplicate=False):
        owner = owner_of(parameter)
        assert owner is not None, "the engine owns every parameter of its module"
        part = engine.zero.state.part_of(owner.name, bucket=owner.bucket)
        if name not in own or part.is_full:
            continue
        value = own.pop(name)
        if tuple(value.shape) == part.full_shape:
            own[name] = part.of(value)
        else:
            errors.append(f"{name} has shape {tuple(value.shape)}, the full model's has {part.full_shape}")
    return own, errors


def _folder(save_dir: str | os.PathLike | None) -> Path:
    """Scripts pass an option of theirs that nobody gave, whose path would be the current folder."""
    if not save_dir:
        raise ValueError(f"save_dir={save_dir!r}: must name a folder; '.' is the current one")
    return Path(save_dir)


def _check_custom(engine: Engine, *, operation: str) -> None:
    if is_cut(engine):
        raise ValueError(
            f"{operation}(custom_load_fn=): the ranks hold parts of the model (pipeline, tensor or expert parallel), which a function of "
            "the full weights cannot fill; rename the weights first, and use load_module_state_dict"
        )


def _names(module: nn.Module) -> Iterator[str]:
    """Yields the names in a state_dict."""
    yield from (name for name, _ in module.named_parameters(remove_duplicate=False))
    yield from (name for name, _ in persistent_buffers(module, every_name=True))


def clone_tensors_for_torch_save(item: object, device: torch.device | str = "cpu") -> object:
    """Copies every tensor in the dicts, lists and tuples of `item`, because `torch.save` writes the entire buffer of a view."""
    if isinstance(item, torch.Tensor):
        return item.detach().to(device, copy=True)
    if isinstance(item, (list, tuple)):
        return type(item)(clone_tensors_for_torch_save(value, device) for value in item)
    if isinstance(item, dict):
        return type(item)({key: clone_tensors_for_torch_save(value, device) for key, value in item.items()})
    return item


def _check_tag(tag: str, *, comm, validation: str) -> None:
    """Compares the tags of all ranks according to `checkpoint.tag_validation`."""
    if validation == "ignore":
        return
    tags = comm.gather_objects(tag)
    if len(set(tags)) > 1:
        text = f"the ranks name different tags: {', '.join(dict.fromkeys(tags))}; all must call with the same tag"
        if validation == "fail":
            raise ValueError(text)
        logger.warning("%s. Rank 0's is used", text)


def _encode(state: dict) -> str:
    """Encodes tensors and plain values as text. Rejects values that need a pickle with code."""
    buffer = io.BytesIO()
    try:
        torch.save(state, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except Exception as error:
        raise ValueError(
            "client_state (or the schedule's state) holds values that could only be read back by running code: give numbers, "
            f"texts, tensors, lists and dicts, such as vars(args) for args ({str(error).splitlines()[0]})"
        ) from error
    return base64.b64encode(buffer.getvalue()).decode()


def _decode(text: str) -> dict:
    try:
        return torch.load(io.BytesIO(base64.b64decode(text)), weights_only=True, map_location="cpu")
    except Exception as error:
        raise CheckpointError(f"the client state of the checkpoint is damaged: {reason_of(error)}") from error


_DEFAULT, _LATEST = None, ""  # no tags
_saved: dict[tuple[Path, str | None], weakref.ref] = {}  # (folder, tag or one of these) -> the last engine


def claim_tag(engine: Any, *, folder: Path, tag: str, is_default: bool) -> None:
    """Checks before `engine` saves `tag`. is_default: the script passed no tag.

    Raises SaveFailed if another engine that is not destroyed saved the same tag, or default tags, into `folder`.
    """
    folder = folder.resolve()
    for key in ((folder, tag), (folder, _DEFAULT)) if is_default else ((folder, tag),):
        if _is_anothers(key, engine=engine):
            tags = f"tag {tag}" if key[1] else "default tags"
            raise SaveFailed(
                f"{folder}: another engine of this script saves {tags} there, and the two would replace each other's checkpoints: "
                "give each engine a save_dir of its own, or a tag (save_checkpoint(save_dir, tag='critic'), and the same for "
                "load_checkpoint)"
            )
        _saved[key] = weakref.ref(engine)


def claim_latest(engine: Any, *, folder: Path) -> None:
    """Warns before `engine` writes `latest` if it names another engine's checkpoint."""
    key = folder.resolve(), _LATEST
    if _is_anothers(key, engine=engine):
        logger.warning(
            "%s/latest names the checkpoint of the engine that saved last, and another engine of this script saves there, too: give "
            "load_checkpoint a tag, or each engine a save_dir of its own",
            folder,
        )
    _saved[key] = weakref.ref(engine)


def _is_anothers(key: tuple[Path, str | None], *, engine: Any) -> bool:
    other = _saved[key]() if key in _saved else None
    return other is not None and other is not engine and not other.is_closed
