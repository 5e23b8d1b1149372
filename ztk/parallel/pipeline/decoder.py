"""The native decoder as layers: embedding, blocks, and norm with head and loss."""

from torch import Tensor, nn

from ztk.nn import Decoder
from ztk.nn.staged import argument
from ztk.parallel.pipeline.layers import BuiltLayers, Carry, Layer, MicroBatch


class DecoderLayers(BuiltLayers):
    """See `LayeredModel`. A tied embedding stays on the head's stage too, under the embedding's name."""

    module: Decoder

    def __init__(self, model: Decoder) -> None:
        self.module = model
        finish = ("norm", "head", "embedding") if model.config.tie_embeddings else ("norm", "head")
        self.layers = [
            self.layer("embedding", modules=("embedding",), run=self._embed),
            *(self._block(f"blocks.{name}", block=block) for name, block in model.blocks.named_children()),
            self.layer("head", modules=finish, run=self._finish, named_by=1),
        ]

    def _block(self, name: str, *, block: nn.Module) -> Layer:
        def run(x: Tensor, batch: MicroBatch) -> Tensor:
            documents = argument(batch, index=2, name="documents")
            return self.module.through(block, x=x, documents=documents)

        return self.layer(name, modules=(name,), run=run)

    def _embed(self, _: Carry, batch: MicroBatch) -> Tensor:
        return self.module.embed(argument(batch, index=0, name="tokens"))

    def _finish(self, x: Tensor, batch: MicroBatch) -> Tensor:
        return self.module.finish(x, targets=argument(batch, index=1, name="targets"))
