"""A sequence's tokens and log-probabilities depend on nothing but the sequence, the weights and the seed."""

import functools

import pytest
import torch

from tests.inference.models import build, build_decoder
from tests.inference.schedules import alone, run_schedule
from ztk.inference import Generator, SamplingParams, generator, products
from ztk.inference.cache import Cache
from ztk.kernels import cache_rows, make_tiles, paged_attention
from ztk.kernels.shared import cached_attention, cpu_rows
from ztk.kernels.shared.cached_attention import BLOCK, Rows, Scratch, attend, attention_bytes, planned

MODELS = {
    "native": build_decoder,
    "native with experts": lambda: build_decoder(experts=4, experts_every=2, shared_hidden_dim=24),
    "gemma3": lambda: build("gemma3"),
    "mixtral": lambda: build("mixtral"),
    "bloom": lambda: build("bloom"),
}


@pytest.mark.parametrize("name", MODELS)
def test_random_schedules_change_no_bit(name):
    model = MODELS[name]()
    expected, reused = alone(model), 0
    for seed in range(6 if name == "native" else 2):
        found, generator = run_schedule(model, seed=seed)
        assert found == expected, seed
        reused += generator.reused_tokens
    assert reused > 300


def test_a_scrambled_cache_entry_is_noticed(monkeypatch):
    """The same check fails when a prefix that is reused has one wrong number in one layer."""
    model = build_decoder()
    expected = alone(model)
    copy = Cache.copy

    def scrambled(self, pairs):
        copy(self, pairs)
        self.keys[1][pairs[0][1], 0, 0, 0] += 0.5

    monkeypatch.setattr(Cache, "copy", scrambled)
    assert any(run_schedule(model, seed=seed)[0] != expected for seed in range(4))


def test_sums_that_follow_the_number_of_rows_are_noticed(monkeypatch):
    """Planted: a product whose sums take another order for more than 8 rows."""
    model = build_decoder()
    expected = alone(model)
    multiply = products.Product.multiply
    doubled = lambda self, x: multiply(self, x * 3) / 3 if len(x) > 8 else multiply(self, x)  # noqa: E731
    with monkeypatch.context() as patch:
        patch.setattr(generator, "check_model", lambda model: frozenset())
        patch.setattr(products.Product, "multiply", doubled)
        assert any(run_schedule(model, seed=seed)[0] != expected for seed in range(4))
    monkeypatch.setattr(products.Product, "multiply", doubled)
    with pytest.raises(ValueError, match="differ between 2 and 130 rows on this processor"):
        Generator(model)


def test_a_processor_whose_lone_rows_differ_computes_them_twice(monkeypatch):
    """Planted: a lone row's product is another."""
    model = build_decoder()
    expected = alone(model)
    multiply = products.Product.multiply
    monkeypatch.setattr(
        products.Product, "multiply", lambda self, x: multiply(self, x) * (1.0001 if len(x) == 1 else 1.0)
    )
    assert alone(model) == expected
    assert run_schedule(model, seed=1)[0] == expected


def test_a_processor_whose_narrow_products_differ_attends_in_full_tiles(monkeypatch):
    """Planted: products of fewer than 8 rows differ."""
    model, product = build_decoder(), torch.bmm
    expected = alone(model)

    def planted(left, right, *, out=None):
        found = product(left, right, out=out)
        return found.mul_(1.0001) if left.shape[1] < 8 else found

    monkeypatch.setattr(torch, "bmm", planted)
    cached_attention._lone_tile.cache_clear()
    try:
        assert cached_attention.lone_tile_of(1, head_dim=16, kv_heads=2) == cached_attention.tile_of(1)
        assert alone(model) == expected
    finally:
        cached_attention._lone_tile.cache_clear()


@pytest.mark.parametrize("heads", [3, 5, 6, 7])
def test_one_key_head_gives_a_lone_sequence_the_bits_of_many(heads, monkeypatch):
    """Planted, like MKL with two threads: a product that is alone in its call has other bits unless its rows are a multiple of 4."""
    product = torch.bmm

    def planted(left, right, *, out=None):
        found = product(left, right, out=out)
        return found.mul_(1.0001) if left.shape[0] == 1 and left.shape[1] % 4 else found

    monkeypatch.setattr(torch, "bmm", planted)
    cached_attention._lone_tile.cache_clear()
    try:
        model = build_decoder(dim=8 * heads, heads=heads, kv_heads=1)
        assert run_schedule(model, seed=0)[0] == alone(model)
    finally:
        cached_attention._lone_tile.cache_clear()


def test_a_processor_whose_lone_products_of_attention_differ_is_refused(monkeypatch):
    """Planted; with two key heads no product is alone in its call."""
    product = torch.bmm

    def planted(left, right, *, out=None):
        found = product(left, right, out=out)
        return found.mul_(1.0001) if left.shape[0] == 1 else found

    monkeypatch.setattr(torch, "bmm", planted)
    cached_attention._lone_tile.cache_clear()
    try:
        with pytest.raises(ValueError, match="4 query and 1 key heads of 8 differ with 1 in a call"):
            Generator(build_decoder(kv_heads=1))
        model = build_decoder()
        assert run_schedule(model, seed=0)[0] == alone(model)
    finally:
        cached_attention._lone_tile.cache_clear()


def test_a_processor_that_adds_products_otherwise_shares_none(monkeypatch):
    """Planted: a product that is added to its result's memory differs from one that is added afterwards."""
    shape, product = {"head_dim": 16, "threads": torch.get_num_threads()}, torch.baddbmm
    assert any(cached_attention.rows_agree.__wrapped__(group, **shape) for group in (1, 2, 3, 5))
    monkeypatch.setattr(torch, "baddbmm", lambda *operands: product(*operands).mul_(1.0001))
    assert not any(cached_attention.rows_agree.__wrapped__(group, **shape) for group in (1, 2, 3, 5))


def attended(query, *, rows: list[Rows], keys, values, **options):
    """By tiles of the op's groups."""
    K, H, D = keys.shape[1], *query.shape[1:]
    found, scratch = torch.full_like(query, float("nan")), Scratch()
    for tiles in planned(rows, total=len(keys), group=H // K, kv_heads=K, head_dim=D):
        found[tiles.targets] = attend(query, tiles=tiles, keys=keys, values=values, scratch=scratch, **options)
    return found


@pytest.mark.parametrize("window, softcap, alibi", [(None, None, False), (20, 3.0, False), (None, None, True)])
def test_attention_equals_its_definition(window, softcap, alibi):
    """In float64, key by key; three sequences at different positions, one in blocks that follow each other in part."""
    torch.manual_seed(0)
    H, K, D = 4, 2, 8
    keys, values = torch.randn(9, K, BLOCK, D), torch.randn(9, K, BLOCK, D)
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625]) if alibi else None
    rows = [
        Rows(blocks=(7, 4), start=101, length=9, row=0),
        Rows(blocks=(2,), start=3, length=1, row=9),
        Rows(blocks=(5, 6, 0), start=140, length=1, row=10),
    ]
    query = torch.randn(11, H, D)
    options = {"scale": 0.3, "window": window, "softcap": softcap, "slopes": slopes}
    found = attended(query, rows=rows, keys=keys, values=values, **options)
    for own in rows:
        own_keys, own_values = (part[list(own.blocks)].transpose(0, 1).flatten(1, 2) for part in (keys, values))
        for t in range(own.length):
            last = own.start + t
            first = 0 if window is None else max(0, last - window + 1)
            for h in range(H):
                past = slice(first, last + 1)
                scores = own_keys[h // 2, past].double() @ query[own.row + t, h].double() * 0.3
                if softcap is not None:
                    scores = torch.tanh(scores / softcap) * softcap
                if slopes is not None:
                    scores = scores + slopes[h].double() * torch.arange(first, last + 1)
                expected = torch.softmax(scores, 0) @ own_values[h // 2, past].double()
                # Scores below 40 by 2^-24 relative each way; values below 4.
                torch.testing.assert_close(found[own.row + t, h].double(), expected, rtol=0, atol=4 * 80 * 2**-24)


@pytest.mark.parametrize("heads", [2, 4, 16])
def test_sequences_at_a_stride_have_the_bits_of_each_alone(heads):
    """Blocks between them are another's, and some have fewer blocks."""
    torch.manual_seed(0)
    K, D, options = 2, 16, {"scale": 0.25}
    keys, values = torch.randn(16, K, BLOCK, D), torch.randn(16, K, BLOCK, D)
    rows = [
        Rows(blocks=(2 * part, 2 * part + 1)[: 1 + (11 * part >= BLOCK)], start=11 * part, length=1, row=row)
        for row, part in enumerate((1, 7, 2, 4, 5, 6))
    ]
    query = torch.randn(len(rows), heads, D)
    sizes = {"total": 16, "group": heads // K, "kv_heads": K, "head_dim": D}
    lone = cached_attention.lone_tile_of(heads // K, head_dim=D, kv_heads=K)
    any_place = lone < cached_attention.tile_of(heads // K) or lone == 1
    assert any(tiles.stride for tiles in planned(rows, **sizes)) == any_place
    assert not any(tiles.stride for tiles in planned(rows, **{**sizes, "total": 15}))  # the last block is not there
    found = attended(query, rows=rows, keys=keys, values=values, **options)
    for own in rows:
        place = slice(own.row, own.row + 1)
        alone = attended(query[place], rows=[own._replace(row=0)], keys=keys, values=values, **options)
        assert torch.equal(found[place], alone), own


@pytest.mark.parametrize("follows", [1, 3, 100])
def test_bits_do_not_depend_on_the_places_of_blocks(follows):
    """Blocks in runs of one, of three, and in one run; two sequences share their first blocks."""
    draw = functools.partial(torch.randn, generator=torch.Generator().manual_seed(0))
    K, D, count = 2, 16, 12
    keys, values, query = draw(2 * count, K, BLOCK, D), draw(2 * count, K, BLOCK, D), draw(90, 4, D)
    logical = [list(range(10)), [0, 1, 10, 11]]
    spans = [(0, 560, 80, 0), (1, 200, 10, 80)]  # sequence, start, length, row
    runs = [list(range(first, min(count, first + follows))) for first in range(0, count, follows)]
    order = [block for run in reversed(runs) for block in run]
    found = []
    for places in (list(range(count)), [order.index(block) + count for block in range(count)]):
        own_keys, own_values = torch.zeros_like(keys), torch.zeros_like(values)
        own_keys[places], own_values[places] = keys[:count], values[:count]
        tables = torch.zeros(2, 10, dtype=torch.int32)
        for number, blocks in enumerate(logical):
            tables[number, : len(blocks)] = torch.tensor([places[block] for block in blocks])
        tiles = torch.tensor(make_tiles(spans, group=2), dtype=torch.int32)
        found.append(paged_attention(query, own_keys, own_values, tables, tiles, scale=0.25, scratch=Scratch()))
    assert torch.equal(*found) and found[0].abs().amax(dim=(1, 2)).min() > 0


def test_numbers_that_a_sequence_has_left_behind_are_not_read():
    """Not even where they are not finite: a block that begins is zero behind its first rows."""
    keys, values = torch.full((2, 3, 2, BLOCK, 16), float("nan"))
    rows, places = torch.randn(3, (4 + 2 * 2) * 16), torch.tensor([BLOCK, BLOCK + 1, BLOCK + 2])
    scratch, positions = Scratch(), torch.arange(3)
    query = cache_rows(rows, None, None, None, None, positions, places, keys, values, scratch=scratch)
    tables = torch.tensor([[1]], dtype=torch.int32)
    tiles = torch.tensor(make_tiles([(0, 0, 3, 0)], group=2), dtype=torch.int32)
    found = paged_attention(query, keys, values, tables, tiles, scale=0.25, scratch=scratch)
    own = values.clone()
    values[1, :, 3:] = 5.0  # hidden
    assert found.isfinite().all() and own[1].isfinite().all() and own[0].isnan().all()
    assert torch.equal(paged_attention(query, keys, values, tables, tiles, scale=0.25), found)


def test_the_share_of_an_expert_does_not_follow_the_number_of_rows():
    """Of single numbers torch computes the sigmoid by another path than of many: 4 % of them differ."""
    column = torch.randn(400, 1, generator=torch.Generator().manual_seed(0))
    full = cpu_rows.share(column)
    for count in (1, 3, 17):
        parts = [cpu_rows.share(part) for part in column.split(count)]
        assert torch.equal(torch.cat(parts), full), count


def test_a_step_of_one_row_has_the_bits_of_many():
    model = build_decoder()
    sampling = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=True)
    text = list(range(60))
    full = Generator(model).generate([text], sampling=sampling)[0][0].prompt_logprobs
    pieces = (
        Generator(model, policy=generator.InferencePolicy(max_step_tokens=1))
        .generate([text], sampling=sampling)[0][0]
        .prompt_logprobs
    )
    assert torch.equal(full, pieces)


@pytest.mark.parametrize("lengths", [[1] * 17, [9] * 17, [1, 70, 3, 1, 130, 1, 5] * 3])
def test_many_sequences_attend_as_one_does(lengths):
    """Sequences with gaps, and rows of several sequences in one group of tiles, some after their first block."""
    draw = functools.partial(torch.randn, generator=torch.Generator().manual_seed(0))
    parts = [2 * number + (number > 5) for number in range(len(lengths))]
    keys, values = (draw(4 * parts[-1] + 4, 2, BLOCK, 16) for _ in range(2))
    query = draw(sum(lengths), 4, 16)
    starts = [number % 7 + (60 if number in (4, 5, 11) else 0) for number in range(len(lengths))]
    first = [sum(lengths[:number]) for number in range(len(lengths))]
    rows = [
        Rows(blocks=tuple(range(4 * part, 4 * part + 4)), start=start, length=length, row=row)
        for part, start, length, row in zip(parts, starts, lengths, first, strict=True)
    ]
    each, options = torch.zeros_like(query), {"keys": keys, "values": values, "scale": 0.25}
    together = attended(query, rows=rows, **options)
    for own in rows:
        place = slice(own.row, own.row + own.length)
        each[place] = attended(query[place], rows=[own._replace(row=0)], **options)
    assert torch.equal(together, each) and together.abs().amax(dim=(1, 2)).min() > 0


@pytest.mark.parametrize(("group", "window"), [(1, None), (3, None), (3, 100), (5, None)])
def test_a_long_prompt_attends_with_few_products_and_the_bits_of_its_tiles(group, window, monkeypatch):
    """From the middle of a block on, over several pieces of `QUERIES` places."""
    draw = functools.partial(torch.randn, generator=torch.Generator().manual_seed(0))
    keys, values = (draw(24, 2, BLOCK, 16) for _ in range(2))
    rows = [
        Rows(blocks=tuple(range(12, 24)), start=90, length=600, row=0),
        Rows(blocks=(0,), start=5, length=40, row=600),
    ]
    query = draw(640, 2 * group, 16)
    options = {"keys": keys, "values": values, "scale": 0.25, "window": window}
    agrees = cached_attention.rows_agree(group, head_dim=16, threads=torch.get_num_threads())
    attended(query, rows=rows, **options)  # tries the processor's products once, which are not counted
    calls, bmm = [], torch.bmm
    monkeypatch.setattr(cached_attention.torch, "bmm", lambda *x, **rest: calls.append(x) or bmm(*x, **rest))

    found = []
    for joins in (True, False):
        monkeypatch.setattr(cached_attention, "rows_agree", lambda group, joins=joins, **shape: joins)
        calls.clear()
        found.append((attended(query, rows=rows, **options), len(calls)))
    (joined, few), (tiled, many) = found
    assert few < many / 2
    assert torch.equal(joined, tiled) or not agrees  # where they do not agree, long prompts have tiles


@pytest.mark.parametrize("joins", [True, False])
def test_the_counted_memory_of_attention_is_what_its_steps_take(joins, monkeypatch):
    """Of prompts in pieces of any length, and of sequences with one row each: at most the count, and the most of each kind is the count."""
    monkeypatch.setattr(cached_attention, "rows_agree", lambda group, **shape: joins)
    of, each = {"heads": 4, "kv_heads": 2, "head_dim": 16}, 20
    length = each * BLOCK
    keys, values = torch.zeros(2, 48 * each, 2, BLOCK, 16)

    def rows_of(number: int, *, start: int, length: int, row: int) -> Rows:
        return Rows(blocks=tuple(range(number * each, (number + 1) * each)), start=start, length=length, row=row)

    lengths = (1, 20, 32, 33, 64, 65, 200, length)
    prompts = [[rows_of(0, start=length - rows, length=rows, row=0)] for rows in lengths]
    prompts.append([rows_of(number, start=0, length=70, row=70 * number) for number in range(8)])
    for count in (1, 48):
        scratch = Scratch()
        lone = [rows_of(number, start=length - 1, length=1, row=number) for number in range(count)]
        for rows in (*prompts, lone):
            query = torch.zeros(rows[-1].row + rows[-1].length, 4, 16)
            for tiles in planned(rows, total=len(keys), group=2, kv_heads=2, head_dim=16):
                attend(query, tiles=tiles, keys=keys, values=values, scale=1.0, scratch=scratch)
        token, batched = attention_bytes(**of, sequences=count)
        assert scratch.nbytes == token * length and 0 < batched < scratch.nbytes
