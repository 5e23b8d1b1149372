"""Models of how other libraries run the same step, to compare a plan with their published runs.

A plan traces ztk's own operations. Eager PyTorch computes some of them as several operations, each of which reads and writes memory;
torch.compile fuses those again. The factors are counted from the operations of torch 2.5 per number of the input, in bytes: an RMSNorm in bf16
reads and writes 4 fused, and 34 eager (to fp32, square, mean, rsqrt, product, to bf16, product).
"""

from dataclasses import dataclass
from enum import StrEnum


class Way(StrEnum):
    """How operations on rows are computed."""

    ztk = "ztk"  # by ztk's kernels
    eager = "eager"  # by PyTorch's operations, one after the other
    compiled = "compiled"  # by kernels that torch.compile generates
    tuned = "tuned"  # by the vendor's library, with its attention, and with a layer's collectives overlapped with its products


# Bytes that eager PyTorch moves, relative to ztk's kernel.
_EAGER = {
    "rms_norm": 34 / 4,
    "rms_norm_backward": 46 / 6,
    "layer_norm": 1.0,  # one kernel in PyTorch, too
    "layer_norm_backward": 1.5,
    "rope": 20 / 4,
    "swiglu": 10 / 6,
    "swiglu_backward": 18 / 10,
    "geglu": 10 / 6,
    "geglu_backward": 18 / 10,
}
# Transformer Engine and cuDNN, relative to the rates of PyTorch's operations in conf/hardware/. Fitted to the runs of Megatron-LM and NeMo in
# docs/published_runs.md that are not held out. FlashAttention-3 (arXiv 2407.08608, figures 5 and 6) reaches 1.5 to 2.0 times
# FlashAttention-2's rate on H100.
_TUNED_PRODUCTS, _TUNED_ATTENTION = 1.08, 2.6
_TUNED_CASTS = 0.25  # of the bytes of casts to fp8: most are fused with the operation before
_TUNED_HIDDEN = 0.8  # of a layer's collectives inside a node, which are cut into parts and sent while products run


@dataclass(frozen=True, kw_only=True, slots=True)
class Peer:
    """way: how operations are computed. fp8: linear layers multiply in fp8; attention and the head do not. again: the share of a forward's
    products that a backward computes again in addition to the plan's own recomputation: 0.5 for torchtitan's selective recomputation."""

    way: Way = Way.ztk
    fp8: bool = False
    again: float = 0.0

    def passes(self, kind: str) -> float:
        """The bytes that an operation moves, relative to ztk's kernel."""
        return _EAGER.get(kind, 1.0) if self.way is Way.eager else 1.0

    @property
    def product_gain(self) -> float:
        """Rate of products, relative to the hardware's description."""
        return _TUNED_PRODUCTS if self.way is Way.tuned else 1.0

    @property
    def casts(self) -> float:
        """Bytes that casts to fp8 move, relative to the bytes of operands and result."""
        return _TUNED_CASTS if self.way is Way.tuned else 1.0

    @property
    def attention_gain(self) -> float:
        """Rate of attention, relative to the hardware's description."""
        return _TUNED_ATTENTION if self.way is Way.tuned else 1.0

    @property
    def hidden(self) -> float:
        """The fraction of a gather or reduce-scatter inside a node that overlaps with products."""
        return _TUNED_HIDDEN if self.way is Way.tuned else 0.0
