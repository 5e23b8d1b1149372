"""`model=hf`: reads sizes from the config.json of `model.path`, and checks the choices that transformers models support."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from ztk.core.policies.config import Config
from ztk.core.policies.data import DataName, Packing
from ztk.core.policies.model import ModelConfig, ModelInit
from ztk.core.policies.records import weight_files
from ztk.core.policies.runs import HUGGING_FACE, is_hugging_face

_SIZES = ("vocab_size", "dim", "layers", "heads", "kv_heads", "max_seq_len")
_MODELS = (("model", "path"), ("inference", "model"))
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
_DROPS = ("dropout", "pdrop", "layerdrop")
_OTHER_HEADS = ("summary", "classifier")  # dropouts of heads that neither policies nor value models have
_DIVIDING = (
    "pretrain",
    "sft",
    "plan",
    "eval",
)  # tasks whose loss is a sum over targets, which can be computed on parts of sequences
_ENDLESS = 1 << 30  # models without learned positions have no maximum length


def take_files(choices: DictConfig) -> list[str]:
    """Replaces the path of a GGUF file by its unpacked folder. Returns one line per fault."""
    faults = []
    for section, name in _MODELS:
        path = choices.get(section, {}).get(name)
        if not (isinstance(path, str) and path.endswith(".gguf")):
            continue
        from ztk.checkpoint.gguf.reading import model_folder  # imported late: it imports torch

        try:
            choices[section][name] = model_folder(path)
        except ValueError as error:
            faults.append(f"{section}.{name}={path}: {error}")
    return faults


def take_sizes(choices: DictConfig) -> list[str]:
    """Sets the sizes of `model=hf` in a composed configuration from its folder. Returns one line per fault."""
    model = choices.model
    if model.get("name") != HUGGING_FACE:
        return []
    given = [name for name in _SIZES if not OmegaConf.is_missing(model, name)]
    if given:
        return [f"model.{name}={model[name]}: model=hf takes it from config.json: leave it out" for name in given]
    path = model.get("path")
    if not path:
        return ["model=hf names no model: use model.path=FOLDER, with a config.json as save_pretrained writes it"]
    folder = Path(path).expanduser()
    if not (folder / "config.json").is_file():
        return [
            f"model.path={path}: there is no config.json (from {os.getcwd()}): name a folder as save_pretrained writes it; models are not "
            "downloaded"
        ]
    try:
        for name, value in sizes_of(folder).items():
            model[name] = value
    except (ImportError, ValueError) as error:
        return [str(error)]
    return []


def sizes_of(folder: Path, *, key: str = "model.path") -> Mapping[str, int]:
    """Returns the sizes in the config.json of `folder`, by the names in `model`. key: the key that names the folder, for messages.

    Raises ValueError for a configuration that is not of a causal model, and ImportError without transformers.
    """
    config = _read(folder)
    text = config.get_text_config()

    def first(*names: str) -> Any:
        return next((value for name in names if isinstance(value := getattr(text, name, None), int)), None)

    heads = first("num_attention_heads")
    found = {
        "vocab_size": first("vocab_size"),
        "dim": first("hidden_size"),
        "layers": first("num_hidden_layers"),
        "heads": heads,
        "kv_heads": first("num_key_value_heads") or heads,
        "max_seq_len": first(*_LENGTHS) or _ENDLESS,
    }
    if lacking := [name for name, value in found.items() if value is None]:
        raise ValueError(
            f"{key}={folder}: its configuration ({type(config).__name__}) lacks {', '.join(lacking)}, which causal models have; name "
            "another model"
        )
    experts = first(*_EXPERTS)
    return found | ({"experts": experts} if experts else {})


def family_of(model: ModelConfig) -> str | None:
    """Returns the `model_type` of `model.path`, or None for ztk's own model."""
    return _read(model.path).model_type if is_hugging_face(model) and model.path else None


def dropouts_of(model: ModelConfig) -> Mapping[str, float]:
    """Returns the non-zero dropout probabilities of the model in `model.path`, by their names in config.json."""
    if not is_hugging_face(model) or not model.path:
        return {}
    found = _read(model.path).get_text_config().to_dict()
    names = [name for name in found if any(word in name for word in _DROPS) and not name.startswith(_OTHER_HEADS)]
    return {name: float(found[name]) for name in names if isinstance(found[name], int | float) and found[name] > 0}


def adds_router_losses(model: ModelConfig) -> bool:
    """Returns whether the loss of the model in `model.path` includes losses of its routers."""
    if not is_hugging_face(model) or not model.path:
        return False
    return bool(getattr(_read(model.path), "output_router_logits", False))


def takes_documents(model: ModelConfig) -> bool:
    """Returns whether texts of the model in `model.path` are packed without padding."""
    from ztk.hf.documents import keeps_apart

    return keeps_apart(_read(model.path))


def _read(folder: str | Path | None) -> Any:
    """Reads the config.json in `folder` with transformers. Raises as `sizes_of`."""
    from ztk.hf.causal import read_config  # imported late: it imports torch and transformers

    return read_config(str(Path(folder or "").expanduser()))


def hugging_face_faults(config: Config) -> Iterator[str]:
    """Yields one line per choice that transformers models do not support."""
    model, topology = config.model, config.topology
    if not is_hugging_face(model):
        return
    folder = Path(model.path or "").expanduser()
    if model.init is ModelInit.pretrained and not weight_files(folder):
        yield (
            f"model.path={model.path}: there are no safetensors files: save the model by save_pretrained, or use model.init=random"
        )
    if topology.context * topology.sequence > 1:
        yield from _parts_faults(config, folder=folder)
    if topology.pipeline > 1:
        from ztk.hf.stages import stages_fault

        if (fault := stages_fault(_read(folder))) is not None:
            yield fault
    if topology.tensor > 1 and topology.sequence_parallel:
        yield (
            "topology.sequence_parallel=true: models of transformers compute positions for full sequences; use "
            "topology.sequence_parallel=false with model=hf"
        )
    if config.data.seq_len > model.max_seq_len:
        yield (
            f"data.seq_len={config.data.seq_len} is longer than the {model.max_seq_len} tokens of {model.path}: use "
            f"data.seq_len={model.max_seq_len}"
        )
    if config.data.packing is Packing.documents:
        from ztk.hf.documents import documents_fault

        in_parts = topology.context * topology.sequence > 1
        if (fault := documents_fault(_read(folder), in_parts=in_parts)) is not None:
            yield fault
    reads_bytes = config.data.name is not DataName.synthetic and config.data.tokenizer in (None, "bytes")
    if reads_bytes and model.vocab_size < 256:
        yield f"model.path={model.path}: text is read as bytes, and its vocabulary has {model.vocab_size} tokens; use data=synthetic"


def _parts_faults(config: Config, *, folder: Path) -> Iterator[str]:
    """Yields faults of sequences that several ranks share."""
    from ztk.hf.sequences import sequences_fault

    key = "topology.sequence" if config.topology.sequence > 1 else "topology.context"
    if config.task.name not in _DIVIDING:
        yield (
            f"{key}: task={config.task.name} gives models of transformers full sequences, not parts of them; use {key}=1"
        )
    read = _read(folder)
    if (fault := sequences_fault(read, key=key)) is not None:
        yield fault
    drops = {} if config.task.name == "eval" else dropouts_of(config.model)
    for name, value in drops.items():
        yield (
            f"{key}: ranks with parts of one sequence would draw the same numbers in dropout ({name}={value:g} in config.json of "
            f"{config.model.path}): set it to 0 there, or use {key}=1"
        )
    if config.lora.rank and config.lora.dropout and config.task.name != "eval":
        yield (
            f"lora.dropout={config.lora.dropout:g}: ranks with parts of one sequence draw the same numbers; use lora.dropout=0, or {key}=1"
        )
    window = getattr(read.get_text_config(), "sliding_window", None) or 0
    if config.topology.context > 1 and config.data.packing is Packing.documents and 0 < window < config.data.seq_len:
        yield (
            f"data.packing=documents: attention around a ring does not combine it with the window of {window} tokens in config.json of "
            f"{config.model.path}; use data.packing=concatenate, or topology.sequence in place of topology.context"
        )
