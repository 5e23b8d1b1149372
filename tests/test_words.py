"""Retired names and clipped descriptions do not come back.

The terms of FSDP2, DeepSpeed and Megatron replaced the names; docs/glossary.md lists them.
"""

import ast
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLACES = ("ztk", "experiments", "scripts", "examples", "notebooks", "tests")

# A retired name, in any case and with or without underscores -> the name to use.
RETIRED = {
    r"nursery|born_?parameters?|on_?birth": "zero_init, PartitionedParameter",
    r"let_go|drop_all": "unpin, reshard",
    r"put_away|land_gradients?": "write_back, finish_reduce",
    r"parking|parked": "state offloading: offload, reload",
    r"disband": "release_model",
    r"short_?exchange": "QuantizedCollectives",
    r"node_?meeting|socket_?lanes": "barrier, PeerSockets",
    r"journey|itinerary": "AsyncAllToAll, DispatchPlan",
    r"wish": "LoadOptions",
    r"silence_idle": "null_inactive_keys",
    r"is_hopeless|verdict": "is_unrecoverable, overflow_status",
}
ANY = re.compile("|".join(RETIRED).replace("_?", "[_ ]?"), re.IGNORECASE)
PATTERNS = [(re.compile(rf"(?:^|_)(?:{names})(?:$|_)"), use) for names, use in RETIRED.items()]


def snake_case(name: str) -> str:
    """`ShortExchange` -> `short_exchange`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def retired(name: str) -> str:
    """The name to use in place of a retired one; empty for any other."""
    return next((use for pattern, use in PATTERNS if pattern.search(snake_case(name))), "")


def names(path: Path) -> Iterator[tuple[int, str]]:
    """The identifiers of a file with their lines; of the file's name with line 0."""
    yield 0, path.stem
    if not ANY.search(path.read_text()):
        return
    with path.open("rb") as file:
        yield from (
            (token.start[0], token.string) for token in tokenize.tokenize(file.readline) if token.type == tokenize.NAME
        )


def test_no_retired_name_is_used():
    paths = [path for place in PLACES for path in (ROOT / place).rglob("*.py")]
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}; use {retired(name)}"
        for path in paths
        for line, name in names(path)
        if retired(name)
    ]
    assert not found, "\n".join(found)


def test_retired_names_are_found_in_any_case():
    assert all(
        map(retired, ("ShortExchange", "_short_exchange", "Nursery", "let_go", "sequence_let_go", "BornParameter"))
    )
    assert not any(map(retired, ("exchange", "outlet_gone", "wishbone", "reload", "landscape")))


# A description that lacks its noun ("dtype: of the weights"), or a summary that lacks its verb ("As `forward`.").
TELEGRAM = re.compile(r"(?:^|(?<=\. )|(?<=\) ))\s*[a-z_]+: (?:of|as) |\AAs `?[\w.]+`?[ .,'(]", re.MULTILINE)


def test_descriptions_name_what_they_describe():
    found = [
        f"{path.relative_to(ROOT)}: {match.group().strip()}: name the thing, for example `dtype: dtype of the weights`"
        for place in ("ztk", "experiments", "scripts")
        for path in (ROOT / place).rglob("*.py")
        if re.search(r': (of|as) |"""As ', path.read_text())  # parses few files
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module)
        for match in TELEGRAM.finditer(ast.get_docstring(node) or "")
    ]
    assert not found, "\n".join(found)
