"""Adapters by request: the bits of merged models, whatever adapters the other sequences of a step have."""

import copy
import random
from types import SimpleNamespace

import pytest
import torch

import ztk
from tests.inference.models import VOCABULARY, build, build_decoder
from tests.inference.schedules import REQUESTS, fingerprint
from tests.inference.test_blocks import Replayed
from tests.inference.test_own_modules import build_other
from ztk.inference import Generator, InferencePolicy, SamplingParams, open_packed
from ztk.inference.adapters import Adapters
from ztk.inference.describe import describe
from ztk.inference.graphs import DecodeGraphs
from ztk.inference.packed import pack
from ztk.nn.lora import targets_of
from ztk.nn.low_rank import LowRank
from ztk.zero.offload import OffloadPolicy

NAMES = (None, "all", "some")
BLOCKS = {"kernels": True}
SHARED = [(5 * i + 1) % VOCABULARY for i in range(150)]


def adapter_of(model, *, seed: int, targets: tuple[str, ...] = ("all-linear",)):
    """Random matrices of rank 3 next to linear layers in lists of layers."""
    chance, found = torch.Generator().manual_seed(seed), {}
    for name, module in targets_of(model, targets=targets).items():
        first, second = module.weight.shape
        outputs, inputs = (first, second) if isinstance(module, torch.nn.Linear) else (second, first)
        down, up = (torch.randn(*shape, generator=chance) * 0.3 for shape in ((3, inputs), (outputs, 3)))
        found[name] = LowRank(down=down, up=up, scale=0.7)
    return found


def merged(model, *, adapter):
    """A copy with the adapter in its weights."""
    own = copy.deepcopy(model)
    with torch.no_grad():
        for name, pair in adapter.items():
            layer = own.get_submodule(name)
            delta = pair.up @ pair.down * pair.scale
            layer.weight += delta if isinstance(layer, torch.nn.Linear) else delta.T
    return own


def apart(model, *, adapters, **policy):
    """Fingerprints by name of each request alone, by engines of the merged models."""
    found = {}
    for name in NAMES:
        own = merged(model, adapter=adapters[name]) if name else model
        generator = Generator(own, policy=InferencePolicy(**policy))
        found[name] = []
        for prompt, sampling in REQUESTS:
            generator.forget_prefixes()
            answers = generator.generate([prompt], sampling=sampling)[0]
            found[name].append([fingerprint(answer.tokens, answer.logprobs.tolist()) for answer in answers])
    return found


def run_mixed(model, *, adapters, seed: int, comm=None, **policy):
    """Runs every request with the base and with each adapter in one engine, in an order and at steps drawn from `seed`. Returns fingerprints by
    name, and the generator."""
    chance = random.Random(seed)
    options = {"max_sequences": chance.randint(4, 9), "max_step_tokens": chance.choice([17, 64, 200]), **policy}
    generator = Generator(model, adapters=adapters, comm=comm, policy=InferencePolicy(**options))
    if generator.follows:
        generator.follow()
        return {}, generator
    left = [(name, number) for name in NAMES for number in range(len(REQUESTS))]
    chance.shuffle(left)
    started, answers = {}, {}
    while left or generator.has_work:
        if left and chance.random() < 0.6:
            name, number = left.pop()
            prompt, sampling = REQUESTS[number]
            started[generator.submit(prompt, sampling=sampling, adapter=name).id] = name, number
        for output in generator.step():
            key = (*started[output.request_id], output.sample)
            tokens, logprobs = answers.setdefault(key, ([], []))
            tokens.append(output.token)
            logprobs.append(float(torch.tensor(output.logprob, dtype=torch.float32)))
    generator.close()
    found = {
        name: [
            [fingerprint(*answers[name, number, sample]) for sample in range(sampling.n)]
            for number, (_, sampling) in enumerate(REQUESTS)
        ]
        for name in NAMES
    }
    return found, generator


@pytest.fixture
def most(monkeypatch):
    """The most models whose rows were in one step."""
    found, original = [0], Adapters.rows

    def rows(self, spans, *, device):
        found[0] = max(found[0], len({span.adapter for span in spans}))
        return original(self, spans, device=device)

    monkeypatch.setattr(Adapters, "rows", rows)
    return found


CASES = {
    "llama": ("llama", "q_proj", {}),
    "llama, blocks": ("llama", "down_proj", BLOCKS),
    "llama, lookups": ("llama", "v_proj", {"lookup_tokens": 3}),
    "llama, int8": ("llama", "o_proj", {"weights": "int8"}),
    "llama, int4 by kernels": ("llama", "up_proj", BLOCKS | {"weights": "int4"}),
    "gpt2": ("gpt2", "c_fc", {}),
    "phi3, blocks": ("phi3", "gate_up_proj", BLOCKS),
    "native": ("native", "query", {}),
}


@pytest.mark.parametrize("case", CASES)
def test_mixed_requests_have_the_bits_of_merged_models(case, most):
    family, some, policy = CASES[case]
    model = build_decoder() if family == "native" else build(family)
    adapters = {"all": adapter_of(model, seed=1), "some": adapter_of(model, seed=2, targets=(some,))}
    expected = apart(model, adapters=adapters, **policy)
    assert len({repr(answers) for answers in expected.values()}) == 3
    found, generator = run_mixed(model, adapters=adapters, seed=len(case), **policy)
    assert found == expected
    assert most == [3]
    assert generator.adapters["all"] > generator.adapters["some"] > 0
    base = Generator(model, policy=InferencePolicy(**policy)).weight_bytes
    assert generator.weight_bytes == base + sum(generator.adapters.values())


def test_a_shared_expert_has_an_adapter():
    model = build("qwen2_moe")
    targets = ("q_proj", "shared_expert.up_proj", "shared_expert.down_proj")
    adapters = {name: adapter_of(model, seed=seed, targets=targets) for seed, name in enumerate(NAMES[1:])}
    found, _ = run_mixed(model, adapters=adapters, seed=0)
    assert found == apart(model, adapters=adapters)


def test_drafts_change_no_bit_of_an_adapter():
    model = build_decoder()
    adapters = {name: adapter_of(model, seed=seed) for seed, name in enumerate(NAMES[1:])}
    found, _ = run_mixed(model, adapters=adapters, seed=3, lookup_tokens=3)
    assert found == apart(model, adapters=adapters)


@pytest.mark.parametrize("policy", [{}, BLOCKS], ids=["products", "kernels"])
def test_a_prefix_is_reused_with_its_own_salt_alone(policy):
    generator = Generator(build_decoder(), policy=InferencePolicy(max_sequences=4, **policy))

    def reused(*salts: str) -> int:
        before = generator.reused_tokens
        sampling = [SamplingParams(max_tokens=2, temperature=0, cache_salt=salt) for salt in salts]
        generator.generate([[*SHARED, 1]] * len(salts), sampling=sampling)
        return generator.reused_tokens - before

    assert reused("a") == reused("b") == reused("") == 0  # of ended sequences
    assert reused("b") >= 128
    generator.forget_prefixes()
    assert reused("a", "b", "") == 0  # of running ones
    assert reused("c", "c") >= 128


@pytest.mark.parametrize("policy", [{}, BLOCKS], ids=["products", "kernels"])
def test_a_prefix_is_reused_by_its_own_adapter_alone(policy):
    model = build_decoder()
    adapters = {name: adapter_of(model, seed=seed) for seed, name in enumerate(NAMES[1:])}
    generator = Generator(model, adapters=adapters, policy=InferencePolicy(max_sequences=4, **policy))
    sampling = SamplingParams(max_tokens=4, temperature=0)
    for name in NAMES:  # of ended sequences
        generator.generate([[*SHARED, 1]], sampling=sampling, adapters=name)
        assert generator.reused_tokens == 0
    generator.generate([[*SHARED, 2]], sampling=sampling, adapters="all")
    reused = generator.reused_tokens
    assert reused >= 128
    generator.forget_prefixes()
    answers = generator.generate([[*SHARED, 3]] * 3, sampling=sampling, adapters=list(NAMES))  # of running ones
    assert generator.reused_tokens == reused
    for name, [answer] in zip(NAMES, answers, strict=True):
        own = Generator(merged(model, adapter=adapters.get(name, {})), policy=InferencePolicy(**policy))
        [[wanted]] = own.generate([[*SHARED, 3]], sampling=sampling)
        assert answer.tokens == wanted.tokens and torch.equal(answer.logprobs, wanted.logprobs)


def mixed_by_ranks(process: ztk.Process, *, policy: dict) -> list:
    """Fingerprints of requests mixed in one engine of two ranks, and of merged models by two ranks."""
    model = build_decoder()
    adapters = {name: adapter_of(model, seed=seed) for seed, name in enumerate(NAMES[1:])}
    found, generator = run_mixed(model, adapters=adapters, seed=1, comm=process.comm, **policy)
    expected = {}
    for name in NAMES:
        own = Generator(
            merged(model, adapter=adapters.get(name, {})), comm=process.comm, policy=InferencePolicy(**policy)
        )
        if own.follows:
            own.follow()
            continue
        expected[name] = [
            [fingerprint(answer.tokens, answer.logprobs.tolist()) for answer in own.generate([prompt], sampling=how)[0]]
            for prompt, how in REQUESTS
        ]
        own.close()
    return [found, expected]


@pytest.mark.parametrize("policy", [{}, BLOCKS], ids=["products", "kernels"])
def test_two_ranks_cut_adapters_as_they_cut_the_base(ranks, policy):
    found, expected = ranks(2).run(mixed_by_ranks, policy=policy)[0]
    assert found == expected


def test_graphs_compute_steps_of_the_base():
    model = build_decoder()
    adapters = {"one": adapter_of(model, seed=0)}
    generator = Generator(model, adapters=adapters, policy=InferencePolicy(**BLOCKS))
    graphs = DecodeGraphs(generator._model, cache=generator._cache, capture=Replayed.capture)
    generator._stepper.graphs = graphs
    sampling = SamplingParams(max_tokens=6, temperature=0.8, seed=1)
    [[own], [base]] = generator.generate([[1, 2], [3, 4, 5]], sampling=sampling, adapters=["one", None])
    assert graphs.captured == 0
    assert generator.generate([[3, 4, 5]], sampling=sampling)[0][0].tokens == base.tokens
    assert graphs.captured == 1
    plain = Generator(merged(model, adapter=adapters["one"]), policy=InferencePolicy(**BLOCKS))
    assert plain.generate([[1, 2]], sampling=sampling)[0][0].tokens == own.tokens


def test_adapters_are_merged_again_into_loaded_weights():
    model, other = build_decoder(), build_decoder()
    with torch.no_grad():
        other.blocks[0].mlp.up.weight.mul_(1.5)
    adapters = {"one": adapter_of(model, seed=0)}
    generator = Generator(model, adapters=adapters)
    greedy = SamplingParams(max_tokens=4, temperature=0)
    [[before]] = generator.generate([[1, 2]], sampling=greedy, adapters="one")
    generator.load(SimpleNamespace(module=other, zero=SimpleNamespace(full_parameters=other.named_parameters)))
    [[after]] = generator.generate([[1, 2]], sampling=greedy, adapters="one")
    [[wanted]] = Generator(merged(other, adapter=adapters["one"])).generate([[1, 2]], sampling=greedy)
    assert torch.equal(after.logprobs, wanted.logprobs) and not torch.equal(after.logprobs, before.logprobs)


def test_a_broken_adapter_ends_its_own_requests():
    model = build_decoder()
    adapter = adapter_of(model, seed=0, targets=("blocks.1.mlp.up", "blocks.1.mlp.down"))
    adapter = {name: LowRank(down=pair.down * 1e15, up=pair.up * 1e15, scale=1.0) for name, pair in adapter.items()}
    generator = Generator(model, adapters={"one": adapter})
    [[own], [base]] = generator.generate(
        [[1, 2], [1, 2]], sampling=SamplingParams(max_tokens=3), adapters=["one", None]
    )
    assert own.finish_reason == "error" and "first after layer 1 of 2" in own.error
    assert base.finish_reason == "length"


def test_adapters_of_another_model_and_unsupported_options_are_refused(tmp_path):
    model = build_decoder()
    adapter = adapter_of(model, seed=0, targets=("query",))
    streamed = InferencePolicy(offload=OffloadPolicy(parameters="nvme", nvme_path=str(tmp_path)))
    packed = pack(tmp_path / "packed", subject=describe(model), state=dict(model.named_parameters()), weights="stored")
    wide = {"blocks.0.attention.query": LowRank(down=torch.zeros(1, 99), up=torch.zeros(32, 1), scale=1.0)}
    head = {"head": LowRank(down=torch.zeros(1, 32), up=torch.zeros(VOCABULARY, 1), scale=1.0)}
    for options, message in (
        (
            {"adapters": {"x": wide}},
            r"inference\.adapters\.x: blocks\.0\.attention\.query\.weight is \[32, 32\] in this model and \[32, 99\]",
        ),
        (
            {"adapters": {"x": {"other": adapter["blocks.0.attention.query"]}}},
            r"inference\.adapters\.x: other is no linear layer",
        ),
        ({"adapters": {"x": head}}, r"inference\.adapters\.x: head cannot have an adapter by request"),
        ({"adapters": {"x": adapter}, "policy": streamed}, r"inference\.adapters=\{x\} with offload=nvme"),
        (
            {"adapters": {"x": adapter}, "policy": InferencePolicy(kernels=True, cache_dtype="fp8")},
            r"inference\.adapters=\{x\} with inference\.cache_dtype=fp8",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            Generator(model, **options)
    with pytest.raises(ValueError, match="whose packed weights are final: name the model that was packed"):
        Generator(open_packed(packed.path), adapters={"x": adapter})
    other = build_other("cohere")
    with pytest.raises(ValueError, match=r"inference\.adapters=\{x\} with model_type=cohere"):
        Generator(other, adapters={"x": adapter_of(other, seed=0)})
    generator = Generator(model, adapters={"x": adapter})
    for call in (
        lambda: generator.submit([1], sampling=SamplingParams(), adapter="y"),
        lambda: generator.generate([[1]], adapters="y"),
        lambda: next(generator.stream([1], adapter="y")),
    ):
        with pytest.raises(ValueError, match="adapter 'y': this generator has x"):
            call()
