"""The dtypes of a run. Dtypes of optimizer states belong to the optimizer's policy."""

from dataclasses import dataclass
from typing import Any, Self

import torch

from ztk.core.policies.loss_scale import LossScalePolicy
from ztk.core.policies.precision import Float8Recipe, MasterWeights
from ztk.core.policies.ranges import member

# The words of the command line.
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class PrecisionPolicy:
    """The dtypes of a run.

    dtype: parameters, activations and gradients as the model computes them.
    reduce_dtype: dtype in which gradients are summed over ranks. Defaults to `dtype`.
    master: the master weights: "fp32", or "stochastic": the bfloat16 parameters themselves, rounded stochastically, with 8 bits more if the
        optimizer's states have 8 bits. Defaults to "stochastic" with optimizer.states=8bit, else "fp32". See `ztk.core.policies.compact`.
    autocast: the 16-bit dtype in which the caller computes under torch.autocast, which casts by itself; parameters and gradients keep
    `dtype`.
    bf16_master: bfloat16 parameters are their own master weights, 2 bytes per parameter instead of 6: an update smaller than 2^-9 of a
    weight
        is lost. bf16_states: the optimizer's states are bfloat16, too. Otherwise both are float32. As DeepSpeed's keys: computed in
        float32, rounded to nearest.
    loss_scale: defaults to `LossScalePolicy()` for float16, autocast's too, and to `LossScalePolicy.off()` otherwise; after construction it
    is
        never None.
    float8: how linear layers inside blocks multiply in float8, see `ztk.nn.float8`. By default they do not. Needs `dtype` bfloat16.

    Raises ValueError for other dtypes, and for loss scaling where it would do nothing but cost (bfloat16 and float32
    have the exponent range of float32).
    """

    dtype: torch.dtype = torch.float32
    reduce_dtype: torch.dtype | None = None
    autocast: torch.dtype | None = None
    bf16_master: bool = False
    bf16_states: bool = False
    loss_scale: LossScalePolicy | None = None
    master: str | None = None
    float8: Float8Recipe | None = None

    def __post_init__(self) -> None:
        words = ", ".join(DTYPES)
        if self.dtype not in _NAMES:
            raise ValueError(f"precision.dtype={self.dtype}: must be one of {words}")
        if self.reduce_dtype is not None and self.reduce_dtype not in _NAMES:
            raise ValueError(
                f"precision.reduce_dtype={self.reduce_dtype}: must be one of {words}, or null for the model's dtype"
            )
        if self.master is not None:
            member(self.master, of=MasterWeights, key="precision.master", otherwise=", or null")
        if self.bf16_master and self.master is not None:
            raise ValueError(
                f"precision.bf16_master=true: precision.master={self.master} contradicts it about the master weights; leave one of them out"
            )
        if self.autocast not in (None, torch.bfloat16, torch.float16):
            raise ValueError(f"precision.autocast={self.autocast}: must be torch.bfloat16, torch.float16 or None")
        if self.bf16_master and self.dtype is not torch.bfloat16:
            raise ValueError(
                f"precision.bf16_master=true has no effect with precision.dtype={_NAMES[self.dtype]}: leave it out, or use precision=bf16"
            )
        if self.bf16_states and not self.bf16_master:
            raise ValueError(
                "precision.bf16_states=true requires precision.bf16_master=true: set it, too, or leave both out"
            )
        if self.float8 is not None:
            object.__setattr__(
                self, "float8", member(self.float8, of=Float8Recipe, key="precision.float8", otherwise=", or null")
            )
            if self.dtype is not torch.bfloat16 or self.autocast is not None:
                other = _NAMES[self.dtype] if self.autocast is None else f"bf16 under torch.autocast of {self.autocast}"
                raise ValueError(
                    f"precision.float8={self.float8}: float8 products need bfloat16 parameters without autocast, and these are {other}; use "
                    "precision=fp8, or leave precision.float8 out"
                )
        needs_scale = torch.float16 in (self.dtype, self.autocast)
        if self.loss_scale is None:
            object.__setattr__(self, "loss_scale", LossScalePolicy() if needs_scale else LossScalePolicy.off())
        elif not needs_scale and self.loss_scale != LossScalePolicy.off():
            kind = "dynamic" if self.loss_scale.dynamic else f"{self.loss_scale.initial}"
            raise ValueError(
                f"precision.loss_scale={kind} has no effect with precision.dtype={_NAMES[self.dtype]}: leave it out, "
                "or use precision=fp16"
            )

    @classmethod
    def named(
        cls,
        name: str,
        *,
        reduce_dtype: str | None = None,
        **options: Any,
    ) -> Self:
        """The policy for the words of the command line: fp32, bf16 or fp16. options: other fields. Raises ValueError for other words."""
        for key, word in (("dtype", name), ("reduce_dtype", reduce_dtype)):
            if word is not None and word not in DTYPES:
                raise ValueError(f"precision.{key}={word}: must be one of {', '.join(DTYPES)}")
        reduce = None if reduce_dtype is None else DTYPES[reduce_dtype]
        return cls(dtype=DTYPES[name], reduce_dtype=reduce, **options)

    @property
    def states_dtype(self) -> torch.dtype:
        """Dtype of the optimizer's states if `bf16_master` is set."""
        return torch.bfloat16 if self.bf16_states else torch.float32

    @property
    def name(self) -> str:
        """The dtype in the word of the command line."""
        return _NAMES[self.dtype]

    @property
    def gradient_dtype(self) -> torch.dtype:
        """The dtype that gradients have on the wire and when the optimizer reads them."""
        return self.dtype if self.reduce_dtype is None else self.reduce_dtype
