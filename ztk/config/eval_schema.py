"""The keys of `task=eval`."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from ztk.config.key import key


class EvalEngine(StrEnum):
    """eval.engine: what computes the model."""

    inference = "inference"
    training = "training"


@dataclass(kw_only=True)
class EvalConfig:
    """The texts that a model is judged by. One of path and choices must be given."""

    path: Any = key(
        "held-out text: a text file, or jsonl or parquet with a document in eval.field, or a list of files; gives bits per byte",
        default=None,
    )
    field: str | None = key("the field of jsonl, the column of parquet, that has the text; null: text", default=None)
    choices: Any = key(
        'a jsonl file or a list of them, each line {"question": "text", "choices": ["one", "two"], "answer": 0}, or "prompt" in place of '
        '"question"; gives accuracies',
        default=None,
    )
    seq_len: int | None = key("tokens of a window; null: what the model takes, 2048 at most", default=None)
    stride: int | None = key(
        "tokens by which windows of a long text move; a token has seq_len - stride before it at least; null: half of seq_len",
        default=None,
    )
    engine: EvalEngine | None = key(
        "inference: one rank, or the ranks of topology.tensor; training: the engine that trains, in any layout, stage and tier; null: "
        "training where zero=, precision= or another layout is chosen, else inference",
        default=None,
    )
    record: bool | None = key("write a line of examples.jsonl per document and question", default=None)
