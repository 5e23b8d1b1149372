"""Rules of the tokenizer and the vocabulary size that follows from it."""

import json
from collections.abc import Iterator
from pathlib import Path

from ztk.config.keys import derive
from ztk.config.other_models import is_text_model
from ztk.config.text import have_same_tokenizer, open_tokenizer, tokenizer_of_run
from ztk.core.policies.config import Config
from ztk.core.policies.data import DataName
from ztk.core.policies.key import written
from ztk.core.policies.machine import Machine
from ztk.core.policies.model import ModelInit
from ztk.core.policies.runs import AUTO, TEXT, TRAIN, data_paths, has_tokenizer, is_hugging_face, reads_lines

_SLOW = (
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
)  # files of tokenizers without tokenizer.json


def follow_tokenizer(config: Config) -> list[str]:
    """Sets `data.tokenizer` to a pretrained model's tokenizer, and `model.vocab_size` to the tokenizer's size.

    Returns one line per fault.

    A vocabulary size that the user set, or that belongs to a transformers model, is kept.
    """
    data, model = config.data, config.model
    if not (data.name in TEXT or _reads_records(config)):
        return []
    faults = _take_tokenizer(config)
    if faults or not has_tokenizer(config):
        return faults
    try:
        size = _vocabulary(config)
    except ValueError as error:
        return [str(error)]
    if not is_hugging_face(model) and "model.vocab_size" not in config.given:
        model.vocab_size = size
    return [] if size <= model.vocab_size else [_too_many(config, size=size)]


def _too_many(config: Config, *, size: int) -> str:
    data, model = config.data, config.model
    fix = f"data.vocab_size={model.vocab_size}" if data.tokenizer == TRAIN else "another data.tokenizer"
    if is_hugging_face(model):
        return f"data.tokenizer={data.tokenizer}: has {size} tokens, and {model.path} {model.vocab_size}: use {fix}"
    return f"model.vocab_size={model.vocab_size}: data.tokenizer={data.tokenizer} has {size} tokens; leave model.vocab_size out, or use {fix}"


def _take_tokenizer(config: Config) -> list[str]:
    """Sets `data.tokenizer` to the tokenizer of pretrained weights, which are useless with bytes. Returns one line per fault."""
    model = config.model
    if not is_hugging_face(model) or model.init is not ModelInit.pretrained or has_tokenizer(config):
        return []
    folder = Path(model.path or "").expanduser()
    if (folder / "tokenizer.json").is_file():
        if "data.tokenizer" in config.given:
            return [
                f"data.tokenizer=bytes: {model.path} was trained in the tokens of its tokenizer.json, not in bytes: leave data.tokenizer out"
            ]
        derive(
            config, key="data.tokenizer", value=str(model.path), reason="the tokens that the weights were trained in"
        )
    elif any((folder / name).is_file() for name in _SLOW):
        return [
            f"model.path={model.path}: has a tokenizer without tokenizer.json, which alone is read: load it by "
            "transformers.AutoTokenizer.from_pretrained and save it there by save_pretrained"
        ]
    return []


def _vocabulary(config: Config) -> int:
    """Returns the tokenizer's size. Raises ValueError for a tokenizer that cannot be used."""
    data = config.data
    if data.tokenizer == TRAIN and data.name not in TEXT:
        raise ValueError(
            f"data.tokenizer=train: is made of text, and data={data.name.value} are records; use the tokenizer of the model that they train, "
            "as in data.tokenizer=RUN/tokenizer"
        )
    if data.tokenizer == TRAIN:
        if data.vocab_size is None:
            raise ValueError("data.tokenizer=train needs a size: use data.vocab_size=4096")
        return data.vocab_size
    return open_tokenizer(config).vocab_size


def text_faults(config: Config, *, machine: Machine) -> Iterator[str]:
    """Yields one line per fault, with its fix."""
    data = config.data
    if data.mixture is not None and data.name is DataName.files and data.path is not None:
        count = len(data_paths(config))
        if len(data.mixture) != count:
            yield (
                f"data.mixture={written(data.mixture)}: {len(data.mixture)} weights for {count} entries of data.path; give one for each, "
                "as in data.path=[a,b] data.mixture=[0.7,0.3]"
            )
        else:
            from ztk.data.mixture import shares_of  # imported late: torch takes a second

            try:
                shares_of(data.mixture)
            except ValueError as error:
                yield str(error)
    reward = (
        None if is_text_model(config.reward.path) else config.reward.path
    )  # such a model has a tokenizer of its own
    sources = {"warm_start.path": config.warm_start.path, "reward.path": reward}
    if not is_text_model(config.distill.teacher):
        sources["distill.teacher"] = config.distill.teacher
    for key, path in (sources | {"checkpoint.resume": config.checkpoint.resume}).items():
        other = None if path in (None, AUTO) else tokenizer_of_run(path)
        if other is not None and not has_tokenizer(config):
            can_follow = data.name in TEXT or _reads_records(config)
            fix = f"data.tokenizer={other}" if can_follow else "a model that was trained with data.tokenizer=bytes"
            yield (
                f"{key}={path}: this model has the tokens of {other}, and task={config.task.name} with data={data.name.value} reads bytes; "
                f"use {fix}"
            )
        elif (
            other is not None
            and data.tokenizer != TRAIN
            and not have_same_tokenizer(other, other=Path(data.tokenizer or ""))
        ):
            yield f"data.tokenizer={data.tokenizer}: {key}={path} has other tokens; use data.tokenizer={other}"
    if is_text_model(config.distill.teacher):
        yield from _teacher_faults(config)


def _teacher_faults(config: Config) -> Iterator[str]:
    """Yields one line if numbers of tokens are other texts to a teacher of transformers than to its student."""
    path, tokenizer = config.distill.teacher, config.data.tokenizer
    theirs = _texts_of(Path(path or ""))
    if theirs is None or tokenizer == TRAIN:
        return
    if not has_tokenizer(config):
        yield (
            f"distill.teacher={path}: this model has the tokens of its tokenizer.json, and the student reads bytes; use data.tokenizer={path}"
        )
        return
    own = _texts_of(Path(tokenizer or "")) or {}
    odd = next((number for number in sorted(own.keys() & theirs.keys()) if own[number] != theirs[number]), None)
    if odd is not None:
        yield (
            f"distill.teacher={path}: token {odd} is {theirs[odd]!r} in its tokenizer.json and {own[odd]!r} in data.tokenizer={tokenizer}; "
            "their distributions are compared token by token, so use a teacher and a student with one vocabulary"
        )


def _texts_of(folder: Path) -> dict[int, str] | None:
    """Returns the tokens of a tokenizer.json by number, without the added ones, which families rename; None without a file that has
    them.
    """
    try:
        found = json.loads((folder.expanduser() / "tokenizer.json").read_text(encoding="utf-8"))
        vocabulary, added = found["model"]["vocab"], {one["id"] for one in found.get("added_tokens") or ()}
    except (OSError, ValueError, KeyError, TypeError):  # a tokenizer that is read is checked where it is opened
        return None
    pairs = vocabulary.items() if isinstance(vocabulary, dict) else ((one[0], at) for at, one in enumerate(vocabulary))
    return {number: text for text, number in pairs if number not in added}


def _reads_records(config: Config) -> bool:
    return reads_lines(config) and config.data.path is not None
