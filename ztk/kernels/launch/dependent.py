"""Kernels of a decoding step that are launched while the kernel before them still runs (programmatic dependent launch).

[Note: Programmatic dependent launch]
A decoding step is a hundred small kernels, and between two of them the GPU is idle for about a microsecond. From Hopper on a kernel may be
launched early: its programs become resident as soon as all of the kernel before it have said that they may, or have ended, and hold in
`griddepcontrol.wait` until that kernel has completed and its writes are visible. No memory is touched before, so nothing else changes:
neither the order of accesses nor a bit of a result.

Two rules keep that. First, a kernel that is launched so begins with `wait_for_kernels`: its wait comes before every access to memory. Second,
no program ends without it, a tile without work included: "the kernel before has completed" means that the one before that has completed,
too, only because it waited. The ahead-of-time budgets (tests/kernels/aot) read both from the compiled code of every such kernel, because a
missing wait would show as wrong tokens, now and then, on a GPU.

A kernel allows the next one to be launched only behind its own wait. So programs that hold shared or tensor memory while they wait are those of
one kernel, and no program that it waits for still needs any. What follows may be any kernel: one that is launched in the ordinary way
waits for all of the one before.

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
    """First in a kernel: until the kernels before have completed; the one behind may be launched from then on"""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


def dependent_launch(target: Machine) -> dict[str, bool]:
    """The constexpr PDL of a kernel that begins with `wait_for_kernels`, and the option of its launch there."""
    return _EARLY if target.dependent_launch and not INTERPRETED.value else _IN_ORDER
