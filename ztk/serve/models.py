"""Models from folders: runs of ztk, its checkpoints, and what transformers reads; each with its tokenizer."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import nn

from ztk import checkpoint
from ztk.checkpoint.gguf.reading import model_folder
from ztk.config import Config
from ztk.config import load as load_config
from ztk.config.generation import end_tokens, generation_file
from ztk.core.policies.data import DataName
from ztk.core.policies.runs import reads_documents
from ztk.data import ByteTokenizer, SubwordTokenizer
from ztk.inference import UnreadModel
from ztk.inference.packed import MANIFEST, Packed, open_packed
from ztk.rl.align import ANSWER_END, ChatTemplate, chat_prompt, text_prompt
from ztk.serve.messages import PLAIN, ChatOptions
from ztk.serve.pieces import Pieces
from ztk.serve.trained import trained_model

_NAMED = 5  # of the weights that are missing
CHATS = (DataName.chat, DataName.preferences)  # data whose answers end with the byte `data.stop`


class Tokenizer(Protocol):
    """Text to tokens and back."""

    @property
    def special(self) -> Mapping[int, str]:
        """The texts of special tokens, which `decode` leaves out."""
        ...

    def encode(self, text: str) -> list[int]:
        """The tokens of `text` after those that the tokenizer puts before a text. Those that it puts after one are left out: the answer comes
        there."""
        ...

    def encode_text(self, text: str) -> list[int]:
        """The tokens of `text` alone."""
        ...

    def decode(self, tokens: list[int]) -> str:
        """The text of `tokens`; bytes that are no UTF-8 become U+FFFD."""
        ...

    def token_bytes(self, token: int) -> bytes | None:
        """The bytes that `token` adds to a text, those of a special token included; None: it has none."""
        ...

    @property
    def longest(self) -> int:
        """Characters of the longest token."""
        ...

    @property
    def template(self) -> str | None:
        """The source of the chat template, or None without one."""
        ...

    def chat(self, messages: list[dict[str, Any]], *, options: ChatOptions = PLAIN) -> list[int]:
        """The tokens of a conversation and of the beginning of the next answer.

        Raises:
            ValueError: the model has no chat template, or it refuses the messages.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Opened:
    """A model with its tokenizer.

    module: the model, a folder of its packed weights, or a model that is read as it is needed. ends: tokens that end an answer.
    vocabulary: tokens that may be drawn; the others have no text. begin: tokens that the tokenizer puts before a text. first: the token
    before a text that has nothing else before it; None: the tokenizer has none. unknown: the token of what the tokenizer cannot write; None:
    it writes everything.
    """

    name: str
    module: nn.Module | Packed | UnreadModel
    tokenizer: Tokenizer
    ends: tuple[int, ...]
    vocabulary: int
    begin: tuple[int, ...] = ()
    first: int | None = None
    unknown: int | None = None


def open_model(path: str, *, ema: bool = False) -> Opened:
    """The model in `path`, fp32 on the CPU: a run folder, a checkpoint of ztk, a folder with a config.json, or one of packed weights, which
    are not read here. Nothing is downloaded.

    ema: with the moving average of the weights that the run has kept.

    Raises:
        ValueError: the folder has neither, it has no average, or transformers is needed and not installed.
    """
    folder = Path(model_folder(path))
    if ema and any((folder / name).is_file() for name in ("config.json", MANIFEST)):
        raise ValueError(f"inference.ema=true: {folder} has one set of weights; leave it out, or name the run folder")
    if (folder / MANIFEST).is_file():
        return open_packed_model(open_packed(folder))
    if (folder / "config.json").is_file():
        return with_tokenizer(folder, module=folder_module(folder))
    step, recorded = recorded_run(folder)
    config = load_config(recorded / "config.yaml")
    return with_tokenizer(folder, module=trained_model(config, step=step, ema=ema).eval())


def with_tokenizer(folder: Path, *, module: nn.Module | UnreadModel) -> Opened:
    """A model that was opened from a run folder, a checkpoint or a folder with a config.json, with the tokenizer that is there.

    Raises:
        ValueError: the folder is neither a run, nor a checkpoint, nor one of transformers; or transformers is needed and not installed.
    """
    if (folder / "config.json").is_file():
        return _of_transformers(folder, name=folder.name, module=module)
    _, recorded = recorded_run(folder)
    return _of_run(recorded, name=recorded.name, config=load_config(recorded / "config.yaml"), module=module)


def open_packed_model(packed: Packed) -> Opened:
    """A folder of packed weights with the tokenizer that was packed with it."""
    name = packed.extra["name"]
    if (packed.path / "config.yaml").is_file():
        return _of_run(packed.path, name=name, config=load_config(packed.path / "config.yaml"), module=packed)
    return _of_transformers(packed.path, name=name, module=packed)


def checkpoint_of(path: str) -> Path | None:
    """The checkpoint whose weights answer for `path`; None for a folder with a config.json or with packed weights."""
    folder = Path(path)
    if any((folder / name).is_file() for name in ("config.json", MANIFEST)):
        return None
    return checkpoint.resolve(folder)


def recorded_run(folder: Path) -> tuple[Path, Path]:
    """The step folder of a checkpoint, and the folder with the config.yaml of its run.

    Raises:
        ValueError: no such file.
        CheckpointError: there is no checkpoint.
    """
    step = checkpoint.resolve(folder)
    recorded = next((place for place in (step, *step.parents[:3]) if (place / "config.yaml").is_file()), None)
    if recorded is None:
        raise ValueError(
            f"inference.model={folder}: no config.yaml of a run lies in or above the checkpoint, so its sizes are unknown; export it with "
            "python -m ztk.checkpoint export, and name the exported folder"
        )
    return step, recorded


def _of_run(recorded: Path, *, name: str, config: Config, module: nn.Module | Packed | UnreadModel) -> Opened:
    tokenizer = _tokenizer_of(recorded, name=config.data.tokenizer)
    stop = None if tokenizer is not None else _stop_of(config)
    has_chats = config.data.name in CHATS
    by_template = config.data.chat_template == "tokenizer"
    ends = {stop} if tokenizer is None else {tokenizer.end, *end_tokens(generation_file(str(recorded)))}
    if tokenizer is not None and by_template and ChatTemplate.has(tokenizer.folder):
        end = ChatTemplate.open(tokenizer.folder).end
        ends.add(None if end is None else tokenizer.token_of(end))
    return Opened(
        name=name,
        module=module,
        tokenizer=_Bytes(chat_stop=stop if has_chats else None)
        if tokenizer is None
        else _Subword(tokenizer, has_chats=has_chats, by_template=by_template),
        ends=tuple(sorted(ends - {None})),
        vocabulary=min(config.model.vocab_size, (tokenizer or ByteTokenizer).vocab_size),
        begin=() if tokenizer is None else tokenizer.begin,
        first=_first_of(config) if tokenizer is None else tokenizer.end,
        unknown=None if tokenizer is None else _unknown_of(tokenizer),
    )


def _first_of(config: Config) -> int:
    """What was before a text when a model of bytes learnt it: the end of another document or answer, or of a line."""
    if config.data.name in CHATS:
        return config.data.stop
    return ByteTokenizer.end if reads_documents(config) else ord("\n")


def _unknown_of(tokenizer: SubwordTokenizer) -> int | None:
    named = getattr(tokenizer.inner.model, "unk_token", None)
    return None if named is None else tokenizer.inner.token_to_id(named)


def _stop_of(config: Config) -> int | None:
    """The byte that ends an answer, where the run learnt answers; None: it learnt text, which has no end."""
    if config.task.name in ("grpo", "ppo"):
        return ANSWER_END
    return config.data.stop if config.data.name in CHATS else None


def _tokenizer_of(run: Path, *, name: str | None) -> SubwordTokenizer | None:
    """The tokenizer in the run folder; None: the model reads bytes. name: data.tokenizer of the run."""
    if name in (None, "bytes"):
        return None
    folder = run / "tokenizer"
    if not (folder / "tokenizer.json").is_file():
        raise ValueError(
            f"inference.model={run}: trained with data.tokenizer={name}, and {folder} has no tokenizer.json; copy the tokenizer there"
        )
    return SubwordTokenizer.open(folder)


def folder_module(folder: Path) -> nn.Module:
    """The model of transformers in `folder`, fp32 on the CPU. Raises ValueError where transformers is not installed, or weights are missing."""
    transformers = _transformers(folder)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True, trust_remote_code=False, output_loading_info=True
    )
    if missing := sorted(info["missing_keys"]):
        named = ", ".join(missing[:_NAMED]) + (f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else "")
        raise ValueError(
            f"inference.model={folder}: its files lack {named}, which {type(model).__name__} computes with; save the model again"
        )
    return model.eval()


def _transformers(folder: Path) -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise ValueError(f'inference.model={folder}: needs transformers: pip install "ztk[hf]"') from error


def _of_transformers(folder: Path, *, name: str, module: nn.Module | Packed | UnreadModel) -> Opened:
    transformers = _transformers(folder)
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    config: Any = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if not isinstance(module, nn.Module) and not (folder / "generation_config.json").is_file():
        named = transformers.GenerationConfig.from_model_config(config).eos_token_id
    elif not isinstance(module, nn.Module):
        named = transformers.GenerationConfig.from_pretrained(folder, local_files_only=True).eos_token_id
    else:
        generation: Any = module.generation_config
        named = generation.eos_token_id
    ends = [] if named is None else [named] if isinstance(named, int) else list(named)
    if tokenizer.eos_token_id is not None:
        ends.append(tokenizer.eos_token_id)
    if tokenizer.chat_template and (end := ChatTemplate(folder=folder, inner=tokenizer).end) is not None:
        ends.append(tokenizer.convert_tokens_to_ids(end))
    return Opened(
        name=name,
        module=module,
        tokenizer=_Pretrained(tokenizer),
        ends=tuple(dict.fromkeys(ends)),
        vocabulary=min(config.vocab_size, max(tokenizer.get_vocab().values()) + 1),  # ids may have gaps
        begin=_begin_of(tokenizer),
        first=tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id,
        unknown=tokenizer.unk_token_id,
    )


def _begin_of(tokenizer: Any) -> tuple[int, ...]:
    """The tokens that a tokenizer of transformers puts before a text."""
    plain, full = tokenizer.encode("a", add_special_tokens=False), tokenizer.encode("a")
    count = next(place for place in range(len(full) + 1) if full[place : place + len(plain)] == plain)
    return tuple(full[:count])


class _Bytes:
    """UTF-8 bytes as tokens. A model may have more tokens: they are never drawn, and their text is U+FFFD."""

    special: Mapping[int, str] = MappingProxyType({})

    def __init__(self, *, chat_stop: int | None = None) -> None:
        """chat_stop: the byte that ends answers of chats, as `task=sft` learns them; None: the model has learnt none."""
        self._bytes, self._chat_stop = ByteTokenizer(), chat_stop

    def encode(self, text: str) -> list[int]:
        return self._bytes.encode(text).tolist()

    encode_text = encode

    def decode(self, tokens: list[int]) -> str:
        return b"".join(bytes([token]) if token < 256 else "\ufffd".encode() for token in tokens).decode(
            errors="replace"
        )

    def token_bytes(self, token: int) -> bytes | None:
        return bytes([token]) if token < 256 else None

    longest = 1
    template: str | None = None

    def chat(self, messages: list[dict[str, Any]], *, options: ChatOptions = PLAIN) -> list[int]:
        if self._chat_stop is None:
            raise ValueError(
                "the model reads bytes and has no chat template: send the text to /v1/completions, or train it on chats with task=sft"
            )
        _check_plain(options)
        return chat_prompt(messages, stop=self._chat_stop).tokens


class _Subword:
    """The tokenizer that a run of ztk was trained with."""

    def __init__(self, tokenizer: SubwordTokenizer, *, has_chats: bool, by_template: bool) -> None:
        """has_chats: it has learnt chats, as `task=sft` writes them. by_template: by the tokenizer's chat template."""
        self._tokenizer, self._has_chats = tokenizer, has_chats
        self.special = tokenizer.special
        self._pieces = Pieces(tokenizer.inner)
        self.token_bytes, self.longest = self._pieces.token_bytes, self._pieces.longest
        self._inner = (
            ChatTemplate.open(tokenizer.folder).inner
            if has_chats and by_template and ChatTemplate.has(tokenizer.folder)
            else None
        )
        self.template = None if self._inner is None else _source(self._inner)

    def encode(self, text: str) -> list[int]:
        return text_prompt(text, tokenizer=self._tokenizer).tokens

    def encode_text(self, text: str) -> list[int]:
        return self._tokenizer.read(text).tokens

    def decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(torch.tensor(tokens, dtype=torch.int64))

    def chat(self, messages: list[dict[str, Any]], *, options: ChatOptions = PLAIN) -> list[int]:
        if not self._has_chats:
            raise ValueError(
                "the model was trained on text and has no chat template: send the text to /v1/completions, or train it on chats with task=sft"
            )
        if self._inner is not None:
            return self._tokenizer.read(_templated(self._inner, messages=messages, options=options)).tokens
        _check_plain(options)
        return chat_prompt(messages, tokenizer=self._tokenizer).tokens


class _Pretrained:
    """A tokenizer of transformers."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self._begin = tokenizer, _begin_of(tokenizer)
        added = tokenizer.added_tokens_decoder.items()
        self.special = {token: entry.content for token, entry in added if entry.special}
        inner = getattr(tokenizer, "backend_tokenizer", None)
        self._pieces = None if inner is None else Pieces(inner)
        self.longest = max(map(len, tokenizer.get_vocab()))
        self.template = _source(tokenizer)

    def token_bytes(self, token: int) -> bytes | None:
        if self._pieces is not None:
            return self._pieces.token_bytes(token)
        text = self._tokenizer.decode([token])  # a tokenizer in Python
        return None if "\ufffd" in text else text.encode()

    def encode(self, text: str) -> list[int]:
        return [*self._begin, *self.encode_text(text)]

    def encode_text(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True)

    def chat(self, messages: list[dict[str, Any]], *, options: ChatOptions = PLAIN) -> list[int]:
        if self.template is None:
            raise ValueError(
                "the model has no chat template: put one into its tokenizer_config.json (key chat_template), or send the text to "
                "/v1/completions"
            )
        text = _templated(self._tokenizer, messages=messages, options=options)
        return list(self._tokenizer.encode(text, add_special_tokens=False))


def _templated(inner: Any, *, messages: list[dict[str, Any]], options: ChatOptions) -> str:
    """By the chat template of a tokenizer of transformers."""
    try:
        return inner.apply_chat_template(
            messages,
            tools=list(options.tools) or None,
            tokenize=False,
            add_generation_prompt=options.begins,
            continue_final_message=options.continues,
            **options.variables,
        )
    except Exception as error:  # noqa: BLE001  # a template is code of the model's folder
        raise ValueError(f"the model's chat template refuses the messages: {error}") from None


def _source(inner: Any) -> str | None:
    """Of the template that is used where no name is given."""
    found = inner.chat_template or None
    return "\n".join(map(str, found.values())) if isinstance(found, dict) else found


def _check_plain(options: ChatOptions) -> None:
    if options.needs_template:
        raise ValueError(
            "the model has no chat template, which chat_template_kwargs, add_generation_prompt and continue_final_message need: leave them out"
        )
