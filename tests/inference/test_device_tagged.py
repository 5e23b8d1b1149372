"""The engine over blocks on CPU tensors that are tagged as a GPU's: no operation mixes devices, and answers have the CPU's bits."""

import pytest

from tests.device_tagged import gpu_tensors
from tests.inference.models import VOCABULARY, build, build_decoder
from tests.inference.test_blocks import Replayed
from tests.inference.test_masks import Counting
from ztk.inference import Generator, InferencePolicy, SamplingParams, graphs

PROMPTS = [[5, 6, 7], [(7 * i) % VOCABULARY for i in range(80)], [11, 12] * 20]
SAMPLING = [
    SamplingParams(max_tokens=70, temperature=0.8, seed=1),
    SamplingParams(
        max_tokens=40, temperature=0.7, top_k=7, top_p=0.9, repetition_penalty=1.2, logit_bias={3: 1.0}, seed=2
    ),
    SamplingParams(max_tokens=3, temperature=0, logprobs=2, prompt_logprobs=True),
]
MODELS = {
    "native with experts": lambda: build_decoder(experts=4, experts_every=2, shared_hidden_dim=24),
    "gemma3": lambda: build("gemma3"),
    "bloom": lambda: build("bloom"),
    "olmo2": lambda: build("olmo2"),
}


def answers(model, *, device: str, **policy) -> tuple[list, Generator]:
    tight = {"cache": "blocks", "max_model_len": 192, "cache_tokens": 192, "lookup_tokens": 2, **policy}
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
        assert other._cache.keys(0).is_cuda
    assert found == expected
    assert other.preempted == one.preempted > 0
    assert other._stepper.graphs.captured > 0


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
                model, policy=InferencePolicy(device=device, cache="blocks", max_model_len=64, cache_tokens=1024)
            )
            record.reads.clear()
            found[device] = [own.tokens for [own] in generator.generate([PROMPTS[0]] * 8, sampling=sampling)]
    assert found["cuda:0"] == found["cpu"] and all(tokens[-1] == 30 for tokens in found["cpu"])
    assert len(record.reads) == max(map(len, found["cpu"])), record.reads
