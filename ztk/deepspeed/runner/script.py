"""The command of one rank."""

import ast
import re
import sys
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path

from ztk.deepspeed.runner.plan import Plan

# How a script declares the argument: argparse, click and the like; a dataclass that Hugging Face's parser reads.
_DECLARED = re.compile(r"""["'](--local[_-]rank)["'=]|^\s+(local_rank)\s*:""", re.MULTILINE)


def rank_command(plan: Plan, *, local_rank: int) -> list[str]:
    """What the rank runs. DeepSpeed appends --local_rank to every script and those that do not know it fail; here it is asked first."""
    python = [sys.executable, "-u"] if plan.python else []
    module = ["-m"] if plan.module else []
    word = local_rank_word(plan.script, module=plan.module) if plan.pass_local_rank else None
    own = [f"{word}={local_rank}"] if word else []
    return [*python, *module, plan.script, *own, *plan.arguments]


def local_rank_word(script: str, *, module: bool = False) -> str | None:
    """`--local_rank` or `--local-rank`, whichever `script` or a module beside it declares; None if none does."""
    path = _file_of_module(script) if module else Path(script)
    if path is None or not path.is_file():
        return None
    for source in _with_neighbours(path):
        if match := _DECLARED.search(source):
            return match[1] or "--local_rank"
    return None


def _with_neighbours(path: Path, *, seen: set[Path] | None = None) -> Iterator[str]:
    """The text of a file, and of what it imports from its own folder."""
    seen = set() if seen is None else seen
    if path in seen:
        return
    seen.add(path)
    text = path.read_text(encoding="utf-8", errors="replace")
    yield text
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module or "", *(".".join(filter(None, (node.module, alias.name))) for alias in node.names)}
    for name in sorted(filter(None, names)):
        place = path.parent.joinpath(*name.split("."))
        for file in (place.with_name(f"{place.name}.py"), place / "__init__.py"):
            if file.is_file():
                yield from _with_neighbours(file, seen=seen)


def _file_of_module(name: str) -> Path | None:
    """Where `python -m name` begins, found without importing what lies above it."""
    path = [str(Path.cwd()), *sys.path]
    *above, last = name.split(".")
    for part in above:
        spec = PathFinder.find_spec(part, path)
        if spec is None or not spec.submodule_search_locations:
            return None
        path = list(spec.submodule_search_locations)
    spec = PathFinder.find_spec(last, path)
    if spec is None:
        return None
    if spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations))) / "__main__.py"
    return Path(spec.origin) if spec.origin else None
