"""Docstrings, comments and messages of every package use five phrases rarely: "what" as a noun, "says", "that of", "beside" and "None:".

They mark sentences without a named subject, or arguments described case by case. The rates are per 1,000 words. A package may have one use of
each phrase in any case, for example in the title of a paper.
"""

import ast
import io
import re
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("experiments", "scripts", "examples", "notebooks", "tests")  # outside of ztk
PACKAGES = [
    *sorted(path.name for path in ROOT.glob("ztk/*") if not path.is_symlink() and any(path.glob("**/*.py"))),
    *FOLDERS,
]

# A phrase -> the most uses per 1,000 words.
GOALS = {
    r"(?i)\bwhat\b": 0.8,
    r"(?i)\bsays\b": 0.1,
    r"(?i)\b(?:that|those) of\b": 0.1,
    r"(?i)\bbeside\b": 0.1,
    r"\bNone:": 0.2,
}

WORD = re.compile(r"\b[A-Za-z][\w'-]*")
DIRECTIVE = re.compile(r"#\s*(?:noqa|type:|pyrefly|ruff|fmt:)")


def texts(source: str) -> Iterator[str]:
    """The docstrings, the comments, and the strings of three or more words; an expression of an f-string becomes {}."""
    tree = ast.parse(source)
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            text = node.value
        else:
            continue
        if id(node) in docstrings or len(WORD.findall(text)) >= 3:
            yield text
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not DIRECTIVE.match(token.string):
            yield token.string


@pytest.mark.parametrize("package", PACKAGES)
def test_rates_of_five_phrases(package: str, show: Callable[[str], None]):
    folder = ROOT / package if package in FOLDERS else ROOT / "ztk" / package
    found = [text for path in sorted(folder.rglob("*.py")) for text in texts(path.read_text())]
    words = sum(len(WORD.findall(text)) for text in found)
    counts = {phrase: sum(len(re.findall(phrase, text)) for text in found) for phrase in GOALS}
    rates = "/".join(f"{1000 * count / words:.1f}" for count in counts.values())
    show(f"{package}: {words:,} words; what/says/that of/beside/None: {rates} per 1,000")
    above = {phrase: count for phrase, count in counts.items() if count > max(1, GOALS[phrase] * words / 1000)}
    assert not above, f"{package}: uses of {above} in {words:,} words: write sentences that name the thing"


def test_texts_are_docstrings_comments_and_messages():
    source = '"""A module."""\nx = 1  # why\ny = f"at most {x} of them"  # noqa: X\nz = "two words"\n'
    assert sorted(texts(source)) == ["# why", "A module.", "at most {} of them"]
