"""save_checkpoint and load_checkpoint by DeepSpeed's rules for tags, on checkpoints that belong to the model.

[Note: Folder]
    save_dir/latest                     the tag to resume from
    save_dir/TAG/step-000120/           a checkpoint of `ztk.checkpoint`
    save_dir/TAG/latest                 its name
Saving a tag again writes the new checkpoint whole before the old one goes.
"""

import base64
import io
import os
from pathlib import Path

import torch

from ztk import checkpoint
from ztk.checkpoint.errors import Agreement, CheckpointError, SaveFailed
from ztk.deepspeed.log import logger

LATEST = "latest"


def save_checkpoint(engine, *, folder: str | os.PathLike, tag: object, client_state: dict, save_latest: bool) -> None:
    """Collective. See `DeepSpeedEngine.save_checkpoint`."""
    folder, comm = Path(folder), engine.engine.comm
    tag = f"global_step{engine.global_steps}" if tag is None else str(tag)
    if not tag or Path(tag).name != tag:
        raise ValueError(f"tag={tag!r}: must be the name of a folder, without a path")
    _check_tag(tag, comm=comm, validation=engine.settings.tag_validation)
    scheduler = engine.lr_scheduler
    state = {
        "client_state": client_state,
        "lr_scheduler": scheduler.state_dict() if hasattr(scheduler, "state_dict") else None,
        "param_groups": None if engine.optimizer is None else engine.optimizer.groups_state(),
        "global_samples": engine.global_samples,
    }
    checkpoint.save(engine.engine, folder=folder / tag, extra={"deepspeed": _encode(state)}, keep=1)
    agreement = Agreement(comm, error=SaveFailed)
    with agreement.step():
        if save_latest and comm.rank == 0:
            temporary = folder / f"{LATEST}.tmp"
            temporary.write_text(tag)
            os.replace(temporary, folder / LATEST)


def load_checkpoint(
    engine,
    *,
    folder: str | os.PathLike,
    tag: object,
    optimizer_states: bool,
    scheduler_states: bool,
    counters: bool,
) -> tuple[str | None, dict]:
    """Collective. See `DeepSpeedEngine.load_checkpoint`."""
    folder, inner = Path(folder), engine.engine
    if tag is None:
        pointer = folder / LATEST
        tag = pointer.read_text().strip() if pointer.is_file() else None
        tag = inner.comm.gather_objects(tag)[0]
        if tag is None:
            logger.warning("%s has no file `latest`: nothing is loaded; give a tag to name a checkpoint", folder)
            return None, {}
    report = checkpoint.load(inner, path=folder / str(tag), weights_only=not optimizer_states)
    if not isinstance(report.extra, dict) or "deepspeed" not in report.extra:
        state = {"client_state": {}, "lr_scheduler": None, "param_groups": None, "global_samples": None}
    else:
        state = _decode(report.extra["deepspeed"])
    if counters:
        inner.global_steps = report.step
        inner.micro_steps = report.step * inner.accumulation_steps
        engine.micro_steps = inner.micro_steps
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


def consolidated_state_dict(engine, *, exclude_frozen: bool = False) -> dict[str, torch.Tensor] | None:
    """The whole weights in main memory on rank 0, tied names and persistent buffers included; None on the others. Collective."""
    inner, keeps = engine.engine, engine.engine.comm.rank == 0
    module = inner.module
    frozen = {name for name, parameter in module.named_parameters() if not parameter.requires_grad}
    whole = {}
    for name, value in inner.zero.whole_parameters():
        if keeps and not (exclude_frozen and name in frozen):
            whole[name] = value.detach().to("cpu", copy=True)
    if not keeps:
        return None
    first = {id(parameter): name for name, parameter in module.named_parameters()}
    state = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if first[id(parameter)] in whole:
            state[name] = whole[first[id(parameter)]]
    for prefix, child in module.named_modules():
        for name, buffer in child._buffers.items():
            if buffer is not None and name not in child._non_persistent_buffers_set:
                state[f"{prefix}.{name}" if prefix else name] = buffer.detach().cpu().clone()
    return state


def clone_tensors_for_torch_save(item: object, device: torch.device | str = "cpu") -> object:
    """A copy of a state_dict, or of tensors nested in lists, tuples and dicts, whose tensors own just the memory they show."""
    if isinstance(item, torch.Tensor):
        return item.detach().clone(memory_format=torch.contiguous_format).to(device)
    if isinstance(item, (list, tuple)):
        return type(item)(clone_tensors_for_torch_save(value, device) for value in item)
    if isinstance(item, dict):
        return type(item)((key, clone_tensors_for_torch_save(value, device)) for key, value in item.items())
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
        raise CheckpointError(f"the client state of the checkpoint is damaged: {error}") from error
