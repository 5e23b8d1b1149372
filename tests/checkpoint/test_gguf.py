"""Export to GGUF files and back: equal bits, blocks equal to the package gguf's, and files that transformers can read."""

import errno
import json
import os
import re
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.inference.models import build, save_letters
from tests.rl.align.chats import train_tokenizer
from ztk.checkpoint import CheckpointError
from ztk.checkpoint.__main__ import main
from ztk.checkpoint.convert import import_checkpoint
from ztk.checkpoint.gguf import reading
from ztk.checkpoint.gguf.families import config_of, metadata_of
from ztk.checkpoint.gguf.general import read_general
from ztk.checkpoint.gguf.reading import model_folder, unpack
from ztk.checkpoint.gguf.tokenizer import read_tokenizer, write_tokenizer
from ztk.checkpoint.gguf.writing import export_gguf
from ztk.config import ConfigError, Machine, compose
from ztk.serve.models import open_model

FAMILIES = ("llama", "qwen2", "qwen3", "gemma")
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message.content }}<|im_end|>{% endfor %}"
WIDE = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 320}
CARD = """---
license: other
license_name: mine-1.0
version: 2
language: [en, de]
base_model: someone/Base
---
# A model
"""
TEXT = "Hello, it's 12345!\n\n<|im_start|>Hi  there<|im_end|> \u00fcber"


def save(folder: Path, *, family: str) -> dict[str, torch.Tensor]:
    """Saves a tiny model with a tokenizer and a template; its matrices are exact in fp16. Returns its weights."""
    model = build(family, **WIDE)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.half())
    model.save_pretrained(folder)
    tokenizer = train_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("family", FAMILIES)
def test_f16_and_back_is_the_same_model(family, tmp_path):
    """Bit by bit; logits, too, since rows of query and key come back where they were. Gemma's norms have 1 added and taken off."""
    weights = save(tmp_path / "own", family=family)
    save_file({"tok_embeddings.weight": torch.ones(2)}, tmp_path / "own" / "consolidated.safetensors")  # as Mistral's
    export_gguf(tmp_path / "own", to=tmp_path / "model.gguf")
    unpack(tmp_path / "model.gguf", to=tmp_path / "back")
    found = load_file(tmp_path / "back" / "model.safetensors")
    assert found.keys() == weights.keys()
    for name, value in weights.items():
        expected = (value + 1) - 1 if family == "gemma" and "norm" in name else value
        assert torch.equal(found[name].float(), expected), name
        assert found[name].dtype == (torch.float16 if value.dim() > 1 else torch.float32)
    first, again = (open_model(str(tmp_path / name)) for name in ("own", "back"))
    tokens = torch.arange(1, 40).unsqueeze(0)
    torch.testing.assert_close(again.module(tokens).logits, first.module(tokens).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_1"])
def test_transformers_reads_the_file_alike(family, kind, tmp_path):
    """`from_pretrained(gguf_file=)`; it does not convert Gemma's norms in this format."""
    save(tmp_path / "own", family=family)
    export_gguf(tmp_path / "own", to=tmp_path / "model.gguf", kind=kind)
    expected = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32)
    found = load_file(f"{model_folder(str(tmp_path / 'model.gguf'))}/model.safetensors")
    for name, value in expected.named_parameters():
        assert torch.equal(found[name].float(), value), name


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1"])
def test_blocks_equal_the_packages(kind, tmp_path):
    weights = save(tmp_path / "own", family="qwen3")  # whose rows stay where they are
    export_gguf(tmp_path / "own", to=tmp_path / "model.gguf", kind=kind)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    for place, name in (("blk.1.ffn_up", "model.layers.1.mlp.up_proj"), ("token_embd", "model.embed_tokens")):
        own = gguf.GGMLQuantizationType["Q8_0" if place == "token_embd" else kind]
        expected = gguf.quants.quantize(weights[f"{name}.weight"].numpy(), own)
        found = tensors[f"{place}.weight"]
        assert found.tensor_type == own and np.array_equal(found.data, expected)
    assert tensors["blk.0.attn_norm.weight"].tensor_type == gguf.GGMLQuantizationType.F32


def test_tokenizer_template_and_end_tokens_come_back(tmp_path):
    """Also where special_tokens_map.json alone names the tokens, as in folders of earlier releases of transformers."""
    save(tmp_path / "own", family="llama")
    settings = json.loads((tmp_path / "own" / "tokenizer_config.json").read_text())
    named = {name: settings.pop(name) for name in list(settings) if name.endswith("_token")}
    assert "eos_token" in named
    (tmp_path / "own" / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "own" / "special_tokens_map.json").write_text(json.dumps(named))
    export_gguf(tmp_path / "own", to=tmp_path / "model.gguf")
    unpack(tmp_path / "model.gguf", to=tmp_path / "back")
    own, back = (transformers.AutoTokenizer.from_pretrained(tmp_path / name) for name in ("own", "back"))
    assert own.encode(TEXT) == back.encode(TEXT) and own.decode(own.encode(TEXT)) == back.decode(own.encode(TEXT))
    assert (own.chat_template, own.eos_token) == (back.chat_template, back.eos_token)
    assert own.eos_token_id in open_model(str(tmp_path / "back")).ends


def general(file: Path) -> dict[str, object]:
    fields = gguf.GGUFReader(file).fields
    return {key: (fields[key].types, fields[key].contents()) for key in fields if key.startswith("general.")}


def test_keys_that_describe_a_model_come_back(tmp_path):
    """Whatever a file has, with its types; the kind of the tensors is the file's own."""
    save(tmp_path / "own", family="llama")
    (tmp_path / "own" / "README.md").write_text(CARD)
    export_gguf(tmp_path / "own", to=tmp_path / "first.gguf")
    found = {key: value for key, (_, value) in general(tmp_path / "first.gguf").items()}
    assert found == found | {
        "general.name": "own",
        "general.license": "other",
        "general.license.name": "mine-1.0",
        "general.version": "2",
        "general.languages": ["en", "de"],
        "general.base_model.count": 1,
        "general.base_model.0.name": "Base",
        "general.base_model.0.repo_url": "https://huggingface.co/someone/Base",
    }
    writer, reader = gguf.GGUFWriter(tmp_path / "more.gguf", "llama"), gguf.GGUFReader(tmp_path / "first.gguf")
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            writer.add_key_value(key, field.contents(), field.types[0], *field.types[1:2])
    writer.add_string("general.author", "Somebody")
    writer.add_float64("general.sampling.temp", 0.1)
    writer.add_int32("general.sampling.top_k", -1)
    writer.add_array("general.numbers", [0.5, 0.25])
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    unpack(tmp_path / "more.gguf", to=tmp_path / "back")
    export_gguf(tmp_path / "back", to=tmp_path / "again.gguf", kind="Q8_0")
    first, again = (general(tmp_path / name) for name in ("more.gguf", "again.gguf"))
    assert {key: first[key] for key in first if key != "general.file_type"} == {
        key: again[key] for key in again if key != "general.file_type"
    }
    (tmp_path / "back" / "gguf_general.json").write_text('{"general.author": [["STRING"], 3]}')
    with pytest.raises(
        ValueError, match=r"gguf_general.json: does not hold keys of a GGUF file \(TypeError: 3 is no STRING"
    ):
        export_gguf(tmp_path / "back", to=tmp_path / "third.gguf")


@pytest.mark.parametrize("header", ["a: &a [1]\nb: {<<: *a}", "license: [", "license: mit\n" + "#" * (1 << 20)])
def test_cards_that_cannot_be_read_are_left_out(header, tmp_path, caplog):
    (tmp_path / "README.md").write_text(f"---\n{header}\n---\n")
    assert read_general(tmp_path, name="own", library=gguf) == {"general.name": (["STRING"], "own")}
    assert "README.md: its header is not read" in caplog.text


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "qwen2", "llama-bpe"])
def test_every_way_to_cut_words_is_found_again(pre, tmp_path):
    pieces = ["<s>", "</s>", *(chr(number) for number in range(33, 127)), "ab"]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.token_type": [3, 3] + [1] * (len(pieces) - 2),
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": TEMPLATE,
    }
    write_tokenizer(metadata, folder=tmp_path, file="model.gguf")
    found = read_tokenizer(tmp_path, vocabulary=len(pieces))
    assert {key: found[key] for key in metadata} == metadata
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("abc")) == ["<s>", "ab", "c"]


def test_a_sentencepiece_vocabulary_gives_its_merges(tmp_path):
    """The pair with the best score merges first: `bc` before `ab`. Characters without a piece become bytes."""
    space = "\u2581"
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{number:02X}>" for number in range(256)), space, "a", "b", "c", "ab", "bc"]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.scores": [0.0] * (len(pieces) - 2) + [-2.0, -1.0],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * 6,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    write_tokenizer(metadata, folder=tmp_path, file="model.gguf")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("abc")) == ["<s>", space, "a", "bc"]
    assert tokenizer.decode(tokenizer.encode("ab \u00e9"), skip_special_tokens=True) == "ab \u00e9"


def test_runs_take_a_file_where_they_take_a_folder(tmp_path):
    """It is unpacked next to itself once, and again when it has changed."""
    save(tmp_path / "own", family="llama")
    export_gguf(tmp_path / "own", to=tmp_path / "model.gguf")
    options = {"output_dir": tmp_path / "run", "machine": Machine(gpus=0, cores=1)}
    file = tmp_path / "model.gguf"
    (tmp_path / "a.jsonl").write_text(
        '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n' * 9
    )
    trained = compose(
        "task=sft",
        "model=hf",
        f"model.path={file}",
        "data=chat",
        f"data.path={tmp_path / 'a.jsonl'}",
        "data.seq_len=32",
        **options,
    )
    assert trained.model.path == f"{file}.unpacked" and trained.model.dim == 64
    asked = compose("task=serve", f"inference.model={file}", **options)
    assert asked.inference.model == trained.model.path == model_folder(str(file))
    made = Path(trained.model.path, "model.safetensors").stat().st_mtime_ns
    assert Path(model_folder(str(file)), "model.safetensors").stat().st_mtime_ns == made
    file.unlink()
    export_gguf(tmp_path / "own", to=file, kind="Q8_0")
    assert load_file(f"{model_folder(str(file))}/model.safetensors")["model.embed_tokens.weight"].dtype == torch.float32
    assert open_model(str(file)).name == "model.gguf.unpacked"


def test_a_checkpoint_of_ztks_decoder_becomes_a_llama(tmp_path, capsys):
    """The command refuses options that do not fit together."""
    weights = save(tmp_path / "own", family="llama")
    import_checkpoint(tmp_path / "own", to=tmp_path / "run", as_decoder=True)
    file = str(tmp_path / "model.gguf")
    assert main(["export", str(tmp_path / "run"), file, "--format", "gguf", "--kind", "F16"]) == 0
    found = load_file(f"{model_folder(file)}/model.safetensors")
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name].float(), value) for name, value in weights.items())
    capsys.readouterr()
    for words, message in (
        (["--kind", "Q8_0"], "--kind Q8_0 has no effect without --format gguf"),
        (["--format", "gguf", "--dtype", "bf16"], "--dtype has no effect with --format gguf"),
        (["--format", "gguf"], "model.gguf exists; name another place"),
    ):
        assert main(["export", str(tmp_path / "run"), file, *words]) == 2
        assert message in capsys.readouterr().err


def test_what_is_not_written_is_refused(tmp_path):
    for family, message in (
        ("gemma2", "model_type=gemma2 has no mapping to GGUF"),
        ("mistral", "sliding_window=24 is not written"),
    ):
        build(family).save_pretrained(tmp_path / family)
        with pytest.raises(ValueError, match=message):
            export_gguf(tmp_path / family, to=tmp_path / f"{family}.gguf")
        assert not (tmp_path / f"{family}.gguf").exists()
    config = build("llama").config.to_dict()
    with pytest.raises(ValueError, match="hidden_act=gelu is not written for llama, only silu is"):
        metadata_of(config | {"hidden_act": "gelu"})
    build("llama").save_pretrained(tmp_path / "letters")
    save_letters(tmp_path / "letters")
    with pytest.raises(ValueError, match="is not a byte-level BPE"):
        export_gguf(tmp_path / "letters", to=tmp_path / "letters.gguf")
    (tmp_path / "letters" / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="has no safetensors files; save the model by save_pretrained"):
        export_gguf(tmp_path / "letters", to=tmp_path / "letters.gguf")
    with pytest.raises(ValueError, match="--kind Q5_K: must be F16, BF16, F32, Q8_0, Q4_0 or Q4_1"):
        export_gguf(tmp_path / "letters", to=tmp_path / "letters.gguf", kind="Q5_K")


@pytest.mark.parametrize(
    ("more", "names", "message"),
    [
        ({"llama.rope.dimension_count": 8}, (), "rope.dimension_count=8 rotates a part of 16 elements"),
        ({}, ("blk.0.attn_q.bias",), "blk.0.attn_q.bias has no place in a LlamaForCausalLM"),
        ({}, ("blk.1.ffn_up.bias",), "blk.1.ffn_up.bias has no place"),
        ({}, ("output.bias",), "output.bias has no place"),
        ({}, ("blk.0.attn_k_norm.weight",), "blk.0.attn_k_norm.weight has no place"),
    ],
)
def test_parts_that_transformers_would_leave_out_are_refused(more, names, message):
    sizes = {"block_count": 2, "context_length": 64, "embedding_length": 64, "feed_forward_length": 96}
    sizes |= {"attention.head_count": 4, "attention.layer_norm_rms_epsilon": 1e-5, "rope.dimension_count": 16}
    metadata = {"general.architecture": "llama"} | {f"llama.{key}": value for key, value in sizes.items()}
    shapes = {"token_embd.weight": (320, 64)}
    whole = [f"blk.0.attn_{part}.bias" for part in ("q", "k", "v", "output")]
    assert config_of(metadata, shapes=shapes | dict.fromkeys(whole, (64,)), file="a.gguf")["attention_bias"]
    with pytest.raises(ValueError, match=message):
        config_of(metadata | more, shapes=shapes | dict.fromkeys(names, (64,)), file="a.gguf")


def changed(folder: Path, *, name: str, value: float) -> None:
    """Sets the first element of one tensor."""
    weights = load_file(folder / "model.safetensors")
    weights[name].view(-1)[0] = value
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("kind", "value", "fits"),
    [("F16", 7e4, False), ("Q8_0", 1e7, False), ("Q4_1", 1e7, False), ("BF16", 7e4, True), ("F32", 7e4, True)],
)
def test_values_that_a_format_cannot_hold_are_refused(kind, value, fits, tmp_path):
    name, out = "model.layers.0.mlp.up_proj.weight", tmp_path / "model.gguf"
    save(tmp_path / "own", family="llama")
    changed(tmp_path / "own", name=name, value=value)
    if not fits:
        with pytest.raises(
            ValueError,
            match=rf"blk.0.ffn_up.weight has values up to {re.escape(f'{value:.4g}')}, which --kind {kind}.* --kind BF16",
        ):
            export_gguf(tmp_path / "own", to=out, kind=kind)
        assert not list(tmp_path.glob("model.gguf*"))
        return
    export_gguf(tmp_path / "own", to=out, kind=kind)
    found = load_file(f"{model_folder(str(out))}/model.safetensors")
    for key, stored in load_file(tmp_path / "own" / "model.safetensors").items():
        assert torch.equal(
            found[key].float(), stored.bfloat16().float() if kind == "BF16" and stored.dim() > 1 else stored
        )


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_values_that_are_not_finite_are_refused(value, tmp_path):
    save(tmp_path / "own", family="qwen3")
    changed(tmp_path / "own", name="model.norm.weight", value=value)
    with pytest.raises(ValueError, match="output_norm.weight has values that are not finite"):
        export_gguf(tmp_path / "own", to=tmp_path / "model.gguf", kind="F32")


END = {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}
TEXT_PIECE = {"Sequence": {"id": "A", "type_id": 0}}


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("normalizer", {"type": "Lowercase"}, "its normalizer Lowercase changes texts"),
        ("normalizer", {"type": "NFC"}, "its normalizer NFC changes texts"),
        (
            "normalizer",
            {"type": "Sequence", "normalizers": [{"type": "NFKC"}, {"type": "StripAccents"}]},
            "its normalizer NFKC, StripAccents changes texts",
        ),
        ("ignore_merges", True, "ignore_merges=true does not belong to"),
        ("end_of_word_suffix", "</w>", "end_of_word_suffix=</w>"),
        ("lstrip", True, "lstrip of the token '<|"),
        ("post_processor", [TEXT_PIECE, END], "puts the tokens .* in front of a text and .* after it"),
    ],
)
def test_parts_of_a_tokenizer_that_the_format_cannot_hold_are_refused(part, value, message, tmp_path):
    save(tmp_path / "own", family="llama")
    file = tmp_path / "own" / "tokenizer.json"
    stored = json.loads(file.read_text())
    if part == "lstrip":
        stored["added_tokens"][0]["lstrip"] = value
    elif part == "post_processor":
        number = next(token["id"] for token in stored["added_tokens"] if token["content"] == "<|im_start|>")
        special = {"<|im_start|>": {"id": "<|im_start|>", "ids": [number], "tokens": ["<|im_start|>"]}}
        stored[part] = {"type": "TemplateProcessing", "single": value, "pair": value, "special_tokens": special}
    else:
        (stored if part == "normalizer" else stored["model"])[part] = value
    file.write_text(json.dumps(stored))
    with pytest.raises(ValueError, match=message):
        export_gguf(tmp_path / "own", to=tmp_path / "model.gguf")
    assert not list(tmp_path.glob("model.gguf*"))


@pytest.mark.parametrize(
    ("family", "more", "names", "message"),
    [
        ("qwen3", {"attention_bias": True}, (), "llama.cpp's qwen3 has no place for blk.0.attn_k.bias"),
        ("gemma", {"attention_bias": True}, (), "llama.cpp's gemma has no place for blk.0.attn_k.bias"),
        ("gemma", {"tie_word_embeddings": False}, (), "llama.cpp's gemma .* has no place for output.weight"),
        ("llama", {"mlp_bias": True}, (), "llama.cpp's llama "),
        ("llama", {}, ("lm_head.bias",), "llama.cpp's llama has no place for output.bias"),
        ("llama", {"final_logit_softcapping": 30.0}, (), "final_logit_softcapping=30.0 is not written"),
        ("llama", {"vocab_size": 321}, (), r"has 320 rows and config.json vocab_size=321"),
    ],
)
def test_parts_of_a_model_that_the_format_cannot_hold_are_refused(family, more, names, message, tmp_path):
    built = {key: value for key, value in more.items() if key.endswith(("bias", "embeddings"))}
    build(family, **WIDE | built).save_pretrained(tmp_path / "own")
    config = tmp_path / "own" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | more))
    weights = load_file(tmp_path / "own" / "model.safetensors") | {name: torch.zeros(320) for name in names}
    save_file(weights, tmp_path / "own" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=message):
        export_gguf(tmp_path / "own", to=tmp_path / "model.gguf")
    assert not list(tmp_path.glob("model.gguf*"))


def test_a_head_that_differs_from_its_tied_embedding_is_refused(tmp_path):
    save(tmp_path / "own", family="llama")
    config = tmp_path / "own" / "config.json"
    for tied, lacks, message in ((True, False, "lm_head.weight differs"), (False, True, "there is no lm_head.weight")):
        config.write_text(json.dumps(json.loads(config.read_text()) | {"tie_word_embeddings": tied}))
        weights = load_file(tmp_path / "own" / "model.safetensors")
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + 1
        if lacks:
            del weights["lm_head.weight"]
        save_file(weights, tmp_path / "own" / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ValueError, match=message):
            export_gguf(tmp_path / "own", to=tmp_path / "model.gguf")


def test_a_file_that_the_disk_changed_gets_no_name(tmp_path, monkeypatch):
    save(tmp_path / "own", family="llama")
    write = gguf.GGUFWriter.write_tensor_data
    count = []

    def damaged(self, tensor, **more):
        count.append(tensor)
        write(self, tensor + 1 if len(count) == 3 else tensor, **more)

    monkeypatch.setattr(gguf.GGUFWriter, "write_tensor_data", damaged)
    with pytest.raises(CheckpointError, match=r"model.gguf.*: blk\..* differs from its value before the write"):
        export_gguf(tmp_path / "own", to=tmp_path / "model.gguf")
    monkeypatch.setattr(gguf.GGUFWriter, "write_tensor_data", write)
    add = gguf.GGUFWriter.add_key_value

    def other(self, key, value, *kinds):
        add(self, key, "another" if key == "general.name" else value, *kinds)

    monkeypatch.setattr(gguf.GGUFWriter, "add_key_value", other)
    with pytest.raises(CheckpointError, match="general.name differs from its value before the write"):
        export_gguf(tmp_path / "own", to=tmp_path / "model.gguf")
    assert not list(tmp_path.glob("model.gguf*"))


def test_two_processes_may_unpack_one_file(tmp_path, monkeypatch):
    """The later one takes the folder of the other, which stays as it is. A read-only file system is an error in words."""
    save(tmp_path / "own", family="llama")
    file = tmp_path / "model.gguf"
    export_gguf(tmp_path / "own", to=file)
    inodes = []

    def slow(source, *, to):
        monkeypatch.setattr(reading, "unpack", unpack)
        inodes.append(Path(model_folder(str(source)), "model.safetensors").stat().st_ino)
        unpack(source, to=to)

    monkeypatch.setattr(reading, "unpack", slow)
    assert Path(model_folder(str(file)), "model.safetensors").stat().st_ino == inodes[0]
    assert not list(tmp_path.glob("*.tmp-*"))

    def refuse(source, *, to):
        raise OSError(errno.EROFS, "Read-only file system")

    os.utime(file, (1, 1))
    monkeypatch.setattr(reading, "unpack", refuse)
    with pytest.raises(ValueError, match="is unpacked into the folder next to it, and .* cannot be written"):
        model_folder(str(file))


def test_what_is_not_read_is_refused(tmp_path):
    save(tmp_path / "own", family="llama")
    export_gguf(tmp_path / "own", to=tmp_path / "model.gguf")
    cut = tmp_path / "cut.gguf"
    cut.write_bytes((tmp_path / "model.gguf").read_bytes()[:2000])
    with pytest.raises(ValueError, match="cut.gguf: is not a complete GGUF file"):
        unpack(cut, to=tmp_path / "back")
    other = tmp_path / "other.gguf"
    writer = gguf.GGUFWriter(other, "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match="general.architecture=mamba is not read: llama, qwen2, qwen3, gemma are"):
        unpack(other, to=tmp_path / "back")
    options = {"output_dir": tmp_path / "run", "machine": Machine(gpus=0, cores=1)}
    with pytest.raises(ConfigError, match=f"inference.model={other}: .*mamba is not read"):
        compose("task=serve", f"inference.model={other}", **options)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cut.gguf", "model.gguf", "other.gguf", "own"]
