"""The engine on CPU tensors that are tagged as a GPU's: no operation mixes devices, and answers have the CPU's bits."""

from unittest import mock

import pytest

import ztk
from tests.device_tagged import Streams, gpu_tensors
from tests.inference.models import VOCABULARY, build, build_decoder
from tests.inference.test_blocks import Replayed
from tests.inference.test_masks import Counting
from tests.inference.test_own_modules import build_other
from ztk.core.runtime.streams import use_api
from ztk.inference import Generator, InferencePolicy, SamplingParams, graphs
from ztk.zero.offload import OffloadPolicy

PROMPTS = [[5, 6, 7], [(7 * i) % VOCABULARY for i in range(80)], [11, 12] * 20]
SAMPLING = [
    SamplingParams(max_tokens=70, temperature=0.8, seed=1),
    SamplingParams(
        max_tokens=40, temperature=0.7, top_k=7, top_p=0.9, repetition_penalty=1.2, logit_bias={3: 1.0}, seed=2
    ),
    SamplingParams(max_tokens=3, temperature=0, logprobs=2, prompt_logprobs=True),
]
GREEDY = SamplingParams(max_tokens=70, temperature=0)
MODELS = {
    "native with experts": lambda: build_decoder(experts=4, experts_every=2, shared_hidden_dim=24),
    "gemma3": lambda: build("gemma3"),
    "bloom": lambda: build("bloom"),
    "olmo2": lambda: build("olmo2"),
}
WIDE = {  # with layers that need more memory than the cache
    "six layers": lambda: build("olmo2", num_hidden_layers=6, intermediate_size=1024),
    "six layers with windows": lambda: build(
        "gemma3", num_hidden_layers=6, layer_types=["sliding_attention", "full_attention"] * 3, intermediate_size=1024
    ),
    "six wide layers": lambda: build("llama", num_hidden_layers=6, hidden_size=128, intermediate_size=512),
    "six layers of experts": lambda: build_decoder(layers=6, experts=4, experts_every=1, hidden_dim=256),
    "six layers of its own modules": lambda: build_other("cohere", num_hidden_layers=6, intermediate_size=1024),
}


def answers(model, *, device: str, **policy) -> tuple[list, Generator]:
    tight = {"kernels": True, "max_model_len": 192, "cache_tokens": 192, "lookup_tokens": 2, **policy}
    generator = Generator(model, policy=InferencePolicy(device=device, **tight))
    found = generator.generate(PROMPTS, sampling=SAMPLING)
    return [(own.tokens, own.logprobs.tolist(), own.top_logprobs) for [own] in found], generator


@pytest.mark.parametrize("name", MODELS)
def test_a_gpu_has_the_answers_of_a_cpu(name, monkeypatch):
    """Draws with and without logits, graphs' tables, preemption, 8 bits of weights and cache."""
    monkeypatch.setattr(graphs, "CudaCapture", lambda: Replayed.capture)
    model, formats = MODELS[name](), {"weights": "int8", "cache_dtype": "fp8"} if name == "bloom" else {}
    expected, one = answers(model, device="cpu", **formats)
    with gpu_tensors():
        found, other = answers(model, device="cuda:0", **formats)
        assert other._cache.keys[0].is_cuda
    assert found == expected
    assert other.preempted == one.preempted > 0
    assert other._stepper.graphs.captured > 0


def offload(tier: str, *, folder) -> OffloadPolicy:
    return OffloadPolicy(parameters=tier, nvme_path=str(folder), block_bytes=1 << 14, threads=2)


def shared_on_a_gpu(process: ztk.Process, *, folder: str, swaps: bool) -> list:
    """Answers by ranks on a GPU each, and preemptions."""
    place = {"offload": offload("nvme", folder=folder)}
    comm = process.comm if process.comm.size > 1 else None
    tight = {"max_model_len": 192, "cache_tokens": 192, "lookup_tokens": 2, "device": "cuda:0"}
    with (
        gpu_tensors(),
        use_api(Streams()),
        mock.patch.object(graphs, "CudaCapture", lambda: Replayed.capture),
    ):
        policy = InferencePolicy(**tight, **(place if swaps else {}))
        generator = Generator(MODELS["native with experts"](), policy=policy, comm=comm)
        assert generator._cache.keys[0].is_cuda
        if generator.follows:
            generator.follow()
            return []
        found = [own.tokens for [own] in generator.generate(PROMPTS, sampling=GREEDY)]
        generator.close()
    return [found, generator.preempted]


@pytest.mark.parametrize(("count", "swaps"), [(2, False), (1, True), (2, True)], ids=["tp2", "nvme", "tp2 and nvme"])
def test_gpus_have_the_tokens_of_one_cpu(ranks, tmp_path, count, swaps):
    """Layers divided over two GPUs, blocks of preempted sequences in files, and both."""
    model = MODELS["native with experts"]()
    expected = [own.tokens for [own] in Generator(model).generate(PROMPTS, sampling=GREEDY)]
    found, preempted = ranks(count).run(shared_on_a_gpu, folder=str(tmp_path), swaps=swaps)[0]
    assert found == expected and preempted > 0
    assert not list(tmp_path.iterdir())


def streamed_on_gpus(process: ztk.Process, *, name: str, folder: str, tier: str, memory_bytes: int, **policy) -> list:
    """Answers by ranks whose layers pass through a GPU each: tokens, log-probabilities, layers that reside there, all layers, and copies
    that the host waits for because their memory is not page-locked."""
    comm = process.comm if process.comm.size > 1 else None
    with (
        gpu_tensors() as record,
        use_api(Streams()),
        mock.patch.object(graphs, "CudaCapture", lambda: Replayed.capture),
    ):
        chosen = InferencePolicy(
            max_model_len=192,
            max_sequences=2,
            max_step_tokens=8,
            device="cuda:0",
            offload=offload(tier, folder=folder),
            memory_bytes=memory_bytes,
            **policy,
        )
        generator = Generator(WIDE[name](), policy=chosen, comm=comm)
        assert generator.plan is not None and generator._cache.keys[0].is_cuda
        if generator.follows:
            generator.follow()
            return []
        record.pageable.clear()
        found = [(own.tokens, own.logprobs.tolist()) for [own] in generator.generate(PROMPTS, sampling=SAMPLING)]
        assert not [place for place in record.pageable if "stream" in place]
        plan, copied = generator.plan, generator.streamed_bytes
        generator.close()
    return [found, plan.resident, plan.sizes.layers, copied]


STREAMED = [
    # model, tier, ranks, bytes of the GPU, options
    ("six layers with windows", "nvme", 1, 2_000_000, {}),
    ("six wide layers", "cpu", 1, 900_000, {"weights": "int4", "cache_dtype": "fp8"}),
    ("six layers of its own modules", "cpu", 1, 700_000, {"weights": "int8", "cache_dtype": "fp8"}),
    ("six layers", "nvme", 2, 1_200_000, {}),
    ("six layers of experts", "cpu", 2, 370_000, {"weights": "int8"}),
]


@pytest.mark.parametrize(("name", "tier", "count", "memory", "policy"), STREAMED)
def test_layers_that_pass_through_a_gpu_change_no_bit(ranks, tmp_path, name, tier, count, memory, policy):
    own = InferencePolicy(kernels=True, max_model_len=192, **policy)
    answers = Generator(WIDE[name](), policy=own).generate(PROMPTS, sampling=SAMPLING)
    expected = [(one.tokens, one.logprobs.tolist()) for [one] in answers]
    options = {"name": name, "folder": str(tmp_path), "tier": tier, "memory_bytes": memory, **policy}
    found, resident, layers, copied = ranks(count).run(streamed_on_gpus, **options)[0]
    if count == 1:
        assert found == expected
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    assert resident < layers and copied > 0
    assert not list(tmp_path.iterdir())


def test_layers_that_fit_leave_the_rest_of_their_memory_to_the_cache(tmp_path):
    """Nothing streams, and `memory_bytes` holds for layers, cache and a step together."""
    with gpu_tensors(), use_api(Streams()), mock.patch.object(graphs, "CudaCapture", lambda: Replayed.capture):
        sizes = {"max_model_len": 192, "max_step_tokens": 8, "memory_bytes": 4_000_000}
        policy = InferencePolicy(device="cuda:0", offload=offload("nvme", folder=tmp_path), **sizes)
        generator = Generator(WIDE["six layers"](), policy=policy)
        layers = sum(product.nbytes for product in generator._model.products())
        assert generator.plan is None
        assert 0 < generator._cache.nbytes < 4_000_000 - layers
        generator.close()


def test_grammars_add_no_read_of_the_device(monkeypatch):
    """One read per step brings the drawn tokens of all rows; masks are sent and nothing of them returns."""
    monkeypatch.setattr(graphs, "CudaCapture", lambda: Replayed.capture)
    model = MODELS["native with experts"]()
    sampling = [
        SamplingParams(max_tokens=20, temperature=0.8, seed=first, grammar=Counting(first=first, last=30))
        for first in range(12, 20)
    ]
    found = {}
    for device in ("cpu", "cuda:0"):
        with gpu_tensors() as record:
            generator = Generator(
                model, policy=InferencePolicy(device=device, kernels=True, max_model_len=64, cache_tokens=1024)
            )
            record.reads.clear()
            found[device] = [own.tokens for [own] in generator.generate([PROMPTS[0]] * 8, sampling=sampling)]
    assert found["cuda:0"] == found["cpu"] and all(tokens[-1] == 30 for tokens in found["cpu"])
    assert len(record.reads) == max(map(len, found["cpu"])), record.reads
