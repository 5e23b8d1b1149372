"""Plants 93 mistakes into copies of the kernels and reports how many survive the tests' checks: `python -m tests.kernels.plant_mistakes`.

Each mistake is a small edit of a kind that code reviews miss: a mask, an offset, a term, a value carried between rounds of a loop, the width
of a reduction, a dtype, two programs on one row. The checks are those in tests/kernels: every shape, variant and `reach` of the op against its
reference, on the interpreter. Each op of an unchanged copy must pass one of them first. The exit code is 1 if a mistake survives. `--only TEXT`
runs the mistakes whose line contains TEXT, `--every N` every Nth of these. `--known-good` first runs all checks on unchanged copies, as
tests/kernels/test_ops.py does with the source itself.
"""

import argparse
import os
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from functools import partial
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"

import pytest
import torch

from tests.interpreter import speed_up_interpreter
from tests.kernels import test_adamw_variants
from tests.kernels.planting import planted, spec_of
from tests.kernels.reach import REACH
from tests.kernels.test_ops import check_against_reference, check_reach


@dataclass(frozen=True, kw_only=True, slots=True)
class Mistake:
    """In `file`, the nth `old` becomes `new`; `op` is the op whose checks must fail."""

    kind: str
    op: str
    file: str
    old: str
    new: str
    nth: int = 0

    def __str__(self) -> str:
        return f"{self.kind:15} {self.op:20} {self.file:28} {self.old.strip()[:44]!r} -> {self.new.strip()[:44]!r}"


def _mistakes() -> tuple[Mistake, ...]:
    rows = (
        # kind, op, file, old, new, nth
        ("mask", "rms_norm", "ops/rms_norm.py", "m_n = o_n < N\n", "m_n = o_n < N - 1\n", 0),
        ("mask", "cross_entropy", "ops/cross_entropy.py", "return o_n, o_n < V", "return o_n, o_n < V - 1", 0),
        ("mask", "attention", "shared/attention_tiles.py", "o_n > o_m - window", "o_n >= o_m - window", 0),
        ("mask", "grouped_matmul", "shared/grouped_tiles.py", "m_k = i_k + o_k < D", "m_k = i_k + o_k < D - 1", 1),
        ("mask", "moe_route", "ops/moe_routing.py", "(i_b + o_b < num_blocks)", "(i_b + o_b < num_blocks - 1)", 0),
        ("offset", "rope", "ops/rope.py", "p_out[:, None] + HALF + o_half", "p_out[:, None] + o_half", 0),
        ("offset", "cross_entropy", "ops/cross_entropy.py", "tail - BLOCK - first", "tail - first - LANES", 0),
        ("offset", "layer_norm", "shared/wide_norm.py", "o_n = start + tl.arange(0, BLOCK)", "o_n = tl.arange(0, BLOCK)", 2),
        ("offset", "adamw_bf16", "shared/adam.py", "random_bits(shift + o_n", "random_bits(o_n", 0),
        ("offset", "attention", "ops/attention_backward.py", "i_key // BLOCK_M * BLOCK_M", "i_key // BLOCK_M * BLOCK_M + BLOCK_M", 0),
        ("term", "adamw", "shared/adam.py", "inverse_bias2 + eps", "inverse_bias2", 0),
        ("term", "rms_norm", "ops/rms_norm.py", "b_hat * b_mean[:, None]", "b_hat", 0),
        ("term", "layer_norm", "ops/layer_norm.py", " - b_mean_g[:, None]", "", 0),
        ("term", "attention", "ops/attention_backward.py", "b_zero) - b_delta[:, None]", "b_zero)", 0),
        ("term", "moe_route", "ops/moe_routing.py", "other=0.0) - b_mean)", "other=0.0))", 0),
        ("carry", "moe_route", "ops/moe_routing.py", "b_count += tl.sum(b_partial, axis=0)", "b_count = tl.sum(b_partial, axis=0)", 0),
        ("carry", "cross_entropy", "ops/cross_entropy.py", "b_sum = b_sum * b_scale", "b_sum = b_sum", 0),
        ("carry", "attention", "ops/attention.py", "b_acc * b_shrink[:, None]", "b_acc", 0),
        ("carry", "sum_of_squares", "ops/sum_of_squares.py", "start += num_programs.to(tl.int64) * BLOCK", "start += BLOCK", 0),
        ("carry", "grouped_matmul", "shared/grouped_tiles.py", "tl.cast(i_k, tl.int64) * stride_d", "tl.cast(i_k, tl.int64)", 0),
        ("offset", "grouped_matmul", "shared/grouped_tiles.py", "[i_e, i_k, i_n]", "[tl.maximum(i_e, 1), i_k, i_n]", 0),
        ("offset", "grouped_matmul", "shared/grouped_tiles.py", "[i_e, i_n, i_k]", "[tl.maximum(i_e, 1), i_n, i_k]", 0),
        ("term", "grouped_matmul", "shared/grouped_tiles.py", ".reshape([BLOCK_N, BLOCK_K]))", ".reshape([BLOCK_K, BLOCK_N]), 0, 1)", 0),
        ("mask", "grouped_matmul", "ops/grouped_gemm.py", "Layout(shape=shape,", "Layout(shape=(shape[0], shape[1], shape[2] - 1),", 0),
        ("mask", "grouped_matmul", "ops/grouped_gemm.py", "Layout(shape=shape,", "Layout(shape=(shape[0] - 1, *shape[1:]),", 0),
        ("term", "grouped_matmul_pair", "shared/grouped_tiles.py", "w = weight2", "w = weight", 0),
        ("reduction width", "rms_norm", "shared/rows.py", "range(0, P, ROWS)", "range(0, ROWS, ROWS)", 0),
        ("reduction width", "layer_norm", "ops/layer_norm.py", "range(0, num_partials, BLOCK_P)", "range(0, BLOCK_P, BLOCK_P)", 0),
        ("reduction width", "sum_of_squares", "ops/sum_of_squares.py", "mask=o_p < P", "mask=o_p < P // 2 + 1", 0),
        ("reduction width", "adamw_8bit", "ops/adamw_8bit.py", "tl.max(b_size, axis=1)", "tl.sum(b_size, axis=1)", 0),
        ("dtype", "adamw_bf16", "shared/rounding.py", "b_random & 0xFFFF", "b_random & 0xFFF", 0),
        ("dtype", "rms_norm", "ops/rms_norm.py", "b_y = b_x * b_rstd[:, None]", "b_y = b_x.to(tl.float16).to(tl.float32) * b_rstd[:, None]", 0),
        ("dtype", "quantize", "ops/quantize.py", "b_code & ((1 << BITS) - 1)", "b_code & ((1 << (BITS - 1)) - 1)", 0),
        ("two on one row", "rms_norm", "ops/rms_norm.py", "partial_ptr + i_program * N", "partial_ptr + i_program // 2 * N", 0),
        ("two on one row", "layer_norm", "ops/layer_norm.py", "tl.num_programs(0) * BLOCK_M", "(tl.num_programs(0) - 1) * BLOCK_M", 0),
        ("two on one row", "moe_combine", "ops/moe_combine.py", "d_y_ptr + i_s * N", "d_y_ptr + i_s // 2 * N", 0),
        ("mask", "linear_rows", "shared/product_tiles.py", "m_k = i_k + o_k < K\n", "m_k = i_k + o_k < K - 1\n", 0),
        ("offset", "linear_rows", "ops/linear_rows.py", "o_x = b_row.to(tl.int64) * K", "o_x = o_m.to(tl.int64) * K", 0),
        ("offset", "linear_rows", "ops/linear_rows.py", "weight_ptr += i_m * stride_e", "weight_ptr += 0", 0),
        ("term", "linear_rows", "shared/weight_formats.py", "(p_scale + 1, m_scale, stride_g, 0", "(p_scale, m_scale, stride_g, 0", 0),
        ("offset", "linear_rows", "shared/weight_formats.py", "(p_scale, m_scale, stride_g, GROUPS,", "(p_scale, m_scale, stride_g, 0,", 0),
        ("term", "linear_rows", "ops/linear_rows.py", "b_out += tl.load(residual_ptr", "b_out = tl.load(residual_ptr", 0),
        ("dtype", "linear_rows", "shared/weight_formats.py", "(b_w >> 4).to(tl.float32)", "(b_w >> 3).to(tl.float32)", 0),
        ("two on one row", "linear_rows", "ops/linear_rows.py", "tl.minimum(first + BLOCK_M, M)", "tl.minimum(first + BLOCK_M - 1, M)", 0),
        ("term", "gated_rows", "ops/linear_rows.py", "_with_bias(b_up, bias2_ptr", "_with_bias(b_up, bias_ptr", 0),
        ("term", "gated_rows", "ops/linear_rows.py", "_with_bias(b_up, bias2_ptr", "_with_bias(b_up, bias_ptr", 1),
        ("offset", "gated_rows", "ops/linear_rows.py", "weight2_ptr += i_m * stride_e", "weight2_ptr += 0", 0),
        ("mask", "cache_rows", "ops/cache_rows.py", "tl.where(place < 0, 0, D)", "tl.where(place < 1, 0, D)", 0),
        ("mask", "cache_rows", "ops/cache_rows.py", "m_turn = o_d < 2 * half", "m_turn = o_d < half", 0),
        ("offset", "cache_rows", "ops/cache_rows.py", "head = (i_h - H) % K", "head = 0", 0),
        ("term", "cache_rows", "ops/cache_rows.py", "tl.where(o_d < half, -b_pair, b_pair)", "b_pair", 0),
        ("reduction width", "cache_rows", "ops/cache_rows.py", "axis=0) / D + eps", "axis=0) / BLOCK_D + eps", 0),
        ("mask", "paged_attention", "ops/paged_attention.py", "o_key[None, :] <= o_pos", "o_key[None, :] < o_pos", 0),
        ("mask", "paged_attention", "ops/paged_attention.py", "o_key[None, :] > o_pos", "o_key[None, :] >= o_pos", 0),
        ("mask", "paged_attention", "ops/paged_attention.py", "o_r < (stop - first) * GROUP", "o_r < (stop - first) * GROUP - 1", 0),
        ("offset", "paged_attention", "ops/paged_attention.py", "o_head = i_k * (_BLOCK * D)", "o_head = i_k * D", 0),
        ("term", "paged_attention", "ops/paged_attention.py", "* o_key.to(tl.float32)", "* o_j.to(tl.float32)", 0),
        ("carry", "paged_attention", "ops/paged_attention.py", "b_sum * b_scale + tl.sum(b_p", "b_sum + tl.sum(b_p", 0),
        ("carry", "paged_attention", "ops/paged_attention.py", "b_acc = b_acc * b_scale[:, None] +", "b_acc = b_acc +", 0),
        ("mask", "draw_rows", "ops/draw_rows.py", "m_n[None, :], b_logit", "o_n[None, :] >= 0, b_logit", 0),
        ("carry", "draw_rows", "ops/draw_rows.py", "other=0.0) * tl.exp(b_below)", "other=0.0)", 0),
        ("dtype", "draw_rows", "ops/draw_rows.py", "(b_key >> 32) & 0xFFFFFFFF", "b_key & 0xFFFFFFFF", 0),
        ("term", "draw_rows", "ops/draw_rows.py", "tl.exp(b_below / warm)", "tl.exp(b_below)", 0),
        ("term", "draw_rows", "ops/draw_rows.py", "b_logit += tl.load(bias_ptr", "b_logit += 0 * tl.load(bias_ptr", 0),
        ("mask", "copy_blocks", "ops/copy_blocks.py", "m_n = o_n < N\n", "m_n = o_n < N - 1\n", 0),
        ("two on one row", "copy_blocks", "ops/copy_blocks.py", "pairs_ptr + 2 * i_p + 1", "pairs_ptr + 1", 0),
        ("mask", "select_rows", "ops/select_rows.py", "is_enough = count < top_k", "is_enough = count <= top_k", 0),
        ("term", "select_rows", "ops/select_rows.py", "mass < top_p * full", "mass < top_p", 0),
        ("term", "select_rows", "ops/select_rows.py", "warm * tl.log(min_p)", "tl.log(min_p)", 0),
        ("carry", "select_rows", "ops/select_rows.py", "b_best = tl.maximum(b_best, b_score)", "b_best = b_score", 0),
        ("mask", "swiglu", "ops/swiglu.py", "m_n = o_n < N\n", "m_n = o_n < N - 1\n", 0),
        ("term", "swiglu", "ops/swiglu.py", "(1.0 + b_gate * (1.0 - b_sigmoid))", "1.0", 0),
        ("term", "rms_norm", "ops/rms_norm.py", " - b_hat * b_mean[:, None]", "", 0),
        ("two on one row", "rms_norm", "ops/rms_norm.py", "first += num_programs * BLOCK_M", "first += BLOCK_M", 0),
        ("term", "rope", "ops/rope.py", "b_sin = -b_sin", "b_sin = b_sin", 0),
        ("offset", "rope", "ops/rope.py", "(o_token % T) * stride_t", "(o_token % H) * stride_t", 0),
        ("term", "cross_entropy", "ops/cross_entropy.py", " - weight * (1.0 - smoothing)", "", 0),
        ("mask", "attention", "ops/attention.py", "i_n >= last_full", "i_n > last_full", 0),
        ("offset", "attention", "ops/attention_backward.py", "i_key + BLOCK_N + window - 1", "i_key + BLOCK_N + window - 2", 0),
        ("term", "adamw", "shared/adam.py", "1.0 - lr * weight_decay", "1.0", 0),
        ("term", "adamw", "shared/adam.py", "beta2) * b_g * b_g", "beta2) * b_g", 0),
        ("offset", "grouped_matmul_pair", "shared/grouped_tiles.py", "p_x = x2_ptr", "p_x = x_ptr", 0),
        ("carry", "grouped_matmul_pair", "shared/grouped_tiles.py", "range(0, 2 * num_k)", "range(0, num_k)", 0),
        ("term", "float8_codes", "ops/float8.py", "b_bits + 0x1FFFFF", "b_bits + 0x200000", 0),
        ("offset", "float8_codes", "ops/float8.py", "i_c * words + i_r // 4", "i_c * words", 0),
        ("offset", "float8_codes", "ops/float8.py", "p_of, p_scales = of_rows_ptr + i_r,", "p_of, p_scales = of_rows_ptr,", 0),
        ("dtype", "float8_codes", "shared/fp8.py", "b_size < 6.103515625e-05", "b_size < 0.015625", 0),
        ("term", "float8_largest", "ops/float8.py", "b_x *= b_factor[None, :]", "b_x *= 1.0", 0),
        ("two on one row", "float8_largest", "ops/float8.py", "atomic_max(rows_ptr + i_r + o_r", "atomic_max(rows_ptr + o_r", 0),
        ("mask", "symmetric_product", "ops/symmetric_product.py", "(o_k < K)[None, :]", "(o_k < K - 1)[None, :]", 0),
        ("mask", "symmetric_product", "ops/symmetric_product.py", "o_i[None, :] < o_j", "o_i[None, :] + 1 < o_j", 0),
        ("offset", "symmetric_product", "ops/symmetric_product.py", "i_t - i_j * (i_j + 1) // 2, i_j", "i_t - i_j * i_j // 2, i_j", 0),
        ("term", "symmetric_product", "ops/symmetric_product.py", "b_out += linear * tl", "b_out += tl", 0),
    )  # fmt: skip
    return tuple(Mistake(kind=k, op=o, file=f, old=a, new=b, nth=n) for k, o, f, a, b, n in rows)


MISTAKES = _mistakes()


def poisoned() -> pytest.MonkeyPatch:
    """Fills torch.empty with NaN, so that values that a kernel does not write are wrong. undo() restores it."""
    patch = pytest.MonkeyPatch()
    for name in ("empty", "empty_like"):
        make = getattr(torch, name)

        def empty(*args, make=make, **kwargs):
            out = make(*args, **kwargs)
            return out.fill_(float("nan")) if out.is_floating_point() else out

        patch.setattr(torch, name, empty)
    return patch


def survives(mistake: Mistake, *, folder: Path) -> bool:
    """Whether every check of the op passes in spite of the mistake."""
    with planted(folder, file=mistake.file, old=mistake.old, new=mistake.new, nth=mistake.nth) as package:
        machine = sys.modules[f"{package.__name__}.launch.machine"]
        spec = spec_of(package, mistake.op)
        patch = poisoned()
        try:
            for dtype in spec.interpreted_dtypes:
                for variant in spec.variants:
                    for shape in spec.small_shapes:
                        check_against_reference(spec, shape, variant, dtype)
                if dtype == spec.interpreted_dtypes[0]:
                    for reach in REACH.get(spec.name, ()):
                        check_reach(spec, reach, machine=machine)
            if (name := mistake.op.removeprefix("adamw_")) in test_adamw_variants.STEPS:
                op, make = getattr(package, mistake.op), test_adamw_variants.STEPS[name][1]
                test_adamw_variants.check_bits_of_the_cpu(op, make, set_backend=package.set_backend)
        except (AssertionError, IndexError, ValueError, RuntimeError):  # an index out of range ends a program
            return False
        finally:
            patch.undo()
    return True


def check_unchanged(ops: set[str], *, folder: Path) -> None:
    """Raises AssertionError if an op of an unchanged copy fails on a small shape, where every mistake would count as caught."""
    with planted(folder, file="_adam.py", old="beta2", new="beta2") as package:
        patch = poisoned()
        try:
            for spec in map(partial(spec_of, package), sorted(ops)):
                check_against_reference(spec, spec.small_shapes[1], spec.variants[0], spec.interpreted_dtypes[0])
        finally:
            patch.undo()


def outcome(mistake: Mistake) -> str:
    """SURVIVES, caught, or crashes (also caught): a store without its mask can end the process, so each check runs in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        child = os.fork()
        if child == 0:
            status = 2
            try:
                status = 1 if survives(mistake, folder=Path(folder)) else 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(status)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code == 2:
        raise RuntimeError(f"the check of {mistake} did not end as checks do: see above")
    return {0: "caught", 1: "SURVIVES"}.get(code, "crashes")


def main() -> int:
    """Runs the chosen mistakes. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="mistakes whose line contains this")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="of these, every Nth")
    parser.add_argument("--known-good", action="store_true", help="first check that unchanged copies pass")
    options = parser.parse_args()
    torch.set_num_threads(1)
    speed_up_interpreter()
    chosen = [mistake for mistake in MISTAKES if options.only in str(mistake)][:: options.every]
    wrong = []
    with tempfile.TemporaryDirectory() as folder:
        check_unchanged({mistake.op for mistake in chosen}, folder=Path(folder))
    if options.known_good:
        unchanged = {m.op: Mistake(kind="none", op=m.op, file=m.file, old=m.old, new=m.old) for m in chosen}
        wrong += [f"fails unchanged: {m.op}" for m in unchanged.values() if outcome(m) != "SURVIVES"]
    for mistake in chosen:
        start = time.perf_counter()
        found = outcome(mistake)
        print(f"{found:8} {time.perf_counter() - start:5.1f} s  {mistake}", flush=True)
        wrong += [f"survives: {mistake}"] if found == "SURVIVES" else []
    alive = sum(line.startswith("survives") for line in wrong)
    print("\n".join([*wrong, f"{len(chosen) - alive} of {len(chosen)} caught"]))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
