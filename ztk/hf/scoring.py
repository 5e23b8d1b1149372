"""Transformers models with one number per token, for reward models and critics in the main job."""

import functools
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor, nn

from ztk.core.policies.model import LoraPolicy
from ztk.core.policies.records import weight_files
from ztk.core.runtime.part import InitialValues
from ztk.hf.causal import parameters_on_meta, read_config, trainable, transformers_module
from ztk.hf.documents import arguments_of, known_documents
from ztk.nn import Documents

HEAD = "score"  # the name in transformers' ...ForSequenceClassification of decoders
_WEIGHT = f"{HEAD}.weight"


def open_scoring(
    path: str, *, init: str, seed: int, lora: LoraPolicy | None = None, kernels: bool = False
) -> tuple[nn.Module, InitialValues]:
    """Opens the decoder of the folder `path` with a linear layer `score` of one output.

    Returns it with its initial values, fp32 by name and range.

    The model is the family's ...ForSequenceClassification with one label, so that transformers can open an export. Its forward is tokens
    int64 [B, T] -> values [B, T, 1]. The head's initial values come from the folder if it has a `score` of one output (a reward model).
    Otherwise they are drawn from `seed` by the rules of transformers. All other values come from the folder.

    init, lora, kernels: as in `open_causal`. The head trains together with adapters.

    Raises:
        ValueError: as `open_causal`; a family without such a model, and a folder with a `score` of several outputs.
    """
    config = read_config(path)
    config.num_labels = 1
    options: dict[str, Any] = {"init": init, "seed": seed, "lora": lora, "kernels": kernels, "may_lack": (_WEIGHT,)}
    model, values = trainable(functools.partial(_build, config, path=path), config=config, path=path, **options)
    if lora is not None:
        getattr(model, HEAD).requires_grad_(True)
        model.peft_config["default"].values.update(task_type="SEQ_CLS", modules_to_save=[HEAD])
    model.forward = ScoringForward(model)
    return model.train(), values


def has_score(path: str) -> bool:
    """Returns whether the folder's files have an output layer for values, as in reward models."""
    files = [file for file in weight_files(Path(path).expanduser()) if file.is_file()]
    for file in files:
        with safetensors.safe_open(file, framework="pt") as entries:
            if _WEIGHT in entries.keys():  # noqa: SIM118 - no mapping
                return True
    return False


def _build(config: Any, *, path: str) -> Any:
    auto = transformers_module().AutoModelForSequenceClassification
    try:
        with parameters_on_meta():
            model = auto.from_config(config, dtype=torch.float32, trust_remote_code=False)
    except ValueError as error:
        raise ValueError(
            f"model.path={path}: {str(error).splitlines()[0]}; name a decoder of a family that has one, such as Llama, Qwen or GPT-2"
        ) from None
    head = getattr(model, HEAD, None)
    if not isinstance(head, nn.Linear) or head.out_features != 1:
        raise ValueError(
            f"model.path={path}: {type(model).__name__} has no linear layer {HEAD!r} over its tokens, so it is no decoder; name a causal model"
        )
    return model


class ScoringForward:
    """The forward: tokens int64 [B, T] -> values [B, T, 1], instead of the pooled output of transformers. See `CausalForward` for
    `documents`.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model: Any = model

    def __call__(self, tokens: Tensor, documents: Documents | None = None) -> Tensor:
        given = arguments_of(documents, config=self._model.config)
        with known_documents(documents, config=self._model.config):
            hidden = self._model.base_model(input_ids=tokens, use_cache=False, **given)[0]
        return self._model.score(hidden)
