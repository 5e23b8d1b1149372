"""`data.tokenizer` and related keys: derived values, refusals and records."""

import json

import pyarrow
import pyarrow.parquet
import pytest

from tests.config.test_config import composed, faults
from ztk.config import compose, from_yaml, reads_documents, save, text_policy, to_yaml
from ztk.config.text import prepare_text
from ztk.data import SubwordTokenizer, open_tokens


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("run") / "tokenizer"
    SubwordTokenizer.train(["some text, some more text"] * 9, vocab_size=260, folder=folder)
    return str(folder)


@pytest.fixture
def lines(tmp_path) -> str:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "a.txt").write_text("a")
    return str(tmp_path)


def test_the_default_reads_bytes_and_keeps_every_vocabulary():
    config = composed()
    assert (config.data.tokenizer, config.data.vocab_size, config.data.field) == ("bytes", None, None)
    assert not reads_documents(config)
    assert composed("model=1b").model.vocab_size == 32_000


def test_the_vocabulary_follows_unless_it_is_given(tokenizer):
    for model in ("tiny", "1b"):
        assert composed("data.tokenizer=train", f"model={model}").model.vocab_size == 4096
        assert composed(f"data.tokenizer={tokenizer}", f"model={model}").model.vocab_size == 260
    config = composed("data.tokenizer=train", "data.vocab_size=512", "model.vocab_size=1024")
    assert (config.model.vocab_size, config.data.vocab_size) == (1024, 512)
    assert faults("data.tokenizer=train", "model.vocab_size=256") == (
        "model.vocab_size=256: data.tokenizer=train has 4096 tokens; leave model.vocab_size out, or use data.vocab_size=256",
    )
    [fault] = faults(f"data.tokenizer={tokenizer}", "model.vocab_size=259")
    assert "has 260 tokens; leave model.vocab_size out, or use another data.tokenizer" in fault


def test_a_tokenizer_that_cannot_be_used_is_refused(tmp_path, tokenizer):
    [fault] = faults(f"data.tokenizer={tmp_path}")
    assert "there is no tokenizer.json" in fault
    endless = tmp_path / "endless"
    SubwordTokenizer.open(tokenizer).save(endless)
    (endless / "tokenizer_config.json").unlink()
    [fault] = faults(f"data.tokenizer={endless}")
    assert "has no end token" in fault and "tokenizer_config.json" in fault
    [fault] = faults("data.tokenizer=train", "data.vocab_size=100")
    assert fault.startswith("data.vocab_size=100")


def test_the_vocabulary_of_a_model_of_transformers_stays(tmp_path, tokenizer):
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    for size in (300, 259):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": size} | sizes))
        words = ("model=hf", f"model.path={tmp_path}", "model.init=random", f"data.tokenizer={tokenizer}")
        if size == 300:
            assert composed(*words).model.vocab_size == 300
        else:
            [fault] = faults(*words)
            assert f"has 260 tokens, and {tmp_path} 259: use another data.tokenizer" in fault


def test_what_has_no_effect_is_refused_and_not_recorded(lines):
    for words, key in [
        (("data.vocab_size=512",), "data.vocab_size"),
        (("data.field=body",), "data.field"),
        ((f"data.path={lines}/a.txt", "data.on_error=skip"), "data.on_error"),
        (("data=synthetic", "data.tokenizer=train"), "data.tokenizer"),
        (("data.mixture=[1]",), "data.mixture"),
    ]:
        assert any(fault.startswith(key) and "no effect" in fault for fault in faults(*words)), words
    assert composed(f"data.path={lines}/a.txt").data.field is None
    config = composed(f"data.path={lines}")  # a.jsonl is among its files
    assert reads_documents(config) and config.data.field == "text" and from_yaml(to_yaml(config)) == config


def test_a_mixture_has_a_weight_for_each_entry(lines):
    paths = f"data.path=[{lines}/a.jsonl,{lines}/a.txt]"
    config = composed(paths, "data.mixture=[3,1]", "data.on_error=skip")
    policy = text_policy(config)
    assert policy.weights == (3.0, 1.0) and policy.read.skips and policy.read.share == 0.05
    assert from_yaml(to_yaml(config)) == config
    [fault] = faults(paths, "data.mixture=[1]")
    assert "1 weights for 2 entries of data.path" in fault
    [fault] = faults(paths, "data.mixture=[1,-1]")
    assert "must be positive" in fault


def test_bytes_do_not_go_on_from_tokens(tmp_path, tokenizer):
    run = tmp_path / "run"
    SubwordTokenizer.open(tokenizer).save(run / "tokenizer")
    save(composed(), path=run / "config.yaml")
    (run / "checkpoints" / "step-3").mkdir(parents=True)
    for path in (run, run / "checkpoints" / "step-3"):
        [fault] = faults(f"checkpoint.resume={path}")
        assert f"use data.tokenizer={run / 'tokenizer'}" in fault
    assert composed(f"checkpoint.resume={run}", f"data.tokenizer={run}/tokenizer").model.vocab_size == 260
    [fault] = faults("task=sft", "data=chat", f"warm_start.path={run}")
    assert "task=sft with data=chat reads bytes" in fault and "data.tokenizer=bytes" in fault


def test_relative_folders_are_recorded_as_absolute(tokenizer, monkeypatch, tmp_path):
    monkeypatch.chdir(tokenizer)
    config = compose("data.tokenizer=../tokenizer", output_dir=tmp_path)
    assert config.data.tokenizer == tokenizer


def test_records_take_the_tokenizer_of_the_model_that_they_train(tmp_path, tokenizer):
    run, records = tmp_path / "run", tmp_path / "a.jsonl"
    SubwordTokenizer.open(tokenizer).save(run / "tokenizer")
    (run / "config.yaml").write_text("")
    (run / "checkpoints" / "step-000001").mkdir(parents=True)
    records.write_text('{"prompt": "a", "answer": "b\\n"}\n{"prompt": "a", "answer": "c"}\n')
    words = ("task=sft", "data=chat", f"data.path={records}")
    config = composed(*words, f"data.tokenizer={tokenizer}", f"warm_start.path={run}")
    assert (config.data.stop, config.model.vocab_size) == (None, 260)
    assert from_yaml(to_yaml(config)) == config
    [fault] = faults(*words)
    assert "contains the byte 10" in fault
    [fault] = faults(*words, "data.stop=3", f"warm_start.path={run}")
    assert f"use data.tokenizer={run / 'tokenizer'}" in fault
    [fault] = faults(*words, "data.tokenizer=train")
    assert "use the tokenizer of the model that they train" in fault
    [fault] = faults(*words, "data.stop=3", f"data.tokenizer={tokenizer}")
    assert "a tokenizer's end token ends answers" in fault
    other = SubwordTokenizer.train(["another text " * 9], vocab_size=259, folder=tmp_path / "other").folder
    [fault] = faults(*words, f"data.tokenizer={other}", f"warm_start.path={run}")
    assert f"has other tokens; use data.tokenizer={run / 'tokenizer'}" in fault


def test_documents_are_kept_apart_where_there_are_some(lines):
    read = ("data=files", f"data.path={lines}/a.jsonl", "data.packing=documents")
    assert text_policy(composed(*read)).keeps_apart
    assert not text_policy(composed(*read[:2])).keeps_apart
    assert composed(*read[:2]).data.packing == "concatenate" and composed().data.packing is None
    assert (
        "data.packing=documents has no effect here, only with task=pretrain with documents"
        in faults("data.packing=documents")[0]
    )
    assert composed(*read, "topology=cp2").topology.context == 2
    assert composed(*read, "topology=sp2", "recompute=selective").topology.sequence == 2


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", b'{"text": "a"}\n{broken\n', "a.jsonl, line 2: not JSON"),
        ("a.jsonl", b"", "a.jsonl: the file is empty; leave it out"),
        ("a.txt", b"fine\nb\xe4d\n", "a.txt, line 2: is not UTF-8"),
        ("a.parquet", None, "a.parquet: has no column 'text' .its columns: body.; use data.field=NAME"),
    ],
)
def test_bad_input_is_refused_before_ranks_start_or_skipped_and_counted(
    tmp_path, monkeypatch, tokenizer, name, content, said
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "good.jsonl").write_text('{"text": "some text"}\n{"text": "some more text"}\n')
    if content is None:
        pyarrow.parquet.write_table(pyarrow.table({"body": ["a"]}), tmp_path / name)
    else:
        (tmp_path / name).write_bytes(content)
    paths = f"data.path=[{tmp_path}/good.jsonl,{tmp_path}/{name}]"
    words = ("data=files", paths, f"data.tokenizer={tokenizer}")
    with pytest.raises(ValueError, match=said):
        prepare_text(composed(*words), show=print)
    skipping = composed(*words, "data.on_error=skip")
    prepare_text(skipping, show=print)
    assert open_tokens(text_policy(skipping)).skipped == 1
