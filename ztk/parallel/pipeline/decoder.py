"""The native decoder as layers: embedding, blocks, and norm with head and loss."""

from collections.abc import Collection

import torch
from torch import Tensor, nn

from ztk.nn import Decoder
from ztk.nn.staged import argument
from ztk.parallel.pipeline.layers import Carry, Layer, MicroBatch, count_multiplied, count_parameters, drop_modules


class DecoderLayers:
    """See `LayeredModel`. A tied embedding stays on the head's stage too, under the embedding's name."""

    def __init__(self, model: Decoder) -> None:
        self.module = model
        finish = ("norm", "head", "embedding") if model.config.tie_embeddings else ("norm", "head")
        self.layers = [
            self._layer("embedding", modules=("embedding",), run=self._embed),
            *(self._block(f"blocks.{name}", block=block) for name, block in model.blocks.named_children()),
            self._layer("head", modules=finish, run=self._finish),
        ]

    def shapes(self) -> dict[str, torch.Size]:
        return {name: p.shape for name, p in self.module.named_parameters() if p.requires_grad}

    def keep(self, own: Collection[int]) -> None:
        needed = {path for index in own for path in self.layers[index].modules}
        known = dict.fromkeys(path for layer in self.layers for path in layer.modules)
        drop_modules(self.module, paths=[path for path in known if path not in needed])

    def _layer(self, name: str, *, modules: tuple[str, ...], run) -> Layer:
        found = [self.module.get_submodule(path) for path in modules]
        kind = type(found[-1] if name != "head" else found[1]).__name__
        return Layer(
            name=name,
            kind=kind,
            modules=modules,
            num_parameters=count_parameters(*found),
            num_multiplied=count_multiplied(*found),
            run=run,
        )

    def _block(self, name: str, *, block: nn.Module) -> Layer:
        def run(x: Tensor, batch: MicroBatch) -> Tensor:
            documents = argument(batch, index=2, name="documents")
            return self.module.through(block, x=x, documents=documents)

        return self._layer(name, modules=(name,), run=run)

    def _embed(self, _: Carry, batch: MicroBatch) -> Tensor:
        return self.module.embed(argument(batch, index=0, name="tokens"))

    def _finish(self, x: Tensor, batch: MicroBatch) -> Tensor:
        return self.module.finish(x, targets=argument(batch, index=1, name="targets"))
