"""Models packed from folders, one layer at a time, and opened without the model."""

from pathlib import Path

import pytest
import torch
import transformers

from tests.inference.models import build, save_letters, save_llama
from tests.inference.test_own_modules import build_other
from ztk.config import Machine, compose, save
from ztk.experiments.generate import open_answering
from ztk.inference import Generator, InferencePolicy, SamplingParams, packed, weights
from ztk.serve import packing
from ztk.serve.__main__ import main
from ztk.serve.models import open_model
from ztk.serve.packing import open_streamed, opened_unread, pack_model
from ztk.zero.offload import OffloadPolicy

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


def test_a_model_is_read_one_parameter_at_a_time(tmp_path):
    """Like ranks that each read a part of every layer."""
    save_llama(tmp_path / "model")
    own = open_model(str(tmp_path / "model"))
    with opened_unread(str(tmp_path / "model")) as unread:
        for name in ("name", "ends", "vocabulary", "begin", "first", "unknown"):
            assert getattr(unread, name) == getattr(own, name)
        assert all(parameter.is_meta for parameter in unread.module.module.parameters())
        assert tokens(Generator(unread.module)) == tokens(Generator(own.module))


def test_a_served_folder_is_neither_mapped_nor_open_afterwards(tmp_path):
    """Pages of a mapping stay in memory next to the engine's weights."""
    save_llama(tmp_path / "model")
    config = compose(
        "task=serve",
        f"inference.model={tmp_path / 'model'}",
        output_dir=str(tmp_path / "run"),
        machine=Machine(gpus=0, cores=2),
    )
    _, generator = open_answering(config)
    assert str(tmp_path / "model") not in Path("/proc/self/maps").read_text()
    assert not [link for link in Path("/proc/self/fd").iterdir() if str(tmp_path / "model") in str(link.resolve())]
    assert tokens(generator)


def test_experts_that_files_have_one_by_one_are_packed(tmp_path):
    """transformers stores Mixtral's experts under other names than the model has."""
    build("mixtral").save_pretrained(tmp_path / "model")
    module = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    packed = pack_model(str(tmp_path / "model"), to=str(tmp_path / "packed"), weights="stored")
    assert tokens(Generator(packed)) == tokens(Generator(module))


def test_a_model_that_runs_its_own_modules_is_read_one_parameter_at_a_time(tmp_path, capsys):
    """And compared with transformers' own forward, by its first layers; its file ends with the generator."""
    model = build_other("cohere", num_hidden_layers=5, tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "model")
    save_letters(tmp_path / "model")
    opened = open_streamed(str(tmp_path / "model"), weights="int8", to=str(tmp_path / "to"))
    assert all(parameter.is_meta for parameter in opened.module.module.parameters()) and opened.tokenizer.encode("abc")
    offload = OffloadPolicy(parameters="nvme", nvme_path=str(tmp_path / "to"))
    generator = Generator(opened.module, policy=InferencePolicy(weights="int8", offload=offload))
    assert tokens(generator) == tokens(Generator(model, policy=InferencePolicy(weights="int8")))
    assert generator.plan.sizes.layers == 5 and not list((tmp_path / "to").iterdir())
    generator.close()
    with pytest.raises(ValueError, match="runs its own modules and is packed when it is opened"):
        pack_model(str(tmp_path / "model"), to=str(tmp_path / "packed"), weights="int8")
    assert main(["pack", str(tmp_path / "model"), str(tmp_path / "packed")]) == 2
    assert f"use inference.model={tmp_path / 'model'} offload=nvme" in capsys.readouterr().err
    assert not (tmp_path / "packed").exists()


def test_what_was_packed_is_used_again_until_the_model_changes(tmp_path):
    save_llama(tmp_path / "model")
    options = {"weights": "int4", "to": str(tmp_path / "cache")}
    first, second = (open_streamed(str(tmp_path / "model"), **options).module.path for _ in range(2))
    assert first == second
    weights_file = tmp_path / "model" / "model.safetensors"
    weights_file.write_bytes(weights_file.read_bytes())
    assert open_streamed(str(tmp_path / "model"), **options).module.path != first
    assert open_streamed(str(first), **options).module.path == first


def test_a_folder_has_its_name_when_the_tokenizer_is_in_it(tmp_path, monkeypatch):
    save_llama(tmp_path / "model")
    options = {"weights": "int8", "to": str(tmp_path / "cache")}

    def fails(*args):
        raise OSError("no space")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="no space"):
        patch.setattr(packed.shutil, "copyfile", fails)
        open_streamed(str(tmp_path / "model"), **options)
    assert not any((tmp_path / "cache").iterdir())
    assert open_streamed(str(tmp_path / "model"), **options).tokenizer.encode("abc")


def test_the_second_of_two_processes_uses_the_folder_of_the_first(tmp_path, monkeypatch):
    save_llama(tmp_path / "model")
    options, write, found = {"weights": "int8", "to": str(tmp_path / "cache")}, packed._write, []

    def overtaken(*args, **given):
        monkeypatch.setattr(packed, "_write", write)
        found.append(open_streamed(str(tmp_path / "model"), **options).module.path)
        return write(*args, **given)

    monkeypatch.setattr(packed, "_write", overtaken)
    found.append(open_streamed(str(tmp_path / "model"), **options).module.path)
    assert found[0] == found[1] and list((tmp_path / "cache").iterdir()) == found[:1]


@pytest.mark.parametrize("changed", ["model/model.safetensors", "run/tokenizer/tokenizer.json", "run/step/1"])
def test_a_run_over_a_folder_is_packed_again_when_a_file_of_either_changes(changed, tmp_path, monkeypatch):
    save_llama(tmp_path / "model")
    step, run = tmp_path / "run/step", tmp_path / "run"
    for folder in (step, run / "tokenizer"):
        folder.mkdir(parents=True)
    (step / "1").write_text("")
    (run / "tokenizer/tokenizer.json").write_text("")
    words = ("model=hf", f"model.path={tmp_path / 'model'}", "data=synthetic", "lora=adapter")
    save(compose(*words, output_dir=str(run)), path=run / "config.yaml")
    monkeypatch.setattr(packing, "recorded_run", lambda folder: (step, run))
    before = packing._key(run, weights="int8", ema=False)
    assert packing._key(run, weights="int8", ema=False) == before
    file = tmp_path / changed
    file.write_bytes(file.read_bytes() + b" ")
    assert packing._key(run, weights="int8", ema=False) != before


def test_a_model_that_the_engine_misreads_is_not_packed(tmp_path, monkeypatch):
    """Planted: wrong norms in the engine. The check compares the first layers with transformers' layers."""
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
