"""Models of transformers by their own modules. Linear layers of a block are read from a file while the previous block computes.

[Note: Modules over streamed layers]
A block's products are written into a file when the copy of the modules is made, block by block, and its linear layers are empty afterwards.
When a forward reaches a block, the block gets the products of the next layer of the ring (`stream`), whose memory is valid until the
following block begins. So the blocks must run once and in order, which is checked. The blocks' other parameters, the embedding and the head
stay in memory.
"""

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ztk.inference.cache import Cache, Span
from ztk.inference.device_stream import DeviceLayers
from ztk.inference.module_cut import Linear
from ztk.inference.module_model import ModuleModel, blocks_name
from ztk.inference.parts import LayerFile, LayerWriter
from ztk.inference.placement import Placement
from ztk.inference.products import Product
from ztk.inference.ranks import Ranks
from ztk.inference.stream import StreamedLayers
from ztk.inference.weights import Values

_NO_LAYERS: Iterable[Values] = ()


class StreamedModuleModel(ModuleModel):
    """A `ModuleModel` with streamed layers and the same bits. state: parameters of any shape and dtype. folder: an existing one for the
    file; None: main memory has the layers. `stream` sets the source of layers; until then, all layers are one layer of zeros.

    Raises:
        ValueError: the same as in `ModuleModel` and `LayerWriter`; the module has no list of its blocks, or they are not built alike.
    """

    def __init__(
        self,
        module: Any,
        *,
        state: Mapping[str, Tensor],
        placement: Placement,
        folder: Path | None,
        pin: bool = False,
        ranks: Ranks | None = None,
    ) -> None:
        count = getattr(module.config, "num_hidden_layers", 0)
        self._prefix, self._pending = blocks_name(module, count=count), dict[str, Product]()
        self._number, self._layers = 0, _NO_LAYERS
        self._pass: Iterator[Values] | None = None
        with LayerWriter(folder, count=count, pin=pin) as self._writer:
            super().__init__(module, state=state, placement=placement, ranks=ranks)
        self.file: LayerFile[Values] = self._writer.file(_as_they_are)

    @property
    def resident_bytes(self) -> int:
        """Bytes that stay in memory without the layers of the file: embedding, norms, buffers, head."""
        own = {id(tensor): tensor.nbytes for tensor in (*self._module.parameters(), *self._module.buffers())}
        return sum(own.values()) + sum(product.nbytes for product in self._products)

    @property
    def packed_bytes(self) -> int:
        """Bytes of the file's layers and of other products, the head's."""
        return self.file.count * self.file.nbytes + sum(product.nbytes for product in self._products)

    def products(self) -> list[Product]:
        """Those in memory."""
        held = self._layers.held if isinstance(self._layers, StreamedLayers | DeviceLayers) else []
        return [*(value for values in held for value in values.values() if isinstance(value, Product)), *self._products]

    def stream(self, layers: Iterable[Values]) -> None:
        """Sets the source of layers, as in `InferenceModel`."""
        self._layers = layers

    def own_logits(self, tokens: Tensor, *, spans: list[Span], cache: Cache, rows: list[int], **options: Any) -> Tensor:
        """Computes logits like `ModuleModel`: tokens int64 [M] -> logits fp32 [len(rows), V]."""
        self._number, self._pass = 0, iter(self._layers)
        found = super().own_logits(tokens, spans=spans, cache=cache, rows=rows, **options)
        if self._number != len(self._blocks):
            raise ValueError("does not compute all of its blocks")
        next(self._pass, None)  # the last layer's memory is free: the next pass is read ahead
        return found

    # Parts

    def _placed(self, name: str, layer: Linear) -> None:
        number, _, path = name.removeprefix(f"{self._prefix}.").partition(".")
        if not self._prefix or not name.startswith(f"{self._prefix}."):
            super()._placed(name, layer)
            return
        if int(number) != self._number:
            self._write()
            self._number = int(number)
        self._pending[path] = layer.product
        del layer.product

    def _try_out(self) -> None:
        if not self._pending:
            raise ValueError(
                f"model_type={self.description.family}: offload=nvme streams the linear layers of a list of blocks, which its modules have "
                "not; leave offload out"
            )
        self._write()
        file, device = self._writer.file(_as_they_are), self.placement.device
        zeros = file.buffer() if device.type == "cpu" else file.device_buffer(device)
        self._layers = [zeros.layer] * len(self._blocks)
        for number, block in enumerate(self._blocks):
            linears = {path: part for path, part in block.named_modules() if isinstance(part, Linear)}
            block.register_forward_pre_hook(partial(self._enter, number, linears))
        super()._try_out()

    def _write(self) -> None:
        self._writer.write(self._pending)
        self._pending = {}

    def _enter(self, number: int, linears: dict[str, Linear], module: nn.Module, given: object) -> None:
        if number != self._number:
            raise ValueError("computes its blocks in another order than they have")
        assert self._pass is not None, "a forward of `own_logits`"
        values = next(self._pass)
        for path, linear in linears.items():
            product = values[path]
            assert isinstance(product, Product), "the file has products alone"
            linear.product = product
        self._number += 1


def _as_they_are(values: Values) -> Values:
    return values
