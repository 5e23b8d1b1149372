"""Which keys of a run's configuration say what experiment it is, and which of them change its numbers."""

from typing import Any

# Where things are, who is told, what is timed, what starts the ranks and where they go on: no part of the experiment.
_ASIDE = (
    *("output_dir", "offload.nvme_path", "checkpoint.resume", "checkpoint.allow_changes"),
    *("checkpoint.last", "checkpoint.grace_seconds"),
    *("kernels.log_every", "train.profile"),
)
_ASIDE_SECTIONS = ("logger", "launch")
# Sections and keys that leave losses as they are, within rounding: where state is stored, how work is divided, what is measured and saved.
_NUMBERLESS_SECTIONS = (
    *_ASIDE_SECTIONS,
    *(
        "zero",
        "offload",
        "recompute",
        "topology",
        "kernels",
        "checkpoint",
        "inference",
        "sampling",
        "serve",
        "eval",
        "task",
        "hardware",
        "ema",
    ),
)
_NUMBERLESS = {
    *_ASIDE,
    *(
        "train.steps",
        "train.max_seconds",
        "train.until_loss",
        "train.log_every",
        "train.eval_every",
        "train.eval_batches",
        "train.quick",
        "train.evaluate",
    ),
    *("train.micro_batch_size", "train.accumulation_steps", "rollout.show_every", "model.name", "model.kernels"),
    *(f"{model}.{choice}" for model in ("reference", "critic", "reward") for choice in ("zero", "offload")),
}
_LOSSY = ("zero.quantized_weights", "zero.quantized_gradients")


def is_counted(key: str, *, value: Any, counted: frozenset[str] = frozenset()) -> bool:
    """Whether a key with this value is part of the experiment. `checkpoint.resume` is if it names a folder, because that is where the run
    starts; a key that is None is not. counted: keys that are although they are left out of others."""
    if value is None:
        return False
    if key in counted or (key == "checkpoint.resume" and value != "auto"):
        return True
    return key not in _ASIDE and key.partition(".")[0] not in _ASIDE_SECTIONS


def changes_numbers(key: str) -> bool:
    """Whether losses depend on the key by more than rounding."""
    if key in _LOSSY:
        return True
    return key not in _NUMBERLESS and key.partition(".")[0] not in _NUMBERLESS_SECTIONS
