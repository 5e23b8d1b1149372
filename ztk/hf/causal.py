"""Causal transformers models for the main job: built without memory, called as `model(tokens, targets)`, filled by slices.

Every rank builds the module tree with parameters on the meta device and real buffers. Initial values are produced per range of a
parameter: from the folder's safetensors files, or drawn by the rules of transformers. A rank thus reads only its own shards, under any
topology.
"""

import contextlib
import functools
import importlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ztk.core.policies.model import LoraPolicy
from ztk.core.runtime.part import InitialValues
from ztk.hf.documents import arguments_of, keeps_apart, known_documents
from ztk.hf.kernels import inject_kernels
from ztk.hf.sequences import divisible, own_places
from ztk.hf.stages import CausalLayers, causal_loss
from ztk.hf.values import DrawnValues, FolderValues
from ztk.nn import Documents
from ztk.nn.lora import adapter_values, add_adapters

logger = logging.getLogger(__name__)


def transformers_module(key: str = "model=hf") -> ModuleType:
    """Imports transformers. key: the option that needs it.

    Raises ValueError if it is not installed.
    """
    try:
        return importlib.import_module("transformers")
    except ImportError:
        raise ValueError(f'{key} needs transformers, which is not installed: pip install "ztk[hf]"') from None


def open_causal(
    path: str,
    *,
    init: str,
    seed: int,
    lora: LoraPolicy | None = None,
    kernels: bool = False,
    z_loss: float = 0.0,
) -> tuple[nn.Module, InitialValues]:
    """Opens the model of the folder `path`. Returns it with its initial values, fp32 by name and range.

    init: "pretrained" reads the folder's safetensors files. "random" needs only config.json and draws from `seed`, the same values on all
        ranks.
    lora: freezes the model and adds trainable adapters.
    kernels: uses ztk's kernels where possible (`kernels.py`) and logs the replaced modules.
    z_loss: weight of the mean squared logsumexp of the logits in the training loss.

    The model has `full_parameter_count`, `pipeline_layers`, `divisible` and `takes_documents`. Its forward is `(tokens, targets=None,
    documents=None)`; see `CausalForward`.

    Raises:
        ValueError: the folder has no causal transformers model, no safetensors files, or lacks weights.
    """
    config = read_config(path)
    options: dict[str, Any] = {"init": init, "seed": seed, "lora": lora, "kernels": kernels}
    model, values = trainable(functools.partial(build_causal, config), config=config, path=path, **options)
    model.z_loss = z_loss
    model.forward = CausalForward(model)
    model.pipeline_layers = functools.partial(CausalLayers, model)
    model.divisible = functools.partial(divisible, model)
    return model.train(), values


def trainable(
    build: Callable[[], Any],
    *,
    config: Any,
    path: str,
    init: str,
    seed: int,
    lora: LoraPolicy | None,
    kernels: bool,
    may_lack: Sequence[str] = (),
) -> tuple[Any, InitialValues]:
    """Returns the model of `build`, prepared for training, with its initial values; other arguments as in `open_causal`.

    may_lack: names of parameters that are drawn if the folder does not have them. Raises ValueError as `open_causal`.
    """
    model, skeleton = build(), build()
    values: InitialValues = DrawnValues(skeleton, seed=seed)
    if init == "pretrained":
        in_folder = FolderValues(path, model=skeleton, may_lack=may_lack)
        in_folder.fill_buffers(model)
        values = functools.partial(_from_folder, in_folder, values)
    if kernels:
        logger.warning("model.kernels: %s", inject_kernels(model, option="model.kernels"))
    if lora is not None:
        add_adapters(model, policy=lora, base=path)
        values = adapter_values(values, model=model, seed=seed)
    model.exported_config = json.loads(config.to_json_string()) | {"architectures": [type(model).__name__]}
    if (generation := Path(path, "generation_config.json")).is_file():
        model.exported_generation = json.loads(generation.read_text(encoding="utf-8"))
    model.config.use_cache = False  # recomputed blocks would append to the cache twice
    model.full_parameter_count = sum(parameter.numel() for parameter in model.parameters())
    model.takes_documents = keeps_apart(config)
    return model, values


def _from_folder(folder: FolderValues, drawn: InitialValues, *, name: str, start: int, stop: int) -> Tensor:
    return (folder if folder.has(name) else drawn)(name=name, start=start, stop=stop)


def empty_causal(path: str, *, key: str = "model.path") -> nn.Module:
    """Returns the unmodified model of the folder's config.json: parameters on the meta device, buffers with their values.

    key: the option that names the folder, for messages.

    Raises ValueError as `open_causal`.
    """
    return build_causal(read_config(path, key=key))


def build_causal(config: Any) -> Any:
    """Returns the model of a configuration: parameters on the meta device, buffers with their values. Raises ValueError as
    `open_causal`.
    """
    auto = transformers_module().AutoModelForCausalLM
    try:
        with parameters_on_meta():
            return auto.from_config(config, dtype=torch.float32, trust_remote_code=False)
    except ValueError as error:
        raise ValueError(
            f"model.path: {str(error).splitlines()[0]}; name a folder with a causal language model"
        ) from None


def read_config(path: str, *, key: str = "model.path") -> Any:
    """Returns transformers' configuration of the folder `path`, which the option `key` names. Raises ValueError if there is none that
    transformers supports, and as `refuse_hub_code`."""
    transformers = transformers_module()
    refuse_hub_code(path, named=f"{key}={path}")
    try:
        return transformers.AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(
            f"{key}={path}: no configuration that transformers can read ({reason}): name a folder with the config.json of a causal "
            "model, as save_pretrained writes it"
        ) from None


def refuse_hub_code(path: str | os.PathLike, *, named: str) -> None:
    """Raises ValueError if config.json asks for an implementation from the Hugging Face hub, which transformers would download and import.

    named: the option and the folder, for the message.
    """
    try:
        values = json.loads(Path(path, "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return  # transformers reports it
    for key, value in _implementations(values):
        if "/" in value:
            raise ValueError(
                f"{named}: its config.json has {key}={value}, code on the Hugging Face hub, which is neither downloaded nor run: remove {key}"
            )


def _implementations(values: Any) -> Iterator[tuple[str, str]]:
    """Yields the keys of a configuration that choose an implementation, such as attn_implementation, also of the models in it."""
    for key, value in values.items() if isinstance(values, dict) else ():
        if "_implementation" in key:
            chosen = value.values() if isinstance(value, dict) else [value]  # one for each model in it
            yield from ((key, one) for one in chosen if isinstance(one, str))
        else:
            yield from _implementations(value)


@contextlib.contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Moves each new parameter to the meta device as soon as a module registers it. Buffers keep their memory."""
    original = nn.Module.register_parameter

    @functools.wraps(original)
    def register_parameter(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
        original(module, name, param)

    # pyrefly: ignore[bad-assignment]  # torch's method, wrapped
    nn.Module.register_parameter = register_parameter
    try:
        yield
    finally:
        nn.Module.register_parameter = original


class CausalForward:
    """The forward `(tokens, targets=None, documents=None)` of a transformers model: tokens int64 [B, T] -> logits [B, T, V], or the loss
    for targets [B, T].

    The loss is the mean cross entropy, an fp32 scalar; targets of -100 are ignored. If the configuration sets `output_router_logits`, the
    router's loss is added with its coefficient. With `documents`, tokens attend only to their own document.
    """

    def __init__(self, model: nn.Module) -> None:
        self.original: Callable[..., Any] = model.forward
        self._model, self._config = model, model.config
        self._router_weight = getattr(model.config, "router_aux_loss_coef", 0.0)

    def __call__(self, tokens: Tensor, targets: Tensor | None = None, documents: Documents | None = None) -> Tensor:
        own = own_places(self._model)
        given = arguments_of(documents, config=self._config, own=own, device=tokens.device)
        with known_documents(documents, config=self._config):
            out = self.original(input_ids=tokens, use_cache=False, **given)
        if targets is None:
            return out.logits
        loss = causal_loss(self._model, logits=out.logits, targets=targets)
        router = getattr(out, "aux_loss", None)
        return loss if router is None else loss + self._router_weight * router.to(loss.device)
