"""Generates the front page, from README.md, and the configuration and library pages of the documentation site.

mkdocs calls these functions (`hooks` in mkdocs.yml). The configuration page is built from the source of `run.py --help GROUP`, and the page of
each ztk package from its docstrings.
"""

import ast
import re
import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import ztk
from scripts.draw_diagrams import DIAGRAM, file_of
from ztk.config import GroupReference, build_reference, conf_dir
from ztk.deepspeed.names.table import MODULES, TOP

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("core", "parallel", "rl", "train", "zero")  # packages by role; their own `__init__` imports nothing
HEADED = "\n    options:\n      show_root_heading: true\n"  # without it, an object of its own has neither a heading nor an anchor
FRONT = "index.md"
CONFIGURATION, LIBRARY, PACKAGES = "reference/configuration.md", "reference/library.md", "reference/{}.md"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Adds the reference to the navigation."""
    pages = [{"Configuration": CONFIGURATION}, {"Library": LIBRARY}]
    pages += [{f"ztk.{package}": PACKAGES.format(package)} for package in packages()]
    # pyrefly: ignore[not-iterable]  # a list in mkdocs.yml
    config.nav = [*config.nav, {"Reference": pages}]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the generated pages."""
    pages = {FRONT: front_page(), CONFIGURATION: configuration_page(), LIBRARY: library_page()}
    pages |= {PACKAGES.format(package): package_page(package) for package in packages()}
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Shows the drawing in place of a Mermaid diagram, which would be drawn by a program from the network.

    Links to README.md, to a package and to conf/config.yaml, which work in a checkout, become links to the front page and to the reference.
    """
    up = "../" * page.file.src_uri.count("/")

    def shown(found: re.Match) -> str:
        name = file_of(found[1])
        if not (ROOT / "docs" / name).exists():
            raise PluginError(f"{page.file.src_uri}: a diagram is not drawn: run python scripts/draw_diagrams.py")
        return f"![Diagram]({up}{name})"

    def package(found: re.Match) -> str:
        return f"]({up}{PACKAGES.format(found[1].replace('/', '.'))})"

    text = DIAGRAM.sub(shown, markdown).replace(f"]({up}../README.md", f"]({up}{FRONT}")
    text = text.replace(f"]({up}../conf/config.yaml)", f"]({up}{CONFIGURATION})")
    return re.sub(rf"\]\({up}\.\./ztk/([\w/]+)/__init__\.py\)", package, text)


def front_page() -> str:
    """README.md, whose links are relative to the checkout."""
    return (ROOT / "README.md").read_text(encoding="utf-8").replace("](docs/", "](")


def packages() -> list[str]:
    """All packages of ztk with subpackages (`zero`, `zero.buckets`), in alphabetical order."""
    files = [*(ROOT / "ztk").glob("*/__init__.py")]
    files += [path for folder in FOLDERS for path in (ROOT / "ztk" / folder).glob("*/__init__.py")]
    return sorted(".".join(path.parent.relative_to(ROOT / "ztk").parts) for path in files)


def package_of(home: str) -> str:
    """The package whose page documents the module `ztk.HOME`: the longest prefix of its name that is a package."""
    parts = home.split(".")[1:]
    names = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next(name for name in names if name in packages())


def configuration_page() -> str:
    """Every group with its options and keys."""
    reference = build_reference([conf_dir()])
    intro = (
        "# Configuration\n\nA run is one option of every group (`zero=stage3`) and any number of values (`train.steps=50`). "
        "`python run.py --help GROUP` prints the same tables. The column of defaults has the usual option's value first, then the values of "
        "options that differ; the meaning explains `null`. A key is refused without the choice that its last column names.\n"
    )
    return "\n".join([intro, *(_group_section(group) for group in reference.values())])


def _group_section(group: GroupReference) -> str:
    lines = [f"## {group.name}", "", group.meaning, ""]
    if group.options:
        lines += [f"| `{group.name}=` | |", "| --- | --- |"]
        for option, meaning in group.options.items():
            mark = " (usual)" if option == group.usual else ""
            lines.append(f"| `{option}`{mark} | {_cell(meaning)} |")
        lines.append("")
    if group.keys:
        lines += ["| key | meaning | takes | default | only with |", "| --- | --- | --- | --- | --- |"]
        for key in group.keys:
            cells = (f"`{key.name}`", *map(_cell, (key.meaning, key.takes, key.default, key.only)))
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def library_page() -> str:
    """The names of `import ztk`, each with the first line of its docstring and a link to its place in the reference."""
    lines = ["# Library", "", "`import ztk` has these names. It imports torch when the first of them is used.", ""]
    lines += ["| name | |", "| --- | --- |"]
    for name in ztk.__all__:
        home = ztk._HOMES[name]  # module that defines the name
        defined = defining_module(home, name=name)
        page = "library.md" if name == "parallelize" else f"{package_of(home)}.md"
        lines.append(f"| [`ztk.{name}`]({page}#{defined}.{name}) | {_cell(_first_line(defined, name=name))} |")
    return "\n".join([*lines, "", f"::: ztk.parallel.apply.parallelize{HEADED}", ""])


def package_page(package: str) -> str:
    """The package's exports, from its docstrings, and the names of `import ztk` that its modules define."""
    if package != "deepspeed":
        homes = sorted(set(ztk._HOMES.values()) - {f"ztk.{name}" for name in packages()})
        modules = [f"::: {home}" for home in homes if package_of(home) == package and home != "ztk.parallel.apply"]
        missed = [name for name, home in ztk._HOMES.items() if home == f"ztk.{package}" and is_missed(home, name=name)]
        names = [f"::: {defining_module(f'ztk.{package}', name=name)}.{name}{HEADED}" for name in sorted(missed)]
        return "\n\n".join([f"# ztk.{package}", f"::: ztk.{package}", *modules, *names]) + "\n"
    # The names are resolved on access, so tools that read the source cannot find them.
    lines = [
        "# ztk.deepspeed",
        "",
        "`import ztk.deepspeed as deepspeed` has these names, and the modules below them.",
        "",
    ]
    for home, names in sorted(TOP.items()):
        lines += [f"::: {home}.{name}{HEADED}" for name in names.split() if _definition(home, name=name)]
    lines += ["## Modules", "", "| module | names |", "| --- | --- |"]
    for module, row in sorted(MODULES.items()):
        names = f"as `{row}`" if isinstance(row, str) else ", ".join(f"`{name}`" for name in _listed(row))
        lines.append(f"| `{module}` | {names} |")
    return "\n".join(lines) + "\n"


def _listed(row: dict[str, str]) -> list[str]:
    """The names of a module; `*` stands for all exports of a ztk module."""
    return [name if name != "*" else f"{home}.*" for home, names in row.items() for name in names.split()]


def is_missed(home: str, *, name: str) -> bool:
    """Whether a package's own docstrings leave the name out: it has no `__all__`, or a module of that name hides it."""
    place = ROOT.joinpath(*home.split("."))
    return "__all__" not in (place / "__init__.py").read_text(encoding="utf-8") or (place / f"{name}.py").exists()


def defining_module(home: str, *, name: str) -> str:
    """The module under which the reference has a name of `import ztk`."""
    if home == "ztk.deepspeed":
        return next(module for module, names in TOP.items() if name in names.split())
    place = ROOT.joinpath(*home.split("."), "__init__.py")
    if not place.exists() or not is_missed(home, name=name):
        return home
    nodes = [node for node in ast.parse(place.read_text(encoding="utf-8")).body if isinstance(node, ast.ImportFrom)]
    return next(str(node.module) for node in nodes if name in [alias.name for alias in node.names])


def _first_line(module: str, *, name: str) -> str:
    """The first line of a docstring, without importing the module: importing torch takes seconds."""
    found = _definition(module, name=name)
    if found is None:
        raise ValueError(f"{module}.{name}: no file of {module} defines it; correct ztk/__init__.py")
    return (ast.get_docstring(found) or "").partition("\n\n")[0]


def _definition(module: str, *, name: str) -> ast.FunctionDef | ast.ClassDef | None:
    """The definition of the name in the module, in a file of the package, or in the module that it is imported from."""
    place = ROOT.joinpath(*module.split("."))
    for path in sorted(place.glob("*.py")) if place.is_dir() else [place.with_suffix(".py")]:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
                return node
            if isinstance(node, ast.ImportFrom) and not (node.module or "").startswith(module):
                found = [alias.name for alias in node.names if name in (alias.name, alias.asname)]
                if found and node.module and node.module.startswith("ztk."):
                    return _definition(node.module, name=found[0])
    return None


def _cell(text: str) -> str:
    """Escapes a text for one cell of a table."""
    return " ".join(text.split()).replace("|", "\\|").replace("*", "\\*").replace("<", "&lt;")
