"""A cache within a number of bytes: who finds no room waits, who could never find any is refused."""

import copy
import mmap
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.inference.models import VOCABULARY, build_decoder
from tests.inference.schedules import REQUESTS, alone, run_schedule
from ztk.inference import Generator, InferencePolicy, SamplingParams, capacity
from ztk.inference.cache import BLOCK, Cache, lazy_zeros

LENGTH = 1024
UNIT = 256  # tokens
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


def held(generator: Generator) -> int:
    """Bytes of all blocks, of copies of preempted ones, and of attention's memory."""
    cache = generator._cache
    return cache.nbytes + cache.scratch.nbytes + sum(copy.nbytes for copy in cache._copies.values())


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_a_cache_takes_memory_where_it_is_written(model):
    """An answer that nothing limits has room for the rest of the context; a short one takes the memory of its tokens."""
    shape, before = (32, 128, 3, 64, 64), resident()  # 8,192 tokens of 32 sequences
    zeros = lazy_zeros(shape)
    assert zeros.nbytes == 201_326_592 and zeros.dtype == torch.float32 and not zeros[0, :2].any()
    zeros[0, :2] = 1
    assert zeros[0, :2].all() and resident() - before < 60_000_000
    assert lazy_zeros((4, 0, 3, 64, 64)).shape == (4, 0, 3, 64, 64)
    generator, before = Generator(model, policy=InferencePolicy(max_sequences=512)), resident()
    generator.generate([_TEXT[:200]], sampling=SamplingParams(max_tokens=2, temperature=0))
    assert generator._cache.nbytes == 512 * 262_144 and resident() - before < 30_000_000


def test_random_schedules_in_little_memory_change_no_bit(model):
    """Lookups, prefixes, several answers and cancelled requests among them; places for one long text or three short ones."""
    expected, running = alone(model, requests=LONG), set()
    for seed in range(4):
        tokens = UNIT * (3 + seed % 2)

        def watch(generator: Generator, tokens: int = tokens) -> None:
            token = 2 * 2 * 2 * 8 * 4  # keys and values of 2 layers, 2 heads of 8, fp32
            assert generator._cache.nbytes <= tokens * token
            running.add(len(generator._scheduler.running))

        found, generator = run_schedule(model, seed=seed, requests=LONG, watch=watch, cache_tokens=tokens)
        assert found == expected
    assert {1, 3} <= running


def needed(model, *, policy: InferencePolicy) -> int:
    """Bytes that the error names for `policy.cache_tokens`. They depend on the processor: a step needs more where products are not joined."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(capacity, "free_memory", lambda: 1000)
        with pytest.raises(
            ValueError, match=r"cache_tokens=\d+ need \d+ bytes with the working memory of a step.*and 1000 are free"
        ) as told:
            Generator(model, policy=policy)
    return int(str(told.value).split()[2])


def test_a_cache_stays_below_the_free_memory(model, monkeypatch):
    """All memory in use at one time, with copies of preempted sequences and attention's memory. The free bytes are enough for 1024 tokens."""
    policy = InferencePolicy(max_step_tokens=64)
    free = needed(model, policy=replace(policy, cache_tokens=1024))
    monkeypatch.setattr(capacity, "free_memory", lambda: free)
    generator = Generator(model, policy=policy)
    assert generator._cache.blocks == 1024 // BLOCK
    running, most = [], 0
    for prompt, sampling in [*LONG, *LONG]:
        generator.submit(prompt, sampling=sampling)
    while generator.has_work:
        generator.step()
        running.append(len(generator._scheduler.running))
        most = max(most, held(generator))
    assert free / 5 < most <= free and generator.preempted > 0
    assert min(running[: len(running) // 2]) < 10 < max(running)  # a long text leaves little room


def test_tokens_are_refused_without_memory_to_compute_them(model, monkeypatch):
    """The number in the error is enough for blocks and their copies, and attention's memory."""
    policy = InferencePolicy(max_step_tokens=64, cache_tokens=6 * UNIT)
    free = needed(model, policy=policy)
    monkeypatch.setattr(capacity, "free_memory", lambda: free)
    generator, most = Generator(model, policy=policy), 0
    for prompt, sampling in LONG:
        generator.submit(prompt, sampling=sampling)
    while generator.has_work:
        generator.step()
        most = max(most, held(generator))
    assert generator._cache.nbytes == 6 * UNIT * 256 < most <= free


def test_what_could_never_fit_is_refused_with_both_numbers(model):
    generator = Generator(model, policy=InferencePolicy(cache_tokens=3 * UNIT))
    other = generator.submit([1, 2], sampling=SamplingParams(max_tokens=3))
    message = r"760 tokens and an answer of up to 9 need 212992 bytes of memory, and the cache may take 196608: shorten"
    with pytest.raises(ValueError, match=message):
        generator.submit(_TEXT[:760], sampling=SamplingParams(max_tokens=9))
    with pytest.raises(ValueError, match=message):
        generator.generate([[1], _TEXT[:760]], sampling=SamplingParams(max_tokens=9))
    with pytest.raises(ValueError, match="769 tokens and an answer of up to 0 need"):
        generator.score([_TEXT[:769]])
    assert len(generator.generate([_TEXT[:760]], sampling=SamplingParams(max_tokens=8))[0][0].tokens) == 8
    assert [output.request_id for output in generator.step()] == [other.id] * 3 and not generator.has_work


def test_a_broken_sequence_is_located_in_its_own_slot(model, monkeypatch):
    """In pieces of a step; its layer is the first one of all pieces. No other memory is taken, and others keep theirs."""
    generator = Generator(model, policy=InferencePolicy(cache_tokens=6 * UNIT, max_step_tokens=64))
    good, broken = SamplingParams(max_tokens=40, temperature=0), _TEXT[:299] + [95]
    [[alone]] = generator.generate([[5, 6]], sampling=good)
    generator.forget_prefixes()
    held = copy.deepcopy(model.embedding.weight.data[95])
    model.embedding.weight.data[95] = float("nan")  # the engine shares it; of the last piece of five
    try:
        request, bad = generator.submit([5, 6], sampling=good), generator.submit(broken, sampling=good)
        outputs, made = generator.step(), []
        monkeypatch.setattr(Cache, "__init__", lambda *given, **options: made.append(options))
        while generator.has_work:
            outputs += generator.step()
    finally:
        model.embedding.weight.data[95] = held
    [found] = [output for output in outputs if output.request_id == bad.id]
    assert "first after layer 0 of 2" in found.error
    assert [output.token for output in outputs if output.request_id == request.id] == alone.tokens
    assert not made and generator._cache.keys[0].isfinite().all() and generator._cache.values[0].isfinite().all()


def test_what_came_first_is_computed_first(model):
    """Short texts do not overtake a long one for ever."""
    generator = Generator(model, policy=InferencePolicy(cache_tokens=3 * UNIT))
    order, sampling = [], SamplingParams(max_tokens=4, temperature=0)
    running = generator.submit([9], sampling=SamplingParams(max_tokens=30))
    long = generator.submit(_TEXT[:740], sampling=sampling)  # of all blocks
    short = generator.submit([5], sampling=sampling)
    while generator.has_work:
        order += [output.request_id for output in generator.step() if output.finished]
    assert order == [running.id, long.id, short.id]


def test_memory_for_nothing_is_refused(model, monkeypatch):
    with pytest.raises(ValueError, match="may take 16128 bytes, and the shortest sequence needs"):
        Generator(model, policy=InferencePolicy(cache_tokens=63))
    monkeypatch.setattr(capacity, "free_memory", lambda: 1000)
    with pytest.raises(ValueError, match="may take 0 bytes"):
        Generator(model)


def test_blocks_that_fit_are_counted():
    """All that are wanted, with the longest sequence; or fewer, each with room for its copy."""
    given = {"positions": 100, "block": 30, "shared": 2}
    assert capacity._fitting(10, free=500, copies=2, **given) == 10
    assert capacity._fitting(10, free=499, copies=2, **given) == 499 // (2 * 30 + 64 * 2)
    assert capacity._fitting(10, free=499, copies=1, **given) == 499 // (30 + 64 * 2)
    assert capacity._fitting(10, free=-1, copies=1, **given) == 0
