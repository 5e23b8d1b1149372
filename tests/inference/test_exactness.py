"""A sequence's tokens and log-probabilities depend on nothing but the sequence, the weights and the seed."""

import functools
from types import SimpleNamespace

import pytest
import torch

from tests.inference.models import build, build_decoder
from tests.inference.schedules import alone, run_schedule
from ztk.inference import Generator, SamplingParams, cache_attention, generator, products, rows, slab_cache, steps
from ztk.inference.cache_attention import Scratch
from ztk.inference.steps import Places, Span, attention_bytes

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
    copy = slab_cache.SlabCache.copy

    def scrambled(self, source, *, target, positions):
        copy(self, source, target=target, positions=positions)
        self.keys[1][target, 0, 0, 2, 0] += 0.5

    monkeypatch.setattr(slab_cache.SlabCache, "copy", scrambled)
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
    cache_attention._lone_tile.cache_clear()
    try:
        assert cache_attention.lone_tile_of(1, head_dim=16, kv_heads=2) == cache_attention.tile_of(1)
        assert alone(model) == expected
    finally:
        cache_attention._lone_tile.cache_clear()


@pytest.mark.parametrize("heads", [3, 5, 6, 7])
def test_one_key_head_gives_a_lone_sequence_the_bits_of_many(heads, monkeypatch):
    """Planted, like MKL with two threads: a product that is alone in its call has other bits unless its rows are a multiple of 4."""
    product = torch.bmm

    def planted(left, right, *, out=None):
        found = product(left, right, out=out)
        return found.mul_(1.0001) if left.shape[0] == 1 and left.shape[1] % 4 else found

    monkeypatch.setattr(torch, "bmm", planted)
    cache_attention._lone_tile.cache_clear()
    try:
        model = build_decoder(dim=8 * heads, heads=heads, kv_heads=1)
        assert run_schedule(model, seed=0)[0] == alone(model)
    finally:
        cache_attention._lone_tile.cache_clear()


def test_a_processor_whose_lone_products_of_attention_differ_is_refused(monkeypatch):
    """Planted; with two key heads no product is alone in its call."""
    product = torch.bmm

    def planted(left, right, *, out=None):
        found = product(left, right, out=out)
        return found.mul_(1.0001) if left.shape[0] == 1 else found

    monkeypatch.setattr(torch, "bmm", planted)
    cache_attention._lone_tile.cache_clear()
    try:
        with pytest.raises(ValueError, match="4 query and 1 key heads of 8 differ with 1 in a call"):
            Generator(build_decoder(kv_heads=1))
        model = build_decoder()
        assert run_schedule(model, seed=0)[0] == alone(model)
    finally:
        cache_attention._lone_tile.cache_clear()


def test_a_processor_that_adds_products_otherwise_shares_none(monkeypatch):
    """Planted: a product that is added to its result's memory differs from one that is added afterwards."""
    shape, product = {"head_dim": 16, "threads": torch.get_num_threads()}, torch.baddbmm
    assert cache_attention.rows_agree.__wrapped__(2, **shape)
    monkeypatch.setattr(torch, "baddbmm", lambda *operands: product(*operands).mul_(1.0001))
    assert not cache_attention.rows_agree.__wrapped__(2, **shape)


@pytest.mark.parametrize("window, softcap, alibi", [(None, None, False), (20, 3.0, False), (None, None, True)])
def test_attention_equals_its_definition(window, softcap, alibi):
    """In float64, key by key; two sequences at different positions."""
    torch.manual_seed(0)
    H, K, D = 4, 2, 8
    keys, values = torch.randn(3, 3, K, cache_attention.BLOCK, D), torch.randn(3, 3, K, cache_attention.BLOCK, D)
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625]) if alibi else None
    spans = [
        Span(slot=2, start=101, length=9, row=0),
        Span(slot=0, start=3, length=1, row=9),
        Span(slot=1, start=70, length=1, row=10),
    ]
    query = torch.randn(11, H, D)
    found = torch.full_like(query, float("nan"))
    for tiles in Places(spans, group=H // K, kv_heads=K, head_dim=D).groups:
        options = {"scale": 0.3, "window": window, "softcap": softcap, "slopes": slopes}
        found[tiles.targets] = cache_attention.attend(query, tiles=tiles, keys=keys, values=values, **options)
    for span in spans:
        own_keys, own_values = (part[span.slot].transpose(0, 1).flatten(1, 2) for part in (keys, values))
        for t in range(span.length):
            last = span.start + t
            first = 0 if window is None else max(0, last - window + 1)
            for h in range(H):
                past = slice(first, last + 1)
                scores = own_keys[h // 2, past].double() @ query[span.row + t, h].double() * 0.3
                if softcap is not None:
                    scores = torch.tanh(scores / softcap) * softcap
                if slopes is not None:
                    scores = scores + slopes[h].double() * torch.arange(first, last + 1)
                expected = torch.softmax(scores, 0) @ own_values[h // 2, past].double()
                # Scores below 40 by 2^-24 relative each way; values below 4.
                torch.testing.assert_close(found[span.row + t, h].double(), expected, rtol=0, atol=4 * 80 * 2**-24)


@pytest.mark.parametrize("heads", [2, 4, 16])
def test_attention_of_sequences_side_by_side_has_the_bits_of_each_alone(heads):
    """A slot between them is another's, and some have fewer blocks."""
    torch.manual_seed(0)
    K, D, options = 2, 16, {"scale": 0.25}
    keys, values = torch.randn(8, 2, K, cache_attention.BLOCK, D), torch.randn(8, 2, K, cache_attention.BLOCK, D)
    spans = [Span(slot=slot, start=11 * slot, length=1, row=row) for row, slot in enumerate((1, 7, 2, 4, 5, 6))]
    query = torch.randn(len(spans), heads, D)
    step = Places(spans, group=heads // K, kv_heads=K, head_dim=D)
    assert any(tiles.side_by_side for tiles in step.groups)
    found = step.attend(query, keys=keys, values=values, **options)
    for span in spans:
        own = slice(span.row, span.row + 1)
        alone = Places([span._replace(row=0)], group=heads // K, kv_heads=K, head_dim=D)
        assert not any(tiles.side_by_side for tiles in alone.groups)
        assert torch.equal(found[own], alone.attend(query[own], keys=keys, values=values, **options)), span


def test_the_share_of_an_expert_does_not_follow_the_number_of_rows():
    """Of single numbers torch computes the sigmoid by another path than of many: 4 % of them differ."""
    column = torch.randn(400, 1, generator=torch.Generator().manual_seed(0))
    full = rows.share(column)
    for count in (1, 3, 17):
        parts = [rows.share(part) for part in column.split(count)]
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
    """Slots with gaps, and rows of several sequences in one group of tiles, some after their first block."""
    generator = torch.Generator().manual_seed(0)
    draw = functools.partial(torch.randn, generator=generator)
    slots = [2 * number + (number > 5) for number in range(len(lengths))]
    keys, values = (draw(slots[-1] + 1, 4, 2, cache_attention.BLOCK, 16) for _ in range(2))
    query = draw(sum(lengths), 4, 16)
    starts = [number % 7 + (60 if number in (4, 5, 11) else 0) for number in range(len(lengths))]
    rows = [sum(lengths[:number]) for number in range(len(lengths))]
    spans = [
        Span(slot=slot, start=start, length=length, row=row)
        for slot, start, length, row in zip(slots, starts, lengths, rows, strict=True)
    ]
    each = torch.zeros_like(query)
    options = {"keys": keys, "values": values, "scale": 0.25}
    together = Places(spans, group=2, kv_heads=2, head_dim=16).attend(query, **options)
    for span in spans:
        alone = Span(slot=span.slot, start=span.start, length=span.length, row=0)
        own = slice(span.row, span.row + span.length)
        each[own] = Places([alone], group=2, kv_heads=2, head_dim=16).attend(query[own], **options)
    assert torch.equal(together, each) and together.abs().amax(dim=(1, 2)).min() > 0


@pytest.mark.parametrize(("group", "window"), [(1, None), (3, None), (3, 100), (5, None)])
def test_a_long_prompt_attends_with_few_products_and_the_bits_of_its_tiles(group, window, monkeypatch):
    """From the middle of a block on, over several pieces of `QUERIES` places."""
    generator = torch.Generator().manual_seed(0)
    draw = functools.partial(torch.randn, generator=generator)
    keys, values = (draw(2, 12, 2, cache_attention.BLOCK, 16) for _ in range(2))
    spans = [Span(slot=1, start=90, length=600, row=0), Span(slot=0, start=5, length=40, row=600)]
    query = draw(640, 2 * group, 16)
    options = {"keys": keys, "values": values, "scale": 0.25, "window": window}
    calls, bmm = [], torch.bmm
    monkeypatch.setattr(cache_attention.torch, "bmm", lambda *x, **rest: calls.append(x) or bmm(*x, **rest))

    found = []
    for joins in (True, False):
        monkeypatch.setattr(steps, "rows_agree", lambda group, joins=joins, **shape: joins)
        places = Places(spans, group=group, kv_heads=2, head_dim=16)
        calls.clear()
        found.append((places.attend(query, **options), len(calls)))
    (joined, few), (tiled, many) = found
    assert torch.equal(joined, tiled) and few < many / 2


@pytest.mark.parametrize("joins", [True, False])
def test_the_counted_memory_of_attention_is_what_its_steps_take(joins, monkeypatch):
    """Of prompts in pieces of any length, and of sequences with one row each: at most the count, and the most of each kind is the count."""
    monkeypatch.setattr(steps, "rows_agree", lambda group, **shape: joins)
    of = SimpleNamespace(heads=4, kv_heads=2, head_dim=16)
    length = 20 * cache_attention.BLOCK
    keys, values = torch.zeros(2, 48, 20, 2, cache_attention.BLOCK, 16)
    lengths = (1, 20, 32, 33, 64, 65, 200, length)
    prompts = [[Span(slot=0, start=length - rows, length=rows, row=0)] for rows in lengths]
    prompts.append([Span(slot=slot, start=0, length=70, row=70 * slot) for slot in range(8)])
    for count in (1, 48):
        scratch = Scratch()
        for spans in (*prompts, [Span(slot=slot, start=length - 1, length=1, row=slot) for slot in range(count)]):
            query = torch.zeros(spans[-1].row + spans[-1].length, 4, 16)
            places = Places(spans, group=2, kv_heads=2, head_dim=16, scratch=scratch)
            places.attend(query, keys=keys, values=values, scale=1.0)
        token, batched = attention_bytes(of, sequences=count)
        taken = sum(flat.nbytes for flat in scratch._flat.values())
        assert taken == token * length and 0 < batched < taken
