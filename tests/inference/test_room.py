"""Slabs within a number of bytes: who finds no room waits, who could never find any is refused."""

import copy
import mmap
import weakref
from pathlib import Path

import pytest
import torch

from tests.inference.models import VOCABULARY, build_decoder
from tests.inference.schedules import REQUESTS, alone, run_schedule
from ztk.inference import Generator, InferencePolicy, SamplingParams, capacity, slab_cache
from ztk.inference.capacity import Room

LENGTH = 1024
UNIT = 256  # positions by which slabs grow
_TEXT = [(7 * i + 3) % VOCABULARY for i in range(900)]
LONG = [
    *REQUESTS,
    (_TEXT[:300], SamplingParams(max_tokens=12, temperature=0.8, n=3, seed=5)),
    (_TEXT[:700], SamplingParams(max_tokens=4, temperature=0.8, seed=6)),
    (_TEXT[:280], SamplingParams(max_tokens=8, temperature=0, prompt_logprobs=True)),
    (_TEXT[:500] + [1], SamplingParams(max_tokens=20, temperature=0.5, seed=7)),
]


@pytest.fixture(scope="module")
def model():
    return build_decoder(max_seq_len=LENGTH)


@pytest.fixture
def slabs(monkeypatch):
    """Bytes of all tensors of zeros that exist, and the most so far."""
    seen, plain = {"now": 0, "most": 0}, slab_cache.lazy_zeros

    def counted(shape):
        made = plain(shape)
        nbytes = made.nbytes
        seen["now"] += nbytes
        seen["most"] = max(seen["most"], seen["now"])
        weakref.finalize(made, lambda: seen.__setitem__("now", seen["now"] - nbytes))
        return made

    monkeypatch.setattr(slab_cache, "lazy_zeros", counted)
    return seen


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_slabs_take_memory_where_they_are_written():
    """An answer that nothing limits has room for the rest of the context; a short one takes the memory of its tokens."""
    shape, before = (32, 128, 3, 64, 64), resident()  # 8,192 tokens of 32 sequences
    slab = slab_cache.lazy_zeros(shape)
    assert slab.nbytes == 201_326_592 and slab.dtype == torch.float32 and not slab[0, :2].any()
    slab[0, :2] = 1
    assert slab[0, :2].all() and resident() - before < 60_000_000
    assert slab_cache.lazy_zeros((4, 0, 3, 64, 64)).shape == (4, 0, 3, 64, 64)


def test_slabs_that_grow_leave_unwritten_places_without_memory(model):
    """Only places with keys are copied to the larger slabs: 1 of 512, where each has 64 KB before and 128 KB after."""
    tokens, sampling = _TEXT[:200], SamplingParams(max_tokens=2, temperature=0)
    generator = Generator(model, policy=InferencePolicy(max_sequences=512, cache_tokens=512 * LENGTH))
    generator.generate([tokens], sampling=sampling)
    cache, before = generator._cache, resident()
    assert cache.positions == UNIT and cache.nbytes == 512 * 65_536
    keys = [slab[0, : 200 // 64].clone() for slab in cache.keys]
    cache.reserve(2 * UNIT)
    assert resident() - before < 8_000_000  # 33 MB if all were copied
    assert all(torch.equal(slab[0, : 200 // 64], own) and own.any() for slab, own in zip(cache.keys, keys, strict=True))


def test_random_schedules_in_little_memory_change_no_bit(model):
    """Lookups, draft models, prefixes, several answers and cancelled requests among them; places for one long text or three short ones."""
    expected, laid_out = alone(model, requests=LONG), set()
    for seed in range(4):
        tokens = UNIT * (3 + seed % 2)

        def watch(generator: Generator, tokens: int = tokens) -> None:
            cache = generator._cache
            token = 2 * 2 * 2 * 8 * 4  # keys and values of 2 layers, 2 heads of 8, fp32
            assert cache.nbytes <= tokens * token
            laid_out.add((cache.slots, cache.positions))

        assert run_schedule(model, seed=seed, requests=LONG, watch=watch, cache_tokens=tokens)[0] == expected
    assert {(1, 3 * UNIT), (3, UNIT)} <= laid_out  # few long places, and more short ones again


@pytest.mark.parametrize(("draft_tokens", "free"), [(0, 4_500_000), (3, 12_000_000)])
def test_slabs_stay_below_the_free_memory(model, monkeypatch, slabs, draft_tokens, free):
    """All memory in use at one time, also while slabs are laid out again, with attention's scratch memory."""
    draft = build_decoder(layers=1, max_seq_len=LENGTH) if draft_tokens else None
    monkeypatch.setattr(capacity, "free_memory", lambda: free)
    policy = InferencePolicy(max_step_tokens=64, draft_tokens=draft_tokens)
    generator = Generator(model, policy=policy, draft=draft)
    running, scratch = [], 0
    for prompt, sampling in [*LONG, *LONG]:
        generator.submit(prompt, sampling=sampling)
    while generator.has_work:
        generator.step()
        running.append(len(generator._scheduler.running))
        scratch = max(scratch, sum(flat.nbytes for flat in generator._cache.scratch._flat.values()))
    assert 0 < slabs["most"] + scratch <= free
    assert min(running[: len(running) // 2]) < 6 < max(running)  # a long text leaves few places


@pytest.mark.parametrize("draft_tokens", [0, 3])
def test_tokens_are_refused_without_memory_to_compute_them(model, monkeypatch, slabs, draft_tokens):
    """The number in the error is enough for slabs, also while they are laid out anew, attention's memory and the draft model's."""
    draft = build_decoder(layers=1, max_seq_len=LENGTH) if draft_tokens else None
    policy = InferencePolicy(max_step_tokens=64, draft_tokens=draft_tokens, cache_tokens=6 * UNIT)
    monkeypatch.setattr(capacity, "free_memory", lambda: 1000)
    with pytest.raises(
        ValueError, match=r"cache_tokens=1536 need \d+ bytes with the working memory of a step.*and 1000 are free"
    ) as told:
        Generator(model, policy=policy, draft=draft)
    free = int(str(told.value).split()[2])
    monkeypatch.setattr(capacity, "free_memory", lambda: free)
    generator, scratch = Generator(model, policy=policy, draft=draft), 0
    for prompt, sampling in LONG:
        generator.submit(prompt, sampling=sampling)
    drafts = generator._scheduler._draft_model
    caches = [generator._cache] + ([] if drafts is None else [drafts._cache])
    while generator.has_work:
        generator.step()
        own = sum(flat.nbytes for cache in caches for flat in cache.scratch._flat.values())
        scratch = max(scratch, own)
    assert generator._cache.nbytes < slabs["most"] and slabs["most"] + scratch <= free


def test_what_could_never_fit_is_refused_with_both_numbers(model):
    generator = Generator(model, policy=InferencePolicy(cache_tokens=3 * UNIT))
    other = generator.submit([1, 2], sampling=SamplingParams(max_tokens=3))
    message = r"760 tokens and an answer of up to 9 need 262144 bytes of memory, and the cache may take 196608: shorten"
    with pytest.raises(ValueError, match=message):
        generator.submit(_TEXT[:760], sampling=SamplingParams(max_tokens=9))
    with pytest.raises(ValueError, match=message):
        generator.generate([[1], _TEXT[:760]], sampling=SamplingParams(max_tokens=9))
    with pytest.raises(ValueError, match="769 tokens and an answer of up to 0 need"):
        generator.score([_TEXT[:769]])
    assert len(generator.generate([_TEXT[:760]], sampling=SamplingParams(max_tokens=8))[0][0].tokens) == 8
    assert [output.request_id for output in generator.step()] == [other.id] * 3 and not generator.has_work


def test_a_broken_sequence_is_located_in_its_own_slot(model, slabs):
    """In pieces of a step; its layer is the first one of all pieces. No other memory is taken, and others keep theirs."""
    generator = Generator(model, policy=InferencePolicy(cache_tokens=6 * UNIT, max_step_tokens=64))
    good, broken = SamplingParams(max_tokens=40, temperature=0), _TEXT[:299] + [95]
    [[alone]] = generator.generate([[5, 6]], sampling=good)
    generator.forget_prefixes()
    held = copy.deepcopy(model.embedding.weight.data[95])
    model.embedding.weight.data[95] = float("nan")  # the engine shares it; of the last piece of five
    try:
        request, bad = generator.submit([5, 6], sampling=good), generator.submit(broken, sampling=good)
        before, outputs = slabs["most"], generator.step()
        while generator.has_work:
            outputs += generator.step()
    finally:
        model.embedding.weight.data[95] = held
    [found] = [output for output in outputs if output.request_id == bad.id]
    assert "first after layer 0 of 2" in found.error
    assert [output.token for output in outputs if output.request_id == request.id] == alone.tokens
    assert slabs["most"] <= max(before, generator._cache.nbytes * 5 // 4)


def test_what_came_first_is_computed_first(model):
    """Short texts do not overtake a long one for ever."""
    generator = Generator(model, policy=InferencePolicy(cache_tokens=3 * UNIT))
    order, sampling = [], SamplingParams(max_tokens=4, temperature=0)
    running = generator.submit([9], sampling=SamplingParams(max_tokens=30))
    long = generator.submit(_TEXT[:600], sampling=sampling)
    short = generator.submit([5], sampling=sampling)
    while generator.has_work:
        order += [output.request_id for output in generator.step() if output.finished]
    assert order == [running.id, long.id, short.id]


def test_memory_for_nothing_is_refused(model, monkeypatch):
    with pytest.raises(ValueError, match="may take 16384 bytes, and the shortest sequence needs 65536"):
        Generator(model, policy=InferencePolicy(cache_tokens=64))
    monkeypatch.setattr(capacity, "free_memory", lambda: 1000)
    with pytest.raises(ValueError, match="may take 0 bytes"):
        Generator(model)


def test_sequences_that_fit_are_counted():
    of = Room(slots=8, nbytes=10_000, token=3, shared=5)
    assert [of.most(positions) for positions in (1, 256, 257, 512, 1024, 1280)] == [8, 8, 4, 4, 1, 0]
    for positions in (256, 512, 1024):
        count = min(of.most(positions), 8)
        assert positions * (count * 3 + 5) <= 10_000
    assert Room(slots=8).most(1 << 40) == 8
