"""Kernels and the ops made of them: `ops` has one op per file, `launch` starts kernels, and `shared` has the code of several ops.

The generic tests, the ahead-of-time report (`python -m tests.kernels.aot`) and the benchmark run from `ALL_OPS`.
"""

from ztk.kernels.launch.library import (
    Backend,
    behind_step,
    get_backend,
    needs_reference,
    op_names,
    operator,
    set_backend,
)
from ztk.kernels.ops import ALL_OPS
from ztk.kernels.ops.adamw import adamw
from ztk.kernels.ops.adamw_8bit import adamw_8bit, decode_master, decode_moments, encode_master
from ztk.kernels.ops.adamw_bf16 import adamw_bf16
from ztk.kernels.ops.adamw_stochastic import adamw_stochastic
from ztk.kernels.ops.attention import attention, attention_varlen
from ztk.kernels.ops.attention_blocks import PackedPair, Pair, Part, attention_block, attention_block_backward
from ztk.kernels.ops.cache_rows import cache_rows
from ztk.kernels.ops.cast_copy import cast_copy
from ztk.kernels.ops.copy_blocks import copy_blocks
from ztk.kernels.ops.cross_entropy import cross_entropy
from ztk.kernels.ops.draw_rows import draw_rows
from ztk.kernels.ops.float8 import float8_codes, float8_largest
from ztk.kernels.ops.geglu import geglu
from ztk.kernels.ops.grouped_gemm import grouped_matmul, grouped_matmul_pair
from ztk.kernels.ops.layer_norm import layer_norm
from ztk.kernels.ops.linear_cross_entropy import bytes_kept, linear_cross_entropy
from ztk.kernels.ops.linear_logits import linear_logit_loss, logit_loss
from ztk.kernels.ops.linear_logprob import chosen_logprobs, linear_logprob, linear_token_loss
from ztk.kernels.ops.linear_rows import gated_rows, linear_rows
from ztk.kernels.ops.lion import lion
from ztk.kernels.ops.moe_combine import moe_combine
from ztk.kernels.ops.moe_routing import Routing, Slots, moe_route, moe_slots
from ztk.kernels.ops.paged_attention import TILE_COLUMNS, make_tiles, paged_attention, positions_per_tile
from ztk.kernels.ops.quantize import dequantize, dequantize_reduce, quantize, quantized_bytes
from ztk.kernels.ops.rms_norm import rms_norm
from ztk.kernels.ops.rope import rope
from ztk.kernels.ops.router_losses import router_losses
from ztk.kernels.ops.segment_scan import segment_scan
from ztk.kernels.ops.select_rows import select_rows
from ztk.kernels.ops.sgd import sgd
from ztk.kernels.ops.sharded_cross_entropy import sharded_cross_entropy
from ztk.kernels.ops.step_control import step_control
from ztk.kernels.ops.sum_of_squares import sum_of_squares
from ztk.kernels.ops.swiglu import swiglu
from ztk.kernels.ops.symmetric_product import symmetric_product
from ztk.kernels.shared.activation import activate_cpu
from ztk.kernels.shared.control import (
    CONTROL_COLUMNS,
    HYPER_COLUMNS,
    SETTINGS_SIZE,
    STATE_SIZE,
    Control,
    Hyper,
    Setting,
    State,
)
from ztk.kernels.shared.cpu import is_cut_evenly
from ztk.kernels.shared.spec import OpSpec
from ztk.kernels.shared.tiles import UpdatePart, tiles_of
from ztk.kernels.shared.weight_formats import quantise_weight
from ztk.kernels.times import Ceilings, KernelTime, KernelTimes

__all__ = [
    "ALL_OPS",
    "CONTROL_COLUMNS",
    "HYPER_COLUMNS",
    "SETTINGS_SIZE",
    "STATE_SIZE",
    "TILE_COLUMNS",
    "Backend",
    "Ceilings",
    "Control",
    "Hyper",
    "KernelTime",
    "KernelTimes",
    "OpSpec",
    "PackedPair",
    "Pair",
    "Part",
    "Routing",
    "Setting",
    "Slots",
    "State",
    "UpdatePart",
    "activate_cpu",
    "adamw",
    "adamw_8bit",
    "adamw_bf16",
    "adamw_stochastic",
    "attention",
    "attention_block",
    "attention_block_backward",
    "attention_varlen",
    "behind_step",
    "bytes_kept",
    "cache_rows",
    "cast_copy",
    "chosen_logprobs",
    "copy_blocks",
    "cross_entropy",
    "decode_master",
    "decode_moments",
    "dequantize",
    "dequantize_reduce",
    "draw_rows",
    "encode_master",
    "float8_codes",
    "float8_largest",
    "gated_rows",
    "geglu",
    "get_backend",
    "grouped_matmul",
    "grouped_matmul_pair",
    "is_cut_evenly",
    "layer_norm",
    "linear_cross_entropy",
    "linear_logit_loss",
    "linear_logprob",
    "linear_rows",
    "linear_token_loss",
    "lion",
    "logit_loss",
    "make_tiles",
    "moe_combine",
    "moe_route",
    "moe_slots",
    "needs_reference",
    "op_names",
    "operator",
    "paged_attention",
    "positions_per_tile",
    "quantise_weight",
    "quantize",
    "quantized_bytes",
    "rms_norm",
    "rope",
    "router_losses",
    "segment_scan",
    "select_rows",
    "set_backend",
    "sgd",
    "sharded_cross_entropy",
    "step_control",
    "sum_of_squares",
    "swiglu",
    "symmetric_product",
    "tiles_of",
]
