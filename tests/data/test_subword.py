"""Tokenizers from folders and trained ones: round trips, the end token, transformers' files, refusals."""

import json
import string

import pytest
import torch
import transformers

from ztk.data.subword import END_TEXT, SubwordTokenizer

TEXTS = [
    "def f(x):\n    return x + 1\n" * 20,
    "def g(y):\n    return f(y) * 2\n" * 20,
    "na\u00efve \u2211 \U0001f600",
    string.printable,
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> SubwordTokenizer:
    return SubwordTokenizer.train(TEXTS, vocab_size=300, folder=tmp_path_factory.mktemp("tokenizer"))


@pytest.mark.parametrize("text", [*TEXTS, "", " \t\r\n x ", "other \u4e2d\u6587", END_TEXT])
def test_every_text_comes_back(trained, text):
    tokens = trained.encode(text)
    assert tokens.dtype == torch.int64
    assert trained.decode(tokens) == text
    assert trained.end not in tokens.tolist()  # also where a text spells it
    assert trained.encode_batch([text, "x"])[0] == tokens.tolist()


def test_merges_are_learnt_and_the_size_is_kept(trained):
    assert trained.vocab_size == 300
    assert len(trained.encode(TEXTS[0])) < len(TEXTS[0]) / 2
    assert len(trained.encode("\u4e2d")) == 3  # bytes that no merge has


def test_the_same_texts_give_the_same_tokenizer(trained, tmp_path):
    again = SubwordTokenizer.train(TEXTS, vocab_size=300, folder=tmp_path / "again")
    other = SubwordTokenizer.train(TEXTS[:1], vocab_size=264, folder=tmp_path / "other")
    assert again.digest == trained.digest != other.digest


def test_a_saved_tokenizer_is_the_same_and_transformers_reads_it(trained, tmp_path):
    trained.save(tmp_path / "copy")
    assert SubwordTokenizer.open(tmp_path / "copy").digest == trained.digest
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "copy", local_files_only=True)
    assert theirs.eos_token_id == trained.end
    assert theirs.encode(TEXTS[1], add_special_tokens=False) == trained.encode(TEXTS[1]).tolist()


def test_refusals(trained, tmp_path):
    with pytest.raises(ValueError, match=r"data\.vocab_size=256: .* 257; use data\.vocab_size=4096"):
        SubwordTokenizer.train(TEXTS, vocab_size=256, folder=tmp_path / "x")
    with pytest.raises(
        ValueError, match=r"data\.vocab_size=9999: the training text gives \d+ tokens; use data\.vocab_size=\d+"
    ):
        SubwordTokenizer.train(TEXTS, vocab_size=9999, folder=tmp_path / "x")
    with pytest.raises(ValueError, match=r"there is no tokenizer\.json"):
        SubwordTokenizer.open(tmp_path / "nothing")
    trained.save(tmp_path / "endless")
    settings = tmp_path / "endless" / "tokenizer_config.json"
    settings.write_text("{}")
    with pytest.raises(ValueError, match=r'has no end token \(no eos_token is named\).*put "eos_token"'):
        SubwordTokenizer.open(tmp_path / "endless")
    settings.write_text(json.dumps({"eos_token": {"content": "</s>"}}))
    with pytest.raises(ValueError, match=r"'</s>' is not in the vocabulary"):
        SubwordTokenizer.open(tmp_path / "endless")
    (tmp_path / "endless" / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer\.json cannot be read"):
        SubwordTokenizer.open(tmp_path / "endless")


def test_without_the_library(trained, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    with pytest.raises(ValueError, match=r'pip install "ztk\[data\]"'):
        SubwordTokenizer.open(trained.folder)
