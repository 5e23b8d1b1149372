"""The GPU properties that launchers receive, and the torch internals that the code uses."""

import ast
import ctypes
import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ztk.kernels.launch import machine as machines
from ztk.kernels.launch.machine import Architecture, machine

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "capability, driver, architecture, early",
    [
        ((8, 0), 12080, Architecture.ampere, False),
        ((8, 9), 12080, Architecture.ampere, False),
        ((9, 0), 12080, Architecture.hopper, True),
        ((9, 0), 12020, Architecture.hopper, False),
        ((10, 0), 13000, Architecture.blackwell, True),
        ((12, 0), 13000, Architecture.ampere, False),
    ],
)
def test_the_machine_of_a_gpu(capability, driver, architecture, early, monkeypatch):
    class Driver:
        def __init__(self, name: str) -> None:
            assert name == "libcuda.so.1"

        def cuDriverGetVersion(self, version) -> int:
            ctypes.cast(version, ctypes.POINTER(ctypes.c_int))[0] = driver
            return 0

    monkeypatch.setattr(ctypes, "CDLL", Driver)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(multi_processor_count=132))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    machines._of_device.cache_clear()
    try:
        found = machine(torch.device("cuda", 0))
    finally:
        machines._of_device.cache_clear()
    assert (found.architecture, found.processors, found.dependent_launch) == (architecture, 132, early)


def test_inner_functions_of_torch_exist():
    """Functions of CUDA builds are in torch's stubs, also in builds without CUDA."""
    stubs = (Path(torch.__file__).parent / "_C" / "__init__.pyi").read_text()
    missing = []
    for path in itertools.chain(*((ROOT / folder).rglob("*.py") for folder in ("ztk", "scripts", "experiments"))):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Attribute) or ast.unparse(node.value) != "torch._C":
                continue
            if not hasattr(torch._C, node.attr) and f"def {node.attr}(" not in stubs:
                missing.append(f"{path.relative_to(ROOT)}: torch._C.{node.attr}")
    assert not missing
