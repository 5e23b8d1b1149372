"""Models packed from folders, one layer at a time, and opened without the model."""

import pytest
import torch
import transformers

from tests.inference.models import build, save_llama
from ztk.inference import Generator, InferencePolicy, SamplingParams, weights
from ztk.offload import OffloadPolicy
from ztk.serve.__main__ import main
from ztk.serve.models import open_model
from ztk.serve.packing import open_streamed, pack_model

SAMPLING = SamplingParams(max_tokens=6, temperature=0.7, seed=2)
PROMPTS = [[1, 2, 3], [7, 8, 9, 10]]


def tokens(generator) -> list:
    return [(answer.tokens, answer.logprobs.tolist()) for [answer] in generator.generate(PROMPTS, sampling=SAMPLING)]


def test_a_packed_model_answers_as_its_folder(tmp_path, capsys):
    save_llama(tmp_path / "model")
    assert main(["pack", str(tmp_path / "model"), str(tmp_path / "packed"), "--weights", "int8"]) == 0
    assert "use weights=int8" in capsys.readouterr().out
    own, packed = open_model(str(tmp_path / "model")), open_model(str(tmp_path / "packed"))
    for name in ("name", "ends", "vocabulary", "begin", "first", "unknown"):
        assert getattr(packed, name) == getattr(own, name)
    assert packed.tokenizer.encode("abc") == own.tokenizer.encode("abc")
    policy = InferencePolicy(weights="int8")
    offload = OffloadPolicy(parameters="nvme", nvme_path=str(tmp_path))
    streamed = Generator(packed.module, policy=InferencePolicy(weights="int8", offload=offload))
    assert tokens(streamed) == tokens(Generator(own.module, policy=policy))
    streamed.close()
    assert main(["pack", str(tmp_path / "model"), str(tmp_path / "packed")]) == 2
    assert "exists already" in capsys.readouterr().err


def test_experts_that_files_have_one_by_one_are_packed(tmp_path):
    """transformers stores Mixtral's experts under other names than the model has."""
    build("mixtral").save_pretrained(tmp_path / "model")
    module = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    packed = pack_model(str(tmp_path / "model"), to=str(tmp_path / "packed"), weights="stored")
    assert tokens(Generator(packed)) == tokens(Generator(module))


def test_what_was_packed_is_used_again_until_the_model_changes(tmp_path):
    save_llama(tmp_path / "model")
    options = {"weights": "int4", "to": str(tmp_path / "cache")}
    first, second = (open_streamed(str(tmp_path / "model"), **options).module.path for _ in range(2))
    assert first == second
    weights_file = tmp_path / "model" / "model.safetensors"
    weights_file.write_bytes(weights_file.read_bytes())
    assert open_streamed(str(tmp_path / "model"), **options).module.path != first
    assert open_streamed(str(first), **options).module.path == first


def test_a_model_that_the_engine_misreads_is_not_packed(tmp_path, monkeypatch):
    """Planted: the engine's norms are others. The first layers are compared with transformers' own."""
    save_llama(tmp_path / "model")
    norm = weights.WeightReader._norm

    def wrong(self, name):
        found = norm(self, name)
        found.weight = found.weight * 1.5
        return found

    monkeypatch.setattr(weights.WeightReader, "_norm", wrong)
    with pytest.raises(ValueError, match="logits differ"):
        pack_model(str(tmp_path / "model"), to=str(tmp_path / "packed"), weights="stored")
    assert not (tmp_path / "packed").exists()
