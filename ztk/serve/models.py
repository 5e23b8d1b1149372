"""Opens models from folders, with their tokenizers: runs of ztk, checkpoints, and transformers folders."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ztk import checkpoint
from ztk.checkpoint.export import Weights
from ztk.checkpoint.gguf.reading import model_folder
from ztk.config import Config
from ztk.config import load as load_config
from ztk.config.generation import end_tokens, generation_file
from ztk.core.policies.data import DataName
from ztk.core.policies.records import run_folder
from ztk.core.policies.runs import is_own, reads_documents
from ztk.data import ByteTokenizer, SubwordTokenizer
from ztk.hf.causal import empty_causal, refuse_hub_code, transformers_module
from ztk.hf.values import shape_error
from ztk.inference import UnreadModel
from ztk.inference.packed import MANIFEST, Packed, open_packed
from ztk.nn import Decoder, DecoderConfig
from ztk.nn.lora import is_adapter, merge_adapters
from ztk.rl.align import ANSWER_END, ChatTemplate
from ztk.serve.tokenizers import Bytes, Pretrained, Subword, Tokenizer, begin_of

_NOT_SIZES = ("name", "path", "init", "kernels")
_NAMED = 5  # missing weights named in an error
CHATS = (DataName.chat, DataName.preferences)  # data whose answers end with the byte `data.stop`


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
    config = run_config(recorded)
    return with_tokenizer(folder, module=trained_model(config, step=step, ema=ema).eval())


def with_tokenizer(folder: Path, *, module: nn.Module | UnreadModel) -> Opened:
    """Adds the tokenizer to a model from a run folder, a checkpoint or a folder with a config.json.

    Raises:
        ValueError: the folder is none of these, or transformers is needed and not installed.
    """
    if (folder / "config.json").is_file():
        return _of_transformers(folder, name=folder.name, module=module)
    _, recorded = recorded_run(folder)
    return _of_run(recorded, name=recorded.name, config=run_config(recorded), module=module)


def open_packed_model(packed: Packed) -> Opened:
    """Opens a folder of packed weights with its tokenizer."""
    name = packed.extra["name"]
    if (packed.path / "config.yaml").is_file():
        return _of_run(packed.path, name=name, config=run_config(packed.path), module=packed)
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
    recorded = run_folder(step)
    if recorded is None:
        raise ValueError(
            f"inference.model={folder}: no config.yaml of a run lies in or above the checkpoint, so its sizes are unknown; export it with "
            "python -m ztk.checkpoint export, and name the exported folder"
        )
    return step, recorded


def run_config(recorded: Path) -> Config:
    """Returns the configuration of a run. recorded: the folder with its config.yaml.

    Raises ValueError if it is no record, or if its model is an object of a user's, which reading a record does not create.
    """
    config = load_config(recorded / "config.yaml")
    if is_own(config, section="model"):
        raise ValueError(
            f"inference.model={recorded}: its model is {config.model.name} (model._target_), and reading a record runs no code; build the "
            "model in a script and fill it with ztk.checkpoint.load"
        )
    return config


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
        tokenizer=Bytes(chat_stop=stop if has_chats else None)
        if tokenizer is None
        else Subword(tokenizer, has_chats=has_chats, by_template=by_template),
        ends=tuple(sorted(end for end in ends if end is not None)),
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


def folder_module(folder: Path, *, key: str = "inference.model") -> nn.Module:
    """Loads the transformers model in `folder`, fp32 on the CPU. key: the option that names it.

    Raises ValueError if transformers is not installed, the folder has no causal model, or weights are missing.
    """
    auto = transformers_module(f"{key}={folder}").AutoModelForCausalLM
    refuse_hub_code(folder, named=f"{key}={folder}")
    try:
        model, info = auto.from_pretrained(
            folder,
            dtype=torch.float32,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported below
        )
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{key}={folder}: {str(error).splitlines()[0]}; name a folder with a causal language model"
        ) from None
    if others := sorted(info["mismatched_keys"]):
        name, own, expected = others[0]
        raise shape_error(f"{key}={folder}", name=name, own=own, expected=expected)
    if missing := sorted(info["missing_keys"]):
        named = ", ".join(missing[:_NAMED]) + (f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else "")
        raise ValueError(
            f"{key}={folder}: its files lack {named}, which {type(model).__name__} computes with; save the model again"
        )
    return model.eval()


def _of_transformers(folder: Path, *, name: str, module: nn.Module | Packed | UnreadModel) -> Opened:
    transformers = transformers_module(f"inference.model={folder}")
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    config: Any = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if (file := generation_file(str(folder))) is not None:
        ends = [*end_tokens(file)]
    else:
        named = transformers.GenerationConfig.from_model_config(config).eos_token_id
        ends = [] if named is None else [named] if isinstance(named, int) else list(named)
    if tokenizer.eos_token_id is not None:
        ends.append(tokenizer.eos_token_id)
    if tokenizer.chat_template and (end := ChatTemplate(folder=folder, inner=tokenizer).end) is not None:
        ends.append(tokenizer.convert_tokens_to_ids(end))
    return Opened(
        name=name,
        module=module,
        tokenizer=Pretrained(tokenizer),
        ends=tuple(dict.fromkeys(ends)),
        vocabulary=min(config.vocab_size, max(tokenizer.get_vocab().values()) + 1),  # ids may have gaps
        begin=begin_of(tokenizer),
        first=tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id,
        unknown=tokenizer.unk_token_id,
    )


class Parameters(Mapping):
    """The parameters of a checkpoint or a folder by name, each read on access. `close` closes their files."""

    def __init__(
        self, stored: Mapping[str, str], *, read: Callable[[str], Tensor], close: Callable[[], None] = lambda: None
    ) -> None:
        """stored: name -> stored name, which tied parameters share. read: returns the parameter of a stored name, in its shape."""
        self._stored, self._read, self.close = stored, read, close

    def __getitem__(self, name: str) -> Tensor:
        return self._read(self._stored[name])

    def __contains__(self, name: object) -> bool:
        return name in self._stored

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)

    def loaded(self) -> dict[str, Tensor]:
        """Returns all parameters, each read once."""
        own = {stored: self._read(stored) for stored in dict.fromkeys(self._stored.values())}
        return {name: own[stored] for name, stored in self._stored.items()}


def stored_parameters(config: Config, *, step: Path, ema: bool) -> Parameters:
    """Returns the parameters of the run with `config`, fp32. Adapters of ztk's decoder are merged, those of other models are not.

    step, ema: as in `trained_model`. Raises ValueError for a reward model.
    """
    if config.task.name == "reward":
        raise ValueError(
            f"inference.model={step}: task=reward trained a model of rewards, which writes no text; name another run"
        )
    manifest = checkpoint.read_manifest(step)
    weights = Weights(manifest, dtype=torch.float32, ema=ema, is_merged=config.model.path is None)
    keys = [spec.key for spec in weights.specs]
    stored = {own: own for own in keys} | {tied: own for tied, own in manifest.tied.items() if own in keys}
    return Parameters(stored, read=weights.full, close=weights.close)


def trained_model(config: Config, *, step: Path, ema: bool = False) -> nn.Module:
    """Returns the model of the run with `config`, fp32 on the CPU. step: the folder of its checkpoint. ema: uses the moving average of
    the weights.

    Adapters are merged: W + alpha / rank B A, in fp32, which differs from the sum of both products by rounding.

    Raises ValueError for a reward model, for `model.path` without the run's model, and for `ema` without an average.
    """
    parameters = stored_parameters(config, step=step, ema=ema)
    try:
        state = parameters.loaded()
    finally:
        parameters.close()
    adapters = {name: value for name, value in state.items() if is_adapter(name)}
    if adapters and checkpoint.leaves_out_base(step):
        assert config.model.path is not None, "adapters of ztk's decoder are merged already"
        model = folder_module(Path(config.model.path), key="model.path")
    else:
        model = empty_model(config)
        model.load_state_dict({name: value for name, value in state.items() if name not in adapters}, assign=True)
    if not adapters:
        return model
    assert config.lora.alpha is not None, "the configuration is checked"
    return merge_adapters(model, state=adapters, scale=config.lora.alpha / config.lora.rank)


def empty_model(config: Config) -> nn.Module:
    """Returns the model of a run, ztk's decoder or one of transformers: parameters on the meta device, buffers with their values."""
    if config.model.path is not None:
        return empty_causal(config.model.path)
    sizes = {name: value for name, value in vars(config.model).items() if name not in _NOT_SIZES and value is not None}
    with torch.device("meta"):
        model = Decoder(DecoderConfig(**sizes))
    model.materialise_buffers("cpu")
    return model
