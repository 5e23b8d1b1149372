"""The engine on CPU tensors that are tagged as a GPU's: no operation mixes devices, and answers have the CPU's bits."""

from unittest import mock

import pytest

import ztk
from tests.device_tagged import Streams, gpu_tensors
from tests.inference.models import VOCABULARY, build, build_decoder
from tests.inference.test_blocks import Replayed
from tests.inference.test_masks import Counting
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


def shared_on_a_gpu(process: ztk.Process, *, folder: str, swaps: bool) -> list:
    """Answers by ranks on a GPU each, and preemptions."""
    place = {"offload": OffloadPolicy(parameters="nvme", nvme_path=folder, block_bytes=1 << 16, threads=1)}
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
