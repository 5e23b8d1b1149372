"""The house rules that a machine can keep: who may import whom, what a kernel may contain, and how large a file grows."""

import ast
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "architecture.md"


def levels_of_the_page() -> dict[str, int]:
    """Package or module of ztk -> level, from the table of docs/architecture.md: the page is the rule."""
    rows = re.findall(r"^\| (\d+) \| ([^|]+) \|", PAGE.read_text(), flags=re.MULTILINE)
    return {name: int(level) for level, cell in rows for name in re.findall(r"`ztk/(\w+?)(?:/|\.py)`", cell)}


LEVEL = levels_of_the_page()
DOOR = max(LEVEL.values())  # the packages of the outermost level work together
LIBRARY_LEVELS = 7  # levels 0 to 7 import these alone
LIBRARY_IMPORTS = {"torch", "triton", "einops", "safetensors", "numpy", "ztk"}
STANDARD_LIBRARY = sys.stdlib_module_names
FILES = sorted((ROOT / "ztk").rglob("*.py"))
KERNEL_FILES = sorted((ROOT / "ztk" / "kernels").glob("*.py"))
HOST_SYNCHRONISATION = {"item", "tolist", "cpu", "synchronize", "numpy"}
MAX_LINES = 480


def imported(tree: ast.AST):
    """Every imported dotted name, relative imports excluded."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def package_of(path: Path) -> str:
    """The top-level package or module of ztk that a file belongs to."""
    return path.relative_to(ROOT / "ztk").with_suffix("").parts[0]


def broken_imports(tree: ast.AST, *, package: str) -> list[str]:
    """The imports of one file that point up or sideways, or out of what its level may use."""
    if package not in LEVEL:
        return [f"ztk/{package} has no level: name it in docs/architecture.md"]
    broken = []
    for name in imported(tree):
        top, *rest = name.split(".")
        if top == "ztk" and rest:
            is_package = (ROOT / "ztk" / rest[0]).is_dir() or (ROOT / "ztk" / f"{rest[0]}.py").exists()
            other = rest[0] if is_package or rest[0] in LEVEL else "__init__"
            if other not in LEVEL:
                broken.append(f"ztk/{other} has no level: name it in docs/architecture.md")
                continue
            within_door = LEVEL[other] == LEVEL[package] == DOOR
            if other != package and LEVEL[other] >= LEVEL[package] and not within_door:
                broken.append(f"{package} (level {LEVEL[package]}) imports {name} (level {LEVEL[other]})")
        elif LEVEL[package] <= LIBRARY_LEVELS and top not in LIBRARY_IMPORTS and top not in STANDARD_LIBRARY:
            broken.append(f"{package} imports {name}; levels 0 to {LIBRARY_LEVELS} use torch, triton and einops")
    return broken


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_down(path):
    assert not broken_imports(ast.parse(path.read_text()), package=package_of(path))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_are_absolute(path):
    for node in ast.walk(ast.parse(path.read_text())):
        assert not (isinstance(node, ast.ImportFrom) and node.level > 0), f"{path.name}:{node.lineno}: relative import"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_source_is_ascii_and_readable_in_one_sitting(path):
    text = path.read_text()
    assert text.isascii(), f"{path.name} holds characters outside ASCII"
    assert len(text.splitlines()) <= MAX_LINES, f"{path.name} has {len(text.splitlines())} lines; it is two subjects"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_modules_say_what_they_are(path):
    assert ast.get_docstring(ast.parse(path.read_text())), f"{path.name} has no docstring"


def jit_functions(tree: ast.AST) -> list[ast.FunctionDef]:
    """The functions that Triton compiles."""
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(d) for d in node.decorator_list)
    ]


def narrow_addresses(tree: ast.AST) -> list[str]:
    """Uses of a program index that could overflow 32 bits in an address: each must be widened where it is read."""
    narrow = []
    for function in jit_functions(tree):
        text = ast.unparse(function)
        if re.search(r"program_id\([^)]*\)(?!\.to\(tl\.int64\))", text):
            narrow.append(function.name)
    return narrow


@pytest.mark.parametrize("path", KERNEL_FILES, ids=lambda p: p.name)
def test_program_ids_are_int64(path):
    assert not narrow_addresses(ast.parse(path.read_text()))


@pytest.mark.parametrize("path", KERNEL_FILES, ids=lambda p: p.name)
def test_kernels_say_their_formula(path):
    for function in jit_functions(ast.parse(path.read_text())):
        assert ast.get_docstring(function), f"{path.name}: {function.name} has no formula in its docstring"


@pytest.mark.parametrize("path", KERNEL_FILES, ids=lambda p: p.name)
def test_launchers_do_not_wait_for_the_device(path):
    """No .item() and its like in functions that launch kernels; the CPU implementations may read their tensors."""
    for function in ast.walk(ast.parse(path.read_text())):
        if isinstance(function, ast.FunctionDef) and function.name.lstrip("_").startswith("launch"):
            for call in ast.walk(function):
                if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
                    assert call.func.attr not in HOST_SYNCHRONISATION, f"{path.name}:{call.lineno} waits for the device"


def launches(tree: ast.AST) -> list[ast.Call]:
    """Every `kernel[grid](...)`."""
    return [n for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Subscript)]


@pytest.mark.parametrize("path", KERNEL_FILES, ids=lambda p: p.name)
def test_launches_fix_what_triton_versions_differ_in(path):
    """FP fusion is on by default up to Triton 3.9 and off from 3.10: every launch says which it means."""
    for call in launches(ast.parse(path.read_text())):
        names = {keyword.arg for keyword in call.keywords}
        if "num_warps" in names and None not in names:  # None: unpacked options are left to the eye
            assert "enable_fp_fusion" in names, f"{path.name}:{call.lineno} leaves fp fusion to the Triton version"


def test_the_rules_catch_what_they_are_for():
    """Planted mistakes: an upward import, a sideways import, a foreign library, a 32-bit offset."""
    assert broken_imports(ast.parse("from ztk.nn import Decoder"), package="kernels")
    assert broken_imports(ast.parse("from ztk.offload import HostStore"), package="zero")
    assert broken_imports(ast.parse("import hydra"), package="engine")
    assert not broken_imports(ast.parse("from ztk.kernels import adamw"), package="optim")
    kernel = "@triton.jit\ndef k(p, B: tl.constexpr):\n    o = tl.program_id(0) * B + tl.arange(0, B)\n"
    assert narrow_addresses(ast.parse(kernel))
    assert not narrow_addresses(ast.parse(kernel.replace("program_id(0)", "program_id(0).to(tl.int64)")))
