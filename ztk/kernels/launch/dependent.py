"""Kernels of a decoding step that are launched while the kernel before them still runs (programmatic dependent launch).

[Note: Programmatic dependent launch]
A decoding step is a hundred small kernels, and between two of them the GPU is idle for about a microsecond. From Hopper on a kernel may be
launched early: its programs become resident as soon as all programs of the previous kernel have permitted it or have ended, and wait in
`griddepcontrol.wait` until that kernel has completed and its writes are visible. Memory is not accessed before, so neither the order of
accesses nor any bit of a result changes.

Two rules ensure this. First, such a kernel begins with `wait_for_kernels`: its wait precedes every access to memory. Second, no program
ends without the wait, even for a tile without work: a completed kernel implies that the one before it has completed only because it
waited. The ahead-of-time budgets (tests/kernels/aot) check both in the compiled code of every such kernel, because a
missing wait would cause wrong tokens, occasionally, on a GPU.

A kernel permits the next launch only after its own wait. So all programs that hold shared or tensor memory while they wait belong to
one kernel, and no program that they wait for still needs such memory. Any kernel may follow: one that is launched in the ordinary way
waits for all of the previous one.

CUDA programming guide, programmatic dependent launch and synchronization; PTX ISA, griddepcontrol.
"""

import triton
import triton.language as tl

from ztk.kernels.launch.machine import Machine
from ztk.kernels.shared.math import INTERPRETED

_EARLY = {"PDL": True, "launch_pdl": True}
_IN_ORDER = {"PDL": False}


@triton.jit
def wait_for_kernels(PDL: tl.constexpr):
    """First statement of a kernel: waits until earlier kernels have completed, and permits the launch of the next one"""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


def dependent_launch(target: Machine) -> dict[str, bool]:
    """The constexpr PDL of a kernel that begins with `wait_for_kernels`, and the option of its launch there."""
    return _EARLY if target.dependent_launch and not INTERPRETED.value else _IN_ORDER
