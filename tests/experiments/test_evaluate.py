"""`task=eval` over a folder of transformers and over a run of ztk; the numbers are compared with transformers' own logits."""

import json
import math

import pytest
import tokenizers
import torch
import transformers

from tests.inference.models import VOCABULARY, build
from tests.inference.test_scoring import PER_TOKEN
from ztk.config import Machine, compose
from ztk.experiments.evaluate import main
from ztk.experiments.evaluation_files import read_questions, read_texts
from ztk.report.folder import PACKED
from ztk.serve.models import _first_of, open_model

QUESTIONS = [
    {"question": "AB?", "choices": ["CD", "E", "FGH"], "answer": 1, "id": 7},
    {"prompt": "AB", "choices": ["C", "DD"], "answer": 0},
    {"prompt": "", "choices": ["CA", "D"], "answer": 1},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Llama whose tokenizer has printable characters, puts <s> before a text, and writes all others as <unk>."""
    return write_folder(build("llama"), path=tmp_path_factory.mktemp("llama"))


def write_folder(model, *, path):
    """`model`, of `VOCABULARY` tokens, with this tokenizer."""
    model.save_pretrained(path)
    letters = {chr(33 + number): number for number in range(VOCABULARY - 3)} | {"<s>": 93, "</s>": 94, "<unk>": 95}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(letters, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 93)])
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(path)
    return path


def evaluate(folder, out, *words):
    main(compose("task=eval", f"inference.model={folder}", *words, output_dir=out, machine=Machine(gpus=0, cores=2)))
    return json.loads((out / "eval.json").read_text())["files"], json.loads((out / "summary.json").read_text())


def expected(model, tokens, *, scored):
    """log p of the tokens from `scored` on, in nats."""
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0].double().log_softmax(-1)
    return sum(float(logits[place - 1, tokens[place]]) for place in range(scored, len(tokens)))


def test_a_folder_of_transformers_is_scored(folder, tmp_path, capsys):
    texts, questions = tmp_path / "t.jsonl", tmp_path / "q.jsonl"
    documents = ["ABCé", "x" * 40]
    texts.write_text("".join(json.dumps({"body": text}) + "\n" for text in documents))
    questions.write_text("\n\n".join(json.dumps(line) for line in QUESTIONS) + "\n")
    words = (f"eval.path={texts}", "eval.field=body", f"eval.choices={questions}", "eval.seq_len=64")
    found, summary = evaluate(folder, tmp_path / "out", *words, "eval.record=true")
    opened = open_model(str(folder))
    assert (opened.begin, opened.first, opened.unknown) == ((93,), 93, 95)
    sums = [expected(opened.module, opened.tokenizer.encode(text), scored=1) for text in documents]
    [text, choices] = found
    assert (text["documents"], text["bytes"], text["tokens"], text["unknown_tokens"]) == (2, 45, 44, 1)
    assert abs(text["bits_per_byte"] - -sum(sums) / math.log(2) / 45) < PER_TOKEN * 44 / 45 / math.log(2)
    assert summary["bits_per_byte"] == text["bits_per_byte"] and summary["status"] == "done"
    lines = [json.loads(line) for line in (tmp_path / "out" / "examples.jsonl").read_text().splitlines()]
    assert sum(line["bits"] for line in lines[:2]) == pytest.approx(text["bits"], rel=1e-12)
    right = right_per_byte = 0
    for number, (line, question) in enumerate(zip(lines[2:], QUESTIONS, strict=True)):
        named = "question" in question
        prompt = f"Question: {question['question']}\nAnswer:" if named else question["prompt"]
        before, values = opened.tokenizer.encode(prompt), []
        for choice in question["choices"]:
            tokens = opened.tokenizer.encode(prompt + " " * named + choice)
            values.append(expected(opened.module, tokens, scored=len(before)))
        assert line["line"] == 2 * number + 1
        for ours, theirs in zip(line["log_likelihoods"], values, strict=True):
            assert abs(ours - theirs) < 4 * PER_TOKEN
        right += values.index(max(values)) == question["answer"]
        per_byte = [value / len(choice) for value, choice in zip(values, question["choices"], strict=True)]
        right_per_byte += per_byte.index(max(per_byte)) == question["answer"]
    assert choices["accuracy"] == right / 3 and choices["accuracy_per_byte"] == right_per_byte / 3
    rate = right / 3
    assert choices["accuracy_stderr"] == pytest.approx(math.sqrt(rate * (1 - rate) / 3))
    assert choices["chance"] == pytest.approx((1 / 3 + 1 / 2 + 1 / 2) / 3)
    printed = capsys.readouterr().out
    assert f"{text['bits_per_byte']:.4f}" in printed and "1 of the tokens are unknown" in printed
    alone, _ = evaluate(folder, tmp_path / "alone", *words, "inference.max_sequences=1", "inference.max_step_tokens=7")
    assert alone == found


def test_lengths_come_from_the_model(folder, tmp_path):
    text, questions = tmp_path / "t.txt", tmp_path / "q.jsonl"
    text.write_text("AB" * 40)
    with pytest.raises(ValueError, match="eval.seq_len=257: the model takes 256 tokens; use eval.seq_len=256"):
        evaluate(folder, tmp_path, f"eval.path={text}", "eval.seq_len=257")
    with pytest.raises(ValueError, match="eval.stride=256: must be below the 256 tokens"):
        evaluate(folder, tmp_path, f"eval.path={text}", "eval.stride=256")
    questions.write_text(json.dumps({"prompt": "A" * 20, "choices": ["B", "C"], "answer": 0}) + "\n")
    found, _ = evaluate(folder, tmp_path, f"eval.choices={questions}", "eval.seq_len=8")
    assert found[0]["cut_prompts"] == 1
    questions.write_text(json.dumps({"prompt": "A", "choices": ["B" * 8, "C"], "answer": 0}) + "\n")
    with pytest.raises(ValueError, match=r"q.jsonl, line 1: a choice has 8 tokens"):
        evaluate(folder, tmp_path, f"eval.choices={questions}", "eval.seq_len=8")


@pytest.mark.parametrize(
    "line, message",
    [
        ("{", "line 2: "),
        ("[]", "line 2: is no JSON object"),
        ('{"choices": ["a", "b"], "answer": 0}', 'line 2: has neither "question" nor "prompt"'),
        ('{"prompt": "x", "question": "x", "choices": ["a", "b"], "answer": 0}', 'has both "question" and "prompt"'),
        ('{"prompt": 3, "choices": ["a", "b"], "answer": 0}', '"prompt" is no text'),
        ('{"prompt": "x", "choices": ["a"], "answer": 0}', '"choices" is no list of two texts'),
        ('{"prompt": "x", "choices": ["a", ""], "answer": 0}', '"choices" is no list of two texts'),
        ('{"prompt": "x", "choices": ["a", "b"], "answer": 2}', '"answer" is 2 and must be .* from 0 to 1'),
        ('{"prompt": "x", "choices": ["a", "b"], "answer": true}', '"answer" is True'),
        ('{"prompt": "x", "choices": ["a", "b"]}', '"answer" is None'),
    ],
)
def test_a_line_that_is_no_question_is_named(line, message, tmp_path):
    path = tmp_path / "q.jsonl"
    path.write_text('{"prompt": "x", "choices": ["a", "b"], "answer": 1}\n' + line + "\n")
    with pytest.raises(ValueError, match=message) as caught:
        read_questions(str(path))
    assert f"eval.choices={path}, line 2" in str(caught.value)


def test_files_are_read_before_a_model_is_loaded(tmp_path):
    path = tmp_path / "q.jsonl"
    path.write_text("{")
    with pytest.raises(ValueError, match="q.jsonl, line 1"):
        evaluate(tmp_path, tmp_path, f"eval.choices={path}")  # the folder has no model


def test_an_empty_file_has_no_question(tmp_path):
    (tmp_path / "q.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="has no question"):
        read_questions(str(tmp_path / "q.jsonl"))


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("t.jsonl", b'{"text": "a"}\n{"body": "b"}\n', r"t.jsonl, line 2: has no field 'text'.*use eval.field=NAME$"),
        ("t.jsonl", b'{"text": "a"}\n{\n', r"t.jsonl, line 2: not JSON"),
        ("t.txt", b"a\n\xff\n", r"t.txt, line 2: is not UTF-8"),
        ("t.txt", b"", r"t.txt: the file is empty"),
    ],
)
def test_a_bad_text_is_named_by_the_keys_of_this_task(name, content, message, tmp_path):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        read_texts(str(path), field="text")
    assert str(caught.value).startswith(f"eval.path={path}") and "data." not in str(caught.value)


def test_a_text_file_is_one_document(tmp_path, monkeypatch):
    monkeypatch.setattr("ztk.data.documents.PIECE_BYTES", 8)
    text = "a line\n" * 10
    (tmp_path / "t.txt").write_text(text)
    assert read_texts(str(tmp_path / "t.txt"), field="text") == [text]


@pytest.mark.parametrize(
    "words, first",
    [
        (("data=stdlib",), ord("\n")),
        (("data=files", "data.path={folder}/t.jsonl"), 0),
        (("task=sft", "data.stop=3"), 3),
    ],
)
def test_a_text_of_bytes_begins_after_the_trained_first_token(words, first, tmp_path):
    (tmp_path / "t.jsonl").write_text('{"text": "a"}\n')
    words = [word.format(folder=tmp_path) for word in words]
    assert _first_of(compose(*words, output_dir=tmp_path, machine=Machine(gpus=0, cores=2))) == first


def test_streamed_layers_score_the_same_with_a_cache_for_one_window(folder, tmp_path, capsys):
    text = tmp_path / "t.txt"
    text.write_text("ABC" * 40)
    words = (f"eval.path={text}", "eval.seq_len=64")
    found, _ = evaluate(folder, tmp_path / "memory", *words)
    streamed, _ = evaluate(folder, tmp_path / "disk", *words, "offload=nvme")
    assert found == streamed
    assert "sequences of up to 64 tokens" in capsys.readouterr().out
    assert not (tmp_path / "disk" / PACKED).exists()
