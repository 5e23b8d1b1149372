"""Models other than the one in training, from folders: the teacher of `task=distill`, and transformers reward models."""

import copy
import json
import os
from collections.abc import Iterator
from pathlib import Path

from ztk.config.hugging_face import sizes_of
from ztk.config.record import load
from ztk.core.policies.config import Config
from ztk.core.policies.model import LoraConfig, ModelConfig, ModelInit
from ztk.core.policies.records import run_record
from ztk.core.policies.runs import HUGGING_FACE


def config_with(config: Config, *, path: str, key: str) -> Config:
    """Returns the configuration with the model of `path`, a run folder, a checkpoint, or a transformers folder. key: named in errors.

    Raises:
        ValueError: another folder, or a configuration that does not describe a causal model.
    """
    own, folder = copy.deepcopy(config), Path(path).expanduser()
    if not (folder / "config.json").is_file():  # exported models may be in their run's folder
        if (record := run_record(path)) is not None:
            run = load(record)
            own.model, own.lora = run.model, run.lora
            return own
        raise ValueError(
            f"{key}={path}: has neither the config.yaml of a run nor a config.json (from {os.getcwd()}); name a run folder, or a folder as "
            "save_pretrained writes it"
        )
    own.model = model_of_folder(folder, kernels=config.model.kernels or False, key=key)
    own.lora = LoraConfig(rank=0)
    return own


def model_of_folder(folder: Path, *, kernels: bool, key: str) -> ModelConfig:
    """Returns the transformers model in `folder`. key: named in errors. Raises ValueError if it is no causal model."""
    return ModelConfig(
        name=HUGGING_FACE,
        path=str(folder.absolute()),
        init=ModelInit.pretrained,
        kernels=kernels,
        hidden_dim=None,
        rope_theta=None,
        norm_eps=None,
        tie_embeddings=None,
        **sizes_of(folder, key=key),
    )


def is_text_model(path: str | None) -> bool:
    """Returns whether `reward.path` is the folder of a transformers model, which has its own tokenizer."""
    return path is not None and Path(path, "config.json").expanduser().is_file()


def gives_rewards(path: str | None) -> bool:
    """Returns whether a folder has a reward model: a run of `task=reward`, or a transformers model for sequence classification."""
    if path is None:
        return False
    if is_text_model(path):
        text = Path(path, "config.json").expanduser().read_text(encoding="utf-8")
        return any(
            str(name).endswith("ForSequenceClassification") for name in json.loads(text).get("architectures") or ()
        )
    record = run_record(path)
    return record is not None and load(record).task.name == "reward"


def reward_model_faults(config: Config) -> Iterator[str]:
    """Yields one line per fault of a `reward.path` with a transformers model."""
    path = config.reward.path
    if path is None or not is_text_model(path):
        return
    from ztk.hf.scoring import has_score  # imported here, because it imports torch and transformers

    try:
        config_with(config, path=path, key="reward.path")
    except (ImportError, ValueError) as error:
        yield str(error)
        return
    if not has_score(path):
        yield (
            f"reward.path={path}: its safetensors files have no score.weight, so it is no reward model; name a folder of a model for sequence "
            "classification with one label (num_labels=1)"
        )
    if not any(Path(path, name).expanduser().is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        yield f"reward.path={path}: has no tokenizer; save the reward model's tokenizer there"


def teacher_faults(config: Config) -> Iterator[str]:
    """Yields one line per fault of `distill.teacher`."""
    path = config.distill.teacher
    if path is None:
        yield "distill.teacher=null: there is nobody to learn from; use distill.teacher=FOLDER, a run folder or a model of transformers"
        return
    if not os.path.isdir(os.path.expanduser(path)):
        return  # reported by its declaration
    try:
        teacher = config_with(config, path=path, key="distill.teacher").model
    except (ImportError, ValueError) as error:
        yield str(error)
        return
    if teacher.vocab_size != config.model.vocab_size:
        yield (
            f"distill.teacher={path}: has a vocabulary of {teacher.vocab_size} tokens and the student has one of {config.model.vocab_size} "
            "(model.vocab_size); their distributions are compared token by token, so use a teacher and a student with one vocabulary"
        )
    if teacher.max_seq_len < config.data.seq_len:
        yield (
            f"distill.teacher={path}: reads {teacher.max_seq_len} tokens at most, and data.seq_len={config.data.seq_len}; use "
            f"data.seq_len={teacher.max_seq_len}, or another teacher"
        )
