"""The static budgets: every kernel compiled for every target, in a process that does not interpret."""

import json
import os
import subprocess
import sys

import pytest

from ztk.kernels import ALL_OPS
from ztk.kernels._sass import dissect_sass, programs_per_processor
from ztk.kernels._spec import TARGETS

COLUMNS = {
    "kernel", "arch", "registers", "stack_bytes", "shared_bytes", "vector_loads", "vector_stores", "barriers",
    "instructions_per_element", "loop_instructions", "programs", "programs_per_processor", "spills", "ok", "reason",
}  # fmt: skip


@pytest.fixture(scope="session")
def rows():
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", "ztk.kernels.aot", "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr[-2000:]
    return json.loads(done.stdout)


def test_every_budget_holds(rows):
    broken = [f"{row['kernel']} {row['arch']}: {row['reason']}" for row in rows if not row["ok"]]
    assert not broken, "\n".join(broken)


def test_every_case_is_reported(rows):
    expected = sorted((case.name, arch) for spec in ALL_OPS for case in spec.aot for arch in case.targets)
    assert sorted((row["kernel"], row["arch"]) for row in rows) == expected
    assert {row["arch"] for row in rows} == set(TARGETS)
    assert all(row.keys() >= COLUMNS for row in rows)


def test_fused_adamw_stays_small(rows):
    """The budget that makes it memory-bound: written here too, so that loosening the spec does not go unnoticed."""
    adamw = [row for row in rows if row["kernel"].startswith("_adamw[") and row["arch"].startswith("sm_")]
    assert len(adamw) == 9  # one group, and a bucket's groups by a table, in two sizes; three architectures
    for row in adamw:
        assert row["programs_per_processor"] >= 12 and row["instructions_per_element"] <= 64, row
        assert row["barriers"] == row["spills"] == row["stack_bytes"] == 0, row
        assert row["vector_loads"] >= 3 and row["vector_stores"] >= 3, row


def test_spills_have_a_reason(rows):
    assert all(row["reason"] for row in rows if row["spills"] or row["stack_bytes"])


def test_slower_launches_break_their_budgets():
    """Budgets are those of the launchers: what a launcher chooses badly breaks them, for the reason meant."""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", "tests.kernels.budget_mistakes"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr[-2000:]
    reasons = json.loads(done.stdout)
    expected = {
        "32 elements per thread": "barriers >",
        "attention with one stage": "B of shared memory <",
        "grouped 128x64x32, one stage": "B of shared memory <",
        "two more exponentials per logit": "instructions per element in loops >",
    }
    assert reasons.keys() == expected.keys()
    for mistake, reason in expected.items():
        assert reason in reasons[mistake], f"{mistake}: {reasons[mistake] or 'within budget'}"


def test_interpreter_is_refused():
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "ztk.kernels.aot"]
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
    """From NVIDIA's occupancy calculator for compute capability 9.0."""
    found = programs_per_processor(registers=registers, shared_bytes=shared, num_warps=warps, arch="sm_90")
    assert found == fitting
