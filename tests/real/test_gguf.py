"""SmolLM2-135M-Instruct out to GGUF and in again, and as transformers reads it."""

import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file

from ztk.checkpoint.gguf.reading import model_folder
from ztk.checkpoint.gguf.writing import export_gguf

pytestmark = pytest.mark.real


def test_transformers_reads_the_written_file_as_ztk_does(folder, tmp_path):
    """Q8_0: its widened weights equal the unpacked folder's."""
    export_gguf(folder, to=tmp_path / "model.gguf", kind="Q8_0")
    found = load_file(f"{model_folder(str(tmp_path / 'model.gguf'))}/model.safetensors")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32)
    expected = dict(model.named_parameters())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_the_tokenizer_comes_back(folder, tmp_path):
    """Token by token over English, digits, other scripts and special tokens; template and end tokens, too."""
    export_gguf(folder, to=tmp_path / "model.gguf", kind="Q4_1")
    back = model_folder(str(tmp_path / "model.gguf"))
    own, other = (transformers.AutoTokenizer.from_pretrained(place) for place in (folder, back))
    text = "Hello, it's 12345 and 3.14!\n\n\u00fcber \u4f60\u597d <|im_start|>user\nHi  there<|im_end|>"
    assert own.encode(text) == other.encode(text)
    assert (own.chat_template, own.eos_token) == (other.chat_template, other.eos_token)
    shutil.rmtree(back)
