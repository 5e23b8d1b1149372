"""model=hf: sizes from config.json, and options that transformers' models do not support."""

import shutil

import pytest

from tests.parallel.topology.families import make
from tests.rl.align.chats import train_tokenizer
from ztk.config import Config, ConfigError, Machine, compose, from_yaml, to_yaml
from ztk.experiments import pretrain

CPU = Machine(gpus=0, cores=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    make("Qwen2Moe", vocab_size=300, max_position_embeddings=128).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    path = tmp_path_factory.mktemp("dense")
    make("Llama", vocab_size=300, max_position_embeddings=128).save_pretrained(path)
    return path


def composed(*overrides: str) -> Config:
    return compose("model=hf", "data.seq_len=64", *overrides, output_dir="/tmp/run", machine=CPU)


def test_sizes_follow_from_the_folder(folder):
    config = composed(f"model.path={folder}", "zero=stage3")
    sizes = (config.model.vocab_size, config.model.dim, config.model.layers, config.model.heads, config.model.kv_heads)
    assert sizes == (300, 32, 2, 4, 2)
    assert (config.model.experts, config.model.max_seq_len, config.model.rope_theta) == (4, 128, None)
    assert from_yaml(to_yaml(config)) == config
    model, values = pretrain.build_model(config)
    assert pretrain.parameter_count(model) == sum(parameter.numel() for parameter in model.parameters())
    assert values(name="model.norm.weight", start=3, stop=9).shape == (6,)
    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ((), "model=hf names no model: use model.path=FOLDER"),
        (("model.path=/no/such",), "there is no config.json .* models are not downloaded"),
        (("model.path={folder}", "model.dim=64"), "model.dim=64: model=hf takes it from config.json: leave it out"),
        (
            ("model.path={folder}", "model.rope_theta=1e6"),
            "model.rope_theta=.* has no effect here, only with ztk's own decoder",
        ),
        (("model.path={folder}", "zero=ddp"), "model=hf: zero=ddp is there to compare ztk's own decoder with"),
        (
            ("model.path={folder}", "topology=sp2", "task=dpo", "data=preferences"),
            "topology.sequence: task=dpo gives models of transformers full sequences",
        ),
        (
            ("model.path={folder}", "topology=tp2", "topology.sequence_parallel=true"),
            "use topology.sequence_parallel=false",
        ),
        (("model.path={folder}", "topology.tensor=4"), "topology.tensor=4 is more than model.kv_heads=2"),
        (("model.path={folder}", "topology.expert=3"), "topology.expert=3 does not divide model.experts=4"),
        (("model.path={folder}", "data.seq_len=256"), "data.seq_len=256 is longer than the 128 tokens"),
        (("model.path={folder}", "model.init=zeros"), "zeros"),
        (
            ("model.path={folder}", "lora=adapter", "model.init=random"),
            "lora.rank=8: adapters on random frozen weights",
        ),
        (("model.path={folder}", "lora.alpha=2"), "lora.alpha=2.0 has no effect here, only with lora=adapter"),
        (("model.path={folder}", "lora=adapter", "lora.targets=3"), "lora.targets=3: must be all-linear or names"),
        (("model.path={folder}", "lora=adapter", "lora.dropout=1.5"), "lora.dropout=1.5"),
    ],
)
def test_what_does_not_fit_is_refused(folder, overrides, message):
    with pytest.raises(ConfigError, match=message):
        composed(*(word.format(folder=folder) for word in overrides))


@pytest.mark.parametrize(
    ("family", "changes", "overrides", "message"),
    [
        ("Bloom", {}, "topology=sp2", "topology.sequence: sequences of models of type bloom are not divided, only"),
        ("Falcon", {}, "topology=cp2", "topology.context: sequences of models of type falcon are not divided, only"),
        ("GPT2", {"resid_pdrop": 0.1}, "topology=sp2", r"in dropout \(resid_pdrop=0.1 in config.json .*: set it to 0"),
        ("GPT2", {}, "topology=cp2 lora=adapter lora.dropout=0.1", "lora.dropout=0.1: ranks .*, or topology.context=1"),
        ("Qwen3Moe", {"output_router_logits": True}, "topology=sp2", "set output_router_logits to false"),
        (
            "Llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "topology=cp2",
            "rotary positions of rope_type=dynamic depend on the length",
        ),
        (
            "Mistral",
            {"sliding_window": 8},
            "topology=cp2 data.path={path}/a.jsonl data.packing=documents",
            "does not combine it with the window of 8 tokens",
        ),
    ],
    ids=["Bloom", "Falcon", "dropout", "dropout of adapters", "router", "rotary", "window and documents"],
)
def test_models_whose_sequences_are_not_divided(tmp_path, family, changes, overrides, message):
    model = make(family, vocab_size=300)
    for name, value in changes.items():
        setattr(model.config, name, value)
    model.save_pretrained(tmp_path)
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n')
    with pytest.raises(ConfigError, match=message):
        composed(f"model.path={tmp_path}", *overrides.format(path=tmp_path).split())


def test_adapters_are_added_to_a_frozen_model(folder):
    config = composed(f"model.path={folder}", "lora=adapter", "lora.targets=[q_proj,v_proj]")
    model, values = pretrain.build_model(config)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert len(trained) == 2 * 2 * 2 and all("_proj.lora_" in name for name in trained)
    assert not values(name=next(name for name in trained if "lora_B" in name), start=0, stop=8).any()


def test_other_models_have_no_folder(folder):
    with pytest.raises(ConfigError, match="model.path=.* has no effect here, only with model=hf: leave it out"):
        compose("model=tiny", f"model.path={folder}", output_dir="/tmp/run", machine=CPU)


def test_a_folder_without_weights_or_of_too_few_words_is_refused(tmp_path):
    model = make("Llama", max_position_embeddings=128)
    model.config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError) as caught:
        composed(f"model.path={tmp_path}")
    assert "there are no safetensors files" in str(caught.value)
    assert "text is read as bytes, and its vocabulary has 64 tokens; use data=synthetic" in str(caught.value)
    config = composed(f"model.path={tmp_path}", "model.init=random", "data=synthetic")
    assert config.model.init == "random"


@pytest.mark.parametrize(
    "words, rate",
    [
        ((), 2e-5),
        (("lora=adapter",), 2e-4),
        (("task=sft",), 2e-5),
        (("task=sft", "lora=adapter"), 2e-4),
        (("optimizer.lr=1e-3",), 1e-3),
        (("optimizer=adamw",), 2e-5),
        (("optimizer=lion",), 3e-4),
        (("model.init=random",), 3e-3),
    ],
)
def test_pretrained_weights_have_a_rate_of_their_own(dense, words, rate):
    assert composed(f"model.path={dense}", *words).optimizer.lr == rate


def test_a_pretrained_model_reads_its_own_tokens(dense, tmp_path):
    own = tmp_path / "model"
    shutil.copytree(dense, own)
    train_tokenizer().save_pretrained(own)
    (tmp_path / "a.txt").write_text("some text")
    text = (f"model.path={own}", f"data.path={tmp_path / 'a.txt'}")
    assert composed(*text).data.tokenizer == str(own)
    assert composed(*text, "model.init=random").data.tokenizer == "bytes"
    with pytest.raises(ConfigError, match="data.tokenizer=bytes: .* not in bytes: leave data.tokenizer out"):
        composed(*text, "data.tokenizer=bytes")
    (own / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match="has a tokenizer without tokenizer.json"):
        composed(*text)
