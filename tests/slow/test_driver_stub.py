"""Launches by Triton's own launcher and by ztk's short ways give the driver equal calls, on a stub of the driver's library: no GPU.

With ZTK_CUDA_BUILD (see tests/slow/test_cuda_build.py) also by the Triton in that folder.
"""

import json
from collections.abc import Callable

import pytest

from tests.slow.test_cuda_build import FOLDER, needs_build, run

OPS = ("adamw", "attention", "grouped_matmul", "scale_rows")
JIT, DESCRIPTORS = "launch/jit.py", "launch/descriptors.py"
DESCRIBED = "return _Descriptor(tensor, *self._lists)"
OTHER_SIZES = "return _Descriptor(tensor, [4, 4, 4], *self._lists[1:])"
ODD_STRIDES = "return _Descriptor(tensor, self._lists[0], [68, 4, 1], self._lists[2])"
REFUSED = "Triton Error [CUDA]: "  # and more, which differs between releases
# Planted faults: the file, its text, the wrong text, the kernel that shows it, and the message.
PLANTED = {
    "order of parameters": (JIT, "handed = list(tensors) if", "handed = list(tensors)[::-1] if", "_adamw", "parameter 0 "),
    "axes of the grid": (JIT, "self._axes = *grid,", "self._axes = *grid[::-1],", "_scale_rows", "grid (3, 2, 1) is (2, 3, 1)"),
    "a grid past the limit": (JIT, "self._axes = *grid, *_REST[len(grid)]", "self._axes = 1, 1 << 16, 1", "_adamw", REFUSED),
    "stream": (JIT, "self._axes, active.get_current_stream(device)", "self._axes, 0", "_adamw", "stream 77 is 0"),
    "a number": (JIT, "behind = (*self.numbers,", "behind = (*(n + 1 for n in self.numbers),", "_attention_fwd", "parameter 5 "),
    "sizes of a map": (DESCRIPTORS, DESCRIBED, OTHER_SIZES, "_grouped_fwd", "parameter 1 "),
    "strides of a map": (DESCRIPTORS, DESCRIBED, ODD_STRIDES, "_grouped_fwd", REFUSED),
}  # fmt: skip


@pytest.mark.parametrize("build", ["installed", pytest.param("folder", marks=needs_build)])
def test_ztk_hands_the_driver_what_triton_does(build: str, show: Callable[[str], None]) -> None:
    """Program, grid, block, cluster, shared memory, stream, attributes, and all bytes of the parameters, tensor maps included, of every op."""
    done = run("-m", "tests.kernels.driver_stub", folder=FOLDER if build == "folder" else None)
    assert done.stdout, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found["faults"] == found["without"] == []
    assert found["launches"] > 60 and found["kernels"] > 50 and found["early"] > 10 and found["maps"] > 2
    show(f"Triton {found['triton']}: {found['launches']} launches of {found['kernels']} kernels are equal in all ways")


def test_planted_faults_are_found() -> None:
    plants = [part for file, old, new, *_ in PLANTED.values() for part in ("--plant", file, old, new)]
    done = run("-m", "tests.kernels.driver_stub", "--ops", *OPS, *plants)
    assert done.stdout, done.stderr[-2000:]
    for name, faults in zip(PLANTED, json.loads(done.stdout), strict=True):
        kernel, said = PLANTED[name][3:]
        assert any(fault.startswith(f"{kernel} by the kept way: {said}") for fault in faults), (name, faults[:5])
