"""TRL's client of its server mode draws from this server. Its weights come by NCCL alone, which needs a GPU."""

import pytest

from tests.serve.test_server import start, tiny
from ztk.inference import Generator, SamplingParams
from ztk.serve.tokenizers import Bytes

vllm_client = pytest.importorskip("trl.generation.vllm_client", reason="needs trl: pip install trl")
PROMPTS = [[97, 98, 99], [120, 121]]


@pytest.fixture
def client(monkeypatch):
    monkeypatch.setattr(
        vllm_client, "is_vllm_available", lambda *given, **more: True
    )  # the client needs none of its code
    running = start(opened=tiny(tokenizer=Bytes()))
    yield vllm_client.VLLMClient(base_url=running.url)
    running.stop()


def test_answers_and_logprobs_are_the_engines(client):
    found = client.generate(PROMPTS, n=2, max_tokens=6, temperature=0.0)
    sampling = SamplingParams(max_tokens=6, temperature=0, vocabulary=128)
    answers = Generator(tiny(tokenizer=Bytes()).module).generate(PROMPTS, sampling=sampling)
    assert found["prompt_ids"] == PROMPTS
    assert found["completion_ids"] == [one.tokens for [one] in answers for _ in range(2)]
    for values, [one] in zip(found["logprobs"][::2], answers, strict=True):
        assert [value for [value] in values] == pytest.approx(one.logprobs.tolist(), rel=1e-6)
    assert found["logprob_token_ids"][0] == [[token] for token in found["completion_ids"][0]]


def test_the_client_names_the_endpoints_that_it_lacks(client):
    with pytest.raises(RuntimeError, match="does not expose its development endpoints"):
        client.get_server_info()
