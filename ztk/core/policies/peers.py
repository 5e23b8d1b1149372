"""Models of how other libraries run the same step, to compare a plan with their published runs.

A plan traces ztk's own operations. For a peer it traces the operations that the peer runs instead (`ztk.planner.peer`): the memory that they
keep and their traffic follow from the trace.
"""

from dataclasses import dataclass
from enum import StrEnum


class Way(StrEnum):
    """How operations on rows are computed."""

    ztk = "ztk"  # by ztk's kernels
    eager = "eager"  # by PyTorch's operations, one after the other
    flash = "flash"  # as eager, with the norms, rotary positions and attention of the flash-attn package
    compiled = "compiled"  # by kernels that torch.compile generates
    tuned = "tuned"  # by the vendor's library, with its attention, and with a layer's collectives overlapped with its products


class Logits(StrEnum):
    """How the loss reads the logits, and which copies of them exist."""

    ztk = "ztk"  # 16 bits; the gradient is written over them, or they exist in chunks
    eager = "eager"  # copied to fp32, then torch's cross entropy (torchtitan, train.py at 9dec370: `pred.flatten(0, 1).float()`)
    compiled = (
        "compiled"  # the same in one pass of torch.compile over 16 bits (torchtitan, components/loss.py at e7c0cae)
    )
    softmax = "softmax"  # copied to fp32, the softmax is kept (nanotron, parallel/tensor_parallel/functional.py; Megatron-LM likewise)
    held = "held"  # torch's cross entropy in 16 bits of all columns, and the script holds the logits (KempnerForge, scripts/train.py)


class Kept(StrEnum):
    """The results that recompute=selective keeps."""

    products = "products"  # the results of all products and of attention
    half = (
        "half"  # only every second product's (torchtitan, parallelisms/parallelize_llama.py at 9dec370: `mm_count % 2`)
    )


class Gradients(StrEnum):
    """Where gradients are until they are reduced, at stages 0 and 1."""

    ztk = "ztk"  # in the buffers that are reduced
    ddp = "ddp"  # besides in .grad until the backward has ended and in the buckets of torch's DistributedDataParallel (nanotron, trainer.py)


# Transformer Engine and cuDNN, relative to the rates of PyTorch's operations in conf/hardware/. Fitted to the runs of Megatron-LM and NeMo in
# docs/published_runs.md that are not held out. FlashAttention-3 (arXiv 2407.08608, figures 5 and 6) reaches 1.5 to 2.0 times
# FlashAttention-2's rate on H100.
_TUNED_PRODUCTS, _TUNED_ATTENTION = 1.08, 2.6
_TUNED_CASTS = 0.25  # of the bytes of casts to fp8: most are fused with the operation before
_TUNED_HIDDEN = 0.8  # of a layer's collectives inside a node, which are cut into parts and sent while products run
# nanotron's column-parallel layers send while they multiply in their backward (`_ColumnLinearAsyncCommunication`): two gathers and two
# reduce-scatters of a layer's ten collectives.
_FLASH_HIDDEN = 0.4

# torchao's Float8Linear gathers its input in fp8 with tensor parallelism, and its weight with enable_fsdp_float8_all_gather (torchtitan,
# docs/float8.md at 9dec370). Embedding and head stay in 16 bits there; a plan halves all gathers.
_FP8_GATHERED = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Peer:
    """way: how operations are computed. fp8: linear layers multiply in fp8; attention and the head do not. fp8_gathers: parameters and the
    inputs of linear layers are gathered in fp8. again: the share of a forward's products that a backward computes again in addition to the
    plan's own recomputation. logits, kept, gradients: tensors held in memory."""

    way: Way = Way.ztk
    fp8: bool = False
    fp8_gathers: bool = False
    again: float = 0.0
    logits: Logits = Logits.ztk
    kept: Kept = Kept.products
    gradients: Gradients = Gradients.ztk

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
    def gathered(self) -> float:
        """Bytes of an all-gather, relative to an all-gather in 16 bits."""
        return _FP8_GATHERED if self.fp8_gathers else 1.0

    @property
    def hidden(self) -> float:
        """The fraction of a gather or reduce-scatter inside a node that overlaps with products."""
        return {Way.tuned: _TUNED_HIDDEN, Way.flash: _FLASH_HIDDEN}.get(self.way, 0.0)
