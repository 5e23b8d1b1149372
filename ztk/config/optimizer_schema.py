"""The keys of `optimizer`: the update of the parameters."""

from dataclasses import dataclass
from enum import StrEnum

from ztk.config.key import key
from ztk.core.policies.compact import STATES


class OptimizerName(StrEnum):
    """optimizer.name: the update."""

    adamw = "adamw"
    adam = "adam"
    sgd = "sgd"
    lion = "lion"
    lamb = "lamb"
    muon = "muon"


class AdjustLr(StrEnum):
    """optimizer.adjust_lr: Muon's factor on the rate of a matrix [rows, columns], named as in torch.optim.Muon."""

    original = "original"  # sqrt(max(1, rows / columns))
    match_rms_adamw = "match_rms_adamw"  # 0.2 sqrt(max(rows, columns)): updates as large as AdamW's


# Named as on the command line, and `8bit` is no name that a class body can have.
# pyrefly: ignore[invalid-argument]  # the members follow the policy
StateDtype = StrEnum("StateDtype", [(word, word) for word in STATES])
StateDtype.__doc__ = """optimizer.states: in what AdamW's states are kept."""


class NewtonSchulzDtype(StrEnum):
    """optimizer.ns_dtype: in which Muon orthogonalises."""

    bf16 = "bf16"
    fp32 = "fp32"


@dataclass(kw_only=True)
class OptimizerConfig:
    """The update of the parameters."""

    name: OptimizerName = key("the optimizer")
    lr: float = key("learning rate, which the schedule multiplies")
    betas: list[float] | None = key("decay rates of the two moving averages, as in [0.9,0.95]", default=None)
    eps: float | None = key("added to the denominator", default=None)
    weight_decay: float = key(
        "weight decay: with adamw, lion and muon decoupled, with lamb added to the update, else added to the gradient"
    )
    momentum: float | None = key("momentum of SGD and Muon", default=None)
    nesterov: bool | None = key("Nesterov's momentum", default=None)
    ns_steps: int | None = key("steps of the Newton-Schulz iteration that orthogonalises Muon's matrices", default=None)
    ns_dtype: NewtonSchulzDtype | None = key(
        "what it computes in and what is sent for it: bf16, or fp32 to compare with", default=None
    )
    adjust_lr: AdjustLr | None = key(
        "factor on optimizer.lr for a matrix; original: sqrt(max(1, rows / columns)); match_rms_adamw: 0.2 sqrt(max(rows, columns))",
        default=None,
    )
    adam_lr: float | None = key(
        "learning rate of what Muon leaves to AdamW: embeddings, head, norms, biases; null: optimizer.lr", default=None
    )
    adam_names: str | None = key(
        "regular expression: AdamW updates matrices whose name contains a match; null: names of heads and embeddings",
        default=None,
    )
    states: StateDtype | None = key(
        "how AdamW's moments are kept: fp32, bf16 (the second rounded stochastically), or 8bit, with a scale per 32 elements and 24 bits of "
        "the master weights; see docs/recipes.md",
        default=None,
    )
    min_coeff: float | None = key(
        "least factor on LAMB's step for a parameter: the norm of its weights over that of its update", default=None
    )
    max_coeff: float | None = key("largest such factor", default=None)
    clip_grad_norm: float = key("largest global gradient norm; 0: no clipping")
    skip_unused: bool | None = key(
        "true: a step leaves parameters alone that got no gradient on any rank, as torch's optimizers do; otherwise their gradient counts as "
        "zero, and momentum and decay move them",
        default=None,
    )
