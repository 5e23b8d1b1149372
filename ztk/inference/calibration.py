"""Inputs of a model's linear layers on a text, one layer after the other.

A layer computes the text in fp32 on the CPU, from the outputs of the layer before it as they are stored, and its products add up the second
moments of their inputs. So only one layer is in memory at a time, the results depend neither on the format and the place of the weights nor
on the ranks that share the model, and every rank computes the same.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ztk.inference.cache import Span
from ztk.inference.describe import Subject
from ztk.inference.model import InferenceModel
from ztk.inference.placement import Placement
from ztk.inference.products import Affine, Product, Recorded
from ztk.inference.weights import WeightReader

PIECE = 512  # tokens of the text that see each other


class Calibration:
    """Computes the layers of the model with the parameters `state` on `tokens`, each when it is asked for. Called with the numbers of the
    layers in order.

    Raises:
        ValueError: no tokens, or one outside the vocabulary; or as `WeightReader`.
    """

    def __init__(self, tokens: Sequence[int], *, subject: Subject, state: Mapping[str, Tensor]) -> None:
        of = subject.description
        if not tokens or not all(0 <= token < of.vocab_size for token in tokens):
            what = f"a token outside of 0 to {of.vocab_size - 1}" if tokens else "no tokens"
            raise ValueError(f"inference.calibration has {what}: name a text for the model's own tokenizer")
        products, self._made = (self._recorded, _first_output, Product), list[Recorded]()
        self._reader = WeightReader(state, description=of, placement=Placement(), products=products)
        self._model = InferenceModel(subject, weights=self._reader.rest())
        size = min(PIECE, of.max_len)
        pieces = torch.tensor(list(tokens)).split(size)
        self._cache, self._spans = self._model.scratch(size), [
            [Span(slot=0, start=0, length=len(piece), row=0)] for piece in pieces
        ]  # fmt: skip
        with torch.no_grad():
            self._hidden = [
                self._model.embed(piece, step=self._cache.step(span))
                for piece, span in zip(pieces, self._spans, strict=True)
            ]
        self._next = 0

    @torch.no_grad()
    def __call__(self, number: int) -> Iterator[Tensor]:
        """Yields the rows that layer `number` reads, as the `Inputs` of a `WeightReader` do."""
        assert number == self._next, "layers are computed one after the other"
        layer = self._reader.layer(number)
        self._hidden = [
            self._model.block(x, layer=layer, number=number, step=self._cache.step(spans))
            for x, spans in zip(self._hidden, self._spans, strict=True)
        ]
        self._next += 1
        moments = [product.moments for product in self._made]
        self._made.clear()
        return iter(moments)

    def _recorded(self, affine: Affine) -> Product:
        self._made.append(Recorded(affine))
        return self._made[-1]


def _first_output(affine: Affine) -> Product:
    """In the place of the head, which is not computed."""
    return Product(Affine(weight=affine.weight[:1]))
