"""Packs the weights of a run, a checkpoint or a transformers model one layer at a time. The model is never in memory as a whole."""

import gc
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ztk.checkpoint.gguf.reading import model_folder
from ztk.core.policies.inference import calibration_faults
from ztk.core.policies.records import weight_files
from ztk.core.runtime.host_memory import return_freed_memory
from ztk.data.documents import Fault, read_documents
from ztk.hf.causal import build_causal, empty_causal, read_config
from ztk.hf.values import FolderValues
from ztk.inference import UnreadModel
from ztk.inference.describe import FAMILIES, describe
from ztk.inference.model import InferenceModel
from ztk.inference.module_model import ModuleModel, is_own_family
from ztk.inference.packed import MANIFEST, VERSION, FolderTaken, Packed, open_packed, pack
from ztk.inference.placement import Placement
from ztk.inference.probe import check_module
from ztk.inference.weights import collect
from ztk.serve.models import (
    Opened,
    Parameters,
    empty_model,
    open_model,
    open_packed_model,
    recorded_run,
    run_config,
    stored_parameters,
    trained_model,
    with_tokenizer,
)
from ztk.serve.tokenizers import Tokenizer

_OPTION = "inference.model"  # names the folder
_TEXT_FILES = (".json", ".txt", ".model", ".jinja")  # configuration and tokenizer files, stored next to the weights
_CHECKED_LAYERS = 2  # minimum for the comparison with transformers' own forward
TOKENS = 8192  # of a text for calibration
_DATA_KEYS = {
    "data.path=": "inference.calibration=",
    "use data.field=NAME": "name the field text",
    ", or use data.on_error=skip": "",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Source:
    """A model whose parameters are read one by one. module: without memory. text: files and folders to copy, each with its new name."""

    name: str
    module: nn.Module
    state: Mapping[str, Tensor]
    text: list[tuple[Path, str]]
    close: Callable[[], None] = lambda: None


def pack_model(path: str, *, to: str, weights: str, ema: bool = False, calibration: str | None = None) -> Packed:
    """Packs the model in `path` into the new folder `to`, with its tokenizer. calibration: a file, as in `calibration_tokens`, for int4.

    Keeps one layer in memory, in addition to embedding and head.

    The first layers of a transformers model are checked as by `Generator`. Adapters are merged first, with the model in memory.

    Raises:
        ValueError: as `open_model` and `pack`.
    """
    folder = Path(model_folder(path))
    source = _source(folder, ema=ema)
    try:
        if not is_own_family(source.module):
            raise ValueError(
                f"{path}: a model outside of {', '.join(sorted(FAMILIES))} runs its own modules and is packed when it is opened: use "
                f"inference.model={path} offload=nvme"
            )
        subject = describe(source.module)
        key = _key(folder, weights=weights, ema=ema, calibration=calibration)
        options: dict[str, Any] = {
            "weights": weights,
            "key": key,
            "extra": {"name": source.name},
            "extra_files": source.text,
        }
        if calibration is not None:
            for fault in calibration_faults(weights, adapters=None):
                raise ValueError(fault)
            tokenizer = with_tokenizer(folder, module=source.module).tokenizer
            options["calibration"] = calibration_tokens(calibration, tokenizer=tokenizer)
        return pack(to, subject=subject, state=source.state, **options)
    finally:
        source.close()


def open_streamed(
    path: str,
    *,
    weights: str,
    to: str,
    ema: bool = False,
    calibration: str | None = None,
    on_packed: Callable[[Packed], None] | None = None,
) -> Opened:
    """Opens the model in `path` with packed weights: itself if it is packed, an earlier pack below the folder `to`, or a new one.

    The generator packs models that run their own modules: it reads a folder one parameter at a time, and a run in full.

    calibration: the same as in `pack_model`; it has no effect on packed weights and on models that run their own modules, which the caller
    refuses. on_packed: called after new weights were packed.

    Raises:
        ValueError: as `pack_model`.
    """
    folder = Path(model_folder(path))
    if (folder / MANIFEST).is_file():
        return open_model(path, ema=ema)
    if not _is_own_family(folder):
        if not (folder / "config.json").is_file():
            return open_model(path, ema=ema)
        source = _source(folder, ema=ema)
        return with_tokenizer(folder, module=UnreadModel(module=source.module, state=source.state))
    key = _key(folder, weights=weights, ema=ema, calibration=calibration)
    target = Path(to) / f"packed-{key[:16]}"
    if not (target / MANIFEST).is_file():
        try:
            packed = pack_model(path, to=str(target), weights=weights, ema=ema, calibration=calibration)
        except FolderTaken:
            pass  # another process has packed the same model meanwhile
        else:
            if on_packed is not None:
                on_packed(packed)
    return open_packed_model(open_packed(target))


@contextmanager
def opened_unread(path: str, *, ema: bool = False) -> Iterator[Opened]:
    """Opens a model like `open_model`, but reads each parameter on access while the context is open.

    The full model is thus never in memory next to the engine's weights. Adapters are merged first, with the model in memory.
    Packed weights, and models that cannot be read in this way, are opened as by `open_model`.

    Raises:
        ValueError: as `pack_model`.
    """
    folder = Path(model_folder(path))
    is_pretrained = (folder / "config.json").is_file()
    is_full = is_pretrained and not (_is_own_family(folder) and weight_files(folder))
    if is_full or (folder / MANIFEST).is_file():
        yield open_model(path, ema=ema)
        return
    source = _source(folder, ema=ema)
    try:
        yield with_tokenizer(folder, module=UnreadModel(module=source.module, state=source.state))
    finally:
        source.close()


def _is_own_family(folder: Path) -> bool:
    """Returns whether the engine implements the model's forward, also for a run."""
    if not (folder / "config.json").is_file():
        base = run_config(recorded_run(folder)[1]).model.path
        return base is None or read_config(base).model_type in FAMILIES
    return read_config(str(folder), key=_OPTION).model_type in FAMILIES


def _source(folder: Path, *, ema: bool) -> _Source:
    if (folder / "config.json").is_file():
        if ema:
            open_model(str(folder), ema=True)  # raises the reason
        return _of_transformers(folder)
    step, recorded = recorded_run(folder)
    config = run_config(recorded)
    text = [(recorded / "config.yaml", "config.yaml")]
    if (recorded / "tokenizer").is_dir():
        text.append((recorded / "tokenizer", "tokenizer"))
    if config.lora.rank > 0:
        module = trained_model(config, step=step, ema=ema)
        return _Source(name=recorded.name, module=module, state=dict(module.named_parameters()), text=text)
    state = stored_parameters(config, step=step, ema=ema)
    return _Source(name=recorded.name, module=empty_model(config), state=state, text=text, close=state.close)


def _of_transformers(folder: Path) -> _Source:
    module: Any = empty_causal(str(folder), key=_OPTION)
    values = FolderValues(str(folder), model=module, key=_OPTION)
    values.fill_buffers(module)
    state = _folder_state(module, values=values)
    _check(folder, state=state)
    gc.collect()  # modules are in cycles, and the layers that were compared would add to the peak
    return_freed_memory()
    text = [
        (file, file.name)
        for file in sorted(folder.iterdir())
        if file.suffix in _TEXT_FILES and not file.name.endswith(".index.json")
    ]
    return _Source(name=folder.name, module=module, state=state, text=text, close=values.close)


def _folder_state(module: nn.Module, *, values: FolderValues) -> Parameters:
    shapes = {name: parameter.shape for name, parameter in module.named_parameters()}

    def read(name: str) -> Tensor:
        return values(name=name, start=0, stop=shapes[name].numel()).view(shapes[name])

    return Parameters({name: name for name in shapes}, read=read)


def _check(folder: Path, *, state: Parameters) -> None:
    """Compares the engine with transformers' forward on the first layers of the model, one of every kind."""
    config = read_config(str(folder))
    kinds = getattr(config, "layer_types", None)
    count = _CHECKED_LAYERS if kinds is None else max(_CHECKED_LAYERS, *(kinds.index(kind) + 1 for kind in set(kinds)))
    config.num_hidden_layers = min(count, config.num_hidden_layers)
    if kinds is not None:
        config.layer_types = kinds[: config.num_hidden_layers]
    module = _cut(config, state=state)
    own = dict(module.named_parameters())
    if not is_own_family(module):
        check_module(ModuleModel(module, state=own, placement=Placement()), module=module, eager=True)
        return
    subject = describe(module)
    check_module(InferenceModel(subject, weights=collect(own, description=subject.description)), module=module)


def _cut(config: Any, *, state: Parameters) -> nn.Module:
    """Returns transformers' model of a configuration with fewer layers, with the first layers' weights."""
    module: Any = build_causal(config)
    for name in [name for name, _ in module.named_parameters()]:
        owner, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(owner), leaf, nn.Parameter(state[name], requires_grad=False))
    module.tie_weights()
    return module.eval()


def _key(folder: Path, *, weights: str, ema: bool, calibration: str | None = None) -> str:
    """Returns a hash of the files of the model and of the text for calibration (name, size and modification time) and the options."""
    if (folder / "config.json").is_file():
        files = _files_of_transformers(folder)
    else:
        step, recorded = recorded_run(folder)
        base = run_config(recorded).model.path
        files = [*step.rglob("*"), recorded / "config.yaml", *(recorded / "tokenizer").rglob("*")]
        files += [] if base is None else _files_of_transformers(Path(base))
    files += [] if calibration is None else [Path(calibration).expanduser()]
    facts = sorted((file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files if file.is_file())
    described = json.dumps([facts, weights, ema, VERSION, torch.__version__, torch.backends.cpu.get_cpu_capability()])
    return hashlib.sha256(described.encode()).hexdigest()


def _files_of_transformers(folder: Path) -> list[Path]:
    return [file for file in folder.glob("*") if file.suffix in (".safetensors", *_TEXT_FILES)]


def calibration_tokens(path: str, *, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Returns the first `TOKENS` tokens of a text file, or of the field `text` of a jsonl or parquet file, its documents one after the other.

    Raises:
        ValueError: a line without that field, or a file that cannot be read or is empty.
    """
    tokens: list[int] = []
    for item in read_documents(Path(path).expanduser(), field="text"):
        if isinstance(item, Fault):
            raise ValueError(item.with_words(_DATA_KEYS))
        tokens += tokenizer.encode(item.text) if item.is_first else tokenizer.encode_text(item.text)
        if len(tokens) >= TOKENS:
            break
    return tuple(tokens[:TOKENS])
