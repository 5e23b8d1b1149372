"""Derives `data.seq_len` from the records, unless the user sets it: the longest text, rounded up, at most the model's context."""

import functools
from math import lcm
from pathlib import Path
from typing import TYPE_CHECKING

from ztk.config.evaluating import multiple_of
from ztk.config.keys import derive, read
from ztk.config.text import encoding_of
from ztk.core.policies.config import Config
from ztk.core.policies.data import ChatTemplateName, DataName, field_faults
from ztk.core.policies.runs import (
    ALIGNING,
    ANSWER_TASKS,
    RECORDS,
    as_paths,
    data_paths,
    distills_draws,
    draws,
    has_tokenizer,
    is_hugging_face,
    is_labelled,
    is_own,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ztk.rl.align import Example, Prompt

_ROW = 8  # row lengths of a batch are multiples of this
ANSWER, DISTILLED = (
    512,
    128,
)  # tokens of a pretrained model's answer: TRL's max_completion_length, and GKD's max_new_tokens
KEY = "data.seq_len"


def take_lengths(config: Config) -> list[str]:
    """Sets `data.seq_len`, and `rollout.max_tokens` for rollouts of a pretrained model, unless the user set them.

    Returns one line per fault.
    """
    if config.data.path is None or is_own(config, section="data"):
        return []
    if faults := list(field_faults(config)):
        return faults
    if config.warm_start.steps:
        reason = "its examples are of rollout.task alone, and data.path has others"
        derive(config, key="warm_start.steps", value=0, reason=reason)
    if distills_draws(config):
        _take_answers(config)
    try:
        if config.task.name in ALIGNING and KEY not in config.given:
            return _take_from_records(config)
        if draws(config):
            return _take_from_prompts(config)
    except ValueError as error:
        return str(error).splitlines()
    return []


def records_of(config: Config, *, seq_len: int | None) -> "tuple[Example, ...]":
    """Returns the records of `data.path` that the task learns from, then the records of `data.eval_path`.

    seq_len: the longest text that is accepted, or None.

    Raises:
        ValueError: a malformed or longer record, or no answer that is to be learnt.
    """
    found = _records(config, key="data.path", seq_len=seq_len)
    return (
        found if config.data.eval_path is None else (*found, *_records(config, key="data.eval_path", seq_len=seq_len))
    )


def _records(config: Config, *, key: str, seq_len: int | None) -> "tuple[Example, ...]":
    from ztk.data.rows import files_of  # imported late: torch takes a second, and only files need it

    data, tokenizer = config.data, str(config.data.tokenizer) if has_tokenizer(config) else None
    paths = as_paths(read(config, key=key))
    files = files_of(paths)
    if tokenizer is not None:
        files += sorted(file for file in Path(tokenizer).expanduser().glob("*") if file.is_file())
    stamps = tuple((str(file), (found := file.stat()).st_size, found.st_mtime_ns) for file in files)
    by_template = data.chat_template is ChatTemplateName.tokenizer
    stop = None if tokenizer else data.stop
    found = _read(
        key=key,
        paths=tuple(paths),
        record_format=data.name.value,
        seq_len=seq_len,
        stop=stop,
        tokenizer=tokenizer,
        by_template=by_template,
        fields=tuple((data.fields or {}).items()),
        labelled=is_labelled(config),
        stamps=stamps,
    )
    if config.task.name not in ANSWER_TASKS:
        return found
    from ztk.rl.align import without_rejected

    if not (kept := tuple(without_rejected(found))):
        raise ValueError(
            f"{key}: all {len(found):,} records have label false, so there is no answer to learn; use task=dpo dpo.loss=kto "
            "data=preferences"
        )
    return kept


def prompts_of(config: Config) -> "list[Prompt]":
    """Returns the prompts of `data.path`. Raises ValueError for a malformed one."""
    from ztk.rl.align import read_prompts  # imported late: torch takes a second

    return read_prompts(data_paths(config), encoding=encoding_of(config), fields=config.data.fields)


@functools.lru_cache(maxsize=2)
def _read(
    *,
    key: str,
    paths: tuple[str, ...],
    record_format: str,
    seq_len: int | None,
    stop: int | None,
    tokenizer: str | None,
    by_template: bool,
    fields: tuple[tuple[str, str], ...],
    labelled: bool,
    stamps: tuple[tuple[str, int, int], ...],
) -> "tuple[Example, ...]":
    """Cached, because both the lengths and the rules need the records. stamps: size and time of the files, to notice changes."""
    from ztk.data import SubwordTokenizer
    from ztk.rl.align import Encoding, RecordFormat, read_examples

    encoding = Encoding() if stop is None else Encoding(stop=stop)
    if tokenizer is not None:
        encoding = Encoding(tokenizer=SubwordTokenizer.open(tokenizer), by_template=by_template)
    options = {"seq_len": seq_len, "encoding": encoding, "fields": dict(fields), "labelled": labelled}
    try:
        return tuple(read_examples(paths, record_format=RecordFormat(record_format), **options))
    except ValueError as error:
        raise ValueError(str(error).replace("data.path=", f"{key}=")) from None


def _take_from_records(config: Config) -> list[str]:
    data = config.data
    if data.name not in RECORDS or not (data.stop or has_tokenizer(config)):
        return []  # reported by the rules
    if config.task.name not in ANSWER_TASKS and data.name is not DataName.preferences:
        return []
    examples, context = records_of(config, seq_len=None), config.model.max_seq_len
    lengths = [max(len(text) for text in example.texts) for example in examples]
    if not (too_long := sum(length > context for length in lengths)):
        if is_labelled(config) and (longest := sum(mismatched_lengths(examples))) > max(lengths):
            if longest > context:
                return [mismatched_fault(examples, limit=f"model.max_seq_len={context}")]
            _derive(config, longest=longest, kind="prompt with the longest answer")
            return []
        drawn = config.rollout.max_tokens or 0 if distills_draws(config) else 0
        asked = max(example.texts[0].last_answer.start for example in examples) + drawn if drawn else 0
        kind = "record" if max(lengths) >= asked else "prompt with rollout.max_tokens"
        _derive(config, longest=max(*lengths, min(asked, context)), kind=kind)
        return []
    first = ""
    try:
        records_of(config, seq_len=context)
    except ValueError as error:
        first = f", the first is {str(error).partition(': ')[0].removeprefix('data.path=')}"
    return [
        f"data.path: {too_long:,} of {len(lengths):,} records are longer than the {context:,} tokens of the model (model.max_seq_len); the "
        f"longest has {max(lengths):,}{first}: shorten them, or leave them out"
    ]


def mismatched_lengths(examples: "Sequence[Example]") -> tuple[int, int]:
    """Returns the lengths of the longest prompt and of the longest answer. KTO reads a prompt with the answer to any other one."""
    texts = [text for example in examples for text in example.texts]
    return max(text.first_answer for text in texts), max(len(text) - text.first_answer for text in texts)


def mismatched_fault(examples: "Sequence[Example]", *, limit: str) -> str:
    """Returns the fault of examples whose longest prompt and longest answer exceed a limit together."""
    prompt, answer = mismatched_lengths(examples)
    return (
        f"{limit}: dpo.loss=kto also reads a prompt with the answer to another one. The longest of data.path have {prompt:,} and {answer:,} "
        f"tokens; use data.seq_len={prompt + answer} and a model.max_seq_len of as many, or shorter records"
    )


def _take_from_prompts(config: Config) -> list[str]:
    if config.data.name is not DataName.prompts:
        return []  # reported by the rules
    _take_answers(config)
    if KEY in config.given:
        return []
    longest = max(len(prompt.tokens) for prompt in prompts_of(config)) + (config.rollout.max_tokens or 0)
    _derive(config, longest=min(longest, config.model.max_seq_len), kind="prompt with rollout.max_tokens")
    return []


def _take_answers(config: Config) -> None:
    """`rollout.max_tokens` and the temperature of draws for a pretrained model."""
    if is_hugging_face(config.model):
        distills = config.task.name == "distill"
        most, of = (DISTILLED, "GKD's max_new_tokens") if distills else (ANSWER, "max_completion_length")
        derive(config, key="rollout.max_tokens", value=min(most, config.model.max_seq_len // 2), reason=f"TRL's {of}")
        if distills:
            derive(config, key="rollout.temperature", value=0.9, reason="GKD's temperature in TRL")


def _derive(config: Config, *, longest: int, kind: str) -> None:
    """Raises `data.seq_len` to `longest` tokens, rounded up. A larger value of an option is kept, so that earlier runs can be
    repeated.
    """
    unit = multiple_of(config.topology)
    rounded = -(-longest // lcm(_ROW, unit)) * lcm(_ROW, unit)
    if rounded > config.model.max_seq_len:
        rounded = -(-longest // unit) * unit
    if rounded > config.data.seq_len:
        derive(config, key=KEY, value=rounded, reason=f"the longest {kind} of data.path has {longest:,} tokens")
