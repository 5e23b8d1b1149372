"""Derives AdamW's `optimizer.lr` from task, method and size, unless the user sets it. The option files have rates for small models."""

from ztk.config.derived import derive
from ztk.core.policies.config import Config
from ztk.core.policies.model import ModelConfig, ModelInit
from ztk.core.policies.optimizer import OptimizerName
from ztk.core.policies.runs import is_hugging_face, is_own

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
# Task -> learning rate of full pretrained weights, of adapters, and the source.
PRETRAINED = {
    "pretrain": (2e-5, 2e-4, "TRL and PEFT"),
    "sft": (2e-5, 2e-4, "TRL and PEFT"),
    "reward": (1e-5, 1e-4, "TRL's example"),
    "dpo": (1e-6, 1e-5, "TRL"),
    "distill": (2e-5, 2e-4, "TRL and PEFT"),
    "grpo": (1e-6, 1e-5, "TRL"),
    "ppo": (3e-6, 3e-5, "TRL"),
}
CRITIC = (9e-6, 9e-5, "OpenRLHF")


def take_rate(config: Config, *, given: frozenset[str]) -> None:
    """Sets `optimizer.lr` and `critic.lr`, unless the user set them: for pretrained weights by task, for weights from scratch by size.

    given: the keys that the user set.
    """
    model, task = config.model, config.task.name
    if task not in PRETRAINED or is_own(config, section="model") or is_own(config, section="optimizer"):
        return
    if config.optimizer.name not in (OptimizerName.adamw, OptimizerName.adam):
        return
    size = active_parameters(model)
    is_trained = is_hugging_face(model) and model.init is ModelInit.pretrained
    if is_trained or (size > SMALL and config.warm_start.path is not None):
        _take_pretrained(config, given=given)
    elif size > SMALL and "optimizer.lr" not in given:
        rate, who = next((rate, who) for most, rate, who in FROM_SCRATCH if size <= most)
        derive(config, key="optimizer.lr", value=rate, reason=f"{size // 10**6:,}M parameters from scratch ({who})")


def _take_pretrained(config: Config, *, given: frozenset[str]) -> None:
    rates = {"optimizer.lr": PRETRAINED[config.task.name]} | (
        {"critic.lr": CRITIC} if config.task.name == "ppo" else {}
    )
    start = "adapters of pretrained weights" if config.lora.rank else "pretrained weights"
    for key, (full, adapters, who) in rates.items():
        if key not in given:
            rate = adapters if config.lora.rank else full
            derive(config, key=key, value=rate, reason=f"task={config.task.name} of {start} ({who})")


def active_parameters(model: ModelConfig) -> int:
    """Returns the approximate number of parameters that compute a token; with experts, only those that a token is routed to."""
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
