"""Hugging Face folders: transformers and peft load exports and compute the same, and their files can be imported."""

import json

import peft
import pytest
import torch
import transformers
from torch import Tensor

from tests.checkpoint.runs import canonical, digest
from tests.zero.models import Layout, make_engine
from ztk.checkpoint import CheckpointError, load, read_manifest, resolve, save
from ztk.checkpoint.__main__ import main
from ztk.checkpoint.convert import import_checkpoint
from ztk.checkpoint.export import export_adapter, export_safetensors
from ztk.nn import Decoder, DecoderConfig

SIZES = {"vocab_size": 50, "dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "hidden_dim": 48, "max_seq_len": 64}
ODD = {"rope_theta": 500.0, "norm_eps": 1e-3}  # no default values, so that a lost one is noticed
TOKENS = torch.arange(24).view(2, 12) * 7 % 50
# The same fp32 operations in another order: errors of some 1e-7 per product, over two layers
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


def train_decoder(process, *, config: DecoderConfig, folder: str) -> Tensor:
    """Trains one step and saves. Returns the logits after it."""
    torch.manual_seed(0)
    engine = make_engine(process, layout=Layout(stage=3), model=Decoder(config))
    engine.backward(engine(TOKENS, TOKENS.roll(-1, dims=1)))
    engine.step()
    save(engine, folder=folder)
    with engine.evaluating():
        return engine(TOKENS)


def decoder_logits(process, *, folder: str) -> Tensor:
    """Of a decoder that is built from nothing but a checkpoint."""
    config = DecoderConfig(**read_manifest(resolve(folder)).model["decoder"])
    engine = make_engine(process, layout=Layout(stage=3), model=Decoder(config))
    load(engine, path=folder, weights_only=True)
    with engine.evaluating():
        return engine(TOKENS)


def logits_of(model: torch.nn.Module) -> Tensor:
    with torch.no_grad():
        return model.eval()(TOKENS).logits


@pytest.mark.parametrize("tied", [False, True])
def test_the_decoder_is_a_llama_to_transformers_and_comes_back(ranks, tmp_path, tied):
    config = DecoderConfig(**SIZES, **ODD, tie_embeddings=tied)
    expected = ranks(2).run(train_decoder, config=config, folder=str(tmp_path / "saved"))[0]
    assert main(["export", str(tmp_path / "saved"), str(tmp_path / "hf"), "--shard-bytes", "20000"]) == 0
    llama, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert type(llama) is transformers.LlamaForCausalLM and llama.dtype == torch.float32
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    torch.testing.assert_close(logits_of(llama), expected, **TOLERANCE)

    assert main(["import", str(tmp_path / "hf"), str(tmp_path / "back"), "--decoder"]) == 0
    assert torch.equal(ranks(1).run(decoder_logits, folder=str(tmp_path / "back"))[0], expected)


@pytest.mark.parametrize("tied", [False, True])
def test_a_llama_of_transformers_becomes_a_decoder(ranks, tmp_path, tied):
    torch.manual_seed(1)
    llama = transformers.LlamaForCausalLM(llama_config(tie_word_embeddings=tied))
    llama.save_pretrained(tmp_path / "hf")
    import_checkpoint(tmp_path / "hf", to=tmp_path / "in", as_decoder=True)
    found = ranks(2).run(decoder_logits, folder=str(tmp_path / "in"))[0]
    torch.testing.assert_close(found, logits_of(llama), **TOLERANCE)


def llama_config(**options) -> transformers.LlamaConfig:
    return transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        rms_norm_eps=1e-3,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        **options,
    )


@pytest.mark.parametrize("option", [{"attention_bias": True}, {"hidden_act": "gelu"}, {"head_dim": 16}])
def test_what_the_decoder_does_not_compute_is_named(tmp_path, option):
    (tmp_path / "config.json").write_text(llama_config(**option).to_json_string())
    (tmp_path / "model.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")
    with pytest.raises(CheckpointError, match=next(iter(option))):
        import_checkpoint(tmp_path, to=tmp_path / "in", as_decoder=True)


def train_gpt2(process, *, folder: str) -> Tensor:
    torch.manual_seed(2)
    config = transformers.GPT2Config(
        vocab_size=50, n_embd=32, n_layer=2, n_head=2, n_positions=32, layer_norm_epsilon=0.1
    )
    model = transformers.GPT2LMHeadModel(config)
    engine = make_engine(process, layout=Layout(stage=2), model=model)
    engine.backward(engine(TOKENS, labels=TOKENS).loss)
    engine.step()
    save(engine, folder=folder)
    with engine.evaluating():
        return engine(TOKENS).logits


def test_a_model_of_transformers_keeps_its_names_and_configuration(ranks, tmp_path):
    expected = ranks(1).run(train_gpt2, folder=str(tmp_path / "saved"))[0]
    export_safetensors(tmp_path / "saved", to=tmp_path / "hf")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert type(model) is transformers.GPT2LMHeadModel and model.config.layer_norm_epsilon == 0.1
    torch.testing.assert_close(logits_of(model), expected, **TOLERANCE)

    export_safetensors(tmp_path / "saved", to=tmp_path / "bf16", dtype=torch.bfloat16)
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "bf16").dtype == torch.bfloat16


def adapted() -> peft.PeftModel:
    """A Llama with adapters and equal values in every call."""
    torch.manual_seed(3)
    policy = peft.LoraConfig(
        r=4, lora_alpha=7, target_modules=["q_proj", "down_proj"], modules_to_save=["lm_head"], init_lora_weights=False
    )
    return peft.get_peft_model(transformers.LlamaForCausalLM(llama_config()), policy)


def train_adapter(process, *, folder: str, steps: int, resumed: bool) -> tuple[Tensor, str]:
    """Up to so many steps, with a save after each; logits and a hash of all states."""
    engine = make_engine(process, layout=Layout(stage=1), model=adapted())
    if resumed:
        report = load(engine, path=folder)
        assert report.kept and all("lora_" not in name for name in report.kept) and engine.global_steps == 1
    while engine.global_steps < steps:
        engine.backward(engine(input_ids=TOKENS, labels=TOKENS).loss)
        engine.step()
        save(engine, folder=folder, trained_only=True)
    with engine.evaluating():
        return engine(input_ids=TOKENS).logits, digest(canonical(engine))


def test_an_adapter_is_saved_alone_resumed_and_exported_for_peft(ranks, tmp_path):
    saved = str(tmp_path / "saved")
    straight = ranks(1).run(train_adapter, folder=str(tmp_path / "straight"), steps=2, resumed=False)[0]
    ranks(1).run(train_adapter, folder=saved, steps=1, resumed=False)
    resumed = ranks(1).run(train_adapter, folder=saved, steps=2, resumed=True)[0]
    assert resumed[1] == straight[1]
    manifest = read_manifest(resolve(saved))
    frozen = sum(p.numel() for p in adapted().parameters() if not p.requires_grad)
    trained = sum(p.numel() for p in adapted().parameters() if p.requires_grad)
    assert manifest.left_out and manifest.nbytes < 12 * trained + 4 * frozen  # states of the trained, none of the rest

    assert main(["export", str(tmp_path / "saved"), str(tmp_path / "adapter"), "--adapter"]) == 0
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["lora_alpha"] == 7
    torch.manual_seed(3)
    base = transformers.LlamaForCausalLM(llama_config())
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    torch.testing.assert_close(logits_of(loaded), resumed[0], **TOLERANCE)

    with pytest.raises(CheckpointError, match="only the trained parameters"):
        export_safetensors(tmp_path / "saved", to=tmp_path / "full")
    with pytest.raises(CheckpointError, match="no adapter 'other': it has default"):
        export_adapter(tmp_path / "saved", to=tmp_path / "other", adapter="other")
