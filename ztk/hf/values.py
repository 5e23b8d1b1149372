"""Initial values of a transformers model per range of a parameter: from a folder of safetensors files, or drawn."""

import copy
import functools
import importlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ztk.core.policies.records import weight_files
from ztk.core.runtime.seed import derive_seed
from ztk.hf.loading import converted_values, names_in_model
from ztk.hf.slices import SafetensorsSlices

logger = logging.getLogger(__name__)


class FolderValues:
    """`(name=, start=, stop=)` -> fp32 [stop - start] on the CPU, read from the folder's files.

    transformers converts parameters that the files store in another form (separate experts), one at a time. The last one is cached.
    """

    def __init__(self, path: str, *, model: nn.Module, may_lack: Sequence[str] = (), key: str = "model.path") -> None:
        """model: the folder's model with parameters on the meta device; kept. may_lack: names of optional parameters; see `has`.
        key: the option that names the folder, for messages.

        Raises ValueError if the folder has no safetensors files, or if they lack a parameter or have it in another shape.
        """
        self._model, self._may_lack, named = model, may_lack, f"{key}={path}"
        self._files = SafetensorsSlices(_files(path, named=named))
        entries = self._files.__enter__()  # the files stay open until `close`, because buckets are filled later
        self._targets = model.state_dict(keep_vars=True)
        self._mapping = importlib.import_module("transformers.conversion_mapping").get_model_conversion_mapping(model)
        self._plain, self._converted = names_in_model(
            entries, model=model, targets=self._targets, mapping=self._mapping
        )
        self._check(named)
        unused = [name for name in self._plain if name not in self._targets]
        if unused:
            logger.warning("%s: %d tensors have no place in the model, such as %s", named, len(unused), unused[0])

    def __call__(self, *, name: str, start: int, stop: int) -> Tensor:
        entry = self._plain.get(name)
        if entry is None:
            return self._convert(name)[start:stop].float()
        return entry.read(start, stop).float()

    def close(self) -> None:
        """Closes the files."""
        self._files.__exit__()

    def has(self, name: str) -> bool:
        """Returns whether the folder has this parameter."""
        return name in self._plain or name in self._converted

    def fill_buffers(self, model: nn.Module) -> None:
        """Copies the values of buffers that the files contain."""
        for name, buffer in model.named_buffers():
            if name in self._plain:
                buffer.copy_(self._plain[name].full())

    def _check(self, named: str) -> None:
        aliases: dict[Any, list[str]] = {}
        for name, target in self._targets.items():
            aliases.setdefault(target, []).append(name)
        lacking = []
        for name, parameter in self._model.named_parameters():
            known = next((other for other in aliases[parameter] if other in self._plain), None)
            if known is not None:
                entry = self._plain[name] = self._plain[known]
                if entry.shape != tuple(parameter.shape):
                    raise shape_error(named, name=name, own=entry.shape, expected=parameter.shape)
            elif name not in self._converted and name not in self._may_lack:
                lacking.append(name)
        if lacking:
            raise ValueError(
                f"{named}: the files lack {len(lacking)} weights of the model, such as {lacking[0]}; name a folder with all weights"
                f"{_or_random(named)}"
            )

    @functools.lru_cache(maxsize=2)  # noqa: B019 - lives as long as the engine is built
    def _convert(self, name: str) -> Tensor:
        values = converted_values(self._converted[name], model=self._model, mapping=self._mapping)
        return values[name].reshape(-1)


def shape_error(named: str, *, name: str, own: Sequence[int], expected: Sequence[int]) -> ValueError:
    """Returns the error for a parameter that has another shape than its model's. named: the option and the folder, for the message."""
    return ValueError(
        f"{named}: {name} has the shape {list(own)} in its files, and {list(expected)} by its config.json; set the sizes of config.json, such "
        "as vocab_size, to the ones of the weights"
    )


def _or_random(named: str) -> str:
    return ", or use model.init=random" if named.startswith("model.path") else ""


def _files(path: str, *, named: str) -> list[str]:
    """Returns the safetensors files of a folder. Raises ValueError if there are none."""
    files = weight_files(path) or [Path(path, "model.safetensors")]
    lacking = [file.name for file in files if not file.is_file()]
    if lacking:
        raise ValueError(
            f"{named}: there is no {lacking[0]}; save the model by save_pretrained, which writes safetensors{_or_random(named)}"
        )
    return [str(file) for file in files]


class DrawnValues:
    """`(name=, start=, stop=)` -> fp32 [stop - start] on the CPU, drawn by the model's own `_init_weights`.

    A unit (an element of a list of layers, else the module that owns the parameter) is drawn in full from its own seed, so that the
    values do not depend on the ranges requested. The last unit is cached.
    """

    def __init__(self, model: Any, *, seed: int) -> None:
        """model: with parameters on the meta device; kept."""
        self._model, self._seed = model, seed
        lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
        outer = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
        self._units = [f"{name}.{leaf}" for name in outer for leaf, _ in model.get_submodule(name).named_children()]

    def __call__(self, *, name: str, start: int, stop: int) -> Tensor:
        unit = next((unit for unit in self._units if name.startswith(f"{unit}.")), name.rpartition(".")[0])
        return self._draw(unit)[name][start:stop]

    @functools.lru_cache(maxsize=1)  # noqa: B019 - lives as long as the engine is built
    def _draw(self, unit: str) -> dict[str, Tensor]:
        drawn = copy.deepcopy(self._model.get_submodule(unit)).to_empty(device="cpu")
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(derive_seed(self._seed, "initial", unit))
            for module in reversed(list(drawn.modules())):  # children first, as in transformers
                self._model._init_weights(module)
        return {f"{unit}.{name}": value.detach().reshape(-1) for name, value in drawn.named_parameters()}
