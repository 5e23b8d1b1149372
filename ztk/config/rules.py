"""Rules between groups. Every rule yields one line per fault, and every line names the override that fixes it.

Rules of a single key are in its declaration.
"""

import importlib.util
import os
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from ztk.config.adapters import lora_faults
from ztk.config.aligned import aligned_faults
from ztk.config.alignment import alignment_faults
from ztk.config.answering import answering_faults
from ztk.config.effects import declared_faults
from ztk.config.errors import ConfigError
from ztk.config.hugging_face import hugging_face_faults
from ztk.config.own import TARGET, own_faults
from ztk.config.planning import PLAN, floor_faults, planning_faults
from ztk.config.rollout import rollout_faults
from ztk.config.text_rules import text_faults
from ztk.config.topology import DEGREES, debug_faults, is_cut, topology_faults
from ztk.core.policies import layout, offload, schedule
from ztk.core.policies.compact import compact_faults
from ztk.core.policies.config import Config
from ztk.core.policies.data import DataName
from ztk.core.policies.launch import Starter, ranks_per_node
from ztk.core.policies.machine import Machine
from ztk.core.policies.optimizer import OptimizerName
from ztk.core.policies.runs import (
    TEXT,
    aligns,
    by_training,
    device_of,
    has_tokenizer,
    holds_nothing_out,
    infers,
    is_hugging_face,
    is_own,
    offloads,
    others_offload,
    reads_documents,
)
from ztk.core.policies.schedule import SchedulerName
from ztk.core.policies.tier import Tier
from ztk.core.policies.train import KernelBackend
from ztk.core.policies.zero import ZeroEngine


def check(config: Config, *, machine: Machine) -> None:
    """Raises ConfigError with all faults of `config`."""
    faults = [*declared_faults(config, machine=machine), *own_faults(config)]
    faults += [fault for rule in _RULES for fault in rule(config, machine=machine)]
    if faults:
        raise ConfigError(list(dict.fromkeys(faults)))


def _task(config: Config, machine: Machine) -> Iterator[str]:
    """Faults of a module that ranks cannot find. Imports nothing."""
    name = config.task.module
    if not all(part.isidentifier() for part in name.split(".")):
        yield (
            f"task.module={name}: must be the dotted name of a module that Python can import, such as "
            "task.module=ztk.experiments.pretrain; a file is not"
        )
    elif not _exists(name):
        yield (
            f"task.module={name}: there is no such module in {os.getcwd()} or where Python looks; correct the name, or add its folder to "
            "PYTHONPATH"
        )


def _exists(name: str) -> bool:
    """Also looks in the current folder, where ranks start."""
    first, *others = name.split(".")
    return _holds(PathFinder.find_spec(first, [os.getcwd(), *sys.path]), names=others) or _holds(
        importlib.util.find_spec(first), names=others
    )


def _holds(spec: ModuleSpec | None, *, names: list[str]) -> bool:
    for name in names:
        places = None if spec is None else spec.submodule_search_locations
        spec = None if places is None else PathFinder.find_spec(name, list(places))
    return spec is not None


def _compared_engines(config: Config, machine: Machine) -> Iterator[str]:
    """Faults of torch's DistributedDataParallel and fully_shard, which are there to compare the pretraining of dense decoders with."""
    if config.zero.engine is ZeroEngine.ztk:
        return
    name, task = config.zero.engine.value, config.task.name
    if config.offload.optimizer is not Tier.none or config.offload.parameters not in ("none", "auto"):
        yield (
            f"offload: zero={name} has no offload; use zero=stage0 to stage3, or offload=none and leave out offload.optimizer and "
            "offload.parameters"
        )
    yield from _compared_optimizers(config, name=name)
    if config.checkpoint.every or config.checkpoint.resume is not None:
        yield (
            f"checkpoint: zero={name} is there to compare with and neither saves nor loads; use zero=stage0 to "
            "stage3, or leave out checkpoint.every and checkpoint.resume"
        )
    if is_hugging_face(config.model):
        yield f"model=hf: zero={name} is there to compare ztk's own decoder with; use zero=stage0 to stage3"
    if is_cut(config.topology) and not infers(config):
        named = sorted(config.given & {f"topology.{degree}" for degree in DEGREES})
        yield (
            f"topology: zero={name} is there to compare with and data-parallel only; use "
            f"topology=dp{' and leave out ' + ', '.join(named) if named else ''}, or zero=stage0 to stage3"
        )
    if config.model.experts is not None and not infers(config):
        yield (
            f"model.experts={config.model.experts}: zero={name} is there to compare dense models with; use zero=stage0 to stage3, or "
            "model=tiny"
        )
    if task == PLAN:
        stage, peer = ("stage3", "FSDP2") if name == "fsdp2" else ("stage0", "DDP")
        yield (
            f"zero={name}: task=plan traces ztk's own engine; use zero={stage} plan.way=eager, which has {peer}'s memory and traffic"
        )
    elif aligns(config):
        yield f"zero={name}: is there to compare with, and task={task} needs ztk's; use zero=stage0 to stage3"
    elif by_training(config):
        yield f"zero={name} is there to compare training with; use zero=stage0 to stage3"


def _compared_optimizers(config: Config, *, name: str) -> Iterator[str]:
    """Faults of optimizers other than torch's AdamW on float32 weights. name: the engine's name."""
    optimizer = config.optimizer.name
    if is_own(config, section="optimizer"):
        yield f"optimizer.{TARGET}: zero={name} runs torch's AdamW; use zero=stage0 to stage3"
    if optimizer in (OptimizerName.lion, OptimizerName.lamb):
        yield f"optimizer={optimizer.value}: torch has none for zero={name}; use zero=stage0 to stage3, or optimizer=adamw"
    if optimizer is OptimizerName.muon:
        yield f"optimizer=muon: torch's does not run with zero={name}; use zero=stage0 to stage3, or optimizer=adamw"
    if config.optimizer.states not in (None, "fp32") or config.precision.master is not None:
        yield (
            f"optimizer.states and precision.master: zero={name} runs torch's AdamW on float32 weights; use zero=stage0 to stage3, or "
            "optimizer.states=fp32 without precision.master"
        )


def _offload(config: Config, machine: Machine) -> Iterator[str]:
    if config.zero.engine is ZeroEngine.ztk:
        yield from layout.offload_faults(config.offload, zero=config.zero)
    if not offloads(config, tier=Tier.nvme) and not others_offload(config, tier=Tier.nvme):
        return
    yield from offload.page_faults(config.offload)
    folder = Path(config.offload.nvme_path or config.output_dir).expanduser().absolute()
    existing = next(place for place in (folder, *folder.parents) if place.exists())
    if not (existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)):
        yield (
            f"offload.nvme_path={folder}: {existing} is not a folder that can be written to; "
            "use offload.nvme_path=FOLDER on a writable disk, or offload=cpu"
        )


def _precision(config: Config, machine: Machine) -> Iterator[str]:
    states = config.optimizer.states
    if config.zero.engine is ZeroEngine.ztk:
        yield from compact_faults(
            name=config.optimizer.name,
            states=states if states is not None and config.optimizer.name is OptimizerName.adamw else "fp32",
            master=config.precision.master and config.precision.master.value,
            dtype=config.precision.dtype.value,
            averages=bool(config.ema.decay),
        )


def _model(config: Config, machine: Machine) -> Iterator[str]:
    model, data = config.model, config.data
    yield from lora_faults(config)
    if is_hugging_face(model):
        yield from hugging_face_faults(config)
        return
    if model.heads > 0 and model.dim > 0:
        if model.dim % model.heads:
            fixed = max(1, model.dim // model.heads) * model.heads
            yield f"model.dim={model.dim} is not a multiple of model.heads={model.heads}: use model.dim={fixed}"
        elif model.dim // model.heads % 2:
            yield (
                f"model.dim={model.dim} with model.heads={model.heads} gives heads of odd size, which rotary "
                f"embedding cannot turn: use model.dim={model.dim + model.heads}"
            )
    if model.kv_heads > 0 and model.heads % model.kv_heads:
        yield (
            f"model.heads={model.heads} is not a multiple of model.kv_heads={model.kv_heads}: "
            f"use model.kv_heads={model.heads}"
        )
    if model.experts is not None and model.experts < (model.experts_per_token or 1):
        yield (
            f"model.experts_per_token={model.experts_per_token} is more than model.experts={model.experts}: "
            f"use model.experts_per_token={model.experts}"
        )
    if model.experts is not None and model.layers < (model.experts_every or 1):
        yield (
            f"model.experts_every={model.experts_every} with model.layers={model.layers} leaves no block with experts: "
            f"use model.experts_every={model.layers}"
        )
    if data.seq_len > model.max_seq_len:
        yield (
            f"data.seq_len={data.seq_len} is longer than model.max_seq_len={model.max_seq_len}: "
            f"use data.seq_len={model.max_seq_len}, or model.max_seq_len={data.seq_len}"
        )
    if data.name is not DataName.synthetic and not has_tokenizer(config) and 0 < model.vocab_size < 256:
        yield f"model.vocab_size={model.vocab_size}: text is read as bytes, use model.vocab_size=256, or data=synthetic"


def _data(config: Config, machine: Machine) -> Iterator[str]:
    if config.data.name is DataName.files and config.data.path is None:
        yield "data=files needs data.path: use data.path=FOLDER, a file or a glob, or data=stdlib"


def _training(config: Config, machine: Machine) -> Iterator[str]:
    train = config.train
    if holds_nothing_out(config) and config.data.name in TEXT and not reads_documents(config):
        yield "data.validation_fraction=0: text that is read as bytes needs a held-out part; use data.validation_fraction=0.05"
    elif holds_nothing_out(config) and train.eval_every:
        yield (
            f"train.eval_every={train.eval_every} has nothing to evaluate with data.validation_fraction=0: "
            "use train.eval_every=0, or data.validation_fraction=0.05"
        )


def _optimizer(config: Config, machine: Machine) -> Iterator[str]:
    scheduler = config.scheduler
    if config.optimizer.name is OptimizerName.lamb:
        for degree in ("tensor", "expert"):
            if (value := getattr(config.topology, degree)) > 1:
                yield (
                    f"optimizer=lamb takes norms of full parameters, and topology.{degree}={value} cuts them: use "
                    f"topology.{degree}=1, or optimizer=adamw"
                )
    end = config.train.steps if scheduler.total_steps is None else scheduler.total_steps
    if scheduler.warmup_steps is not None and scheduler.warmup_steps >= end > 0:
        key = "train.steps" if scheduler.total_steps is None else "scheduler.total_steps"
        yield (
            f"scheduler.warmup_steps={scheduler.warmup_steps} leaves nothing of {key}={end}: "
            f"use scheduler.warmup_steps={max(0, end // 10)}, or {key}={scheduler.warmup_steps * 10}"
        )
    if scheduler.name is SchedulerName.wsd:
        warmup = config.train.steps // 20 if scheduler.warmup_steps is None else scheduler.warmup_steps
        yield from schedule.room_faults(
            warmup=warmup, decay=schedule.wsd_steps(scheduler.decay_steps, end=end), end=end
        )


def _ray_faults(ranks: int | None) -> Iterator[str]:
    if missing := [name for name in ("ray", "pandas", "pyarrow") if importlib.util.find_spec(name) is None]:
        yield f"launch=ray: Ray Train needs the package {missing[0]}, which is not installed; use pip install 'ztk[ray]'"
    if ranks is None:
        yield "launch=ray: needs launch.ranks=N, and launch.device=cuda for a GPU each; the cluster may have other machines than this one"


def _launch(config: Config, machine: Machine) -> Iterator[str]:
    launch = config.launch
    device = device_of(config, machine=machine)
    if config.task.name == PLAN:
        return  # a plan starts no ranks
    if launch.starter is Starter.ray:
        yield from _ray_faults(launch.ranks)
    if launch.starter is Starter.slurm and launch.ranks not in (None, machine.started_ranks):
        yield (
            f"launch.ranks={launch.ranks}: {launch.nodes} nodes with {ranks_per_node(launch)} ranks each have {machine.started_ranks}; leave "
            "launch.ranks out, or change launch.nodes and launch.ranks_per_node"
        )
    elif machine.started_ranks and launch.ranks not in (None, machine.started_ranks):
        yield (
            f"launch.ranks={launch.ranks} has no effect on the {machine.started_ranks} ranks that are already started: "
            "leave it out, or start by `python run.py`"
        )
    if device == "cuda" and not machine.gpus:
        yield "launch.device=cuda: there is no GPU that the installed torch can use; use launch.device=cpu"
    elif device == "cuda" and not machine.started_ranks and launch.ranks and launch.ranks > machine.gpus:
        yield (
            f"launch.ranks={launch.ranks} with {machine.gpus} GPUs: use launch.ranks={machine.gpus}, or "
            "launch.device=cpu"
        )
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if config.kernels.backend is KernelBackend.triton and device == "cpu" and not interpreted:
        yield "kernels=triton needs a GPU: use kernels=auto (torch's kernels on a CPU), or kernels=reference"


_RULES = (
    topology_faults,
    debug_faults,
    answering_faults,
    _task,
    _compared_engines,
    aligned_faults,
    _offload,
    _precision,
    _model,
    _data,
    _training,
    _optimizer,
    _launch,
    floor_faults,
    rollout_faults,
    alignment_faults,
    text_faults,
    planning_faults,
)
