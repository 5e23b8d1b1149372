"""The kernels: one op per file, each with its Triton kernels, CPU implementation, torch reference and `SPEC`.

`ALL_OPS` is what the generic tests, the AOT report (`python -m ztk.kernels.aot`) and the benchmark run from.
"""

from ztk.kernels import adamw as _adamw
from ztk.kernels import adamw_8bit as _adamw_8bit
from ztk.kernels import adamw_bf16 as _adamw_bf16
from ztk.kernels import adamw_stochastic as _adamw_stochastic
from ztk.kernels import attention as _attention
from ztk.kernels import cache_rows as _cache_rows
from ztk.kernels import cast_copy as _cast_copy
from ztk.kernels import copy_blocks as _copy_blocks
from ztk.kernels import cross_entropy as _cross_entropy
from ztk.kernels import draw_rows as _draw_rows
from ztk.kernels import geglu as _geglu
from ztk.kernels import grouped_gemm as _grouped_gemm
from ztk.kernels import layer_norm as _layer_norm
from ztk.kernels import linear_cross_entropy as _linear_cross_entropy
from ztk.kernels import linear_logprob as _linear_logprob
from ztk.kernels import linear_rows as _linear_rows
from ztk.kernels import lion as _lion
from ztk.kernels import moe_combine as _moe_combine
from ztk.kernels import moe_routing as _moe_routing
from ztk.kernels import paged_attention as _paged_attention
from ztk.kernels import quantize as _quantize
from ztk.kernels import rms_norm as _rms_norm
from ztk.kernels import rope as _rope
from ztk.kernels import router_losses as _router_losses
from ztk.kernels import segment_scan as _segment_scan
from ztk.kernels import select_rows as _select_rows
from ztk.kernels import sgd as _sgd
from ztk.kernels import sharded_cross_entropy as _sharded_cross_entropy
from ztk.kernels import step_control as _step_control
from ztk.kernels import sum_of_squares as _sum_of_squares
from ztk.kernels import swiglu as _swiglu
from ztk.kernels._activation import activate_cpu
from ztk.kernels._attention_blocks import PackedPair, Pair, Part, attention_block, attention_block_backward
from ztk.kernels._control import (
    CONTROL_COLUMNS,
    HYPER_COLUMNS,
    SETTINGS_SIZE,
    STATE_SIZE,
    Control,
    Hyper,
    Setting,
    State,
)
from ztk.kernels._cpu import is_cut_evenly
from ztk.kernels._library import Backend, behind_step, get_backend, op_names, operator, set_backend
from ztk.kernels._spec import AotCase, OpSpec
from ztk.kernels._tiles import UpdatePart, tiles_of
from ztk.kernels._times import Ceilings, KernelTime, KernelTimes
from ztk.kernels._weight_formats import quantise_weight
from ztk.kernels.adamw import adamw
from ztk.kernels.adamw_8bit import adamw_8bit, decode_master, decode_moments, encode_master
from ztk.kernels.adamw_bf16 import adamw_bf16
from ztk.kernels.adamw_stochastic import adamw_stochastic
from ztk.kernels.attention import attention, attention_varlen
from ztk.kernels.cache_rows import cache_rows
from ztk.kernels.cast_copy import cast_copy
from ztk.kernels.copy_blocks import copy_blocks
from ztk.kernels.cross_entropy import cross_entropy
from ztk.kernels.draw_rows import draw_rows
from ztk.kernels.geglu import geglu
from ztk.kernels.grouped_gemm import grouped_matmul, grouped_matmul_pair
from ztk.kernels.layer_norm import layer_norm
from ztk.kernels.linear_cross_entropy import bytes_kept, linear_cross_entropy
from ztk.kernels.linear_logprob import chosen_logprobs, linear_logprob, linear_token_loss
from ztk.kernels.linear_rows import gated_rows, linear_rows
from ztk.kernels.lion import lion
from ztk.kernels.moe_combine import moe_combine
from ztk.kernels.moe_routing import Routing, Slots, moe_route, moe_slots
from ztk.kernels.paged_attention import TILE_COLUMNS, make_tiles, paged_attention, positions_per_tile
from ztk.kernels.quantize import dequantize, dequantize_reduce, quantize, quantized_bytes
from ztk.kernels.rms_norm import rms_norm
from ztk.kernels.rope import rope
from ztk.kernels.router_losses import router_losses
from ztk.kernels.segment_scan import segment_scan
from ztk.kernels.select_rows import select_rows
from ztk.kernels.sgd import sgd
from ztk.kernels.sharded_cross_entropy import sharded_cross_entropy
from ztk.kernels.step_control import step_control
from ztk.kernels.sum_of_squares import sum_of_squares
from ztk.kernels.swiglu import swiglu

ALL_OPS: tuple[OpSpec, ...] = (
    _step_control.SPEC,
    _sum_of_squares.SPEC,
    _adamw.SPEC,
    _sgd.SPEC,
    _lion.SPEC,
    _cast_copy.SPEC,
    _swiglu.SPEC,
    _geglu.SPEC,
    _rms_norm.SPEC,
    _rope.SPEC,
    _cross_entropy.SPEC,
    _quantize.SPEC,
    _quantize.DEQUANTIZE_SPEC,
    _quantize.DEQUANTIZE_REDUCE_SPEC,
    _layer_norm.SPEC,
    _adamw_bf16.SPEC,
    _adamw_8bit.SPEC,
    _adamw_stochastic.SPEC,
    _attention.SPEC,
    _attention.VARLEN_SPEC,
    _moe_routing.SPEC,
    _grouped_gemm.SPEC,
    _grouped_gemm.PAIR_SPEC,
    _linear_cross_entropy.SPEC,
    _moe_combine.SPEC,
    _segment_scan.SPEC,
    _linear_logprob.SPEC,
    _linear_rows.SPEC,
    _linear_rows.GATED_SPEC,
    _cache_rows.SPEC,
    _paged_attention.SPEC,
    _copy_blocks.SPEC,
    _sharded_cross_entropy.SPEC,
    _router_losses.SPEC,
    _draw_rows.SPEC,
    _select_rows.SPEC,
)

__all__ = [
    "ALL_OPS",
    "CONTROL_COLUMNS",
    "HYPER_COLUMNS",
    "SETTINGS_SIZE",
    "STATE_SIZE",
    "TILE_COLUMNS",
    "AotCase",
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
    "gated_rows",
    "geglu",
    "get_backend",
    "grouped_matmul",
    "grouped_matmul_pair",
    "is_cut_evenly",
    "layer_norm",
    "linear_cross_entropy",
    "linear_logprob",
    "linear_rows",
    "linear_token_loss",
    "lion",
    "make_tiles",
    "moe_combine",
    "moe_route",
    "moe_slots",
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
    "tiles_of",
]
