"""Uses the weights of a checkpoint as initial values of a model. Every rank reads only its own ranges."""

from pathlib import Path

import torch
from torch import Tensor, nn

from ztk.checkpoint.export import Weights
from ztk.checkpoint.manifest import read_manifest
from ztk.core.runtime.part import InitialValues


class CheckpointValues:
    """`InitialValues` of a checkpoint, float32 weights by name and range. The model need not have the layout of the save."""

    def __init__(self, step: Path, *, ema: bool = False, base: InitialValues | None = None) -> None:
        """step: the folder of the checkpoint. ema: uses the moving average of the weights. base: values for the parameters that a
        checkpoint of trained parameters omits; not needed for a full checkpoint.

        Raises CheckpointError for a damaged checkpoint, and for `ema` without an average.
        """
        manifest = read_manifest(step)
        self._weights, self._base = Weights(manifest, dtype=torch.float32, ema=ema), base
        self._names = {spec.key: spec.key for spec in self._weights.specs}
        self._names |= {name: first for name, first in manifest.tied.items() if first in self._names}
        self._buffers = [info.name for info in manifest.buffers]

    def __call__(self, *, name: str, start: int, stop: int) -> Tensor:
        """Returns float32 [stop - start] of the flat parameter `name`. Raises CheckpointError if the checkpoint lacks it."""
        if self._base is not None and name not in self._names:
            return self._base(name=name, start=start, stop=stop)
        return self._weights.read(self._names.get(name, name), start=start, stop=stop)

    def fill_buffers(self, model: nn.Module) -> None:
        """Copies the checkpoint's buffers into the model's buffers, except those on the meta device."""
        own = dict(model.named_buffers())
        for name in self._buffers:
            if name in own and not own[name].is_meta:
                values = self._weights.read(name, start=0, stop=own[name].numel())
                own[name].copy_(values.view(own[name].shape))

    def close(self) -> None:
        """Closes the files."""
        self._weights.close()
