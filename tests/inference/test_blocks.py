"""The engine by kernels, as on a GPU: the same answers as by products, whatever is shared, preempted or copied on write."""

import random
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from tests.inference.models import VOCABULARY, build, build_decoder
from tests.inference.schedules import alone, run_schedule
from ztk.inference import Generator, InferencePolicy, SamplingParams, memory, probe
from ztk.inference.cache import Cache
from ztk.inference.graphs import CudaCapture, DecodeGraphs
from ztk.inference.opening import ReadParameters
from ztk.inference.sample import Draw, cut_of, penalised, select
from ztk.inference.slots import BlockPool
from ztk.kernels import set_backend
from ztk.kernels.shared.cached_attention import BLOCK
from ztk.zero.offload import OffloadPolicy

PROMPTS = [[5, 6, 7], [(7 * i) % VOCABULARY for i in range(80)], [11, 12] * 20]
BLOCKS = {"kernels": True, "max_model_len": 192}


def answers(model, *, sampling, prompts=PROMPTS, **policy):
    return Generator(model, policy=InferencePolicy(**policy)).generate(prompts, sampling=sampling)


@pytest.mark.parametrize("family", ["native", "gpt2", "gemma3", "qwen2_moe", "bloom", "olmo2", "phi"])
def test_greedy_answers_are_those_of_products(family):
    """The families cover norms of both kinds in all places, ALiBi, windows, parallel blocks, both norms of heads, and shared experts."""
    model = build_decoder() if family == "native" else build(family)
    sampling = SamplingParams(max_tokens=8, temperature=0, prompt_logprobs=True)
    for own, expected in zip(
        answers(model, sampling=sampling, **BLOCKS), answers(model, sampling=sampling), strict=True
    ):
        assert own[0].tokens == expected[0].tokens
        for name in ("logprobs", "prompt_logprobs"):
            # Sums in another order: three layers of at most 300 terms each, whose errors of 2^-24 add up below 1e-4 of logits below 10.
            torch.testing.assert_close(getattr(own[0], name), getattr(expected[0], name), rtol=0, atol=1e-4)


@pytest.mark.parametrize("family, policy", [("native", {}), ("qwen2_moe", {"weights": "int4", "cache_dtype": "fp8"})])
def test_random_schedules_change_no_bit(family, policy):
    """Neighbours, chunks, drafts, shared prefixes, copies on write, and sequences that lose their blocks and get them back."""
    model = build_decoder() if family == "native" else build(family)
    expected, reused, preempted = alone(model, **BLOCKS, **policy), 0, 0
    for seed in range(3 if family == "native" else 2):
        tight = {"cache_tokens": BLOCK * random.Random(seed).randint(3, 5)}
        found, generator = run_schedule(model, seed=seed, **BLOCKS, **policy, **tight)
        assert found == expected, seed
        reused, preempted = reused + generator.reused_tokens, preempted + generator.preempted
    assert reused > 100
    assert preempted > 0


@pytest.mark.parametrize("factor", [2.0**12, 2.0**-12])
def test_an_fp8_cache_has_a_scale_per_head(factor, monkeypatch):
    """One head's keys are larger, and the queries that read them smaller, by a power of two: the same bits, whatever the keys' size."""
    sampling = SamplingParams(max_tokens=8, temperature=0, prompt_logprobs=True)
    model, policy = build_decoder(), {**BLOCKS, "cache_dtype": "fp8"}
    of = Generator(model).description
    size, group = of.head_dim, of.heads // of.kv_heads

    def values():
        return [
            (own.tokens, own.logprobs.tolist(), own.prompt_logprobs.tolist())
            for [own] in answers(model, sampling=sampling, **policy)
        ]

    expected = values()
    with torch.no_grad():
        for block in model.blocks:
            block.attention.key.weight[:size] *= factor
            block.attention.query.weight[: group * size] /= factor
    assert values() == expected
    monkeypatch.setattr(memory, "find_scales", lambda model, *, cache: None)
    assert values() != expected


def test_scales_follow_loaded_weights():
    model = build_decoder()
    generator = Generator(model, policy=InferencePolicy(**BLOCKS, cache_dtype="fp8"))
    before = generator._cache.scales.clone()
    with torch.no_grad():
        for block in model.blocks:
            block.attention.value.weight *= 4
    generator.load(SimpleNamespace(module=model, zero=SimpleNamespace(full_parameters=model.named_parameters)))
    keys, values = generator._cache.scales[0]  # of the first layer, in front of which nothing has changed
    assert torch.equal(keys, before[0, 0]) and torch.equal(values, 4 * before[0, 1])


def test_preemption_copies_blocks_and_computes_nothing_again(monkeypatch):
    model, rows = build_decoder(), []
    sampling = SamplingParams(max_tokens=70, temperature=0)
    prompts = [[number] * 60 for number in range(1, 4)]
    expected = answers(model, prompts=prompts, sampling=sampling, **BLOCKS)
    generator = Generator(model, policy=InferencePolicy(cache_tokens=4 * BLOCK, **BLOCKS))
    forward = generator._model.forward
    monkeypatch.setattr(
        generator._model, "forward", lambda tokens, **where: rows.append(len(tokens)) or forward(tokens, **where)
    )
    found = generator.generate(prompts, sampling=sampling)
    assert [own[0].tokens for own in found] == [own[0].tokens for own in expected]
    assert [own[0].logprobs.tolist() for own in found] == [own[0].logprobs.tolist() for own in expected]
    assert generator.preempted > 0
    assert sum(rows) == sum(60 + 69 for _ in prompts)


def test_preempted_blocks_are_kept_in_files(tmp_path):
    """A request that is cancelled while it waits gives its places back."""
    model, sampling = build_decoder(), SamplingParams(max_tokens=70, temperature=0)
    prompts = [[number] * 120 for number in range(1, 5)]
    policy = BLOCKS
    expected = answers(model, prompts=prompts, sampling=sampling, **policy)
    offload = OffloadPolicy(parameters="nvme", nvme_path=str(tmp_path), threads=2, block_bytes=1 << 20, direct_io=False)
    generator = Generator(model, policy=InferencePolicy(cache_tokens=7 * BLOCK, offload=offload, **policy))
    swap = generator._cache.swap
    for _ in range(2):
        found = generator.generate(prompts, sampling=sampling)
        assert [own[0].logprobs.tolist() for own in found] == [own[0].logprobs.tolist() for own in expected]
    assert swap.counters.write_bytes >= swap.counters.read_bytes > 0  # blocks that are still in the cache are not read
    requests = [generator.submit(prompt, sampling=sampling) for prompt in prompts]
    while generator._scheduler.slots._saved == {}:
        generator.step()
    for request in requests:
        generator.cancel(request.id)
    assert len({id(slot) for slot in swap._free}) == len(swap._free) == len(swap._store._slots) > 0
    assert list(tmp_path.iterdir()) == []
    generator.close()


def test_sampling_steps_are_made_where_the_logits_are():
    """Bias, penalties, top-k, top-p and min-p by kernels compared with the host's; the draws differ, the distribution is equal."""
    model = Generator(build_decoder(), policy=InferencePolicy(**BLOCKS))._model
    x = torch.randn(5, model.description.dim, generator=torch.Generator().manual_seed(0))
    options = [
        {"top_k": 7},
        {"top_p": 0.6, "temperature": 0.7},
        {"min_p": 0.2},
        {"top_k": 20, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.3, "logit_bias": {3: 4.0, 5: -2.0}},
        {"temperature": 0, "presence_penalty": 0.5, "frequency_penalty": 1.5},
    ]
    draws = [Draw(sampling=SamplingParams(**one), tokens=[1, 2, 3, 3, 9], prompt_length=2) for one in options]
    drawn = select(model.logits(x), draws=draws)
    for logits, one, own in zip(model.logits(x).double(), draws, drawn, strict=True):
        scores = penalised(logits, draw=one)
        assert own.logprob == pytest.approx(float(logits.log_softmax(0)[own.token]), abs=1e-6)
        if one.sampling.temperature == 0:
            assert (own.token, own.processed_logprob) == (int(scores.argmax()), 0)
            continue
        p = torch.softmax(scores / one.sampling.temperature, 0)
        p *= cut_of(one.sampling).kept(p.unsqueeze(0))[0]
        assert own.processed_logprob == pytest.approx(float((p[own.token] / p.sum()).log()), abs=1e-6)


def test_answers_to_one_prompt_share_its_blocks():
    generator = Generator(build_decoder(), policy=InferencePolicy(**BLOCKS))
    prompt = [(3 * i) % VOCABULARY for i in range(100)]
    generator.submit(prompt, sampling=SamplingParams(max_tokens=4, n=3, seed=1))
    for _ in range(3):
        generator.step()
    tables = [sequence.slot for sequence in generator._scheduler.running]
    first, second, third = (generator._cache.tables[slot] for slot in tables)
    assert first[0] == second[0] == third[0]
    assert len({first[1], second[1], third[1]}) == 3
    assert generator.reused_tokens == 2 * 99


def test_a_scrambled_block_is_noticed(monkeypatch):
    """The same check fails when a block that comes back from main memory has one wrong number."""
    model, restore = build_decoder(), Cache.restore

    def scrambled(self, copies, *, blocks):
        restore(self, copies, blocks=blocks)
        self._store[blocks[0], 0, 0, 0, 0, 0] += 0.5

    sampling = SamplingParams(max_tokens=70, temperature=0)
    prompts = [[number] * 60 for number in range(1, 4)]
    expected = answers(model, prompts=prompts, sampling=sampling, **BLOCKS)
    monkeypatch.setattr(Cache, "restore", scrambled)
    found = answers(model, prompts=prompts, sampling=sampling, cache_tokens=4 * BLOCK, **BLOCKS)
    assert any(own[0].logprobs.tolist() != one[0].logprobs.tolist() for own, one in zip(found, expected, strict=True))


@pytest.mark.parametrize("family", ["native", "qwen3_moe"])
def test_the_kernels_themselves_give_the_same_tokens(family):
    """On the interpreter, every kernel of the step; a prompt of two chunks, then single rows."""
    model = build_decoder() if family == "native" else build(family, num_hidden_layers=1)
    sampling, prompts = SamplingParams(max_tokens=3, temperature=0), [[5, 6, 7], [8] * 10]
    policy = {"max_step_tokens": 8, "exact": False, **BLOCKS}
    expected = answers(model, prompts=prompts, sampling=sampling, **policy)
    set_backend("triton")
    try:
        found = answers(model, prompts=prompts, sampling=sampling, **policy)
    finally:
        set_backend("auto")
    for own, one in zip(found, expected, strict=True):
        assert own[0].tokens == one[0].tokens
        torch.testing.assert_close(own[0].logprobs, one[0].logprobs, rtol=0, atol=1e-4)


def test_draws_follow_the_probabilities_and_nothing_else():
    """With kernels one draws: 400 answers of one token against the model's own probabilities; each has the same token alone."""
    model, prompt, count = build_decoder(), [5, 6, 7], 400
    generator = Generator(model, policy=InferencePolicy(**BLOCKS))
    sampling = SamplingParams(max_tokens=1, temperature=0.8, n=count, seed=3)
    [found] = generator.generate([prompt], sampling=sampling)
    with torch.no_grad():
        logits = model(torch.tensor([prompt]))[0, -1].double()
    expected = (logits / 0.8).softmax(-1)
    drawn = torch.tensor([answer.tokens[0] for answer in found])
    seen = torch.bincount(drawn, minlength=VOCABULARY) / count
    # Total variation of 400 draws from 96 tokens: sqrt(96 / (2 pi 400)) = 0.2 for even ones, and less for others.
    assert float((seen - expected).abs().sum()) / 2 < 0.25
    for name, values in (("logprobs", logits), ("processed_logprobs", logits / 0.8)):
        own = torch.cat([getattr(answer, name) for answer in found]).double()
        torch.testing.assert_close(own, values.log_softmax(-1)[drawn], rtol=0, atol=1e-5)


class Replayed:
    """A graph that calls the function again, like a GPU's replay of its launches: the same output tensor and buffers."""

    def __init__(self, compute):
        self.compute, self.results = compute, compute().fill_(float("nan"))

    def replay(self):
        self.results.copy_(self.compute())

    @classmethod
    def capture(cls, compute):
        graph = cls(compute)
        return graph, graph.results


def test_decoding_by_graphs_changes_no_bit():
    """Rows and tables padded to powers of two; graphs are captured when they are needed first."""
    model = build("qwen3_moe")
    policy = InferencePolicy(max_sequences=3, **BLOCKS)
    sampling = [
        SamplingParams(max_tokens=7, temperature=0.7, seed=1),
        SamplingParams(max_tokens=5, temperature=0),
        SamplingParams(max_tokens=40, temperature=1.1, seed=2),
    ]
    expected = Generator(model, policy=policy).generate(PROMPTS, sampling=sampling)
    generator = Generator(model, policy=policy)
    assert generator._stepper.graphs is None  # on a CPU
    generator._stepper.graphs = DecodeGraphs(generator._model, cache=generator._cache, capture=Replayed.capture)
    found = generator.generate(PROMPTS, sampling=sampling)
    assert [own[0].tokens for own in found] == [own[0].tokens for own in expected]
    assert [own[0].logprobs.tolist() for own in found] == [own[0].logprobs.tolist() for own in expected]
    assert generator._stepper.graphs.captured == 4  # for 3 rows, 2 rows, and 1 row over one block and over two


def only_even(answer: list[int]) -> torch.Tensor:
    return torch.arange(VOCABULARY) % 2 == 0


def watched(function, *, calls: list):
    def call(*args, **kwargs):
        calls.append(function)
        return function(*args, **kwargs)

    return call


def test_every_way_of_sampling_shares_the_graph(monkeypatch):
    """A step in which each sequence has one token is a replay, whatever the sequences draw with. Only the prompts' step is none."""
    model, replays, eager = build("qwen3_moe"), [], []
    generator_of = partial(Generator, model, policy=InferencePolicy(max_sequences=8, **BLOCKS))
    ways = [
        {"temperature": 0},
        {"temperature": 0.8},
        {"temperature": 0.8, "top_k": 5},
        {"temperature": 0.9, "top_p": 0.7},
        {"temperature": 0.8, "frequency_penalty": 0.5},
        {"temperature": 0, "logprobs": 3},
        {"temperature": 1.0, "fp32_logprobs": True},
        {"temperature": 0.7, "token_mask": only_even},
    ]
    sampling = [SamplingParams(max_tokens=6, seed=seed, **way) for seed, way in enumerate(ways)]
    prompts = [PROMPTS[number % len(PROMPTS)] for number in range(len(ways))]
    expected = generator_of().generate(prompts, sampling=sampling)
    generator = generator_of()
    graphs = DecodeGraphs(generator._model, cache=generator._cache, capture=Replayed.capture)
    monkeypatch.setattr(Replayed, "replay", watched(Replayed.replay, calls=replays))
    monkeypatch.setattr(generator._model, "forward", watched(generator._model.forward, calls=eager))
    generator._stepper.graphs = graphs
    found = generator.generate(prompts, sampling=sampling)
    for own, other in zip(found, expected, strict=True):
        assert own[0].tokens == other[0].tokens and own[0].logprobs.tolist() == other[0].logprobs.tolist()
    assert len(eager) == 1 and len(replays) >= 5


def test_queries_of_other_threads_do_not_end_a_capture(monkeypatch):
    """torch's calls, without a GPU. The capture mode is per thread; in torch's default mode a watchdog's event query ends the capture."""
    told = mock.create_autospec(torch.cuda.graph)  # with torch's signature
    for name, value in (("graph", told), ("CUDAGraph", mock.Mock()), ("graph_pool_handle", lambda: (0, 1))):
        monkeypatch.setattr(torch.cuda, name, value)
    CudaCapture()(lambda: torch.zeros(1))
    assert told.call_args.kwargs == {"pool": (0, 1), "capture_error_mode": "thread_local"}


def test_formats_of_weights_and_cache_lose_little():
    """Against the weights as stored: the error of the log-probabilities follows the format's step."""
    model = build_decoder(dim=128, hidden_dim=256)
    sampling = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=True)
    exact = answers(model, sampling=sampling, **BLOCKS)[1][0].prompt_logprobs
    worst = {}
    for name, policy in {
        "int8": {"weights": "int8"},
        "fp8": {"weights": "fp8"},
        "int4": {"weights": "int4"},
        "fp8 cache": {"cache_dtype": "fp8"},
    }.items():
        found = answers(model, sampling=sampling, **BLOCKS, **policy)[1][0].prompt_logprobs
        worst[name] = float((found - exact).abs().mean())
    # Steps relative to the greatest weight: 2^-8, 2^-4 of each weight, 2^-5.
    assert 0 < worst["int8"] < worst["fp8"] < worst["int4"]
    assert 0 < worst["fp8 cache"] < 0.1


def test_rows_of_other_bits_are_reported_and_answered(monkeypatch, caplog):
    model, sampling = build_decoder(), SamplingParams(max_tokens=4, temperature=0)
    wanted = answers(model, sampling=sampling, **BLOCKS)
    assert not caplog.records
    monkeypatch.setattr(probe.torch, "equal", lambda *args: False)
    monkeypatch.setattr(ReadParameters, "check", lambda self: None)
    found = answers(model, sampling=sampling, **BLOCKS)
    assert [own[0].tokens for own in found] == [own[0].tokens for own in wanted]
    assert "an answer depends on the sequences of its batch, as with inference.exact=false" in caplog.text


def test_weights_of_the_model_are_loaded_again():
    model = build_decoder()
    generator = Generator(model, policy=InferencePolicy(**BLOCKS))
    sampling = SamplingParams(max_tokens=6, temperature=0)
    generator.generate(PROMPTS, sampling=sampling)
    other = build_decoder()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(-0.7)

    class Engine:
        module = other

        @property
        def zero(self):
            return self

        def full_parameters(self):
            yield from other.named_parameters()

    generator.load(Engine())
    expected = answers(other, sampling=sampling, **BLOCKS)
    assert [own[0].tokens for own in generator.generate(PROMPTS, sampling=sampling)] == [
        own[0].tokens for own in expected
    ]
    assert generator.weight_bytes == Generator(other, policy=InferencePolicy(**BLOCKS)).weight_bytes


def test_a_layer_that_is_not_finite_is_named_and_its_blocks_are_not_found_again():
    model = build_decoder()
    generator = Generator(model, policy=InferencePolicy(**BLOCKS))
    generator._model.weights.layers[1].out.weight[0, 0] = float("inf")
    generator.read = ReadParameters(None)
    [[broken]] = generator.generate([list(range(70))], sampling=SamplingParams(max_tokens=2))
    assert broken.finish_reason == "error" and "after layer 1 of 2" in broken.error
    assert not generator._scheduler.slots.pool.match(list(range(70)))


def test_a_broken_sequence_is_located_in_its_own_blocks(monkeypatch):
    """In pieces of a step, without a cache more; one that shares a prefix with it, inside a block, goes on as alone."""
    model, good = build_decoder(), SamplingParams(max_tokens=40, temperature=0)
    shared = [(7 * place + 3) % 90 for place in range(100)]
    generator = Generator(model, policy=InferencePolicy(**BLOCKS, max_step_tokens=48))
    [[alone]] = generator.generate([shared], sampling=good)
    generator.forget_prefixes()
    request = generator.submit(shared, sampling=good)
    outputs = [output for _ in range(6) for output in generator.step()]
    generator._model.weights.embedding[95] = float("nan")
    generator.read = ReadParameters(None)
    made = []
    monkeypatch.setattr(Cache, "__init__", lambda *given, **options: made.append(options))
    bad = generator.submit([*shared[:90], *range(60), 95], sampling=good)
    while generator.has_work:
        outputs += generator.step()
    assert generator.reused_tokens >= 90 and not made
    [found] = [output for output in outputs if output.request_id == bad.id]
    assert "first after layer 0 of 2" in found.error
    assert [output.token for output in outputs if output.request_id == request.id] == alone.tokens


@pytest.mark.parametrize(
    "policy, message",
    [
        ({"weights": "bf16"}, "inference.weights=bf16 is for GPUs"),
        ({"exact": False}, "inference.exact=false is for GPUs"),
        ({"cache_tokens": 63}, "the cache may take .* bytes, and the shortest sequence needs"),
    ],
)
def test_what_does_not_apply_is_refused(policy, message):
    with pytest.raises(ValueError, match=message):
        Generator(build_decoder(), policy=InferencePolicy(**policy))


# The pool


def test_full_blocks_are_found_by_their_tokens_until_they_are_needed():
    pool = BlockPool(4, tables=[[], []])
    tokens = list(range(150))
    assert pool.extend(0, start=0, stop=150) == []
    pool.register(0, tokens=tokens, computed=150)
    kept = list(pool.tables[0])
    assert pool.match(tokens) == kept[:2]
    assert pool.match([*tokens[:64], 0, *tokens[65:]]) == kept[:1]
    pool.release(0)
    assert pool.available == 4 and pool.match(tokens) == kept[:2]
    assert pool.extend(1, start=0, stop=3 * BLOCK) == []  # takes the unused ones, then the end of the chain
    assert pool.match(tokens) == kept[:1]
    pool.release(1, keep=False)
    pool.forget()
    assert pool.match(tokens) == [] and pool.available == 4


def test_the_tail_of_an_ended_sequence_is_found_until_it_is_written():
    """By a chat's next turn, in the block itself; a second one copies it. Other owners do not find it."""
    pool, tokens = BlockPool(6, tables=[[], [], []]), list(range(100))
    pool.extend(0, start=0, stop=100)
    pool.register(0, tokens=tokens, computed=100, owner="mine")
    kept = list(pool.tables[0])
    pool.release(0, tokens=tokens, owner="mine")
    assert pool.match_tail([*tokens, 7, 8], owner="mine") == (kept, 100)
    assert pool.match_tail([*tokens[:80], 7, 8], owner="mine") == (kept, 80)
    assert pool.match_tail(tokens, owner="other") == ([], 0) and pool.match_tail([9], owner="mine") == ([], 0)
    pool.share(1, blocks=kept)
    pool.share(2, blocks=pool.match_tail([*tokens[:70], 5], owner="mine")[0])
    assert pool.extend(2, start=70, stop=72) == [(kept[1], pool.tables[2][1])]
    assert pool.extend(1, start=100, stop=102) == [] and pool.tables[1] == kept
    assert pool.match_tail([*tokens, 7, 8], owner="mine") == (kept[:1], 64)


def test_a_sequence_that_grows_alone_has_blocks_in_a_row():
    """Each slot from its own part on; after a shared beginning, too."""
    pool = BlockPool(12, tables=[[], [], []], is_apart=True)
    for stop in (10, 100, 200):
        for slot in range(3):
            assert pool.extend(slot, start=0, stop=stop) == []
    assert pool.tables == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    tokens = list(range(200))
    pool.register(2, tokens=tokens, computed=130)
    for slot in range(3):
        pool.release(slot)
    pool.share(1, blocks=pool.match(tokens))
    assert pool.extend(1, start=128, stop=200) == [] and pool.tables[1] == [8, 9, 10, 11]
    assert pool.extend(2, start=0, stop=70) == []  # its own part is taken
    first, second = pool.tables[2]
    assert second == first + 1


def test_whoever_writes_first_copies():
    pool = BlockPool(5, tables=[[], [], []])
    pool.extend(0, start=0, stop=100)
    shared = list(pool.tables[0])
    pool.share(1, blocks=shared)
    assert pool.extend(1, start=99, stop=101) == [(shared[1], pool.tables[1][1])]
    assert pool.tables[1][0] == shared[0] and pool.tables[1][1] != shared[1]
    assert pool.extend(0, start=100, stop=101) == []  # alone again
    assert pool.extend(2, start=0, stop=3 * BLOCK) is None and pool.tables[2] == []


def test_a_block_that_is_written_again_is_found_no_more():
    """Its first owner has ended, and the other one goes on in the middle of it."""
    pool, tokens = BlockPool(3, tables=[[], []]), list(range(64))
    pool.extend(0, start=0, stop=64)
    pool.register(0, tokens=tokens, computed=64)
    pool.share(1, blocks=pool.tables[0])
    pool.release(0)
    assert pool.extend(1, start=40, stop=41) == []
    assert pool.match(tokens) == []


def test_random_use_of_the_pool_loses_no_block():
    chance = random.Random(0)
    pool = BlockPool(12, tables=[[] for _ in range(4)])
    lengths = [0] * 4
    for _ in range(2000):
        slot = chance.randrange(4)
        if lengths[slot] and chance.random() < 0.3:
            pool.release(slot, keep=chance.random() < 0.7)
            lengths[slot] = 0
        else:
            tokens = [chance.randrange(2)] * 400
            if not lengths[slot]:
                blocks = pool.match(tokens[: chance.randrange(300)])
                pool.share(slot, blocks=blocks)
                lengths[slot] = len(blocks) * BLOCK
            stop = min(300, lengths[slot] + chance.randint(1, 100))
            if stop > lengths[slot] and pool.extend(slot, start=lengths[slot], stop=stop) is not None:
                lengths[slot] = stop
            elif not lengths[slot]:
                pool.release(slot)
        held = [block for table in pool.tables for block in table]
        assert len(set(held)) + pool.available == 12
        for table, length in zip(pool.tables, lengths, strict=True):
            assert len(table) >= -(-length // BLOCK)
