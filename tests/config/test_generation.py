"""generation_config.json: which values of `sampling` it gives, which fields are refused, and the tokens that end answers."""

import json

import pytest

from ztk.config import Config, ConfigError, Machine, compose, save, to_explained_yaml
from ztk.config.generation import end_tokens, generation_file

CPU = Machine(gpus=0, cores=2)
LLAMA = {
    "do_sample": True,
    "temperature": 0.6,
    "top_p": 0.9,
    "eos_token_id": [128001, 128008, 128009],
    "bos_token_id": 128000,
}
QWEN = {
    "do_sample": True,
    "repetition_penalty": 1.05,
    "temperature": 0.7,
    "top_p": 0.8,
    "top_k": 20,
    "eos_token_id": [7],
}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text("{}")

    def write(values: dict):
        (tmp_path / "generation_config.json").write_text(json.dumps(values))
        return tmp_path

    return write


def composed(*overrides: str, task: str = "generate") -> Config:
    return compose(f"task={task}", *overrides, output_dir="/tmp/run", machine=CPU)


@pytest.mark.parametrize("task", ["generate", "serve"])
def test_the_folder_draws_as_its_makers_do(folder, task):
    path = folder(QWEN | {"max_new_tokens": 512, "stop_strings": ["END"]})
    config = composed(f"inference.model={path}", task=task)
    sampling = config.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.repetition_penalty) == (0.7, 0.8, 20, 1.05)
    assert (sampling.max_tokens, sampling.stop, sampling.min_p) == (512, ["END"], 0.0)
    reason = f"from {path}/generation_config.json"
    assert config.reasons["sampling.top_k"] == reason and f"  top_p: 0.8  # {reason}\n" in to_explained_yaml(config)
    assert config.notes[0].startswith(
        f"sampling of {path}/generation_config.json: temperature=0.7, top_k=20, top_p=0.8"
    )


def test_the_users_values_come_first(folder):
    path = folder(LLAMA)
    config = composed(f"inference.model={path}", "sampling.temperature=0.8")
    assert (config.sampling.temperature, config.sampling.top_p) == (0.8, 0.9)
    config = composed(f"inference.model={path}", "inference.generation_config=false")
    assert (config.sampling.temperature, config.sampling.top_p, config.notes) == (0.8, 1.0, [])


@pytest.mark.parametrize(
    ("values", "temperature"),
    [
        ({"eos_token_id": 2, "_from_model_config": True}, 0.8),
        ({"do_sample": False, "temperature": 0.6}, 0.0),
        ({"do_sample": True}, 1.0),
        ({"top_p": 0.9, "top_k": -1}, 1.0),
    ],
)
def test_a_temperature_that_is_not_there(folder, values, temperature):
    sampling = composed(f"inference.model={folder(values)}").sampling
    assert (sampling.temperature, sampling.top_k) == (temperature, 0)


@pytest.mark.parametrize(
    "values",
    [
        {"num_beams": 4},
        {"no_repeat_ngram_size": 6},
        {"typical_p": 0.9},
        {"suppress_tokens": [1]},
        {"min_new_tokens": 8},
    ],
)
def test_steps_that_ztk_lacks_are_refused(folder, values):
    path, (name, value) = folder(LLAMA | values), *values.items()
    with pytest.raises(ConfigError) as caught:
        composed(f"inference.model={path}")
    assert f"{path}/generation_config.json: {name}={value} changes answers" in str(caught.value)
    assert "inference.generation_config=false" in str(caught.value)
    composed(f"inference.model={path}", "inference.generation_config=false")


def test_values_that_change_nothing_pass(folder):
    neutral = {
        "num_beams": 1,
        "typical_p": 1.0,
        "length_penalty": 2.0,
        "bad_words_ids": None,
        "suppress_tokens": [],
        "min_length": 0,
    }
    assert composed(f"inference.model={folder(LLAMA | neutral)}").sampling.temperature == 0.6
    greedy = folder({"typical_p": 0.9})
    composed(f"inference.model={greedy}", "sampling.temperature=0")


def test_what_is_not_used_is_named_once(folder):
    config = composed(f"inference.model={folder({'max_length': 4096})}")
    assert len(config.notes) == 1 and "max_length=4096 is not used" in config.notes[0]


def test_a_broken_file_is_named(folder):
    path = folder({})
    (path / "generation_config.json").write_text("{")
    with pytest.raises(ConfigError, match="generation_config.json: is no JSON"):
        composed(f"inference.model={path}")


def test_a_run_has_its_base_models_file(folder, tmp_path):
    base, run = folder(LLAMA), tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    config = compose("model=nano", output_dir=run)
    config.model.path = str(base)
    save(config, path=run / "config.yaml")
    file = generation_file(str(run / "checkpoints"))
    assert file == base / "generation_config.json" and end_tokens(file) == (128001, 128008, 128009)
    assert end_tokens(generation_file(str(tmp_path / "run" / "nothing" / "in" / "it" / "at" / "all"))) == ()
