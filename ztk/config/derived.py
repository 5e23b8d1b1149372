"""Values that the user left open: they follow from the model, the task, the data and the machine. `Config.reasons` has the reasons.

The option files have learning rates for small models.
"""

import os

from ztk.config.batch import forwards_of, settle_batch
from ztk.config.effects import null_inactive_keys
from ztk.config.errors import ConfigError
from ztk.config.keys import derive, fill, read, run_keys, write
from ztk.config.record import load
from ztk.config.topology import replicas_of, settled_ranks
from ztk.core.policies.align import WITHOUT_REFERENCE, DpoLossName, DpoReferenceName
from ztk.core.policies.config import Config
from ztk.core.policies.disks import file_system, is_on_network, node_disk
from ztk.core.policies.machine import Machine
from ztk.core.policies.model import ModelConfig, ModelInit
from ztk.core.policies.offload import ParameterTier
from ztk.core.policies.optimizer import OptimizerName
from ztk.core.policies.records import record_of, run_record
from ztk.core.policies.runs import (
    ALIGNING,
    AUTO,
    aligns,
    device_of,
    holds_nothing_out,
    infers,
    is_hugging_face,
    is_own,
)
from ztk.core.policies.schedule import SchedulerName, wsd_steps
from ztk.core.policies.train import MOST_SECONDS, Evaluated

SMALL = 5_000_000  # up to this number of parameters, the option files' rates apply
# Largest number of parameters -> learning rate from random weights, and its source.
FROM_SCRATCH = (
    (50e6, 1e-3, "nanoGPT at 11M"),
    (250e6, 6e-4, "GPT-3 at 125M"),
    (3e9, 4e-4, "OLMo and TinyLlama at 1B"),
    (20e9, 3e-4, "Llama at 7B"),
    (100e9, 1.5e-4, "Llama at 65B"),
    (float("inf"), 6e-5, "GPT-3 at 175B"),
)
# Task -> learning rate of full pretrained weights, of adapters, and the source. docs/trl_defaults.md compares them with TRL's.
PRETRAINED = {
    "pretrain": (2e-5, 2e-4, "TRL and PEFT"),
    "sft": (2e-5, 2e-4, "TRL and PEFT"),
    "reward": (1e-4, 1e-3, "TRL"),
    "dpo": (1e-6, 1e-5, "TRL"),
    "distill": (2e-5, 2e-4, "TRL and PEFT"),
    "grpo": (1e-6, 1e-5, "TRL"),
    "ppo": (3e-6, 3e-5, "TRL"),
}
CRITIC = (9e-6, 9e-5, "OpenRLHF")
OF_TRL = (*ALIGNING, "grpo")  # tasks with TRL's defaults
_HIGHER = ("reward", "accuracy", "margin")  # metrics for which larger is better


def derive_choices(config: Config) -> None:
    """Sets learning rates, the reference, the metric of checkpoints and evaluations, unless the user set them."""
    _derive_rate(config)
    if config.task.name in OF_TRL:
        _derive_trls(config)
    dpo = config.dpo
    if config.task.name == "dpo" and dpo.loss in WITHOUT_REFERENCE:
        reason = f"dpo.loss={dpo.loss.value} has no reference"
        derive(config, key="dpo.reference", value=DpoReferenceName.none, reason=reason)
        derive(config, key="dpo.sft_weight", value=1.0, reason=f"dpo.loss={dpo.loss.value} (TRL)")
    if config.task.name == "dpo" and dpo.loss is DpoLossName.ipo:
        derive(config, key="dpo.length_normalised", value=True, reason="dpo.loss=ipo (TRL)")
    _derive_metric(config)
    if config.task.name in ALIGNING and config.data.eval_path is not None:
        reason = "data.eval_path has the records of evaluations"
        derive(config, key="data.validation_fraction", value=0.0, reason=reason)
    needs_evaluations = {"train.until_loss", "train.patience"} & config.given
    if holds_nothing_out(config) and config.train.eval_every and not needs_evaluations:
        derive(config, key="train.eval_every", value=0, reason="data.validation_fraction=0")


def _derive_rate(config: Config) -> None:
    """Sets AdamW's `optimizer.lr` and `critic.lr`: for pretrained weights by task, for weights from scratch by size."""
    model, task = config.model, config.task.name
    if task not in PRETRAINED or is_own(config, section="model") or is_own(config, section="optimizer"):
        return
    if config.optimizer.name not in (OptimizerName.adamw, OptimizerName.adam):
        return
    size = active_parameters(model)
    if is_trained(model) or (size > SMALL and config.warm_start.path is not None):
        rates = {"optimizer.lr": PRETRAINED[task]} | ({"critic.lr": CRITIC} if task == "ppo" else {})
        start = "adapters of pretrained weights" if config.lora.rank else "pretrained weights"
        for key, (full, adapters, who) in rates.items():
            rate = adapters if config.lora.rank else full
            derive(config, key=key, value=rate, reason=f"task={task} of {start} ({who})")
    elif size > SMALL:
        rate, who = next((rate, who) for most, rate, who in FROM_SCRATCH if size <= most)
        derive(config, key="optimizer.lr", value=rate, reason=f"{size // 10**6:,}M parameters from scratch ({who})")


def _derive_trls(config: Config) -> None:
    """Sets the betas of AdamW, and the schedule for pretrained weights, to TRL's defaults."""
    reason = f"task={config.task.name} (TRL)"
    if not is_own(config, section="optimizer") and config.optimizer.name in (OptimizerName.adamw, OptimizerName.adam):
        derive(config, key="optimizer.betas", value=[0.9, 0.999], reason=reason)
    chosen = any(key.partition(".")[0] == "scheduler" for key in config.given) or is_own(config, section="scheduler")
    if is_trained(config.model) and not chosen:
        reason = f"task={config.task.name} of pretrained weights (TRL)"
        for key, value in (("name", SchedulerName.linear), ("warmup_steps", 0), ("final", 0.0)):
            derive(config, key=f"scheduler.{key}", value=value, reason=reason)


def is_trained(model: ModelConfig) -> bool:
    """Returns whether the run starts from the weights of a model of transformers."""
    return is_hugging_face(model) and model.init is ModelInit.pretrained


def active_parameters(model: ModelConfig) -> int:
    """Returns the approximate number of parameters that compute a token; with experts, without the ones that a token skips."""
    embeddings = model.vocab_size * model.dim * (1 if model.tie_embeddings else 2)
    if model.hidden_dim is None:  # transformers model: 12 dim^2 per block
        return embeddings + 12 * model.dim**2 * model.layers
    attention = 2 * model.dim**2 + 2 * model.dim**2 * model.kv_heads // max(1, model.heads)
    dense, experts = model.layers, 0
    if model.experts is not None:
        experts = model.layers // max(1, model.experts_every or 1)
        dense -= experts
    width = (model.experts_per_token or 0) * (model.expert_hidden_dim or 0) + (model.shared_hidden_dim or 0)
    return embeddings + model.layers * attention + 3 * model.dim * (dense * model.hidden_dim + experts * width)


def _derive_metric(config: Config) -> None:
    """Sets the metric that ranks checkpoints."""
    task, saved = config.task.name, config.checkpoint
    if not aligns(config) or not (saved.keep_best or config.train.patience is not None):
        return
    metric = "validation_loss" if task in ALIGNING else "eval_reward"
    fill(config, key="checkpoint.metric", value=metric, reason="held-out data are measured by it")
    higher = any(word in str(saved.metric) for word in _HIGHER)
    fill(config, key="checkpoint.higher_is_better", value=higher, reason=f"checkpoint.metric={saved.metric}")


def settle(config: Config, *, machine: Machine) -> None:
    """Sets keys without a value to values with their reasons, and keys without effect to None. The rules must hold already."""
    _settle_parameter_tier(config)
    null_inactive_keys(config, machine=machine)
    _settle_launch(config, machine=machine)
    settle_batch(config, recorded=_continued(config))
    _settle_paths(config)
    config.train.z_loss = config.train.z_loss or None
    write(config, key="ema.decay", value=config.ema.decay or None)
    config.train.evaluate = None if config.train.evaluate == Evaluated.weights else config.train.evaluate
    steps = config.train.steps
    decay = wsd_steps(None, end=config.scheduler.total_steps or steps)
    fill(config, key="scheduler.warmup_steps", value=steps // 20, reason="train.steps / 20")
    fill(config, key="scheduler.decay_steps", value=decay, reason="the steps / 10")
    fill(config, key="scheduler.rise_steps", value=max(1, steps // 2), reason="train.steps / 2")
    fill(config, key="scheduler.step_size", value=max(1, steps // 10), reason="train.steps / 10")
    null_inactive_keys(config, machine=machine)  # also values without effect that were just set
    _note_network(config)


def _settle_parameter_tier(config: Config) -> None:
    """Replaces `auto` by the optimizer states' tier if parameters are sharded, and else by the device."""
    if config.offload.parameters is ParameterTier.auto:
        sharded = config.zero.stage == 3
        tier = ParameterTier[config.offload.optimizer.name] if sharded else ParameterTier("none")
        write(config, key="offload.parameters", value=tier)


def _settle_launch(config: Config, *, machine: Machine) -> None:
    launch, topology = config.launch, config.topology
    device = device_of(config, machine=machine)
    launch.device = type(launch.device)(device)
    ranks = settled_ranks(config, machine=machine)
    reason = "as many as the topology needs, else one per GPU, two without a GPU"
    fill(config, key="launch.ranks", value=ranks, reason=reason)
    replicas = replicas_of(topology, ranks=ranks)
    fill(config, key="topology.data", value=replicas, reason="ranks divided by the other degrees")
    write(config, key="topology.data", value=replicas)  # the number of an option follows the ranks, too
    if launch.debug is not None:
        launch.timeout_seconds = MOST_SECONDS
        config.reasons["launch.timeout_seconds"] = "launch.debug: a rank in a debugger stops for any time"
    reason = "OMP_NUM_THREADS, else the cores divided by the ranks"
    fill(config, key="launch.threads", value=_threads(machine, ranks=ranks), reason=reason)
    if device == "cuda" and config.offload.optimizer != "none" and config.offload.pin_memory is None:
        write(config, key="offload.pin_memory", value=True)


def _threads(machine: Machine, *, ranks: int) -> int:
    # torchrun always sets OMP_NUM_THREADS=1, so it is not the user's choice there.
    wanted = "" if machine.started_ranks else os.environ.get("OMP_NUM_THREADS", "")
    fair = max(1, machine.cores // (machine.started_here or ranks))
    return int(wanted) if wanted.isdecimal() and wanted.isascii() and int(wanted) else fair


def _continued(config: Config) -> Config | None:
    """Returns the run whose global batch this one keeps. Raises ConfigError if `train.accumulation_steps` would change it."""
    checkpoint = config.checkpoint
    if checkpoint.resume is None:
        return None
    if checkpoint.resume == AUTO:
        record = record_of(config.output_dir)
        return load(record) if record else None
    record, steps = run_record(checkpoint.resume), config.train.accumulation_steps
    if record is None or (checkpoint.allow_changes and steps is not None):
        return None
    recorded = load(record)
    batch, replicas = recorded.train.global_batch_size, replicas_of(config.topology, ranks=config.launch.ranks)
    if batch is not None and steps is not None:
        needed = forwards_of(batch, replicas=replicas, size=config.train.micro_batch_size)
        if needed != steps:
            raise ConfigError(
                [
                    f"train.accumulation_steps={steps}: the run of checkpoint.resume takes train.global_batch_size={batch} sequences per step, "
                    f"which is train.accumulation_steps={needed} here; leave it out, or use checkpoint.allow_changes=true"
                ]
            )
    return recorded


def _settle_paths(config: Config) -> None:
    for name, key in run_keys().items():
        if key.paths is not None and (value := read(config, key=name)) is not None:
            write(config, key=name, value=key.paths.absolute(value))
    if not infers(config):  # packed weights are deleted after the run, unless the user names a folder
        path, reason = os.path.join(config.output_dir, "nvme"), "the run folder"
        if is_on_network(config.output_dir) and (disk := node_disk()):
            path = os.path.join(disk, f"ztk-{config.output_dir.strip(os.sep).replace(os.sep, '-')}")
            reason = "a disk of this machine, because the run folder is on a network file system"
        fill(config, key="offload.nvme_path", value=path, reason=reason)


def _note_network(config: Config) -> None:
    """Adds a note if offloaded states would go over the network in every step."""
    path = config.offload.nvme_path
    if path is not None and is_on_network(path):
        config.notes.append(
            f"offload.nvme_path={path}: is on a network file system ({file_system(path)}), which every step reads and writes; use "
            "offload.nvme_path=FOLDER on a disk of the node"
        )
