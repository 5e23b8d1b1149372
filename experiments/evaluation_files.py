"""Reads the files of `task=eval`: held-out documents, and multiple-choice questions. Invalid lines are reported before a model is
loaded.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ztk.data.documents import Fault, read_documents
from ztk.data.lines import parse_line

_EXAMPLE = '{"question": "text", "choices": ["one", "two"], "answer": 0}'
_DATA_KEYS = {"data.path=": "eval.path=", "data.field=": "eval.field=", ", or use data.on_error=skip": ""}


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """line: number in the file. prompt and choices: texts to score, each choice after the prompt. sizes: UTF-8 bytes of the choices in the
    file. answer: index of the right choice.
    """

    line: int
    prompt: str
    choices: list[str]
    sizes: list[int]
    answer: int


def read_texts(path: str, *, field: str) -> list[str]:
    """Reads the documents of a file: the whole of a text file, a line of jsonl, or a row of parquet.

    Raises:
        ValueError: a line without text in `field`, with file and line; or a file that cannot be read.
    """
    found: list[list[str]] = []
    for item in read_documents(Path(path), field=field):
        if isinstance(item, Fault):
            raise ValueError(item.with_words(_DATA_KEYS))
        if item.is_first:
            found.append([])
        found[-1].append(item.text)
    return ["".join(pieces) for pieces in found]


def read_questions(path: str) -> list[Question]:
    """Reads the questions of a jsonl file.

    Raises:
        ValueError: an invalid question, with file and line; or a file without one.
    """
    found = []
    for number, line in enumerate(Path(path).read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            found.append(_question(parse_line(line), number=number))
        except ValueError as error:
            raise ValueError(f"eval.choices={path}, line {number}: {error}; a line is {_EXAMPLE}") from None
    if not found:
        raise ValueError(f"eval.choices={path}: has no question; a line is {_EXAMPLE}")
    return found


def _question(given: Any, *, number: int) -> Question:
    if not isinstance(given, dict):
        raise ValueError("is no JSON object")
    named = [name for name in ("question", "prompt") if name in given]
    if len(named) != 1:
        raise ValueError('has both "question" and "prompt"' if named else 'has neither "question" nor "prompt"')
    [name] = named
    text, choices, answer = given[name], given.get("choices"), given.get("answer")
    if not isinstance(text, str):
        raise ValueError(f'"{name}" is no text')
    if not isinstance(choices, list) or len(choices) < 2 or not all(isinstance(one, str) and one for one in choices):
        raise ValueError('"choices" is no list of two texts or more, none of them empty')
    if type(answer) is not int or not 0 <= answer < len(choices):
        raise ValueError(f'"answer" is {answer!r} and must be the number of a choice, from 0 to {len(choices) - 1}')
    sizes = [len(choice.encode()) for choice in choices]
    if name == "question":
        text, choices = f"Question: {text}\nAnswer:", [f" {choice}" for choice in choices]
    return Question(line=number, prompt=text, choices=choices, sizes=sizes, answer=answer)
