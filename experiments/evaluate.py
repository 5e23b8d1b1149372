"""Measures how well a model predicts held-out text and answers questions: the program of `python run.py task=eval`.

`eval.json` in the run folder has the numbers of the table. With eval.record, `examples.jsonl` has one line per document and question.
"""

import json
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ztk.config import Config
from ztk.core.policies.evaluation import EvalEngine
from ztk.experiments.evaluation_engine import scoring
from ztk.experiments.evaluation_files import Question, read_questions, read_texts
from ztk.experiments.generate import answering, release_module
from ztk.inference import EncodedChoices, Scorer, encode_choices, log_likelihoods, score_choices
from ztk.report import RunFolder
from ztk.report.folder import write_json
from ztk.serve.models import Opened

_QUESTIONS_AT_ONCE = 16
_SECONDS_BETWEEN = 10.0  # seconds between lines of progress


@dataclass(kw_only=True)
class Subject:
    """The evaluated model. seq_len: most tokens per sequence. speaks: whether this rank prints."""

    opened: Opened
    scorer: Scorer
    seq_len: int
    speaks: bool = True


def main(config: Config) -> None:
    """Scores all files, prints the table and writes it.

    Raises:
        ValueError: an invalid document or question, by file and line, or a model that cannot be run.
        FloatingPointError: logits are not finite.
    """
    chosen = config.eval
    texts = {path: read_texts(path, field=chosen.field or "text") for path in chosen.path or []}
    questions = {path: read_questions(path) for path in chosen.choices or []}
    files = {"texts": texts, "questions": questions}
    if chosen.engine is EvalEngine.training:
        with scoring(config) as scored:
            evaluate(config, **files, opened=scored.opened, scorer=scored.scorer, speaks=scored.is_first)
        return
    with answering(config) as leading:
        if leading is not None:
            release_module(leading.opened)
            evaluate(config, **files, opened=leading.opened, scorer=leading.generator)


def evaluate(
    config: Config,
    *,
    texts: dict[str, list[str]],
    questions: dict[str, list[Question]],
    opened: Opened,
    scorer: Scorer,
    speaks: bool = True,
) -> None:
    """Scores all files, which have been read. Prints and writes the table if this rank `speaks`. Raises as `main`."""
    chosen = config.eval
    seq_len = settled_seq_len(chosen.seq_len, scorer=scorer)
    subject = Subject(opened=opened, scorer=scorer, seq_len=seq_len, speaks=speaks)
    started = time.perf_counter()
    lines: list[dict[str, Any]] = []
    found = [
        score_texts(
            subject, path=path, texts=own, stride=settled_stride(chosen.stride, seq_len=subject.seq_len), lines=lines
        )
        for path, own in texts.items()
    ]
    found += [score_questions(subject, path=path, questions=own, lines=lines) for path, own in questions.items()]
    if not speaks:
        return
    folder = RunFolder(config.output_dir)
    write_json(folder.path / "eval.json", values={"files": found})
    if chosen.record:
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        (folder.path / "examples.jsonl").write_text(text, encoding="utf-8")
    summary = totals(found) | {"seq_len": subject.seq_len, "seconds": time.perf_counter() - started}
    folder.write_summary({"status": "done", "error": None, "steps": 0} | summary)
    print("\n".join(table(found)))


def settled_seq_len(given: int | None, *, scorer: Scorer) -> int:
    """Returns the tokens of a window, by default the scorer's maximum. Raises ValueError for more than the model takes."""
    if given is not None and given > scorer.max_len:
        raise ValueError(
            f"eval.seq_len={given}: the model takes {scorer.max_len} tokens; use eval.seq_len={scorer.max_len}"
        )
    return given or scorer.max_len


def settled_stride(given: int | None, *, seq_len: int) -> int:
    """Returns the tokens by which windows move. Raises ValueError for windows that do not overlap."""
    if given is not None and given >= seq_len:
        raise ValueError(
            f"eval.stride={given}: must be below the {seq_len} tokens of a window; use eval.stride={seq_len // 2}"
        )
    return given or seq_len // 2


def score_texts(
    subject: Subject, *, path: str, texts: list[str], stride: int, lines: list[dict[str, Any]]
) -> dict[str, Any]:
    """Scores a file's documents in bits per byte. lines: receives one line per document.

    Raises:
        ValueError: there is no token to put before a text.
        FloatingPointError: logits are not finite.
    """
    opened = subject.opened
    before = list(opened.begin) or [opened.first]
    if before == [None]:
        raise ValueError(
            f"inference.model={opened.name}: the first token of a text needs one before it, and the tokenizer has neither a bos_token "
            "nor an eos_token; name one in its tokenizer_config.json"
        )
    tokens = [opened.tokenizer.encode_text(text) for text in texts]
    total = sum(map(len, tokens))
    sums = log_likelihoods(
        subject.scorer,
        sequences=[[*before, *own] for own in tokens],
        context=len(before),
        seq_len=subject.seq_len,
        stride=stride,
        on_scored=Progress(total=total, unit=f"tokens of {path}", speaks=subject.speaks).add,
    )
    sizes = [len(text.encode()) for text in texts]
    lines += [
        {"path": path, "document": number, "bytes": size, "tokens": len(own), "bits": -value / math.log(2)}
        for number, (size, own, value) in enumerate(zip(sizes, tokens, sums, strict=True))
    ]
    return {
        "kind": "text",
        "path": path,
        "documents": len(texts),
        "bytes": sum(sizes),
        "tokens": total,
        "unknown_tokens": sum(own.count(opened.unknown) for own in tokens) if opened.unknown is not None else 0,
        "bits": -sum(sums) / math.log(2),
        "bits_per_byte": -sum(sums) / math.log(2) / sum(sizes),
        "stride": stride,
    }


def score_questions(
    subject: Subject, *, path: str, questions: list[Question], lines: list[dict[str, Any]]
) -> dict[str, Any]:
    """Computes the accuracies of a file's questions. lines: receives one line per question.

    Raises:
        ValueError: a choice that the model cannot process, by file and line.
        FloatingPointError: logits are not finite.
    """
    pairs = [(question, encode_question(question, subject=subject, path=path)) for question in questions]
    progress = Progress(total=len(questions), unit=f"questions of {path}", speaks=subject.speaks)
    right = right_per_byte = 0
    for start in range(0, len(questions), _QUESTIONS_AT_ONCE):
        several = pairs[start : start + _QUESTIONS_AT_ONCE]
        scores = score_choices(subject.scorer, examples=[example for _, example in several])
        for (question, _), values in zip(several, scores, strict=True):
            best = max(range(len(values)), key=values.__getitem__)
            per_byte = [value / size for value, size in zip(values, question.sizes, strict=True)]
            best_per_byte = max(range(len(values)), key=per_byte.__getitem__)
            right += best == question.answer
            right_per_byte += best_per_byte == question.answer
            lines.append(
                {
                    "path": path,
                    "line": question.line,
                    "answer": question.answer,
                    "chosen": best,
                    "chosen_per_byte": best_per_byte,
                    "log_likelihoods": values,
                }
            )
        progress.add(len(several))
    count = len(questions)
    return {
        "kind": "choices",
        "path": path,
        "questions": count,
        "chance": sum(1 / len(question.choices) for question in questions) / count,
        "cut_prompts": sum(example.is_cut for _, example in pairs),
        **_rate("accuracy", right=right, count=count),
        **_rate("accuracy_per_byte", right=right_per_byte, count=count),
    }


def encode_question(question: Question, *, subject: Subject, path: str) -> EncodedChoices:
    """Returns the tokens of a question, truncated at the beginning if it is too long.

    Raises ValueError with file and line for a choice that is.
    """
    opened = subject.opened
    try:
        return encode_choices(
            question.prompt,
            choices=question.choices,
            encode=opened.tokenizer.encode_text,
            begin=opened.begin,
            first=opened.first,
        ).cut_to(subject.seq_len)
    except ValueError as error:
        raise ValueError(f"eval.choices={path}, line {question.line}: {error}") from None


def totals(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Combines all files of a kind, with equal weight for each byte and each question."""
    texts = [one for one in found if one["kind"] == "text"]
    choices = [one for one in found if one["kind"] == "choices"]
    values: dict[str, Any] = {}
    if texts:
        values |= {name: sum(one[name] for one in texts) for name in ("documents", "bytes", "tokens", "unknown_tokens")}
        values["bits_per_byte"] = sum(one["bits"] for one in texts) / values["bytes"]
    if choices:
        count = sum(one["questions"] for one in choices)
        values |= {"questions": count, "cut_prompts": sum(one["cut_prompts"] for one in choices)}
        for name in ("accuracy", "accuracy_per_byte"):
            values |= _rate(name, right=round(sum(one[name] * one["questions"] for one in choices)), count=count)
    return values


def table(found: list[dict[str, Any]]) -> Iterator[str]:
    """Yields the lines of the table on the terminal."""
    if texts := [one for one in found if one["kind"] == "text"]:
        yield f"{'bits per byte':>13} {'bytes':>12} {'tokens':>11} {'documents':>9}  held-out text"
        for one in texts:
            yield f"{one['bits_per_byte']:>13.4f} {one['bytes']:>12,} {one['tokens']:>11,} {one['documents']:>9,}  {one['path']}"
            if one["unknown_tokens"]:
                yield f"  {one['unknown_tokens']:,} of the tokens are unknown to the tokenizer: the bits leave out which bytes they were"
    if choices := [one for one in found if one["kind"] == "choices"]:
        yield f"{'accuracy':>17} {'per byte':>17} {'chance':>7} {'questions':>9}  file"
        for one in choices:
            rates = [f"{one[name]:.4f} +- {one[f'{name}_stderr']:.4f}" for name in ("accuracy", "accuracy_per_byte")]
            yield f"{rates[0]:>17} {rates[1]:>17} {one['chance']:>7.4f} {one['questions']:>9,}  {one['path']}"
            if one["cut_prompts"]:
                yield f"  {one['cut_prompts']:,} of the prompts are longer than the model takes: their beginning was left out"


def _rate(name: str, *, right: int, count: int) -> dict[str, float]:
    """Returns a rate with its binomial standard error, sqrt(p (1 - p) / n)."""
    rate = right / count
    return {name: rate, f"{name}_stderr": math.sqrt(rate * (1 - rate) / count)}


@dataclass(kw_only=True)
class Progress:
    """Prints lines on standard error, at most one in ten seconds."""

    total: int
    unit: str
    speaks: bool = True
    done: int = 0
    shown: float = field(default_factory=time.monotonic)

    def add(self, count: int) -> None:
        """Adds `count` to the finished items."""
        self.done += count
        if self.speaks and time.monotonic() - self.shown >= _SECONDS_BETWEEN:
            self.shown = time.monotonic()
            print(f"{self.done:,} of {self.total:,} {self.unit}", file=sys.stderr, flush=True)
