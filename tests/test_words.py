"""One vocabulary: the terms of FSDP2, DeepSpeed and Megatron in names, comments, docstrings, errors and pages; docs/glossary.md has them."""

import re
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# Pattern of a replaced word -> the word to use. Case does not matter, underscores and capital letters separate words.
REPLACED = {
    r"sleeps?|slept|asleep|sleeping": "resides, is stored on; waits",
    r"born|births?|nursery": "zero_init, PartitionedParameter; made, built",
    r"borrow(s|ed|ing)?": "unshard, pin",
    r"let go|drop all": "unpin, reshard",
    r"parking|parked": "state offloading: offload, reload",
    r"whole|wholes|wholly": "full, entire, all",
    r"unseen": "without_dispatch_modes; not seen",
    r"disband(s|ed)?": "release_model",
    r"short exchanges?": "QuantizedCollectives",
    r"secondary shards?": "hpz_partition_size",
    r"put away": "write_back",
    r"sequence norms?": "sequence_parallel",
    r"journeys?|travel(s|s|led|ling)?|itinerar(y|ies)|depart(s|ed|ure|ures)?": "exchange, send, all-to-all; DispatchPlan",
    r"meets?|met|meetings?": "barrier; reach, run into, call",
    r"wish(es|ed)?": "LoadOptions; options, request",
    r"verdicts?": "overflow_status; result",
    r"hopeless": "is_unrecoverable",
    r"figures": "metrics, numbers",
    r"silence idle": "null_inactive_keys",
    r"doors?": "layer, interface, entry point",
    r"houses?": "architecture, ztk",
    r"mend(s|ed|ing)?": "fix",
    r"told about": "accepted with a note",
    r"stretch(es|ed)?": "range",
}
# Attributes of earlier versions whose words are ordinary English in a sentence.
ATTRIBUTES = {
    r"near|far": "intra_node, inter_node",
    r"come_back": "reload",
    r"hold|keeping|let_go": "pin, unpin, keep_unsharded",
    r"land|landing": "finish_reduce",
}
# Uses that are right: arithmetic's term, the system call, plotting, old keys of the command line that are still accepted, and the value of
# `rollout.weights`.
ALLOWED = re.compile(
    r"[Ww]hole[ _-]numbers?|time\.sleep|\bsleep\(|import sleep|[\"']sleep[\"', ]|\bsleep \d+"
    r"|zero\.secondary_shards|topology\.sequence_norms"
    r"|RolloutWeights\.whole|weights=whole|whole = \"whole|[`\"']whole[`\"']|\bwhole(?=: parameters| if | or streamed| where all)"
)
PATTERNS = [
    (re.compile(rf"(?<![A-Za-z])(?:{words.replace(' ', '[ _-]')})(?![A-Za-z])", re.IGNORECASE), use)
    for words, use in REPLACED.items()
]
ATTRIBUTE_PATTERNS = [(re.compile(rf"(?<=\.)(?:{names})\b"), use) for names, use in ATTRIBUTES.items()]

# Checked: everything but what is listed here, which is the text of others or this list itself.
PLACES = (
    "ztk",
    "experiments",
    "scripts",
    "conf",
    "docs",
    "examples",
    "notebooks",
    "tests",
    "README.md",
    "CONTRIBUTING.md",
    "run.py",
)
EXCLUDED = ("tests/documents/blocks/", "tests/test_words.py", "experiments/tasks/lexicon.py")
# Not yet cleaned.
PENDING: tuple[str, ...] = ()
KINDS = {".py", ".md", ".yaml", ".yml", ".toml", ".json"}


def split_capitals(text: str) -> str:
    """`AsyncAllToAll` -> `Async All To All`: a class name has words like any other name."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", text)


def replaced_words(text: str) -> list[tuple[str, str]]:
    """The replaced words of one line, each with what to say instead."""
    line = split_capitals(ALLOWED.sub("", text))
    return [(match.group(), use) for pattern, use in PATTERNS for match in pattern.finditer(line)]


def replaced_attributes(line: str) -> list[tuple[str, str]]:
    """The replaced attribute names that a line of code uses."""
    return [(match.group(), use) for pattern, use in ATTRIBUTE_PATTERNS for match in pattern.finditer(line)]


def code_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Lines of a Python file without its strings and comments: for rules about names."""
    lines = path.read_text().splitlines()
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type in (tokenize.STRING, tokenize.COMMENT) or token.type == getattr(
                tokenize, "FSTRING_MIDDLE", -1
            ):
                for row in range(token.start[0], token.end[0] + 1):
                    start = token.start[1] if row == token.start[0] else 0
                    end = token.end[1] if row == token.end[0] else len(lines[row - 1])
                    text = lines[row - 1]
                    lines[row - 1] = text[:start] + " " * (end - start) + text[end:]
    yield from enumerate(lines, start=1)


def files() -> list[Path]:
    """Every file of the project whose words are checked: those that git knows, and in a copy without git all that are there."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    names = listed.stdout.splitlines() or [
        str(path.relative_to(ROOT)) for place in PLACES for path in (ROOT / place).rglob("*")
    ]
    return [
        ROOT / name
        for name in sorted(names)
        if name.startswith(tuple(f"{place}/" if "." not in place else place for place in PLACES))
        and not name.startswith((*EXCLUDED, *PENDING))
        and Path(name).suffix in KINDS
        and (ROOT / name).is_file()
    ]


def findings(path: Path) -> list[str]:
    """The replaced words in a file's name and lines: names, comments, docstrings, strings and prose alike."""
    name = str(path.relative_to(ROOT))
    found = [f"{name}: file name: {word!r}; say: {use}" for word, use in replaced_words(name)]
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        found += [f"{name}:{number}: {word!r}; say: {use}" for word, use in replaced_words(line)]
    if path.suffix == ".py":
        for number, line in code_lines(path):
            found += [f"{name}:{number}: .{word}; say: {use}" for word, use in replaced_attributes(line)]
    return found


def test_the_fields_own_words_are_used():
    found = [finding for path in files() for finding in findings(path)]
    assert not found, f"{len(found)} replaced words:\n" + "\n".join(found)


def test_the_rule_finds_words_in_names_and_sentences_and_leaves_legitimate_uses():
    assert [word for word, _ in replaced_words("class ShortExchange: the_whole_buffer, WholeBuffer")] == [
        "whole",
        "Whole",
        "Short Exchange",
    ]
    assert replaced_words("raise ValueError('n must fit; mend: n=2')") and replaced_words("gradients sleep on disk")
    assert not replaced_words("a whole number, whole_numbers, time.sleep(1), sleep(1), wholesale, recommend, indoors")
    assert replaced_attributes("x = mesh.near.size") and not replaced_attributes("near = 3")
