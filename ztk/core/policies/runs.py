"""Predicates over a configuration, shared by conditions of keys and rules."""

import functools
import glob
import os
from pathlib import Path
from typing import TYPE_CHECKING

from ztk.core.policies.text import is_structured
from ztk.core.policies.tier import Tier

if TYPE_CHECKING:
    from ztk.core.policies.config import Config
    from ztk.core.policies.machine import Machine
    from ztk.core.policies.model import ModelConfig

DRAWING = ("generate", "serve")  # tasks that answer prompts and train nothing
ANSWERING = (*DRAWING, "eval")  # DRAWING and the task that scores texts
ALIGNING = ("sft", "reward", "dpo", "distill")
ANSWER_TASKS = ("sft", "distill")  # tasks whose examples are single answers
TEXT = ("stdlib", "files")
RECORDS = ("chat", "preferences")
BYTES, TRAIN = "bytes", "train"
AUTO = "auto"  # value of checkpoint.resume: the run folder's own latest checkpoint, if there is one
OVERWRITE = "overwrite"  # value of checkpoint.resume: a new run in place of the run folder's
HUGGING_FACE = "hf"


def is_own(config: "Config", *, section: str) -> bool:
    """Whether the object of this section is the user's."""
    return section in config.own


def is_hugging_face(model: "ModelConfig") -> bool:
    """Whether the model is one of transformers."""
    return model.name == HUGGING_FACE


def by_training(config: "Config") -> bool:
    """Whether the engine that trains scores texts."""
    return config.task.name == "eval" and config.eval.engine == "training"


def infers(config: "Config") -> bool:
    """Whether the inference engine computes the model."""
    return config.task.name in ANSWERING and not by_training(config)


def trains(config: "Config") -> bool:
    """Whether the task updates a model."""
    return config.task.name not in (*ANSWERING, "plan")


def draws(config: "Config") -> bool:
    """Whether the task draws answers from the policy that it trains."""
    return config.task.name in ("grpo", "ppo")


def aligns(config: "Config") -> bool:
    """Whether the task aligns a model, by records or by answers that are drawn."""
    return config.task.name in ALIGNING or draws(config)


def distills_draws(config: "Config") -> bool:
    """Whether some steps of task=distill take answers that are drawn in place of the data's."""
    return config.task.name == "distill" and bool(config.distill.fraction or config.distill.seq_kd)


def offloads(config: "Config", *, tier: Tier) -> bool:
    """Whether anything is stored on `tier`. Parameters on `auto` never use another tier than the optimizer states."""
    return tier in (config.offload.optimizer, config.offload.parameters)


def others_offload(config: "Config", *, tier: Tier) -> bool:
    """Whether a second model, or the average of the weights, is stored on `tier` by a choice of its own."""
    return tier in (config.reference.offload, config.critic.offload, config.reward.offload, config.ema.offload)


def streams_layers(config: "Config") -> bool:
    """Whether a task that answers reads layers from files in every pass, on a CPU. On a GPU only layers that do not fit stream."""
    return config.offload.optimizer is not Tier.none and config.launch.device != "cuda"


def device_of(config: "Config", *, machine: "Machine") -> str:
    """`cpu` or `cuda`."""
    if config.task.name == "plan":
        return "cuda"  # a plan is always for GPUs
    if config.launch.device == "auto":
        return "cuda" if machine.gpus and not _needs_cpu(config, machine=machine) else "cpu"
    return config.launch.device.value


def _needs_cpu(config: "Config", *, machine: "Machine") -> bool:
    """Whether the task answers in a way that only the CPU has: with more ranks than there are GPUs."""
    return infers(config) and config.topology.tensor > machine.gpus


def times_kernels(config: "Config") -> bool:
    """Whether the run times operations in some of its steps."""
    return trains(config) and bool(config.kernels.log_every)


def reports_mfu(config: "Config", *, machine: "Machine") -> bool:
    """Whether the run counts its operations against the peak rate of a GPU."""
    is_counted = config.task.name == "pretrain" and not is_own(config, section="data")
    return is_counted and device_of(config, machine=machine) == "cuda"


def holds_out(config: "Config") -> bool:
    """Whether held-out data can be evaluated; own data hold some out if they have a method `held_out`."""
    return config.data.name in TEXT or is_own(config, section="data")


def holds_nothing_out(config: "Config") -> bool:
    """Whether a run that could hold data out for evaluation does not."""
    is_read = config.data.name in TEXT or config.data.path is not None
    return is_read and config.data.validation_fraction == 0 and config.data.eval_path is None


def reads_records(config: "Config") -> bool:
    """Whether examples are chats or preferences."""
    return config.data.name in RECORDS


def is_labelled(config: "Config") -> bool:
    """Whether an example is one answer with a label."""
    return config.task.name == "dpo" and config.dpo.loss == "kto"


def reads_lines(config: "Config") -> bool:
    """Whether `data.path` may name lines of JSON with texts."""
    return config.data.name in (*RECORDS, "prompts")


def has_tokenizer(config: "Config") -> bool:
    """Whether tokens come from a tokenizer rather than bytes."""
    return config.data.tokenizer not in (None, BYTES)


def reads_documents(config: "Config") -> bool:
    """Whether text is read as documents and tokenised once; otherwise the bytes of the files are read as they are."""
    data = config.data
    if data.name not in TEXT:
        return False
    if has_tokenizer(config) or data.mixture is not None:
        return True
    return data.name == "files" and data.path is not None and _has_structured(tuple(as_paths(data.path)))


@functools.lru_cache(maxsize=8)
def _has_structured(paths: tuple[str, ...]) -> bool:
    for entry in map(os.path.expanduser, paths):
        if os.path.isdir(entry):
            for _, folders, names in os.walk(entry):
                folders[:] = [name for name in folders if not name.startswith(".")]
                if any(is_structured(Path(name)) for name in names if not name.startswith(".")):
                    return True
        elif is_structured(Path(entry)) or any(is_structured(Path(name)) for name in glob.iglob(entry, recursive=True)):
            return True
    return False


def as_paths(value: object) -> list[str]:
    """A path, or a list of them, as a list."""
    return [str(entry) for entry in value] if isinstance(value, list) else [str(value)]


def data_paths(config: "Config") -> list[str]:
    """`data.path` as a list."""
    return as_paths(config.data.path)
