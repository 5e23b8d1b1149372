"""Attention of texts in blocks: the inference engine's bits, and the gradient of plain attention."""

import pytest
import torch

from ztk.kernels import cache_rows, make_tiles, paged_attention
from ztk.kernels.shared.cached_attention import Scratch
from ztk.rl.rollout import blocks
from ztk.rl.rollout.blocks import Blocks, Segment

SHAPES = [(4, 2, 6), (4, 4, 16), (6, 2, 20), (16, 1, 32)]  # heads, key heads, head size: tiles of 4, 8, 2 and 1
LENGTHS = [1, 70, 3, 12, 12, 64, 65, 300]  # the last in three segments


def drawn(tokens: int, *, heads: int, kv_heads: int, head_dim: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(tokens, count, head_dim, generator=generator) for count in (heads, kv_heads, kv_heads)]


def engines(query: torch.Tensor, *, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """By the inference engine, of one text."""
    (T, H, D), K, scratch = query.shape, key.shape[1], Scratch()
    keys, values = torch.zeros(2, -(-T // 64), K, 64, D)
    rows, positions = torch.cat([query, key, value], dim=1).flatten(1), torch.arange(T)
    taken = cache_rows(rows, None, None, None, None, positions, positions, keys, values, scratch=scratch)
    assert torch.equal(taken, query)
    tables = torch.arange(len(keys), dtype=torch.int32).unsqueeze(0)
    tiles = torch.tensor(make_tiles([(0, 0, T, 0)], group=H // K), dtype=torch.int32)
    return paged_attention(query, keys, values, tables, tiles, scale=D**-0.5, scratch=scratch)


def plain(query: torch.Tensor, *, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Of one text, [T, H, D]."""
    group = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
    scores = torch.einsum("ihd,jhd->hij", query, key) * query.shape[-1] ** -0.5
    future = torch.ones(len(query), len(query), dtype=torch.bool).triu(1)
    return torch.einsum("hij,jhd->ihd", scores.masked_fill(future, float("-inf")).softmax(-1), value)


@pytest.mark.parametrize("agree", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), SHAPES)
def test_every_text_has_the_engines_bits(monkeypatch, heads, kv_heads, head_dim, agree):
    """Also where products may not have more rows than the engine's."""
    if not agree:
        monkeypatch.setattr(blocks, "rows_agree", lambda group, **shape: False)
    starts = torch.tensor([0, *LENGTHS]).cumsum(0).tolist()
    segments = [Segment(row=row, length=length) for row, length in zip(starts, LENGTHS, strict=False)]
    sizes = {"kv_heads": kv_heads, "head_dim": head_dim}
    query, key, value = drawn(starts[-1], heads=heads, **sizes)
    found, _ = Blocks(segments, tokens=starts[-1], group=heads // kv_heads, **sizes).attend(query, key=key, value=value)
    for segment in segments:
        own = slice(segment.row, segment.row + segment.length)
        assert torch.equal(found[own], engines(query[own], key=key[own], value=value[own])), segment


@pytest.mark.parametrize("border", [6, 8, 63, 64, 75, 192])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), SHAPES)
def test_texts_that_share_their_beginning_have_the_bits_and_gradients_of_full_ones(heads, kv_heads, head_dim, border):
    """The gradients within float32's rounding of those in float64."""
    own = [3, 1, 140, 3]
    tokens, group = border + sum(own), heads // kv_heads
    query, key, value = drawn(tokens, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    segments, rows = [Segment(row=0, length=border)], []
    for length in own:
        first = segments[-1].row + segments[-1].length
        segments.append(Segment(row=first, length=length, start=border, border=border))
        rows.append(torch.cat([torch.arange(border), torch.arange(first, first + length)]))
    places = Blocks(segments, tokens=tokens, kv_heads=kv_heads, group=group, head_dim=head_dim)
    found, lse = places.attend(query, key=key, value=value)
    for text in rows:
        assert torch.equal(found[text], engines(query[text], key=key[text], value=value[text]))

    d_out = torch.randn(found.shape, generator=torch.Generator().manual_seed(1))
    gradients = places.gradients(d_out, query=query, key=key, value=value, out=found, lse=lse)
    inputs = [x.double().requires_grad_() for x in (query, key, value)]
    expected = torch.zeros(found.shape, dtype=torch.float64)
    for text in rows:
        expected = expected.index_copy(0, text, plain(inputs[0][text], key=inputs[1][text], value=inputs[2][text]))
    for mine, exact in zip(gradients, torch.autograd.grad(expected, inputs, d_out.double()), strict=True):
        # Sums of up to 4 x 336 products of numbers near 1, each rounded: errors of random signs.
        assert (mine - exact).norm() <= 8 * torch.finfo(torch.float32).eps * exact.norm()
