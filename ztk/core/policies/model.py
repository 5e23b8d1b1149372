"""Keys of the model and of its adapters."""

from dataclasses import MISSING, dataclass
from enum import StrEnum
from typing import Any

from ztk.core.policies.key import Changes, When, key, key_faults, section
from ztk.core.policies.paths import Paths
from ztk.core.policies.ranges import BELOW_ONE, COUNT, COUNT_OR_ZERO, NOT_NEGATIVE, POSITIVE, Range, refuse
from ztk.core.policies.runs import is_hugging_face


class ModelInit(StrEnum):
    """The first values of a Hugging Face model."""

    pretrained = "pretrained"  # the weights in the folder
    random = "random"  # drawn as transformers draws them; the folder needs only its config.json


_HUGGING_FACE = When("model=hf", lambda config, machine: is_hugging_face(config.model))
_DECODER = When("ztk's own decoder, such as model=tiny", lambda config, machine: not is_hugging_face(config.model))
_EXPERTS = When(
    "model=tiny_moe and others with model.experts",
    lambda config, machine: config.model.experts is not None and not is_hugging_face(config.model),
)
_ADAPTERS = When("lora=adapter, or lora.rank above 0", lambda config, machine: config.lora.rank > 0)


@dataclass(kw_only=True)
class ModelConfig:
    """The decoder: ztk's own, a Llama-like transformer, dense or with experts; or a causal model of transformers (model=hf), whose sizes
    come from its config.json."""

    name: str = key(
        "name of the model, for the record; hf: the model of transformers in model.path",
        default=MISSING,
        changes=Changes.experiment,
    )
    path: str | None = key(
        "folder with the config.json, and for model.init=pretrained the safetensors files; or a GGUF file",
        acts=_HUGGING_FACE,
        paths=Paths(),
    )
    init: ModelInit | None = key(
        "first weights: pretrained: the folder's; random: drawn from train.seed", acts=_HUGGING_FACE
    )
    kernels: bool | None = key(
        "ztk's kernels compute norms, gated MLPs and attention where they compute the same as the model's modules on a sample",
        acts=_HUGGING_FACE,
        changes=Changes.experiment,
    )
    vocab_size: int = key(
        "tokens of the vocabulary; it follows data.tokenizer, and bytes are 256", default=MISSING, range=COUNT
    )
    dim: int = key("width of the residual stream", default=MISSING, range=COUNT)
    layers: int = key("number of blocks", default=MISSING, range=COUNT)
    heads: int = key("query heads", default=MISSING, range=COUNT)
    kv_heads: int = key("key and value heads (grouped-query attention)", default=MISSING, range=COUNT)
    hidden_dim: int | None = key(
        "hidden width of the SwiGLU, in a model with experts of the blocks without them",
        default=MISSING,
        range=COUNT,
        acts=_DECODER,
    )
    max_seq_len: int = key("longest sequence in tokens", default=MISSING, range=COUNT)
    rope_theta: float | None = key(
        "base of the rotary embedding's wavelengths", default=MISSING, range=POSITIVE, acts=_DECODER
    )
    norm_eps: float | None = key("added to the mean square in RMSNorm", default=MISSING, range=POSITIVE, acts=_DECODER)
    tie_embeddings: bool | None = key("the output layer is the embedding's weight", default=MISSING, acts=_DECODER)
    experts: int | None = key("experts of a block that has them; null: the model is dense", range=COUNT)
    experts_per_token: int | None = key("experts that a token is sent to", range=COUNT, acts=_EXPERTS)
    experts_every: int | None = key("every n-th block has experts, the last of each n", range=COUNT, acts=_EXPERTS)
    expert_hidden_dim: int | None = key("hidden width of the SwiGLU in an expert", range=COUNT, acts=_EXPERTS)
    shared_hidden_dim: int | None = key(
        "hidden width of the expert that every token uses; 0: there is none", range=COUNT_OR_ZERO, acts=_EXPERTS
    )
    balance_loss_weight: float | None = key(
        "weight of the load-balancing loss, which is 1 when experts are used evenly", range=NOT_NEGATIVE, acts=_EXPERTS
    )
    router_z_loss_weight: float | None = key(
        "weight of the mean squared logsumexp of the router's logits", range=NOT_NEGATIVE, acts=_EXPERTS
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraPolicy:
    """Low-rank adapters. targets: suffixes of names of linear layers; ("all-linear",) selects all linear layers in lists of layers.

    Raises ValueError for a number out of range.
    """

    rank: int = key(
        "rank of an adapter; 0: the model itself trains", default=8, range=Range(low=0, high=65_536), chosen=True
    )
    alpha: float = key(
        "an adapter's output is multiplied by alpha / rank", default=16.0, range=POSITIVE, acts=_ADAPTERS
    )
    targets: tuple[str, ...] = key(
        "all-linear, or ends of names of linear layers, as in [q_proj,v_proj]",
        default="all-linear",
        acts=_ADAPTERS,
        line=Any,
    )
    dropout: float = key("dropout of an adapter's inputs, a probability", default=0.0, range=BELOW_ONE, acts=_ADAPTERS)

    def __post_init__(self) -> None:
        if isinstance(self.targets, str):
            object.__setattr__(self, "targets", (self.targets,))
        if self.rank == 0:
            raise ValueError("lora.rank=0: must be 1 or more; without adapters, leave the policy out")
        refuse(key_faults(self, section="lora"))

    @property
    def scale(self) -> float:
        """The factor on the product B A."""
        return self.alpha / self.rank


@section
class LoraConfig(LoraPolicy):
    """Low-rank adapters: the model is frozen, and small products added to its linear layers are trained."""
