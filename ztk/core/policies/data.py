"""Keys of `data`: where sequences come from."""

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from ztk.core.policies.key import When, key
from ztk.core.policies.paths import Paths
from ztk.core.policies.ranges import BELOW_ONE, COUNT, Range
from ztk.core.policies.runs import (
    ALIGNING,
    BYTES,
    TEXT,
    TRAIN,
    draws,
    has_tokenizer,
    reads_documents,
    reads_lines,
    reads_records,
)
from ztk.core.policies.text import SMALLEST_VOCABULARY

if TYPE_CHECKING:
    from ztk.core.policies.config import Config


class DataName(StrEnum):
    """data.name: where sequences come from."""

    stdlib = "stdlib"  # the source code of the Python standard library on this machine
    files = "files"  # the files of `data.path`
    synthetic = "synthetic"  # random tokens, for benchmarks
    prompts = "prompts"  # prompts of `rollout.task`, or lines of `data.path`
    chat = "chat"  # answers to learn: made on the spot, or lines of `data.path`
    preferences = "preferences"  # pairs of answers: made on the spot, or lines of `data.path`


class OnError(StrEnum):
    """Handling of records that cannot be used."""

    refuse = "refuse"  # before ranks start
    skip = "skip"  # leave it out, and count it


class Packing(StrEnum):
    """data.packing: how documents share sequences."""

    concatenate = "concatenate"  # attention crosses document boundaries
    documents = "documents"  # a token attends to its own document


class ChatTemplateName(StrEnum):
    """data.chat_template: how messages are written."""

    tokenizer = "tokenizer"
    roles = "roles"


class TruncationName(StrEnum):
    """data.truncate_prompts: which end of a prompt that is too long is cut."""

    left = "left"
    right = "right"


_FILES = When("data=files", lambda config, machine: config.data.name == "files")
_DOCUMENTS = When(
    "data=files with jsonl, parquet or compressed files, data.mixture, or another data.tokenizer than bytes",
    lambda config, machine: config.data.name == "files" and reads_documents(config),
)
_PATHS = When(
    "data=files, prompts, chat or preferences",
    lambda config, machine: config.data.name == "files" or reads_lines(config),
)
_TOKENIZED = When(
    "data=stdlib or data=files, and data=chat, data=preferences or data=prompts with data.path",
    lambda config, machine: config.data.name in TEXT or (reads_lines(config) and config.data.path is not None),
)
_TRAINED_TOKENIZER = When(
    "data.tokenizer=train", lambda config, machine: config.data.name in TEXT and config.data.tokenizer == TRAIN
)
_RECORDS = When(
    "data=chat, data=preferences or data=prompts with data.path",
    lambda config, machine: reads_lines(config) and config.data.path is not None,
)
_EVALUATED = When(
    "data.path with task=sft, reward, dpo or distill, or with task=grpo or ppo and rollout.eval_every above 0 or checkpoint.keep_best",
    lambda config, machine: (
        config.data.path is not None
        and (
            config.task.name in ALIGNING
            or (draws(config) and bool(config.rollout.eval_every or config.checkpoint.keep_best))
        )
    ),
)
_PACKED = When(
    "task=pretrain with documents: jsonl, parquet or compressed files, data.mixture, or another data.tokenizer than bytes",
    lambda config, machine: config.task.name in ("pretrain", "plan") and reads_documents(config),
)
_TEMPLATED = When(
    "data=chat, data=preferences or data=prompts with data.path and data.tokenizer=FOLDER",
    lambda config, machine: reads_lines(config) and has_tokenizer(config) and config.data.path is not None,
)
_PROMPTS = When(
    "task=grpo or task=ppo with data=prompts and data.path",
    lambda config, machine: draws(config) and config.data.name == "prompts" and config.data.path is not None,
)
_BYTE_RECORDS = When(
    "data=chat or data=preferences with data.tokenizer=bytes; a tokenizer's end token ends answers",
    lambda config, machine: reads_records(config) and not (has_tokenizer(config) and config.data.path is not None),
)
_HELD_OUT = When(
    "data=stdlib or data=files, and data=chat or data=preferences with data.path",
    lambda config, machine: config.data.name in TEXT or (reads_records(config) and config.data.path is not None),
)


# Fields of records that ztk reads under these names.
RECORD_FIELDS = (
    *("prompt", "messages", "answer", "completion", "chosen", "rejected", "margin", "label", "tools"),
    *("conversations", "instruction", "input", "output", "system", "history", "completions"),
)


def field_faults(config: "Config") -> Iterator[str]:
    """One line per entry of `data.fields` that names no field."""
    found = config.data.fields
    if found is None:
        return
    if not isinstance(found, Mapping) or not all(isinstance(own, str) for own in found.values()):
        yield f"data.fields={found}: must name a field of the data for each of ztk's; use data.fields={{prompt: question, answer: response}}"
        return
    for name in found:
        if name not in RECORD_FIELDS:
            yield f"data.fields={{{name}: {found[name]}}}: records have no field {name!r}; use one of {', '.join(RECORD_FIELDS)}"


@dataclass(kw_only=True)
class DataConfig:
    """The tokens to train on."""

    name: DataName = key(
        "stdlib: the source code of this machine's Python standard library; files: the files of data.path; synthetic: random "
        'tokens; prompts: of rollout.task, or data.path\'s lines {"prompt": ...} or {"messages": ...}; chat: made on the spot, or '
        'data.path\'s lines {"messages": ...} or {"prompt": ..., "answer": ...}; preferences: likewise, lines {"prompt": ..., "chosen": '
        '..., "rejected": ...}. Forms of known data sets are read, too',
        default=MISSING,
    )
    path: Any = key(
        "a file, a folder, a glob, or a list of them",
        acts=_PATHS,
        optional=True,
        paths=Paths(kind="pattern", several=True, fix="name others"),
    )
    eval_path: Any = key(
        "records or prompts of evaluations, as data.path. null: data.validation_fraction of the records; prompts of data.path itself, or "
        "new ones of rollout.task",
        acts=_EVALUATED,
        optional=True,
        paths=Paths(several=True),
    )
    tokenizer: str | None = key(
        "bytes; train: a byte-level BPE of data.vocab_size tokens, made on the training text; or a folder with a tokenizer.json. "
        "model.vocab_size follows it unless it is given",
        acts=_TOKENIZED,
        paths=Paths(words=(BYTES, TRAIN)),
    )
    vocab_size: int | None = key(
        "tokens of data.tokenizer=train, the bytes and the end token included",
        range=Range(low=SMALLEST_VOCABULARY, high=1 << 20),
        acts=_TRAINED_TOKENIZER,
    )
    fields: Any = key(
        "names of the data for fields of records, as in {prompt: question, answer: response}",
        acts=_RECORDS,
        optional=True,
    )
    field: str | None = key("field of jsonl and column of parquet that has the text", acts=_DOCUMENTS)
    mixture: list[float] | None = key(
        "weights of the entries of data.path, as in [0.7,0.3]: parts of the training sequences; null: one order over all documents",
        acts=_FILES,
        optional=True,
    )
    packing: Packing | None = key(
        "documents in a sequence: concatenate: attention crosses their boundaries; documents: a token attends to its own document alone",
        acts=_PACKED,
    )
    on_error: OnError | None = key(
        "handling of broken records and files: refuse: the run does not start; skip: they are left out and counted",
        acts=_DOCUMENTS,
    )
    chat_template: ChatTemplateName | None = key(
        "how messages become tokens of data.tokenizer. tokenizer: by the chat template of its folder, as transformers renders it; roles: lines "
        "<|role|>, and the end token after an answer",
        acts=_TEMPLATED,
    )
    truncate_prompts: TruncationName | None = key(
        "end that is cut from a prompt that leaves no room for rollout.max_tokens in data.seq_len: left or right; null: the prompt is "
        "refused",
        acts=_PROMPTS,
        optional=True,
    )
    stop: int | None = key(
        "byte that ends an answer of data=chat and data=preferences; 10: a line end",
        range=Range(low=1, high=127),
        acts=_BYTE_RECORDS,
    )
    validation_fraction: float | None = key(
        "part of the text held out for evaluation", range=BELOW_ONE, acts=_HELD_OUT, idle=0
    )
    seq_len: int = key(
        "tokens per sequence; of records in data.path the longest text, where it is not given",
        default=MISSING,
        range=COUNT,
    )
