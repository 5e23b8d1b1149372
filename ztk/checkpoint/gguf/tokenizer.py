"""Converts tokenizers between GGUF's metadata and the files of a transformers folder.

Byte-level BPE can be read and written. GGUF names the way of splitting text into words (`tokenizer.ggml.pre`); `_WORDS` lists the
supported names. SentencePiece tokenizers (`tokenizer.ggml.model=llama`) can be read as BPE over characters, with merges derived from the
tokens' scores.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ztk.data.subword import read_settings, token_text

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5  # values of tokenizer.ggml.token_type
_PREFIX = "tokenizer.ggml."
_NAMED = ("bos", "eos", "unknown", "padding")  # special tokens with an id in the metadata
_SETTINGS = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
_SPACE = "\u2581"
_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _byte_level(*, use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _sequence(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": list(parts)}


def _split(numbers: str) -> dict[str, Any]:
    pattern = {"Regex": _SPLIT % numbers}
    return {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}


# tokenizer.ggml.pre -> pre_tokenizer of tokenizer.json
_WORDS = {
    "gpt-2": _byte_level(use_regex=True),
    "smollm": _sequence({"type": "Digits", "individual_digits": True}, _byte_level(use_regex=True)),
    "qwen2": _sequence(_split(r"\p{N}"), _byte_level(use_regex=False)),
    "llama-bpe": _sequence(_split(r"\p{N}{1,3}"), _byte_level(use_regex=False)),
}
_DECODER = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}


def write_tokenizer(metadata: Mapping[str, Any], *, folder: Path, file: str) -> None:
    """Writes tokenizer.json, tokenizer_config.json, generation_config.json and chat_template.jinja, as far as the metadata define them.

    Raises ValueError for an unsupported tokenizer.
    """
    kind = metadata.get(f"{_PREFIX}model", "no_vocab")
    ids = {name: metadata[key] for name in _NAMED if (key := f"{_PREFIX}{name}_token_id") in metadata}
    ends = {
        f"{name}_token_id": ids[own] for name, own in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")) if own in ids
    }
    _write_json(folder / "generation_config.json", value=ends)
    if kind in ("no_vocab", "none"):
        return
    if kind not in ("gpt2", "llama"):
        raise ValueError(
            f"{file}: tokenizer.ggml.model={kind} is not read: gpt2 (byte-level BPE) and llama (SentencePiece) are; name the model's folder"
        )
    tokens = metadata[f"{_PREFIX}tokens"]
    parts = _byte_bpe(metadata, file=file) if kind == "gpt2" else _sentence_piece(metadata)
    stored = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": _added(metadata), **parts}
    stored["post_processor"] = _beginning(metadata, tokens=tokens)
    _write_json(folder / "tokenizer.json", value=stored)
    settings = {_SETTINGS[name]: tokens[number] for name, number in ids.items()}
    settings |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    _write_json(folder / "tokenizer_config.json", value=settings)
    if template := metadata.get("tokenizer.chat_template"):
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def read_tokenizer(folder: Path, *, vocabulary: int) -> dict[str, Any]:
    """Returns the GGUF metadata of the tokenizer in `folder`, or of a model without a tokenizer if tokenizer.json is missing.

    vocabulary: rows of the embedding. The file needs a token for each.

    Raises ValueError for an unsupported tokenizer.
    """
    if not (folder / "tokenizer.json").is_file():
        return {f"{_PREFIX}model": "no_vocab"}
    stored = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    model = stored["model"]
    if model["type"] != "BPE" or model.get("byte_fallback"):
        raise ValueError(
            f"--format gguf: the tokenizer in {folder} is not a byte-level BPE, the only kind that is written; leave --format out"
        )
    tokens, types = _tokens_of(stored, vocabulary=vocabulary)
    if len(tokens) > vocabulary:
        raise ValueError(
            f"--format gguf: the tokenizer in {folder} has {len(tokens)} tokens and the model {vocabulary}; use the model's own tokenizer"
        )
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    pre = _pre_of(stored, folder=folder)
    _check_parts(stored, pre=pre, folder=folder)
    found = {
        f"{_PREFIX}model": "gpt2",
        f"{_PREFIX}pre": pre,
        f"{_PREFIX}tokens": tokens,
        f"{_PREFIX}token_type": types,
        f"{_PREFIX}merges": merges,
        f"{_PREFIX}add_space_prefix": False,
    }
    known = {token: number for number, token in enumerate(tokens)}
    named = read_settings(folder)
    for name, setting in _SETTINGS.items():
        text = token_text(named.get(setting))
        if text in known:
            found[f"{_PREFIX}{name}_token_id"] = known[text]
    before, after = _around(stored)
    ids = {side: found.get(f"{_PREFIX}{side}_token_id") for side in ("bos", "eos")}
    if before not in ([], [ids["bos"]]) or after not in ([], [ids["eos"]]):
        raise ValueError(
            f"--format gguf: the tokenizer in {folder} puts the tokens {before} in front of a text and {after} after it, and GGUF can name "
            "bos_token and eos_token alone; leave --format out"
        )
    found |= {f"{_PREFIX}add_bos_token": bool(before)} | ({f"{_PREFIX}add_eos_token": True} if after else {})
    if template := _template(folder, named=named):
        found["tokenizer.chat_template"] = template
    return found


def _byte_bpe(metadata: Mapping[str, Any], *, file: str) -> dict[str, Any]:
    pre = metadata.get(f"{_PREFIX}pre", "gpt-2")
    if pre not in _WORDS:
        raise ValueError(
            f"{file}: tokenizer.ggml.pre={pre} is not read: {', '.join(_WORDS)} are; name the model's folder with its tokenizer.json"
        )
    merges = [list(merge.split(" ", 1)) for merge in metadata[f"{_PREFIX}merges"]]
    return {
        "normalizer": {"type": "NFC"} if pre == "qwen2" else None,
        "pre_tokenizer": _WORDS[pre],
        "decoder": _DECODER,
        "model": _bpe(_used(metadata), merges=merges, ignore_merges=pre == "llama-bpe"),
    }


def _sentence_piece(metadata: Mapping[str, Any]) -> dict[str, Any]:
    tokens, scores = metadata[f"{_PREFIX}tokens"], metadata[f"{_PREFIX}scores"]
    prefixed = metadata.get(f"{_PREFIX}add_space_prefix", True)
    unknown = metadata.get(f"{_PREFIX}unknown_token_id")
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    first = {"type": "Prepend", "prepend": _SPACE}
    back = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        *([{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefixed else []),
    ]
    model = _bpe(_used(metadata), merges=_merges(tokens, scores=scores), ignore_merges=False)
    model |= {"byte_fallback": True, "fuse_unk": True, "unk_token": None if unknown is None else tokens[unknown]}
    return {
        "normalizer": {"type": "Sequence", "normalizers": [first, spaces]} if prefixed else spaces,
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": back},
        "model": model,
    }


def _merges(tokens: list[str], *, scores: list[float]) -> list[list[str]]:
    """Returns all pairs that merge into a token, ordered by the token's score, best first."""
    number = {token: place for place, token in enumerate(tokens)}
    found = []
    for token, score in zip(tokens, scores, strict=True):
        pairs = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        ways = [
            (number[left], number[right], left, right) for left, right in pairs if left in number and right in number
        ]
        found += [(-score, left, right) for *_, left, right in sorted(ways)]
    return [[left, right] for _, left, right in sorted(found, key=lambda entry: entry[0])]


def _used(metadata: Mapping[str, Any]) -> dict[str, int]:
    """Returns the tokens that have a text, with their ids."""
    tokens = metadata[f"{_PREFIX}tokens"]
    types = metadata.get(f"{_PREFIX}token_type", [NORMAL] * len(tokens))
    pairs = enumerate(zip(tokens, types, strict=True))
    return {token: number for number, (token, kind) in pairs if kind != UNUSED}


def _bpe(vocabulary: dict[str, int], *, merges: list[list[str]], ignore_merges: bool) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": ignore_merges,
        "vocab": vocabulary,
        "merges": merges,
    }


def _added(metadata: Mapping[str, Any]) -> list[dict[str, Any]]:
    types = metadata.get(f"{_PREFIX}token_type", ())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return [
        {"id": number, "content": metadata[f"{_PREFIX}tokens"][number], **flags, "special": kind != USER_DEFINED}
        for number, kind in enumerate(types)
        if kind in (UNKNOWN, CONTROL, USER_DEFINED)
    ]


def _beginning(metadata: Mapping[str, Any], *, tokens: list[str]) -> dict[str, Any] | None:
    """Returns the post-processor that prepends the first token to a text."""
    number = metadata.get(f"{_PREFIX}bos_token_id")
    is_added = metadata.get(f"{_PREFIX}add_bos_token", metadata.get(f"{_PREFIX}model") == "llama")
    if number is None or not is_added:
        return None
    bos = tokens[number]
    special, text = {"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    pair = [special, text, {"Sequence": {"id": "B", "type_id": 1}}]
    named = {bos: {"id": bos, "ids": [number], "tokens": [bos]}}
    return {"type": "TemplateProcessing", "single": [special, text], "pair": pair, "special_tokens": named}


def _tokens_of(stored: Mapping[str, Any], *, vocabulary: int) -> tuple[list[str], list[int]]:
    """Returns all tokens in order, and their types."""
    numbers = dict(stored["model"]["vocab"])
    kinds = {}
    for token in stored.get("added_tokens") or ():
        numbers[token["content"]] = token["id"]
        kinds[token["content"]] = CONTROL if token["special"] else USER_DEFINED
    by_number = {number: token for token, number in numbers.items()}
    count = max(vocabulary, *(number + 1 for number in by_number))
    tokens = [by_number.get(number, f"[PAD{number}]") for number in range(count)]
    return tokens, [kinds.get(token, NORMAL if token in numbers else UNUSED) for token in tokens]


def _pre_of(stored: Mapping[str, Any], *, folder: Path) -> str:
    own = _significant(stored["pre_tokenizer"])
    for name, words in _WORDS.items():
        if _significant(words) == own:
            return name
    raise ValueError(
        f"--format gguf: the tokenizer in {folder} cuts text into words in a way that has no name here: {', '.join(_WORDS)} have; leave "
        "--format out"
    )


def _significant(words: Any) -> Any:
    """Removes offsets, which affect no token."""
    if isinstance(words, dict):
        return {key: _significant(value) for key, value in words.items() if key != "trim_offsets"}
    return [_significant(part) for part in words] if isinstance(words, list) else words


def _around(stored: Mapping[str, Any]) -> tuple[list[int], list[int]]:
    """Returns the tokens that the tokenizer adds before and after a text."""
    after = stored.get("post_processor") or {}
    parts: Iterable[Mapping[str, Any]] = after.get("processors", [after])
    found: tuple[list[int], list[int]] = ([], [])
    for part in parts:
        side = 0
        for piece in part.get("single") or ():
            if "Sequence" in piece:
                side = 1
            else:
                found[side].extend(part["special_tokens"][piece["SpecialToken"]["id"]]["ids"])
    return found


def _check_parts(stored: Mapping[str, Any], *, pre: str, folder: Path) -> None:
    """Raises ValueError for parts of a tokenizer that a GGUF file does not hold, so that other tokens would be read.

    The name qwen2 stands for NFC, and llama-bpe for words that are looked up before they are merged.
    """
    model, faults = stored["model"], []
    normal = stored.get("normalizer")
    kinds = [part["type"] for part in _parts_of(normal)]
    if kinds and (kinds != ["NFC"] or pre != "qwen2"):
        faults.append(f"its normalizer {', '.join(kinds)} changes texts")
    if bool(model.get("ignore_merges")) != (pre == "llama-bpe"):
        faults.append(f"ignore_merges={str(bool(model.get('ignore_merges'))).lower()} does not belong to {pre}")
    faults += [
        f"{key}={model[key]}"
        for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
        if model.get(key)
    ]
    for token in stored.get("added_tokens") or ():
        flags = [flag for flag in ("single_word", "lstrip", "rstrip") if token.get(flag)]
        faults += [f"{flags[0]} of the token {token['content']!r}"] if flags else []
    if faults:
        raise ValueError(
            f"--format gguf: the tokenizer in {folder} has what GGUF cannot hold, so that llama.cpp would read other tokens: {faults[0]}; "
            "leave --format out"
        )


def _parts_of(normalizer: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if normalizer is None:
        return []
    inner = normalizer.get("normalizers")
    return [normalizer] if inner is None else [part for entry in inner for part in _parts_of(entry)]


def _template(folder: Path, *, named: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    found = named.get("chat_template")
    return found if isinstance(found, str) else None


def _write_json(path: Path, *, value: object) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
