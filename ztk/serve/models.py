"""Opens models from folders, with their tokenizers: runs of ztk, checkpoints, and transformers folders."""

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

_NAMED = 5  # missing weights named in an error
CHATS = (DataName.chat, DataName.preferences)  # data whose answers end with the byte `data.stop`


class Tokenizer(Protocol):
    """Converts text to tokens and back."""

    @property
    def special(self) -> Mapping[int, str]:
        """The texts of special tokens, which `decode` omits."""
        ...

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of `text` with the tokens that the tokenizer prepends to a text.

        Appended ones are omitted, because the answer follows.
        """
        ...

    def encode_text(self, text: str) -> list[int]:
        """Returns the tokens of `text` alone."""
        ...

    def decode(self, tokens: list[int]) -> str:
        """Returns the text of `tokens`. Invalid UTF-8 becomes U+FFFD."""
        ...

    def token_bytes(self, token: int) -> bytes | None:
        """Returns the bytes of `token` in a text, also for special tokens, or None if it has none."""
        ...

    @property
    def longest(self) -> int:
        """Number of characters of the longest token."""
        ...

    @property
    def template(self) -> str | None:
        """The source of the chat template, or None."""
        ...

    def chat(self, messages: list[dict[str, Any]], *, options: ChatOptions = PLAIN) -> list[int]:
        """Returns the tokens of a conversation and of the beginning of the next answer.

        Raises:
            ValueError: the model has no chat template, or it rejects the messages.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Opened:
    """A model with its tokenizer.

    module: the model, a folder of its packed weights, or a model that is read on demand.
    ends: tokens that end an answer.
    vocabulary: number of tokens with a text; others are never sampled.
    begin: tokens that the tokenizer prepends to a text.
    first: the token before a text without a prefix, or None if the tokenizer has none.
    unknown: the token for text that the tokenizer cannot represent, or None if there is no such text.
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
    """Opens the model in `path`, fp32 on the CPU: a run folder, a ztk checkpoint, a folder with a config.json, or one of packed weights,
    which are not read here. Nothing is downloaded.

    ema: uses the moving average of the run's weights.

    Raises:
        ValueError: the folder has none of these or no average, or transformers is needed and not installed.
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
    """Adds the tokenizer to a model from a run folder, a checkpoint or a folder with a config.json.

    Raises:
        ValueError: the folder is none of these, or transformers is needed and not installed.
    """
    if (folder / "config.json").is_file():
        return _of_transformers(folder, name=folder.name, module=module)
    _, recorded = recorded_run(folder)
    return _of_run(recorded, name=recorded.name, config=load_config(recorded / "config.yaml"), module=module)


def open_packed_model(packed: Packed) -> Opened:
    """Opens a folder of packed weights with its tokenizer."""
    name = packed.extra["name"]
    if (packed.path / "config.yaml").is_file():
        return _of_run(packed.path, name=name, config=load_config(packed.path / "config.yaml"), module=packed)
    return _of_transformers(packed.path, name=name, module=packed)


def checkpoint_of(path: str) -> Path | None:
    """Returns the checkpoint with the weights for `path`, or None for a folder with a config.json or with packed weights."""
    folder = Path(path)
    if any((folder / name).is_file() for name in ("config.json", MANIFEST)):
        return None
    return checkpoint.resolve(folder)


def recorded_run(folder: Path) -> tuple[Path, Path]:
    """Returns the step folder of a checkpoint, and the folder with the config.yaml of its run.

    Raises:
        ValueError: there is no such file.
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
    # task=grpo and ppo write messages of prompts as task=sft does; their byte models have no `data.stop`
    has_chats = config.data.name in CHATS or (tokenizer is not None and config.data.name is DataName.prompts)
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
    """Returns the byte before a text in a byte model's training data: the end of another document or answer, or of a line."""
    if config.data.name in CHATS:
        return config.data.stop
    return ByteTokenizer.end if reads_documents(config) else ord("\n")


def _unknown_of(tokenizer: SubwordTokenizer) -> int | None:
    named = getattr(tokenizer.inner.model, "unk_token", None)
    return None if named is None else tokenizer.inner.token_to_id(named)


def _stop_of(config: Config) -> int | None:
    """Returns the byte that ends an answer, if the run learnt answers. None if it learnt plain text."""
    if config.task.name in ("grpo", "ppo"):
        return ANSWER_END
    return config.data.stop if config.data.name in CHATS else None


def _tokenizer_of(run: Path, *, name: str | None) -> SubwordTokenizer | None:
    """Returns the tokenizer in the run folder, or None if the model reads bytes. name: data.tokenizer of the run."""
    if name in (None, "bytes"):
        return None
    folder = run / "tokenizer"
    if not (folder / "tokenizer.json").is_file():
        raise ValueError(
            f"inference.model={run}: trained with data.tokenizer={name}, and {folder} has no tokenizer.json; copy the tokenizer there"
        )
    return SubwordTokenizer.open(folder)


def folder_module(folder: Path) -> nn.Module:
    """Loads the transformers model in `folder`, fp32 on the CPU.

    Raises ValueError if transformers is not installed, or weights are missing.
    """
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
    """Returns the tokens that a transformers tokenizer prepends to a text."""
    plain, full = tokenizer.encode("a", add_special_tokens=False), tokenizer.encode("a")
    count = next(place for place in range(len(full) + 1) if full[place : place + len(plain)] == plain)
    return tuple(full[:count])


class _Bytes:
    """UTF-8 bytes as tokens. Further tokens of a model are never sampled, and their text is U+FFFD."""

    special: Mapping[int, str] = MappingProxyType({})

    def __init__(self, *, chat_stop: int | None = None) -> None:
        """chat_stop: the byte that ends answers of chats, as `task=sft` learns them; None if the model has not learnt chats."""
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
    """The tokenizer with which a ztk run was trained."""

    def __init__(self, tokenizer: SubwordTokenizer, *, has_chats: bool, by_template: bool) -> None:
        """has_chats: whether the model has learnt chats in the format of `task=sft`. by_template: uses the tokenizer's chat template."""
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
    """A transformers tokenizer."""

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
        text = self._tokenizer.decode([token])  # a slow tokenizer
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
    """Formats messages with the chat template of a transformers tokenizer."""
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
    """Returns the source of the default template."""
    found = inner.chat_template or None
    return "\n".join(map(str, found.values())) if isinstance(found, dict) else found


def _check_plain(options: ChatOptions) -> None:
    if options.needs_template:
        raise ValueError(
            "the model has no chat template, which chat_template_kwargs, add_generation_prompt and continue_final_message need: leave them out"
        )
