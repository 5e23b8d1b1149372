"""The static budgets: every kernel compiled for sm_90, and with `--slow` for every target, in a process that does not interpret."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import ztk.kernels
from tests.kernels.aot.case import NVIDIA_TARGETS, TARGETS
from tests.kernels.aot.cases import CASES
from tests.kernels.aot.sass import before_the_wait, dissect_sass, programs_per_processor

COLUMNS = {
    "kernel", "arch", "registers", "stack_bytes", "shared_bytes", "vector_loads", "vector_stores", "barriers",
    "instructions_per_element", "loop_instructions", "programs", "programs_per_processor", "spills", "dependent", "early", "ok", "reason",
}  # fmt: skip


@pytest.fixture(scope="session")
def targets(request):
    return TARGETS if request.config.getoption("--slow") else ("sm_90",)


@pytest.fixture(scope="session")
def rows(targets):
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", "tests.kernels.aot", "--json", *(f"--arch={target}" for target in targets)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr[-2000:]
    return json.loads(done.stdout)


def test_every_budget_holds(rows):
    broken = [f"{row['kernel']} {row['arch']}: {row['reason']}" for row in rows if not row["ok"]]
    assert not broken, "\n".join(broken)


def test_every_case_is_reported(rows, targets):
    assert CASES.keys() == {spec.name for spec in ztk.kernels.ALL_OPS}
    every = [(case.name, arch) for cases in CASES.values() for case in cases for arch in case.targets]
    assert sorted((row["kernel"], row["arch"]) for row in rows) == sorted(one for one in every if one[1] in targets)
    assert {row["arch"] for row in rows} == set(targets)
    assert all(row.keys() >= COLUMNS for row in rows)


def test_fused_adamw_stays_small(rows, targets):
    """The budget that makes it memory-bound: written here too, so that loosening the spec does not go unnoticed."""
    adamw = [row for row in rows if row["kernel"].startswith("_adamw[") and row["arch"].startswith("sm_")]
    # One group, and a bucket's groups by a table, in two sizes.
    assert len(adamw) == 3 * len({row["arch"] for row in rows} & set(NVIDIA_TARGETS)) > 0
    for row in adamw:
        assert row["programs_per_processor"] >= 12 and row["instructions_per_element"] <= 64, row
        assert row["barriers"] == row["spills"] == row["stack_bytes"] == 0, row
        assert row["vector_loads"] >= 3 and row["vector_stores"] >= 3, row


def test_spills_have_a_reason(rows):
    assert all(row["reason"] for row in rows if row["spills"] or row["stack_bytes"])


EARLY = {  # of a decoding step; norms and routes are training's, too
    "_linear_rows", "_linear_few", "_linear_many", "_cache_rows", "_paged_attention", "_merge_segments", "_draw_tiles", "_merge_draws",
    "_select_rows", "_copy_blocks", "_rms_norm_fwd", "_layer_norm_fwd", "_wide_norm_fwd", "_moe_choose", "_moe_scan", "_moe_place",
    "_combine_fwd",
}  # fmt: skip


def test_kernels_of_a_decoding_step_are_launched_early_and_wait(rows):
    """Before the kernel in front of them has ended, from Hopper on; that they wait first is a budget (`before_the_wait`)."""
    early = {(row["kernel"].split("[")[0], row["arch"]) for row in rows if row["dependent"]}
    assert early == {
        (row["kernel"].split("[")[0], row["arch"])
        for row in rows
        if row["kernel"].split("[")[0] in EARLY and row["arch"] in ("sm_90", "sm_100")
    }
    assert {kernel for kernel, _ in early} == EARLY and not any(row["early"] for row in rows)


def test_kernels_and_launches_agree_on_the_wait():
    """A kernel with PDL waits in its first line, and `launch_pdl` is an option of `dependent_launch` alone."""
    waiting = set()
    for path in Path(ztk.kernels.__file__).parent.rglob("*.py"):
        text = path.read_text()
        assert "launch_pdl" not in text or path.name == "dependent.py", path.name
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and any(argument.arg == "PDL" for argument in node.args.args):
                waiting.add(node.name)
                assert node.name == "wait_for_kernels" or ast.unparse(node.body[1]) == "wait_for_kernels(PDL)", (
                    node.name
                )
    assert waiting == EARLY | {"wait_for_kernels"}


@pytest.mark.parametrize(
    "ptx, sass, found",
    [
        ("ld.param.b64 %rd1, [p];\n@%p2 tcgen05.alloc [%r43], 32;\nld.shared.b32 %r2, [s];\ngriddepcontrol.wait ;", "", ""),
        ("griddepcontrol.wait; // dummy %r1\nld.global.b32 %r1, [%rd1];", "", ""),
        ("@%p1 ld.global.nc.b32 %r1, [%rd1];\ngriddepcontrol.wait ;", "", "PTX: `@%p1 ld.global"),
        ("cp.async.bulk.shared::cta.global [%r1], [%rd1], 16, [%r2];\ngriddepcontrol.wait ;", "", "PTX: `cp.async.bulk"),
        ("red.global.add.f32 [%rd1], %f1;\ngriddepcontrol.wait ;", "", "PTX: `red.global"),
        ("ld.b32 %r1, [%rd1];\ngriddepcontrol.wait ;", "", "PTX: `ld.b32"),
        ("@%p1 griddepcontrol.wait ;", "", "PTX: `@%p1 griddepcontrol.wait"),
        ("ret;", "", "PTX: `ret"),
        ("mov.u32 %r1, %tid.x;", "", "PTX: `st.global"),
        ("griddepcontrol.wait;", "S2R R1, SR_TID.X ;\n/*0018*/ @P0 ACQBULK", "SASS: `@P0 ACQBULK"),
        ("griddepcontrol.wait;", "LDG.E R1, desc[UR4][R2.64]", "SASS: `LDG.E"),
        ("griddepcontrol.wait;", "@P0 BRA 0x30", "SASS: `@P0 BRA 0x30"),
        ("griddepcontrol.wait;", "@P0 BRA 0x20", ""),  # to the wait
        ("griddepcontrol.wait;", "CALL.REL.NOINC 0x50", ""),  # to a trap
        ("griddepcontrol.wait;", "CALL.REL.NOINC 0x30", "SASS: `CALL.REL"),
        ("griddepcontrol.wait;", "@!UP1 EXIT", "SASS: `@!UP1 EXIT"),
    ],
)  # fmt: skip
def test_what_comes_before_a_wait_is_read_right(ptx, sass, found):
    """PTX and SASS with predicates and comments. In SASS the instruction is at 0x10, the wait at 0x20."""
    code = (
        f"/*0000*/ LDC R1, c[0x0][0x28] ;\n/*0010*/ {sass or 'NOP'} ;\n/*0020*/ ACQBULK ;\n/*0030*/ LDG.E R1, [R2] ;\n"
    )
    code += "/*0040*/ EXIT ;\n/*0050*/ BPT.TRAP 0x1 ;"
    text = f".func .entry k(\n.param .u64 p\n)\n.reqntid 128\n{{\n\t.reg .pred %p<2>;\n\t{ptx}\n\tst.global.b32 [%rd1], %r1;\n\tret;\n}}"
    answer = before_the_wait(ptx=text, sass=code)
    assert answer.startswith(found) and bool(answer) == bool(found), answer


@pytest.fixture(scope="module")
def planted():
    """The output of tests/kernels/budget_mistakes.py."""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", "tests.kernels.budget_mistakes"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr[-2000:]
    return json.loads(done.stdout)


def test_slower_launches_break_their_budgets(planted):
    """Budgets match the launchers: worse launch configurations and missing waits exceed them, for the intended reason."""
    reasons = planted["reasons"]
    expected = {
        "32 elements per thread": "barriers >",
        "attention with one stage": "B of shared memory <",
        "grouped 128x64x32, one stage": "B of shared memory <",
        "grouped by pointers": "no loads by descriptors",
        "two more exponentials per logit": "instructions per element in loops >",
        "no wait": "ld.global",
        "a store before the wait": "st.global",
        "a wait in some programs": "bra",
    }
    assert reasons.keys() == expected.keys()
    for mistake, reason in expected.items():
        assert reason in reasons[mistake], f"{mistake}: {reasons[mistake] or 'within budget'}"


def test_kernels_that_are_disassembled_together_read_as_alone(planted):
    """Addresses and targets included."""
    opcodes = {text.split()[text.startswith("@")].split(".")[0] for kernel in planted["alone"] for _, text in kernel}
    assert len(planted["alone"]) == 3 and opcodes >= {"BRA", "CALL", "RET", "BSSY", "LDG"}
    assert planted["together"] == planted["alone"]


def test_interpreter_is_refused():
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "tests.kernels.aot"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "TRITON_INTERPRET" in done.stderr


def test_sass_is_read_right():
    """A fragment with known counts: predicates, widths, spills, barriers, padding after the end."""
    sass = """
        /*0000*/                   LDC R1, c[0x0][0x37c] ;              /* 0x0000df00ff017b82 */
        /*0010*/              @!P0 LDG.E.EL.128 R4, desc[UR4][R2.64] ;  /* 0x0 */
        /*0020*/                   LDG.E R8, desc[UR4][R2.64] ;         /* 0x0 */
        /*0030*/             @!UP1 LDG.E.U16.CONSTANT R9, desc[UR4][R2.64] ;
        /*0040*/               @P1 STG.E.64 desc[UR4][R2.64], R4 ;
        /*0050*/                   STL [R1], R4 ;
        /*0060*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*0070*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24 ;
        /*0080*/                   EXIT ;
        /*0090*/                   NOP ;
    """
    anatomy = dissect_sass(sass, arch="sm_90", registers=32, stack_bytes=8, shared_bytes=0)
    assert anatomy.load_bytes == (16, 4, 2) and anatomy.store_bytes == (8,)
    assert (anatomy.spills, anatomy.barriers, anatomy.matrix_instructions, anatomy.instructions) == (1, 1, 1, 9)


def test_loops_are_found_in_sass():
    """An inner loop of two loads inside an outer one, a spin without loads, and the branch to itself behind the end."""
    sass = """
        /*0000*/                   MOV R1, R2 ;
        /*0010*/                   LDG.E R8, desc[UR4][R2.64] ;
        /*0020*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0030*/                   LDGSTS.E.BYPASS.128 [R5], desc[UR4][R2.64] ;
        /*0040*/               @P0 BRA 0x10 ;
        /*0050*/              @!P1 BRA 0x50 ;
        /*0060*/                   BRA 0x0 ;
        /*0070*/                   EXIT ;
        /*0080*/                   BRA 0x80;
    """
    (loop,) = dissect_sass(sass, arch="sm_90", registers=32, stack_bytes=0, shared_bytes=0).loops
    assert (loop.instructions, loop.vector_bytes, loop.async_copies) == (4, 32, 1)


@pytest.mark.parametrize(
    "registers, shared, warps, fitting",
    [
        (32, 0, 4, 16),  # 64 warps
        (40, 0, 4, 12),  # 1,280 registers a warp: 12 warps in each quarter of 16,384
        (64, 0, 8, 4),
        (65, 0, 8, 3),  # given out by eights: 72
        (255, 0, 8, 1),
        (32, 98304, 8, 2),  # 97 KiB of 228 each
        (16, 0, 1, 32),
    ],
)
def test_occupancy_is_nvidias(registers, shared, warps, fitting):
    """Values from NVIDIA's occupancy calculator for compute capability 9.0."""
    found = programs_per_processor(registers=registers, shared_bytes=shared, num_warps=warps, arch="sm_90")
    assert found == fitting
