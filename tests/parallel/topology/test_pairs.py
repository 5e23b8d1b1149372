"""Which tokens of packed documents see each other across chunks of a ring, by the definition."""

import pytest
import torch

from ztk.kernels import PackedPair, Part, attention_block, attention_block_backward, set_backend
from ztk.parallel.sequence.ring import Chunks

LENGTH, COUNT = 8, 6  # tokens of a chunk, chunks of a sequence
CPU = torch.device("cpu")
STARTS = (
    (0, 3, 8, 9, 30, 41),  # a document that begins with a chunk, one over three chunks, one over the end of another
    (0,),
    tuple(range(LENGTH * COUNT)),
    (0, 5, 47),
)


def by_definition(starts: tuple[int, ...]) -> torch.Tensor:
    """bool [tokens, tokens]: the key in a query's document, not behind it."""
    place = torch.arange(LENGTH * COUNT)
    document = torch.bucketize(place, torch.tensor(starts), right=True)
    return (document[:, None] == document[None]) & (place[:, None] >= place[None])


def shown(pair, *, sequence: int) -> torch.Tensor:
    """bool [LENGTH, LENGTH] of one sequence of the pair."""
    mask = torch.zeros(len(STARTS) * LENGTH, len(STARTS) * LENGTH, dtype=torch.bool)
    parts = () if pair is None else pair.parts if isinstance(pair, PackedPair) else None
    if parts is None:  # a plain pair: every sequence alike
        parts = [Part(query=first, key=first, pair=pair) for first in range(0, len(mask), LENGTH)]
    for part in parts:
        apart = part.pair.distance + torch.arange(part.pair.length)[:, None] - torch.arange(part.pair.keys)[None]
        assert not mask[part.rows].any() and not mask[:, part.columns].any()  # no token is in two parts
        mask[part.rows, part.columns] = apart >= 0
    own = slice(sequence * LENGTH, (sequence + 1) * LENGTH)
    assert mask[own].sum() == mask[own, own].sum()  # nothing of another sequence
    return mask[own, own]


@pytest.mark.parametrize("sequence", range(len(STARTS)))
def test_pairs_of_chunks_are_the_mask_of_the_documents(sequence):
    chunks, expected = Chunks(length=LENGTH, starts=STARTS), by_definition(STARTS[sequence])
    for query in range(COUNT):
        for key in range(COUNT):
            block = expected[query * LENGTH : (query + 1) * LENGTH, key * LENGTH : (key + 1) * LENGTH]
            assert shown(chunks.pair(query=query, key=key, device=CPU), sequence=sequence).equal(block), (query, key)


def test_one_document_over_two_chunks_is_a_plain_pair():
    chunks = Chunks(length=LENGTH, starts=((0,), (0, 3)))
    assert not isinstance(chunks.pair(query=3, key=1, device=CPU), PackedPair)
    assert chunks.pair(query=1, key=2, device=CPU) is None
    assert Chunks(length=LENGTH, starts=((0, 8), (0, 16))).pair(query=2, key=0, device=CPU) is None


@pytest.mark.parametrize("query, key", [(1, 1), (3, 2), (5, 3)])
def test_the_reference_backend_computes_the_same(query, key):
    pair = Chunks(length=LENGTH, starts=STARTS).pair(query=query, key=key, device=CPU)
    generator = torch.Generator().manual_seed(1)
    q, d_out = (torch.randn(len(STARTS) * LENGTH, 4, 16, generator=generator) for _ in range(2))
    k, v = (torch.randn(len(STARTS) * LENGTH, 2, 16, generator=generator) for _ in range(2))
    found = []
    for backend in ("auto", "reference"):
        set_backend(backend)
        try:
            out, lse = attention_block(q, k, v, pair=pair, scale=0.25)
            sums = lse.clamp(min=-1e4)  # of a query that sees no key
            own = {"out": out, "lse": sums, "pair": pair, "scale": 0.25}
            found.append((out, lse, *attention_block_backward(d_out, q, k, v, **own)))
        finally:
            set_backend("auto")
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(
            one, other, rtol=0, atol=1e-5
        )  # sums of at most 8 products of size 1, in another order
