"""The rules of docs/architecture.md that a machine can check: imports, kernels, docstrings, size of files. Ruff checks the rest.

Each rule is one function from a file to a list of faults, and one test that reports the faults of all files at once.
"""

import ast
import functools
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "architecture.md"


def levels_of_the_page() -> dict[str, int]:
    """Package or module below ztk (`zero/buckets`) -> level, from the table of docs/architecture.md: the page is the rule."""
    rows = re.findall(r"^\| (\d+) \| ([^|]+) \|", PAGE.read_text(), flags=re.MULTILINE)
    return {name: int(level) for level, cell in rows for name in re.findall(r"`ztk/([\w/]+?)(?:/|\.py)`", cell)}


LEVEL = levels_of_the_page()
OUTERMOST = max(LEVEL.values())  # the packages of this level work together
LIBRARY_LEVELS = 8  # levels 0 to 8 import only these
LIBRARY_IMPORTS = {"torch", "triton", "einops", "safetensors", "numpy", "ztk"}
STANDARD_LIBRARY = sys.stdlib_module_names
FILES = sorted((ROOT / "ztk").rglob("*.py"))
KERNEL_FILES = sorted((ROOT / "ztk" / "kernels").rglob("*.py"))
HOST_SYNCHRONISATION = {"item", "tolist", "cpu", "synchronize", "numpy"}
MAX_LINES = 1000
# DeepSpeed's signatures.
POSITIONAL_PACKAGES = {"deepspeed"}
# Implementations of registered ops, which torch's dispatcher calls by position.
POSITIONAL_FILES = {"cross_entropy_cpu.py"}
# Signatures of Python's, transformers' or ztk's own protocols, and of DeepSpeed's and torch's classes outside of these packages.
PROTOCOL_SIGNATURES = {
    "attention_forward",
    "cdiv",  # Triton's
    "choose",  # as selective checkpointing of torch calls it
    "find_class",
    "find_spec",
    "forward",
    "read",
    "split_params_into_different_moe_groups_for_optimizer",
    "Linear.__init__",
    "MoE.__init__",
    "TiedLayerSpec.__init__",
}
# Exceptions that belong to a protocol of Python and not to a function's contract.
PROTOCOL_ERRORS = {"AttributeError", "KeyError", "NotImplementedError", "StopIteration", "SystemExit"}

Rule = Callable[[Path], Iterable[str]]


def assert_kept(rule: Rule, *, files: Iterable[Path]) -> None:
    """Fails with the faults that `rule` finds in any of `files`."""
    faults = [f"{path.relative_to(ROOT)}: {fault}" for path in files for fault in rule(path)]
    assert not faults, f"{len(faults)} faults:\n" + "\n".join(faults)


@functools.cache
def parsed(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text())


def package_of(path: Path) -> str:
    """The package or module with a level that a file of ztk belongs to."""
    return owner_of(path.relative_to(ROOT / "ztk").with_suffix("").parts)


def owner_of(parts: Sequence[str]) -> str:
    """The longest beginning of a path below ztk that has a level; its first part if none has."""
    names = ("/".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((name for name in names if name in LEVEL), parts[0])


# Imports


def imported(tree: ast.AST) -> Iterator[str]:
    """Every imported dotted name: import statements, and `import_module` and `__import__` of a literal."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in {
            "import_module",
            "__import__",
        }:
            literals = [str(argument.value) for argument in node.args[:1] if isinstance(argument, ast.Constant)]
            yield from (name for name in literals if name.startswith("ztk."))


def broken_imports(tree: ast.AST, *, package: str) -> list[str]:
    """The imports of one file that point up or sideways, or that its level must not use."""
    broken = []
    for name in imported(tree):
        if package not in LEVEL:
            return [f"ztk/{package} has no level: name it in docs/architecture.md"]
        top, *rest = name.split(".")
        if top == "ztk" and rest:
            is_package = (ROOT / "ztk" / rest[0]).is_dir() or (ROOT / "ztk" / f"{rest[0]}.py").exists()
            other = owner_of(rest) if is_package else "__init__"
            if other not in LEVEL:
                broken.append(f"ztk/{other} has no level: name it in docs/architecture.md")
                continue
            both_outermost = LEVEL[other] == LEVEL[package] == OUTERMOST
            if other != package and LEVEL[other] >= LEVEL[package] and not both_outermost:
                broken.append(f"{package} (level {LEVEL[package]}) imports {name} (level {LEVEL[other]})")
        elif LEVEL[package] <= LIBRARY_LEVELS and top not in LIBRARY_IMPORTS and top not in STANDARD_LIBRARY:
            broken.append(f"{package} imports {name}; levels 0 to {LIBRARY_LEVELS} use {sorted(LIBRARY_IMPORTS)}")
    return broken


def test_imports_point_down():
    assert_kept(lambda path: broken_imports(parsed(path), package=package_of(path)), files=FILES)


def test_programs_are_imported_by_one_name():
    """`experiments` may be a package of the user's; ztk's programs are `ztk.experiments`."""

    def named_otherwise(path: Path) -> list[str]:
        return [
            f"imports {name}: write ztk.{name}"
            for name in imported(parsed(path))
            if name.partition(".")[0] == "experiments"
        ]

    folders = ("ztk", "experiments", "examples", "notebooks", "scripts", "tests")
    assert_kept(named_otherwise, files=[path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))])


def test_no_modules_import_each_other():
    dotted = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in FILES}
    graph = {}
    for name, path in dotted.items():
        typing_only = [
            node for node in parsed(path).body if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        ]
        names = set(imported(parsed(path))) - {only for node in typing_only for only in imported(node)}
        modules = {one if one in dotted else one.rpartition(".")[0] for one in names if one.startswith("ztk.")}
        graph[name] = modules - {name}
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the modules of a circle


# Files and docstrings


def unreadable(path: Path) -> Iterator[str]:
    """ASCII only, and few enough lines for one subject."""
    text = path.read_text()
    if not text.isascii():
        yield "has characters outside ASCII"
    if len(text.splitlines()) > MAX_LINES:
        yield f"has {len(text.splitlines())} lines, more than {MAX_LINES}: split it by subject"


def test_files_are_ascii_and_short():
    assert_kept(unreadable, files=FILES)


def public_functions(tree: ast.Module) -> Iterator[tuple[ast.FunctionDef, ast.ClassDef | None]]:
    """Functions and methods that a user may call, constructors included, each with its class."""
    for parent in [tree, *(node for node in tree.body if isinstance(node, ast.ClassDef))]:
        owner = parent if isinstance(parent, ast.ClassDef) else None
        if owner is not None and owner.name.startswith("_"):
            continue
        for node in parent.body:
            constructs = owner is not None and getattr(node, "name", "") in {"__init__", "__post_init__"}
            if isinstance(node, ast.FunctionDef) and (constructs or not node.name.startswith("_")):
                yield node, owner


def raised_directly(function: ast.FunctionDef) -> Iterator[str]:
    """The names of the exception classes in `raise` statements of the function itself, not of nested functions."""
    nodes: list[ast.AST] = list(function.body)
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            continue
        if isinstance(node, ast.Raise) and node.exc is not None:
            error = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
            name = ast.unparse(error).rpartition(".")[2]
            if name.isidentifier() and name[0].isupper() and name not in PROTOCOL_ERRORS:
                yield name
        nodes += ast.iter_child_nodes(node)


def unnamed_errors(tree: ast.Module) -> Iterator[str]:
    """Exceptions that a public function raises and that neither its docstring nor its class's names."""
    for function, owner in public_functions(tree):
        text = (ast.get_docstring(function) or "") + (ast.get_docstring(owner) or "" if owner else "")
        for name in sorted(set(raised_directly(function))):
            if name not in text:
                yield f"{function.lineno}: {function.name} raises {name}: name it in the docstring under `Raises:`"


def test_docstrings_name_the_errors():
    assert_kept(lambda path: unnamed_errors(parsed(path)), files=FILES)


# The shape of a tensor in a docstring: dimensions in brackets, as [N, D] and [.., n], or a word such as scalar or flat.
SHAPE = re.compile(
    r"(?<![\w)\]\"'])\[[\w ., *+/()-]*\]|\b(scalars?|shapes?|shaped|flat|flattened|one number|elements?|elementwise)\b",
    re.IGNORECASE,
)

# A module's docstring counts for its functions if it is explicit: "Shapes and dtypes are as in torch.distributed".
SHAPES_OF_ALL = re.compile(r"\bshapes\b[^.:]* (are|as) ", re.IGNORECASE)


def takes_tensors(function: ast.FunctionDef) -> bool:
    """Whether an argument or the result is a tensor, or a collection of tensors."""
    arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    kinds = [argument.annotation for argument in arguments] + [function.returns]
    return any(re.search(r"\bTensor\b", ast.unparse(kind)) for kind in kinds if kind is not None)


def method_texts(trees: Iterable[ast.Module]) -> dict[str, str]:
    """Docstrings that implementations need not repeat: Class.method -> docstrings of both; method -> docstrings in all protocols."""
    texts: dict[str, str] = {}
    for tree in trees:
        for function, owner in public_functions(tree):
            if owner is None or function.name.startswith("_"):
                continue
            about = "\n\n".join((ast.get_docstring(function) or "", ast.get_docstring(owner) or ""))
            is_protocol = any(ast.unparse(base).startswith("Protocol") for base in owner.bases)
            for key in (f"{owner.name}.{function.name}", *([function.name] if is_protocol else [])):
                texts[key] = "\n\n".join((texts.get(key, ""), about))
    return texts


@functools.cache
def shared_texts() -> dict[str, str]:
    """`method_texts` of ztk."""
    return method_texts(map(parsed, FILES))


def sources(function: ast.FunctionDef, *, owner: ast.ClassDef | None, shared: dict[str, str]) -> list[str]:
    """The docstrings that speak of a function: its own, and for a method its class's, base classes' and protocols'."""
    texts = [ast.get_docstring(function)]
    if owner is not None:
        bases = [f"{ast.unparse(base).rpartition('.')[2]}.{function.name}" for base in owner.bases]
        texts += [ast.get_docstring(owner), *(shared.get(key) for key in (function.name, *bases))]
    return [text for text in texts if text]


def shapeless(tree: ast.Module, *, shared: dict[str, str]) -> Iterator[str]:
    """Public functions over tensors for which no docstring gives a shape. NAME_reference has the shapes of NAME."""
    references = {node.name + "_reference": node for node in tree.body if isinstance(node, ast.FunctionDef)}
    for function, owner in public_functions(tree):
        documented = references.get(function.name, function)
        own, of_all = sources(documented, owner=owner, shared=shared), ast.get_docstring(tree) or ""
        says = SHAPES_OF_ALL.search(of_all) or any(SHAPE.search(text) for text in own)
        if takes_tensors(function) and not says:
            yield f"{function.lineno}: {function.name} takes or returns a tensor: say its shape, [N, D] or scalar or any shape"


def test_docstrings_give_shapes():
    # Only where shapes are the contract. Elsewhere a rule for every tensor would only add filler such as "any shape".
    files = [path for path in FILES if path.relative_to(ROOT / "ztk").parts[0] in {"kernels", "nn", "data"}]
    assert len(files) > 50
    assert_kept(lambda path: shapeless(parsed(path), shared=shared_texts()), files=files)


# Arguments that are a time or a size, and so need a unit.
QUANTITY = re.compile(r"timeout|interval|delay|duration|latency|bandwidth|capacity|budget|deadline|memory|size")
UNIT = re.compile(
    r"seconds?|bytes?|[GM]i?B|KiB|bits?|elements?|features?|columns?|entries|tokens?|positions?|rows?|samples?|groups?|blocks?|pieces?"
    r"|layers?|steps?|ranks?|threads?|jobs?|overflows?|numbers?",
    re.IGNORECASE,
)
# Names whose unit is the same everywhere: ranks, tokens, bytes as in torch, threads, and pure numbers.
KNOWN_UNITS = re.compile(r"(\w+_)?world_size|[te]p_size|vocab_size|itemsize|warp_size|\w+_factor")


def unitless(tree: ast.Module, *, shared: dict[str, str]) -> Iterator[str]:
    """Numeric arguments of public functions that are a time or a size, and have no unit in their name or in a sentence that names them."""
    for function, owner in public_functions(tree):
        texts = sources(function, owner=owner, shared=shared)
        sentences = [
            sentence
            for text in [*texts, ast.get_docstring(tree) or ""]
            for sentence in re.split(r"(?<=\.)\s|\n\n", text)
        ]
        for argument in [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]:
            name, kind = argument.arg, ast.unparse(argument.annotation) if argument.annotation else ""
            if not re.match(r"(int|float)\b", kind) or not QUANTITY.search(name) or KNOWN_UNITS.fullmatch(name):
                continue
            given = any(part in name.split("_") for part in ("seconds", "bytes", "steps", "tokens", "rows", "groups"))
            about = [sentence for sentence in sentences if re.search(rf"\b{name}\b", sentence)]
            if not given and not any(re.search(rf"\b({UNIT.pattern})\b", s, re.IGNORECASE) for s in about):
                yield f"{function.lineno}: {function.name}({name}): say its unit"


def test_docstrings_give_units():
    assert_kept(lambda path: unitless(parsed(path), shared=shared_texts()), files=FILES)


def documented_methods() -> set[str]:
    """Names of methods that have a docstring in some class of ztk: an implementation of a protocol need not repeat it."""
    return {
        function.name
        for path in FILES
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.ClassDef)
        for function in node.body
        if isinstance(function, ast.FunctionDef) and ast.get_docstring(function)
    }


def test_public_methods_are_documented():
    documented = documented_methods()

    def undocumented(path: Path) -> Iterator[str]:
        for function, owner in public_functions(parsed(path)):
            if owner is not None and not function.name.startswith("_") and function.name not in documented:
                yield f"{function.lineno}: {owner.name}.{function.name} has no docstring"

    assert_kept(undocumented, files=FILES)


def positional_arguments(tree: ast.Module, *, is_kernel: bool = False) -> Iterator[str]:
    """Public functions with more than two positional arguments: keywords name a value.

    In kernels, tensors keep torch's order, as in `F.layer_norm(x, weight, bias)`, and Triton's functions keep their own.
    """
    for function, owner in public_functions(tree):
        is_static = any(ast.unparse(decorator) == "staticmethod" for decorator in function.decorator_list)
        count = len(function.args.posonlyargs + function.args.args) - (owner is not None and not is_static)
        autograd = owner is not None and any(ast.unparse(base).endswith("Function") for base in owner.bases)
        names = {function.name, f"{owner.name}.{function.name}" if owner is not None else function.name}
        kinds = [ast.unparse(argument.annotation) if argument.annotation else "" for argument in function.args.args]
        tensors = is_kernel and (function in jit_functions(tree) or all(kind.startswith("Tensor") for kind in kinds))
        if count > 2 and not autograd and not tensors and not names & PROTOCOL_SIGNATURES:
            yield f"{function.lineno}: {function.name} has {count} positional arguments: make all but two keywords"


def test_functions_take_keywords():
    files = [
        path for path in FILES if package_of(path) not in POSITIONAL_PACKAGES and path.name not in POSITIONAL_FILES
    ]
    assert_kept(lambda path: positional_arguments(parsed(path), is_kernel=path in KERNEL_FILES), files=files)


# Pages


def test_pages_name_tests_that_exist():
    files = list((ROOT / "tests").rglob("*.py"))
    names = {name for path in files for name in re.findall(r"def (test_\w+)", path.read_text())}
    known = names | {path.stem for path in files}

    def missing(page: Path) -> Iterator[str]:
        for code in re.findall(r"`[^`\n]*`", page.read_text()):
            yield from (f"{name} is no test" for name in re.findall(r"\btest_\w+", code) if name not in known)

    assert_kept(missing, files=[ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))])


# Kernels


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
            narrow.append(f"{function.lineno}: {function.name} uses a program id in 32 bits: add .to(tl.int64)")
    return narrow


def test_program_ids_are_int64():
    assert_kept(lambda path: narrow_addresses(parsed(path)), files=KERNEL_FILES)


def without_formula(tree: ast.AST) -> Iterator[str]:
    """Kernels without a docstring, which is their formula."""
    for function in jit_functions(tree):
        if not ast.get_docstring(function):
            yield f"{function.lineno}: {function.name} has no formula in its docstring"


def test_kernels_state_their_formula():
    assert_kept(lambda path: without_formula(parsed(path)), files=KERNEL_FILES)


def host_waits(tree: ast.AST) -> Iterator[str]:
    """`.item()` and the like in functions that launch kernels; the CPU implementations may read their tensors."""
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef) and function.name.lstrip("_").startswith("launch"):
            for call in ast.walk(function):
                name = call.func.attr if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) else ""
                if name in HOST_SYNCHRONISATION:
                    yield f"{call.lineno}: {function.name} waits for the device in .{name}()"


def test_launchers_do_not_wait_for_the_device():
    assert_kept(lambda path: host_waits(parsed(path)), files=KERNEL_FILES)


def implicit_fusion(tree: ast.AST) -> Iterator[str]:
    """Launches that leave FP fusion to Triton: it is on by default up to 3.9 and off from 3.10."""
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call):
            continue
        is_prepared = isinstance(call.func, ast.Name) and call.func.id in ("Prepared", "bind")
        if is_prepared or isinstance(call.func, ast.Subscript):  # kernel[grid](...)
            names = {keyword.arg for keyword in call.keywords}
            # unpacked options have no name here
            if "num_warps" in names and None not in names and "enable_fp_fusion" not in names:
                yield f"{call.lineno}: the launch leaves enable_fp_fusion to the version of Triton"


def test_launches_choose_fp_fusion():
    assert_kept(lambda path: implicit_fusion(parsed(path)), files=KERNEL_FILES)


# The rules themselves


def bare_functions(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and "torch.autograd.Function" in map(ast.unparse, node.bases):
            yield f"{node.name} derives from torch.autograd.Function: derive it from ztk.kernels.launch.functions"


# Modules within `ztk.zero` that DeepSpeed's layer imports, next to the methods of the engine. No commit may add one.
OF_PARAMETERS = {"construction", "partitioned", "released"}  # parameters before there is an engine, and their classes
OF_BUCKETS = {"bucket", "gradient", "residency"}  # the bucket of a parameter, and the state of both
IN_ZERO = {f"ztk.zero.parameters.{name}" for name in OF_PARAMETERS} | {
    f"ztk.zero.buckets.{name}" for name in OF_BUCKETS
}


def test_deepspeed_uses_the_engine():
    inside = re.compile(r"ztk\.zero\.(parameters|buckets|update|state)\.")
    files = (ROOT / "ztk" / "deepspeed").rglob("*.py")
    found = {name for path in files for name in imported(parsed(path)) if inside.match(name)}
    assert {".".join(name.split(".")[:4]) for name in found} == IN_ZERO


def test_autograd_functions_refuse_what_they_cannot_differentiate():
    own = {
        "ztk/kernels/launch/functions.py",
        "ztk/core/runtime/differentiable.py",  # has rules for all transforms
        "ztk/planner/peer.py",  # imitates other libraries
    }
    assert_kept(
        lambda path: list(bare_functions(parsed(path))),
        files=[path for path in FILES if path.relative_to(ROOT).as_posix() not in own],
    )


def test_the_rules_find_planted_mistakes():
    assert list(bare_functions(ast.parse("class F(torch.autograd.Function): ...")))
    assert broken_imports(ast.parse("from ztk.nn import Decoder"), package="kernels")
    assert broken_imports(ast.parse("from ztk.zero.offload import HostStore"), package="zero")
    assert broken_imports(ast.parse("import hydra"), package="train/engine")
    assert broken_imports(ast.parse("importlib.import_module('ztk.config')"), package="deepspeed")
    assert broken_imports(ast.parse("__import__('ztk.config')"), package="deepspeed")
    assert not broken_imports(ast.parse("from ztk.kernels import adamw"), package="optim")
    kernel = "@triton.jit\ndef k(p, B: tl.constexpr):\n    o = tl.program_id(0) * B + tl.arange(0, B)\n"
    assert narrow_addresses(ast.parse(kernel)) and list(without_formula(ast.parse(kernel)))
    assert not narrow_addresses(ast.parse(kernel.replace("program_id(0)", "program_id(0).to(tl.int64)")))
    assert list(host_waits(ast.parse("def launch_sum(x):\n    return x.item()")))
    assert list(implicit_fusion(ast.parse("k[grid](x, num_warps=4)")))
    assert list(implicit_fusion(ast.parse("p = Prepared(k, num_warps=4)")))
    assert list(implicit_fusion(ast.parse("bind(k, N, grid=grid, num_warps=4)")))
    assert not list(implicit_fusion(ast.parse("k[grid](x, num_warps=4, enable_fp_fusion=False)")))
    assert list(positional_arguments(ast.parse("def f(x, y, z): ...")))
    assert not list(positional_arguments(ast.parse("def f(x, y, *, z): ...")))
    assert list(positional_arguments(ast.parse("def f(x: Tensor, y: Tensor, n: int): ..."), is_kernel=True))
    assert not list(positional_arguments(ast.parse("def f(x: Tensor, w: Tensor | None): ..."), is_kernel=True))
    assert list(positional_arguments(ast.parse("class MoE:\n    def route(self, x, y, z): ...")))
    assert not list(positional_arguments(ast.parse("class MoE:\n    def __init__(self, x, y, z): ...")))
    silent = "def f(x):\n    '''Half of x.'''\n    if x % 2:\n        raise ValueError('odd')\n    return x // 2"
    assert list(unnamed_errors(ast.parse(silent)))
    assert not list(unnamed_errors(ast.parse(silent.replace("Half of x.", "Half of x. Raises: ValueError: x is odd."))))


def test_the_rules_on_docstrings_find_planted_mistakes():
    def faults(rule: Callable, *, text: str, shared: str = "") -> list[str]:
        return list(rule(ast.parse(text), shared=method_texts([ast.parse(shared)])))

    half = "def f(x: Tensor):\n    '''Half of x.'''"
    assert faults(shapeless, text=half)
    assert faults(shapeless, text=half.replace("of x.", "of x[i], see [Note: Halves] and `sizes[0]`."))  # no shapes
    for shape in ("x [N, D].", "x [.., n].", "x, float32 [].", "x, a scalar.", "x, of any shape."):
        assert not faults(shapeless, text=half.replace("x.", shape))
    assert faults(shapeless, text="'''Of tensors [N, D].'''\n" + half)
    assert not faults(shapeless, text="'''Halves. Shapes are those of torch.'''\n" + half)
    assert faults(shapeless, text=half + "\ndef f_reference(x: Tensor): ...")
    assert not faults(shapeless, text=half.replace("x.", "x [N].") + "\ndef f_reference(x: Tensor): ...")
    moves = "class Wire(Protocol):\n    '''Moves tensors [n].'''\n    def send(self, x: Tensor): ..."
    assert not faults(shapeless, text="class A:\n    def send(self, x: Tensor): ...", shared=moves)
    assert faults(shapeless, text="class A:\n    def recv(self, x: Tensor): ...", shared=moves)
    assert faults(
        shapeless, text="class A:\n    def send(self, x: Tensor): ...", shared=moves.replace("(Protocol)", "")
    )
    assert not faults(
        shapeless, text="class A(Wire):\n    def send(self, x: Tensor): ...", shared=moves.replace("(Protocol)", "")
    )
    wait = "def f(x, *, timeout: float):\n    '''Waits ten seconds. timeout: then it fails.'''"
    assert faults(unitless, text=wait)
    assert not faults(unitless, text=wait.replace("timeout: then", "timeout: seconds; then"))
    assert not faults(unitless, text=wait.replace("timeout: float", "timeout_seconds: float"))
    assert not faults(unitless, text="def f(*, world_size: int): ...")
    assert faults(unitless, text="def f(*, bucket_size: int | None): ...")
