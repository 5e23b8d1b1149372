"""Records of files: parsed records, and the errors of bad ones."""

import json
import math

import pytest

from ztk.data import SubwordTokenizer
from ztk.rl.align import Encoding, RecordFormat, read_examples, read_prompts


def read(tmp_path, *records, kind="preferences", seq_len=200, stop=10):
    file = tmp_path / "records.jsonl"
    file.write_text("".join(f"{record if isinstance(record, str) else json.dumps(record)}\n" for record in records))
    return read_examples([str(file)], record_format=RecordFormat(kind), seq_len=seq_len, encoding=Encoding(stop=stop))


def text_of(text) -> tuple[str, str]:
    """The full text, and the trained part of it."""
    return bytes(text.tokens.tolist()).decode(), bytes(text.tokens[text.answer].tolist()).decode()


def test_a_preference(tmp_path):
    first, second = read(
        tmp_path,
        {"prompt": "2+2=", "chosen": "4", "rejected": "5"},
        {"prompt": "a", "chosen": "\u00e4", "rejected": "", "margin": 2},
    )
    assert [text_of(text) for text in first.texts] == [("2+2=4\n", "4\n"), ("2+2=5\n", "5\n")]
    assert math.isnan(first.margin)
    assert second.margin == 2.0
    assert [text_of(text) for text in second.texts] == [("a\u00e4\n", "\u00e4\n"), ("a\n", "\n")]


def test_a_preference_of_messages(tmp_path):
    prompt = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "ho"},
        {"role": "user", "content": "?"},
    ]
    (example,) = read(
        tmp_path, {"prompt": prompt, "chosen": [{"role": "assistant", "content": "yes"}], "rejected": "no"}, stop=3
    )
    start = "<|user|>\nhi\n<|assistant|>\nho\x03<|user|>\n?\n<|assistant|>\n"
    assert [text_of(text) for text in example.texts] == [(f"{start}yes\x03", "yes\x03"), (f"{start}no\x03", "no\x03")]


def test_chats(tmp_path):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "3+3?"},
        {"role": "assistant", "content": "6"},
    ]
    first, second = read(tmp_path, {"messages": messages}, {"prompt": "2+2=", "answer": "4"}, kind="chat")
    all_of_it = "<|system|>\nBe brief.\n<|user|>\n2+2?\n<|assistant|>\n4\n<|user|>\n3+3?\n<|assistant|>\n6\n"
    assert text_of(first.texts[0]) == (all_of_it, "4\n6\n")
    assert text_of(second.texts[0]) == ("2+2=4\n", "4\n")


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ("{", "line 2: not JSON"),
        ("[1]", "line 2: must be a JSON object"),
        ({"chosen": "a", "rejected": "b"}, 'have no common beginning, which would be the prompt: give a "prompt"'),
        (
            {"chosen": "a", "rejected": ["b"]},
            'its fields are chosen, rejected; .*, and it lacks "prompt": use data.fields={prompt: NAME}',
        ),
        ({"prompt": "", "chosen": "a", "rejected": "b"}, "\"prompt\": '' must be a text of a character or more"),
        ({"prompt": "p", "chosen": "a", "worse": "b"}, 'it lacks "rejected": use data.fields={rejected: worse}'),
        ({"prompt": "p", "chosen": "a", "rejected": "a"}, "are equal"),
        (
            {"prompt": "p", "chosen": "a", "rejected": "b", "margin": "large"},
            "\"margin\": 'large' must be a finite number",
        ),
        ({"prompt": "p", "chosen": "a\nb", "rejected": "b"}, '"chosen" contains the byte 10.*use data.stop=3'),
        (
            {"prompt": "p", "chosen": "a" * 300, "rejected": "b"},
            "302 tokens, and data.seq_len=200: .* use data.seq_len=302",
        ),
        (
            {"prompt": [{"role": "bot", "content": "x"}], "chosen": "a", "rejected": "b"},
            "a role of system, user, assistant",
        ),
    ],
)
def test_a_bad_preference_is_named(tmp_path, record, says):
    with pytest.raises(ValueError, match=rf"(?s)records.jsonl, line 2: .*{says.removeprefix('line 2: ')}"):
        read(tmp_path, {"prompt": "p", "chosen": "a", "rejected": "b"}, record)


def test_a_chat_without_an_answer_is_named(tmp_path):
    with pytest.raises(ValueError, match='line 1: "messages" has no message of the role "assistant"'):
        read(tmp_path, {"messages": [{"role": "user", "content": "hi"}]}, kind="chat")
    with pytest.raises(ValueError, match="line 1: None must be a list of messages"):
        read(tmp_path, {"messages": None}, kind="chat")


def test_all_bad_lines_up_to_ten_are_named(tmp_path):
    with pytest.raises(ValueError, match="(?s)line 1: .*line 2: .*line 10: .*later lines were not read"):
        read(tmp_path, *["{"] * 20)
    with pytest.raises(ValueError, match="there are no records"):
        read(tmp_path, "")


def test_an_error_of_several_lines_is_written_once(tmp_path):
    with pytest.raises(ValueError) as caught:
        read(tmp_path, *[{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "a"}]}] * 3)
    first, second, third = str(caught.value).splitlines()
    assert "line 1: its fields are messages" in first and first.endswith("task=sft learns from a conversation")
    assert "line 2: the same as" in second and "line 3: the same as" in third and len(second) < len(first)


def test_missing_files_are_named(tmp_path):
    with pytest.raises(ValueError, match="data.path=none.jsonl: no such file"):
        read_examples(["none.jsonl"], record_format=RecordFormat.chat, seq_len=8, encoding=Encoding())


def test_a_tokenizer_ends_answers_with_its_end_token(tmp_path):
    tokenizer = SubwordTokenizer.train(["user assistant 2+2 four\n" * 9], vocab_size=264, folder=tmp_path / "tokenizer")
    lines = [
        {"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "fo\nur"}]},
        {"prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "answer": "c"},
    ]
    file = tmp_path / "records.jsonl"
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    first, second = (
        example.texts[0]
        for example in read_examples(
            [str(file)], record_format=RecordFormat.chat, seq_len=99, encoding=Encoding(tokenizer=tokenizer)
        )
    )
    answer = [*tokenizer.encode("fo\nur").tolist(), tokenizer.end]
    assert first.tokens[first.answer].tolist() == answer and first.tokens[-len(answer) :].tolist() == answer
    assert max(first.tokens.tolist()) > 255 and len(first) < len("<|user|>\n2+2?\n<|assistant|>\nfo\nur")
    assert tokenizer.decode(first.tokens) == "<|user|>\n2+2?\n<|assistant|>\nfo\nur"
    assert second.tokens.tolist().count(tokenizer.end) == 2  # also behind an answer that is not learnt
    assert second.tokens[second.answer].tolist() == [*tokenizer.encode("c").tolist(), tokenizer.end]


@pytest.mark.parametrize("kind", ["chat", "prompts"])
def test_lines_end_at_line_feeds_and_bad_ones_are_named_together(tmp_path, kind):
    """Half of a surrogate pair, JSON that is too deep and bytes that are no UTF-8 are faults of their lines, in all files at once."""

    def read(*paths):
        if kind == "prompts":
            return read_prompts([str(path) for path in paths], encoding=Encoding())
        return read_examples(
            [str(path) for path in paths], record_format=RecordFormat.chat, seq_len=99, encoding=Encoding()
        )

    good, bad, other = (tmp_path / f"{name}.jsonl" for name in ("good", "bad", "other"))
    good.write_text('{"prompt": "a\u2028b\u0085c", "answer": "d"}\n', encoding="utf-8")
    (record,) = read(good)
    tokens = record.tokens if kind == "prompts" else record.texts[0].tokens.tolist()
    assert bytes(tokens).decode().startswith("a\u2028b\u0085c")
    bad.write_bytes(
        b'{"prompt": "\\ud83d", "answer": "d"}\n' + b"[" * 100_000 + b'\n{"prompt": "\xff", "answer": "d"}\n'
    )
    other.write_text('{"prompt": 1}\n')
    with pytest.raises(ValueError) as caught:
        read(bad, good, other)
    expected = ("line 1: is not UTF-8 (surrogates", "line 2: its JSON is nested too", "line 3: is not UTF-8 (byte 0xff")
    lines = str(caught.value).split("\n")
    assert [f"data.path={bad}, {said}" in line for said, line in zip(expected, lines, strict=False)] == [True] * 3
    assert len(lines) == 4 and lines[3].startswith(f"data.path={other}, line 1: ")
