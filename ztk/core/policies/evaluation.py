"""Keys of `task=eval`."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar

from ztk.core.policies.key import Changes, When, key, tasks
from ztk.core.policies.paths import Paths
from ztk.core.policies.ranges import COUNT, INT32_MAX, Range

if TYPE_CHECKING:
    from ztk.core.policies.config import Config


class EvalEngine(StrEnum):
    """eval.engine: the engine that computes the model."""

    inference = "inference"
    training = "training"


_EVAL = tasks("eval")
_READS = When(
    "task=eval and eval.path=FILE",
    lambda config, machine: config.task.name == "eval" and config.eval.path is not None,
)


def _stride(config: "Config") -> Iterator[str]:
    length, stride = config.eval.seq_len, config.eval.stride
    if length is not None and stride is not None and stride >= length:
        yield f"eval.stride={stride}: must be below eval.seq_len={length}, or tokens have nothing before them"


@dataclass(kw_only=True)
class EvalConfig:
    """The texts of an evaluation. One of `path` and `choices` must be given."""

    acts: ClassVar = _EVAL
    changes: ClassVar = Changes.experiment

    path: Any = key(
        "held-out text: a text file, or jsonl or parquet with a document in eval.field, or a list of files; gives bits per byte",
        optional=True,
        paths=Paths(kind="file", several=True, fix="name a text, jsonl or parquet file, or a list of them"),
    )
    field: str | None = key(
        "the field of jsonl, the column of parquet, that has the text; null: text", acts=_READS, optional=True
    )
    choices: Any = key(
        'a jsonl file or a list of them, each line {"question": "text", "choices": ["one", "two"], "answer": 0}, or "prompt" in place of '
        '"question"; gives accuracies',
        optional=True,
        paths=Paths(kind="file", several=True, fix="name a jsonl file with questions, or a list of them"),
    )
    seq_len: int | None = key(
        "tokens of a window; null: the model's longest sequence, 2048 at most",
        range=Range(low=2, high=INT32_MAX),
        optional=True,
    )
    stride: int | None = key(
        "tokens by which windows of a long text move; a token has seq_len - stride before it at least; null: half of seq_len",
        range=COUNT,
        acts=_READS,
        optional=True,
        contradicts=_stride,
    )
    engine: EvalEngine | None = key(
        "inference: one rank, or the ranks of topology.tensor; training: the engine that trains, in any layout, stage and tier; null: "
        "training where zero=, precision= or another layout is chosen, else inference",
        optional=True,
    )
    record: bool | None = key("write a line of examples.jsonl per document and question")
