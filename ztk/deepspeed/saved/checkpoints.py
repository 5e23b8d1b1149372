"""save_checkpoint and load_checkpoint by DeepSpeed's rules for tags, on checkpoints that belong to the model.

[Note: Folder]
    save_dir/latest                     the tag to resume from
    save_dir/zero_to_fp32.py            makes full fp32 weights of it
    save_dir/TAG/step-000120/           a checkpoint of `ztk.checkpoint`
    save_dir/TAG/latest                 its name
Saving a tag again writes the complete new checkpoint before it removes the old one. Weights have the dtype that the model computes in.
"""

import base64
import io
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ztk import checkpoint
from ztk.checkpoint.errors import Agreement, CheckpointError, SaveFailed
from ztk.checkpoint.folder import read_pointer
from ztk.checkpoint.full import is_cut, persistent_buffers
from ztk.checkpoint.sources import reason_of
from ztk.deepspeed import zero_to_fp32
from ztk.deepspeed.engine.owners import Owner, owner_of
from ztk.deepspeed.tools.log import logger
from ztk.deepspeed.zero.gathered import GatheredParameters

LATEST = "latest"


def save_checkpoint(
    engine, *, folder: str | os.PathLike, tag: object, client_state: dict, save_latest: bool, trained_only: bool = False
) -> None:
    """Collective. See `DeepSpeedEngine.save_checkpoint`. Raises ValueError for a tag that is no name of a folder."""
    folder, comm, is_default = Path(folder), engine.engine.comm, tag is None
    tag = f"global_step{engine.global_steps}" if tag is None else str(tag)
    if not tag or Path(tag).name != tag or tag == ".." or tag != tag.strip():
        raise ValueError(f"tag={tag!r}: must be the name of a folder, without a path and without spaces around it")
    _check_tag(tag, comm=comm, validation=engine.settings.tag_validation)
    agreement = Agreement(comm, error=SaveFailed)
    with agreement.step():
        if comm.rank == 0:
            claim_tag(engine, folder=folder, tag=tag, is_default=is_default)
            if engine.since_step:
                logger.warning(
                    "save_checkpoint after %d of %d micro-batches of a step: their gradients are not saved, a run that resumes begins the step "
                    "anew",
                    engine.since_step,
                    engine.settings.batch.accumulation,
                )
    scheduler = engine.lr_scheduler
    state = {
        "client_state": client_state,
        "lr_scheduler": scheduler.state_dict() if hasattr(scheduler, "state_dict") else None,
        "param_groups": None if engine.optimizer is None else engine.optimizer.groups_state(),
        "global_samples": engine.global_samples,
    }
    checkpoint.save(
        engine.engine, folder=folder / tag, extra={"deepspeed": _encode(state)}, keep=1, trained_only=trained_only
    )
    with agreement.step():
        if comm.rank == 0:
            zero_to_fp32.leave_script(folder)
            if save_latest:
                claim_latest(engine, folder=folder)
                temporary = folder / f"{LATEST}.tmp"
                temporary.write_text(tag)
                os.replace(temporary, folder / LATEST)


def load_checkpoint(
    engine,
    *,
    folder: str | os.PathLike,
    tag: object,
    strict: bool,
    optimizer_states: bool,
    scheduler_states: bool,
    counters: bool,
    custom: Callable | None,
) -> tuple[str | None, dict]:
    """Collective. See `DeepSpeedEngine.load_checkpoint`."""
    folder, inner = Path(folder), engine.engine
    if custom is not None:
        _check_custom(engine, what="load_checkpoint")
    if tag is None:
        pointer = folder / LATEST
        tag = read_pointer(pointer) if pointer.is_file() else None
        tag = inner.comm.gather_objects(tag)[0]
        if tag is None:
            logger.warning("%s has no file `latest`: nothing is loaded; give a tag to name a checkpoint", folder)
            return None, {}
    if engine.optimizer is not None:
        inner.discard_gradients()  # of micro-batches of a step that was begun before: they belong to the old weights
        engine.since_step = 0
    # A custom function sets the weights; what else is asked for must still fit.
    strict = (strict and custom is None) or optimizer_states
    report = checkpoint.load(inner, path=folder / str(tag), weights_only=not optimizer_states, strict=strict)
    if custom is not None:
        full = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(folder, str(tag))
        load_module(engine, state=full, strict=True, custom=custom)
    if not isinstance(report.extra, dict) or "deepspeed" not in report.extra:
        state = {"client_state": {}, "lr_scheduler": None, "param_groups": None, "global_samples": None}
    else:
        state = _decode(report.extra["deepspeed"])
    if counters:
        inner.resume_at(report.step)
        engine.micro_steps, engine.since_step = inner.micro_steps, 0
        samples = state["global_samples"]
        engine.global_samples = report.step * engine.settings.batch.train if samples is None else samples
    if optimizer_states and engine.optimizer is not None and state["param_groups"] is not None:
        engine.optimizer.load_groups_state(state["param_groups"])
    if scheduler_states and state["lr_scheduler"] is not None and hasattr(engine.lr_scheduler, "load_state_dict"):
        engine.lr_scheduler.load_state_dict(state["lr_scheduler"])
    return str(report.path.parent), state["client_state"]


def save_16bit_model(engine, *, folder: str | os.PathLike, filename: str, exclude_frozen: bool) -> bool:
    """Collective. See `DeepSpeedEngine.save_16bit_model`."""
    path, comm = Path(folder) / filename, engine.engine.comm
    if engine.settings.zero.shards_parameters and not engine.settings.gathers_on_save:
        logger.warning("%s is not saved: set zero_optimization.stage3_gather_16bit_weights_on_model_save to true", path)
        return False
    state = consolidated_state_dict(engine, exclude_frozen=exclude_frozen)
    agreement = Agreement(comm, error=SaveFailed)
    with agreement.step():
        if comm.rank == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(state, path)
    return True


def module_state_dict(
    engine, *, destination: dict | None, prefix: str, keep_vars: bool, exclude_frozen: bool
) -> dict[str, torch.Tensor]:
    """See `DeepSpeedEngine.module_state_dict`. Collective at stage 3 and where ranks hold parts of the model.

    Values have the shapes of the full parameters. Raises ValueError for keep_vars where they are copies.
    """
    module = engine.module
    if engine.settings.zero.shards_parameters or is_cut(engine.engine):
        if keep_vars:
            raise ValueError(
                "keep_vars=True: at stage 3, and where ranks hold parts of the model, full weights are copies; use "
                "zero.GatheredParameters"
            )
        full = checkpoint.full_state_dict(engine.engine, everywhere=True, exclude_frozen=exclude_frozen)
        state = {} if destination is None else destination
        assert full is not None
        state |= {f"{prefix}{name}": value for name, value in full.items()}
        return state
    state = module.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
    for name, parameter in module.named_parameters():
        if exclude_frozen and not parameter.requires_grad:
            state.pop(f"{prefix}{name}", None)
    return state


def load_module(engine, *, state: Mapping[str, torch.Tensor], strict: bool, custom: Callable | None) -> None:
    """See `DeepSpeedEngine.load_module_state_dict`. Collective. state: values in the shapes of the full parameters.

    Raises ValueError for other shapes, and if strict for names that one has and the other has not.
    """
    module, comm = engine.module, engine.engine.comm
    if custom is not None:
        _check_custom(engine, what="load_module_state_dict")
        with GatheredParameters(module.parameters(), modifier_rank=0):
            custom(src=state, dst=module)
        return
    expected = {name for own in comm.gather_objects(list(_names(module))) for name in own}  # of the full model
    missing, unexpected = sorted(expected - set(state)), sorted(set(state) - expected)
    if strict and (missing or unexpected):
        raise ValueError(
            f"load_module_state_dict: missing {', '.join(missing[:5]) or 'nothing'}, unexpected "
            f"{', '.join(unexpected[:5]) or 'nothing'}; strict=False loads what both have"
        )
    own, errors = _own_part(engine, state=state)
    for prefix, part in module.named_modules():
        prefix = f"{prefix}." if prefix else ""
        parameters = list(part.parameters(recurse=False))
        with GatheredParameters(parameters, modifier_rank=0), torch.no_grad():
            # pyrefly: ignore[missing-attribute]  # every parameter of the engine has an owner
            if any(owner.bucket.comm.rank == 0 for owner in map(owner_of, parameters)):
                part._load_from_state_dict(dict(own), prefix, {}, False, [], [], errors)
    if errors := [error for rank in comm.gather_objects(errors) for error in rank]:
        raise ValueError(f"load_module_state_dict: {errors[0]}")
    for name, buffer in persistent_buffers(module):  # every rank has its own
        if name in state:
            buffer.data.copy_(state[name])


def _own_part(engine, *, state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """`state` with what this rank's model holds of every full parameter, and what is wrong with it."""
    own, errors = dict(state), []
    for name, parameter in engine.module.named_parameters(remove_duplicate=False):
        owner: Owner = owner_of(parameter)
        part = engine.engine.zero.state.part_of(owner.name, bucket=owner.bucket)
        if name not in own or part.is_full:
            continue
        value = own.pop(name)
        if tuple(value.shape) == part.full_shape:
            own[name] = part.of(value)
        else:
            errors.append(f"{name} has shape {tuple(value.shape)}, the full model's has {part.full_shape}")
    return own, errors


def _check_custom(engine, *, what: str) -> None:
    if is_cut(engine.engine):
        raise ValueError(
            f"{what}(custom_load_fn=): the ranks hold parts of the model (pipeline, tensor or expert parallel), which a function of "
            "the full weights cannot fill; rename what it loads first, and use load_module_state_dict"
        )


def consolidated_state_dict(engine, *, exclude_frozen: bool = False) -> dict[str, torch.Tensor] | None:
    """See `full_state_dict`: name -> value in the shape of the full parameter."""
    return checkpoint.full_state_dict(engine.engine, exclude_frozen=exclude_frozen)


def _names(module: nn.Module) -> Iterator[str]:
    """Of a state_dict."""
    yield from (name for name, _ in module.named_parameters(remove_duplicate=False))
    yield from (name for name, _ in persistent_buffers(module))


def clone_tensors_for_torch_save(item: object, device: torch.device | str = "cpu") -> object:
    """`item` with every tensor in its dicts, lists and tuples copied: `torch.save` writes the entire buffer under a view."""
    if isinstance(item, torch.Tensor):
        return item.detach().to(device, copy=True)
    if isinstance(item, (list, tuple)):
        return type(item)(clone_tensors_for_torch_save(value, device) for value in item)
    if isinstance(item, dict):
        return type(item)({key: clone_tensors_for_torch_save(value, device) for key, value in item.items()})
    return item


def _check_tag(tag: str, *, comm, validation: str) -> None:
    """`checkpoint.tag_validation`: do all ranks name the same tag?"""
    if validation == "ignore":
        return
    tags = comm.gather_objects(tag)
    if len(set(tags)) > 1:
        text = f"the ranks name different tags: {', '.join(dict.fromkeys(tags))}; all must call with the same tag"
        if validation == "fail":
            raise ValueError(text)
        logger.warning("%s. Rank 0's is used", text)


def _encode(state: dict) -> str:
    """Tensors and plain values as text; what only a pickle could hold is refused."""
    buffer = io.BytesIO()
    try:
        torch.save(state, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except Exception as error:
        raise ValueError(
            "client_state (or the schedule's state) holds what could only be read back by running code: give numbers, "
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
    """`engine` is about to save `tag`. is_default: the script named none.

    Raises SaveFailed if another engine that is not destroyed saved the same tag, or default tags, into `folder`.
    """
    folder = folder.resolve()
    for key in ((folder, tag), (folder, _DEFAULT)) if is_default else ((folder, tag),):
        if _is_anothers(key, engine=engine):
            what = f"tag {tag}" if key[1] else "default tags"
            raise SaveFailed(
                f"{folder}: another engine of this script saves {what} there, and the two would replace each other's checkpoints: "
                "give each engine a save_dir of its own, or a tag (save_checkpoint(save_dir, tag='critic'), and the same for "
                "load_checkpoint)"
            )
        _saved[key] = weakref.ref(engine)


def claim_latest(engine: Any, *, folder: Path) -> None:
    """`engine` is about to write `latest`; says so if it named another engine's checkpoint."""
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
