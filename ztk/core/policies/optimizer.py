"""Which optimizer runs, with which hyperparameters, on which parameters."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from ztk.core.policies.compact import STATES, states_faults
from ztk.core.policies.key import When, chosen, key, key_faults, section
from ztk.core.policies.ranges import (
    BELOW_ONE,
    NOT_NEGATIVE,
    POSITIVE,
    Range,
    member,
    pattern_faults,
    refuse,
)
from ztk.core.policies.zero import ZTK

TORCH = "torch"  # an optimizer object that a script passes; no name for a command line
# Names of weights outside of the blocks in ztk's decoder and in transformers' models, independent of their modules' classes.
ADAM_NAMES = r"(^|\.)(lm_head|head|embed_out|score|classifier|output_projection|w[tp]e|\w*embed\w*)(\.|$)"
_ADAM = {"betas": (0.9, 0.95), "eps": 1e-8}
_DEFAULTS = {
    "adamw": _ADAM,
    "adam": _ADAM,
    "lion": {"betas": (0.9, 0.99)},
    "lamb": {"betas": (0.9, 0.999), "eps": 1e-8, "min_coeff": 0.01, "max_coeff": 10.0},
    "muon": _ADAM
    | {
        "momentum": 0.95,
        "nesterov": True,
        "ns_steps": 5,
        "ns_dtype": "bf16",
        "adjust_lr": "original",
        "adam_names": ADAM_NAMES,
    },
}


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


StateDtype.__doc__ = """optimizer.states: the format of AdamW's states."""


class NewtonSchulzDtype(StrEnum):
    """optimizer.ns_dtype: the dtype of Muon's orthogonalisation."""

    bf16 = "bf16"
    fp32 = "fp32"


@dataclass(frozen=True, slots=True)
class _Betas:
    """Two numbers from 0 to below 1, also in float32, where 0.99999999 becomes 1."""

    brief: str = "two of 0 or more and below 1"

    def fault(self, betas: Sequence[float]) -> str:
        """Why `betas` are refused; "" if they are accepted."""
        if len(betas) != 2:
            return "must be two numbers, such as optimizer.betas=[0.9,0.95]"
        reasons = ((number, BELOW_ONE.fault(beta)) for number, beta in enumerate(betas, start=1))
        return next((f"number {number} {reason}" for number, reason in reasons if reason), "")


OWN = When("optimizer._target_", lambda config, machine: "optimizer" in config.own)
_MUON, _LAMB = chosen("optimizer", "muon"), chosen("optimizer", "lamb")
_MOMENTUM = chosen("optimizer", "sgd", "muon")


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterGroup:
    """Hyperparameters for the parameters whose full name contains a match of the regular expression `pattern`.

    None uses the value of the policy. A `weight_decay` given here applies to every parameter of the group, also to
    parameters that the policy would not decay.

    Raises:
        ValueError: for a pattern that is not a regular expression.
    """

    pattern: str
    lr: float | None = None
    betas: tuple[float, float] | None = None
    eps: float | None = None
    weight_decay: float | None = None
    momentum: float | None = None

    def __post_init__(self) -> None:
        refuse(pattern_faults(self.pattern, key="optimizer.groups pattern"))


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerPolicy:
    """One optimizer for the full model.

    name: adamw (Loshchilov and Hutter 2019, https://arxiv.org/abs/1711.05101), adam (Kingma and Ba 2015,
        https://arxiv.org/abs/1412.6980, weight decay as an L2 term), sgd, lion (Chen et al. 2023,
        https://arxiv.org/abs/2302.06675), muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/): Muon for parameters of
        two dimensions, AdamW for the others, for embeddings and for the head; or lamb (You et al. 2020, https://arxiv.org/abs/1904.00962):
        Adam whose step is scaled, for each parameter, by the ratio of the norms of its weights and its update. torch is for a torch
        optimizer that is passed in addition to the policy: its parameter groups hold the hyperparameters, and the policy only clips.
    betas: defaults to (0.9, 0.95) for adam, adamw and muon's AdamW, (0.9, 0.99) for lion, (0.9, 0.999) for lamb.
    eps: defaults to 1e-8. min_coeff, max_coeff: default to 0.01 and 10, as in DeepSpeed.
    momentum, nesterov: default to 0 and False for sgd, 0.95 and True for muon.
    ns_steps, ns_dtype: default to 5 and "bf16", as in torch.optim.Muon. adjust_lr: defaults to "original", see `ztk.optim.muon.scale_of`.
    adam_names: AdamW updates the weights of nn.Embedding, too. Defaults to `ADAM_NAMES`.
    weight_decay: decays the parameters with two or more dimensions; `decay_all` decays norms and biases too.
    bias_correction: adam, adamw and lamb only. False uses the averages as they are, as the first BERT did (Devlin et al. 2019,
        https://arxiv.org/abs/1810.04805).
    clip_grad_norm: limit of the norm of the full model's averaged gradient.
    skip_unused: leaves the states of these parameters unchanged, too.
    states: see `ztk.core.policies.compact`.
    rounding_seed: seed of the bits that round smaller states; the run's seed.
    groups: the first group whose pattern matches a parameter's name sets its hyperparameters.

    Raises ValueError for a value out of range and for an option that the optimizer does not have.
    """

    name: str = key("the optimizer", default="adamw", chosen=True, line=OptimizerName)
    lr: float = key("learning rate, which the schedule multiplies", default=3e-4, range=NOT_NEGATIVE, chosen=True)
    betas: tuple[float, float] | None = key(
        "decay rates of the two moving averages, as in [0.9,0.95]",
        range=_Betas(),
        acts=chosen("optimizer", "adamw", "adam", "lion", "lamb", "muon"),
        line=list[float],
    )
    eps: float | None = key(
        "added to the denominator", range=POSITIVE, acts=chosen("optimizer", "adamw", "adam", "lamb", "muon")
    )
    weight_decay: float = key(
        "weight decay: with adamw, lion and muon decoupled, with lamb added to the update, else added to the gradient",
        default=0.0,
        range=NOT_NEGATIVE,
        chosen=True,
    )
    momentum: float | None = key("momentum of SGD and Muon", range=BELOW_ONE, acts=_MOMENTUM)
    nesterov: bool | None = key(
        "Nesterov's momentum",
        acts=_MOMENTUM,
        contradicts=lambda config: nesterov_faults(
            nesterov=config.optimizer.nesterov, momentum=config.optimizer.momentum
        ),
    )
    ns_steps: int | None = key(
        "steps of the Newton-Schulz iteration that orthogonalises Muon's matrices",
        range=Range(low=1, high=99),
        acts=_MUON,
    )
    ns_dtype: str | None = key(
        "dtype of its computation and communication: bf16, or fp32 to compare with", acts=_MUON, line=NewtonSchulzDtype
    )
    adjust_lr: str | None = key(
        "factor on optimizer.lr for a matrix; original: sqrt(max(1, rows / columns)); match_rms_adamw: 0.2 sqrt(max(rows, columns))",
        acts=_MUON,
        line=AdjustLr,
    )
    adam_lr: float | None = key(
        "learning rate of AdamW for parameters that Muon does not update: embeddings, head, norms, biases; null: optimizer.lr",
        range=NOT_NEGATIVE,
        acts=_MUON,
        optional=True,
    )
    adam_names: str | None = key(
        "regular expression: AdamW updates matrices whose name contains a match; null: names of heads and embeddings",
        acts=_MUON,
        optional=True,
        contradicts=lambda config: pattern_faults(config.optimizer.adam_names, key="optimizer.adam_names"),
    )
    states: str = key(
        "how AdamW's moments are kept: fp32, bf16 (the second rounded stochastically), or 8bit, with a scale per 32 elements and 24 bits of "
        "the master weights; see docs/recipes.md",
        default="fp32",
        acts=chosen("optimizer", "adamw"),
        line=StateDtype,
    )
    min_coeff: float | None = key(
        "least factor on LAMB's step for a parameter: norm of its weights / norm of its update",
        range=NOT_NEGATIVE,
        acts=_LAMB,
        contradicts=lambda config: coefficient_faults(low=config.optimizer.min_coeff, high=config.optimizer.max_coeff),
    )
    max_coeff: float | None = key("largest such factor", range=POSITIVE, acts=_LAMB)
    clip_grad_norm: float = key(
        "largest global gradient norm; 0: no clipping", default=0.0, range=NOT_NEGATIVE, chosen=True
    )
    skip_unused: bool = key(
        "true: a step leaves parameters alone that got no gradient on any rank, as torch's optimizers do; otherwise their gradient counts as "
        "zero, and momentum and decay move them",
        default=False,
        acts=ZTK,
        optional=True,
    )
    decay_all: bool = False
    bias_correction: bool = True
    rounding_seed: int = 0
    groups: tuple[ParameterGroup, ...] = ()

    def __post_init__(self) -> None:
        if self.name != TORCH:
            member(self.name, of=OptimizerName, key="optimizer.name")
        object.__setattr__(self, "groups", tuple(self.groups))
        for name, default in ({"momentum": 0.0, "nesterov": False} | _DEFAULTS.get(self.name, {})).items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, default)
        refuse(self._faults())

    def _faults(self) -> Iterator[str]:
        yield from states_faults(self.states, name=self.name)
        yield from key_faults(self, section="optimizer")
        if not self.bias_correction and "eps" not in _DEFAULTS.get(self.name, {}):
            yield f"optimizer.bias_correction=false has no effect with optimizer={self.name}: leave it out, or use optimizer=adamw"
        yield from nesterov_faults(nesterov=self.nesterov, momentum=self.momentum)
        yield from coefficient_faults(low=self.min_coeff, high=self.max_coeff)
        if self.name == "muon":
            member(self.adjust_lr, of=AdjustLr, key="optimizer.adjust_lr")
            member(self.ns_dtype, of=NewtonSchulzDtype, key="optimizer.ns_dtype")
        yield from pattern_faults(self.adam_names, key="optimizer.adam_names")
        for group in self.groups:
            place = f"optimizer.groups[{group.pattern!r}]"
            yield from key_faults(group, keys=OptimizerPolicy, section="optimizer", place=place, of=self)
            if self.name == "sgd" and bool(group.momentum) and not self.momentum:
                yield (
                    f"optimizer.groups momentum={group.momentum} for {group.pattern!r} needs a momentum buffer: "
                    "set optimizer.momentum too, to a small value if other parameters need little"
                )


@section
class OptimizerConfig(OptimizerPolicy):
    """The update of the parameters."""

    elementwise: bool | None = key(
        "true: the own optimizer updates every element of a parameter from that element's weight, gradient and states alone, so it runs over "
        "shards; otherwise it steps full parameters, with full states on every rank",
        acts=OWN,
        optional=True,
    )
    needs_closure: bool | None = key(
        "true: the own optimizer's step(closure) evaluates the loss again; not needed where the argument has no default",
        acts=OWN,
        optional=True,
    )


def coefficient_faults(*, low: float | None, high: float | None) -> Iterator[str]:
    """Faults of the bounds of lamb's factor."""
    if low is not None and high is not None and low > high:
        yield f"optimizer.min_coeff={low}: is above optimizer.max_coeff={high}; use optimizer.min_coeff={high} or less"


def nesterov_faults(*, nesterov: bool | None, momentum: float | None) -> Iterator[str]:
    """Nesterov's method needs momentum."""
    if nesterov and not momentum:
        yield (
            "optimizer.nesterov=true has no effect without momentum: use optimizer.momentum=0.9, or optimizer.nesterov=false"
        )
