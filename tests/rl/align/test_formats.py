"""Records of known data sets: every form and every kind of file gives the tokens of ztk's own form."""

import gzip
import importlib
import json
import math
from functools import partial

import pytest

from tests.rl.align.chats import save_tokenizer, train_tokenizer
from tests.rl.align.test_records import text_of
from ztk.config import ConfigError, Machine, compose, from_yaml, to_yaml
from ztk.data import SubwordTokenizer
from ztk.rl.align import Encoding, RecordFormat, read_examples, read_prompts
from ztk.rl.align.formats import CHAT as CHAT_RECORDS
from ztk.rl.align.formats import PREFERENCES, PROMPTS, unified
from ztk.rl.align.records import read_records

ASKED = [{"role": "user", "content": "2+2?"}]
CHAT = [{"role": "system", "content": "brief"}, *ASKED, {"role": "assistant", "content": "4"}]
BAD = [*ASKED, {"role": "assistant", "content": "5"}]
TURNS = [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]
TEXTS = ("<|user|>\n2+2?\n<|assistant|>\n4\x03", "<|user|>\n2+2?\n<|assistant|>\n5\x03")


def written(folder, *records, name="records.jsonl"):
    file = folder / name
    file.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return str(file)


def examples(path, *, kind, **options):
    return read_examples([path], record_format=RecordFormat(kind), seq_len=None, encoding=Encoding(stop=3), **options)


@pytest.mark.parametrize(
    ("record", "text", "learnt"),
    [
        ({"prompt": "2+2=", "completion": "4"}, "2+2=4\x03", "4\x03"),
        ({"prompt": ASKED, "completion": CHAT[-1:]}, TEXTS[0], "4\x03"),
        ({"instruction": "2+2?", "input": "", "output": "4"}, TEXTS[0], "4\x03"),
        (
            {"instruction": "add", "input": "2 2", "output": "4", "system": "brief", "history": [["a", "b"]]},
            "<|system|>\nbrief\n<|user|>\na\n<|assistant|>\nb\x03<|user|>\nadd\n\n2 2\n<|assistant|>\n4\x03",
            "4\x03",
        ),
        ({"conversations": TURNS}, TEXTS[0], "4\x03"),
        ({"conversations": TURNS, "system": "brief"}, f"<|system|>\nbrief\n{TEXTS[0]}", "4\x03"),
        ({"conversations": CHAT}, f"<|system|>\nbrief\n{TEXTS[0]}", "4\x03"),
        (
            {"prompt": "2+2?", "prompt_id": "x", "messages": CHAT[1:], "chosen": CHAT, "rejected": BAD},
            TEXTS[0],
            "4\x03",
        ),
        ({"prompt": "2+2=", "chosen": "4", "rejected": "5"}, "2+2=4\x03", "4\x03"),
    ],
)
def test_chats(record, text, learnt, tmp_path):
    (example,) = examples(written(tmp_path, record), kind="chat")
    assert text_of(example.texts[0]) == (text, learnt)


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": ASKED, "chosen": "4", "rejected": "5"},
        {"chosen": [*ASKED, CHAT[-1]], "rejected": BAD},
        {"prompt": "2+2?", "chosen": [*ASKED, CHAT[-1]], "rejected": BAD, "score_chosen": 9.0},
        {"chosen": "\n\nHuman: 2+2?\n\nAssistant: 4", "rejected": "\n\nHuman: 2+2?\n\nAssistant: 5"},
        {
            "instruction": "2+2?",
            "completions": [
                {"response": text, "overall_score": score} for text, score in (("6", 3), ("5", 1), ("4", 9))
            ],
        },
        {"instruction": "2+2?", "input": "", "chosen": "4", "rejected": "5"},
        {"conversations": TURNS[:1], "chosen": TURNS[1], "rejected": {"from": "gpt", "value": "5"}},
    ],
)
def test_preferences(record, tmp_path):
    (example,) = examples(written(tmp_path, record), kind="preferences")
    assert [text_of(text) for text in example.texts] == [(TEXTS[0], "4\x03"), (TEXTS[1], "5\x03")]


def test_conversations_may_differ_before_their_last_message(tmp_path):
    other = [{"role": "user", "content": "1+4?"}, BAD[-1]]
    (example,) = examples(written(tmp_path, {"chosen": CHAT[1:], "rejected": other}), kind="preferences")
    assert text_of(example.texts[1]) == ("<|user|>\n1+4?\n<|assistant|>\n5\x03", "5\x03")


def test_a_prompt_is_not_lost_to_answers_of_several_messages(tmp_path):
    calls = [{"role": "assistant", "content": "add"}, {"role": "tool", "content": "4"}, CHAT[-1]]
    with pytest.raises(ValueError, match='"chosen": .* must be a text, or a list of one message'):
        examples(written(tmp_path, {"prompt": ASKED, "chosen": calls, "rejected": calls[:2]}), kind="preferences")
    record = {"prompt": CHAT[:2], "chosen": CHAT[1:], "rejected": BAD}
    with pytest.raises(ValueError, match='"prompt" has a message that the conversation of "chosen" lacks'):
        examples(written(tmp_path, record), kind="preferences")
    assert examples(written(tmp_path, record | {"prompt": ASKED}), kind="preferences")


def test_an_alpaca_record_without_a_question_is_refused(tmp_path):
    record = {"instruction": "", "input": "", "output": "4"}
    with pytest.raises(ValueError, match='"instruction" and "input" are empty'):
        examples(written(tmp_path, record), kind="chat")


def test_scores_that_are_no_numbers_do_not_choose_answers(tmp_path):
    scored = [{"response": text, "overall_score": score} for text, score in (("4", 9), ("6", math.nan), ("5", 1))]
    (example,) = examples(written(tmp_path, {"instruction": "2+2?", "completions": scored}), kind="preferences")
    assert [text_of(text)[1] for text in example.texts] == ["4\x03", "5\x03"]


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (
            {"instruction": "a", "chosen": "4", "rejected": "5", "history": ["hi", "yo"]},
            '"history": .* must be a list of',
        ),
        ({"instruction": "a", "chosen": "4", "rejected": "5", "history": [["a"]]}, '"history": .* must be a list of'),
        ({"instruction": "a", "completions": [{"overall_score": 1}, {"overall_score": 2}]}, "no two different values"),
        ({"conversations": TURNS, "chosen": TURNS[1], "rejected": TURNS[1]}, "ends with an answer, next to"),
    ],
)
def test_parts_of_another_form_are_named(record, said, tmp_path):
    with pytest.raises(ValueError, match=f"line 1: .*{said}"):
        examples(written(tmp_path, record), kind="preferences")


@pytest.mark.parametrize("tools", [[], "[]", "", None])
def test_no_tools_are_none(tools):
    assert "tools" not in unified({"conversations": TURNS, "tools": tools}, purpose="chat")


def test_speakers_may_be_written_in_capitals():
    turns = [TURNS[0], {"from": "Function_Call", "value": '{"name": "add", "arguments": {}}'}]
    assert unified({"conversations": turns}, purpose="chat")["messages"][1]["tool_calls"]


def test_ktos_records_have_a_label(tmp_path):
    records = [
        {"prompt": "2+2=", "completion": "4", "label": True},
        {"prompt": ASKED, "completion": BAD[-1:], "label": 0},
    ]
    first, second = examples(written(tmp_path, *records), kind="preferences", labelled=True)
    assert (text_of(first.texts[0]), first.label) == (("2+2=4\x03", "4\x03"), True)
    assert (text_of(second.texts[0]), second.label) == ((TEXTS[1], "5\x03"), False)
    with pytest.raises(ValueError, match="use task=dpo dpo.loss=kto"):
        examples(written(tmp_path, *records), kind="preferences")
    with pytest.raises(ValueError, match='"label": 2 must be true or false'):
        examples(written(tmp_path, records[0] | {"label": 2}), kind="preferences", labelled=True)


@pytest.mark.parametrize(
    ("record", "text"),
    [
        ({"prompt": "2+2="}, "2+2="),
        ({"conversations": TURNS}, "<|user|>\n2+2?\n<|assistant|>\n"),
        ({"instruction": "2+2?", "input": "", "output": "4"}, "<|user|>\n2+2?\n<|assistant|>\n"),
        ({"chosen": CHAT[1:], "rejected": BAD}, "<|user|>\n2+2?\n<|assistant|>\n"),
    ],
)
def test_prompts(record, text, tmp_path):
    (found,) = read_prompts([written(tmp_path, record)], encoding=Encoding())
    assert found.text == text and all(found.record[name] == value for name, value in record.items())


CALL = {"type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 2}'}}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
WITH_TOOLS = [
    *ASKED,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "4", "name": "add"},
    {"role": "assistant", "content": "It is 4."},
]
TOOL_TEMPLATE = (
    "{% if tools %}<|im_start|>tools {{ tools | length }}<|im_end|>{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.tool_calls %}{% for call in message.tool_calls %}{{ call.function.name }}:{{ call.function.arguments.a }}"
    "{% endfor %}{% else %}{{ message.content }}{% endif %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("as_text", [False, True])
def test_tools_and_their_calls_are_written_by_the_template(as_text, tmp_path):
    """OpenAI's arguments are a text; a template reads their fields."""
    path = save_tokenizer(train_tokenizer(), path=tmp_path / "tokenizer", template=TOOL_TEMPLATE)
    record = {"messages": WITH_TOOLS, "tools": json.dumps(TOOLS) if as_text else TOOLS}
    tokenizer = SubwordTokenizer.open(path)
    encoding = Encoding(tokenizer=tokenizer, by_template=True)
    options = {"record_format": RecordFormat.chat, "seq_len": None, "encoding": encoding}
    (example,) = read_examples([written(tmp_path, record)], **options)
    text = tokenizer.decode(example.texts[0].tokens, shows_special=True)
    assert "tools 1" in text and "add:2" in text
    learnt = tokenizer.decode(example.texts[0].tokens[example.texts[0].answer], shows_special=True)
    assert learnt.count("<|im_end|>") == 2 and "It is 4." in learnt and "user" not in learnt
    prompt = {"messages": WITH_TOOLS[:-1], "tools": TOOLS}
    (found,) = read_prompts([written(tmp_path, prompt)], encoding=encoding)
    assert found.text.startswith("<|im_start|>tools 1") and found.text.endswith("<|im_start|>assistant\n")
    with pytest.raises(ValueError, match="use data.tokenizer=FOLDER with a chat template that writes them"):
        examples(written(tmp_path, record), kind="chat")


@pytest.mark.parametrize(
    ("kind", "record", "said"),
    [
        (
            "chat",
            {"question": "a", "response": "b"},
            "question, response; .*use data.fields={prompt: question, answer: response}",
        ),
        ("chat", {"prompt": "a", "response": "b"}, 'it lacks "answer": use data.fields={answer: response}'),
        (
            "chat",
            {"instruction": "a", "result": "b"},
            'the nearest format is Alpaca, {"instruction": ..., "input": ..., "output": ...}',
        ),
        ("preferences", {"prompt": "a", "accepted": "b", "rejected": "c"}, "use data.fields={chosen: accepted}"),
        ("preferences", {"prompt": "a", "answer": "b"}, 'it lacks "chosen" and "rejected"'),
        (
            "chat",
            {"conversations": [{"from": "nobody", "value": "a"}]},
            'turn 1: .* must be {"from": ..., "value": ...}',
        ),
    ],
)
def test_an_unknown_form_is_named_with_the_nearest_one(kind, record, said, tmp_path):
    with pytest.raises(ValueError, match=rf"(?s)records.jsonl, line 1: .*{said.replace('{', '[{]')}"):
        examples(written(tmp_path, record), kind=kind)


def test_fields_are_renamed(tmp_path):
    path = written(tmp_path, {"question": "2+2=", "response": "4"})
    fields = {"prompt": "question", "answer": "response"}
    (example,) = examples(path, kind="chat", fields=fields)
    assert text_of(example.texts[0]) == ("2+2=4\x03", "4\x03")
    (found,) = read_prompts([path], encoding=Encoding(), fields={"prompt": "question"})
    assert found.record["question"] == "2+2=" == found.text  # reward functions may ask for the data's own name
    with pytest.raises(
        ValueError, match=r"line 1: has no field 'ask' of data.fields={prompt: ask}; its fields are question, response"
    ):
        examples(path, kind="chat", fields={"prompt": "ask"})


def test_fields_of_the_command_line(tmp_path):
    path = written(tmp_path, *[{"question": "2+2=", "response": "4"}] * 3)
    words = ("task=sft", f"data.path={path}", "data.fields={prompt: question, answer: response}")
    config = compose(*words, output_dir="/run", machine=Machine(gpus=0, cores=2))
    assert config.data.fields == from_yaml(to_yaml(config)).data.fields == {"prompt": "question", "answer": "response"}
    with pytest.raises(ConfigError, match="records have no field 'ask'; use one of prompt, messages"):
        compose(*words[:2], "data.fields={ask: question}", output_dir="/run", machine=Machine(gpus=0, cores=2))
    with pytest.raises(ConfigError, match="its fields are question, response; .*use data.fields="):
        compose(*words[:2], output_dir="/run", machine=Machine(gpus=0, cores=2))


RECORDS = [
    {"prompt": ASKED, "completion": CHAT[-1:], "note": None},
    {"prompt": ASKED, "completion": BAD[-1:], "note": "x"},
]


def saved(folder, kind, records=RECORDS):
    """The path of `records` as a file or folder of a kind."""
    folder.mkdir()
    lines = "".join(f"{json.dumps(record)}\n" for record in records)
    if kind == "jsonl":
        (folder / "a.jsonl").write_text(lines)
        return folder
    if kind == "json.gz":
        (folder / "a.json.gz").write_bytes(gzip.compress(json.dumps(records).encode()))
        return folder
    if kind in ("json", "json of lines", "json with a key"):
        value = records if kind == "json" else {"data": records}
        (folder / "a.json").write_text(lines if kind == "json of lines" else json.dumps(value, indent=1))
        return folder / "a.json"
    if kind == "jsonl.gz":
        (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
        return folder
    arrow = pytest.importorskip("pyarrow")
    if kind == "jsonl.zst":
        with arrow.output_stream(str(folder / "a.jsonl.zst"), compression="zstd") as file:
            file.write(lines.encode())
        return folder / "a.jsonl.zst"
    if kind == "parquet":
        importlib.import_module("pyarrow.parquet").write_table(arrow.Table.from_pylist(records), folder / "a.parquet")
        return folder
    datasets = pytest.importorskip("datasets")
    found = datasets.Dataset.from_list(records)
    if kind == "splits":
        datasets.DatasetDict({"train": found}).save_to_disk(str(folder / "all"))
    else:
        found.save_to_disk(str(folder / "all"), num_shards=min(2, len(records)))
    return folder / "all"


@pytest.mark.parametrize(
    "kind", ["json", "json of lines", "json with a key", "jsonl.gz", "jsonl.zst", "parquet", "save_to_disk"]
)
def test_kinds_of_files(kind, tmp_path):
    found = examples(str(saved(tmp_path / "data", kind)), kind="chat")
    assert [text_of(example.texts[0])[0] for example in found] == list(TEXTS)


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}}}
CALLED = [
    *ASKED,
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "name": "add", "content": "4"},
]
# By the tasks that read them: sft and distill, dpo, kto, grpo and ppo. Each with a call of a tool.
BY_TASK = {
    "sft": (CHAT_RECORDS, [{"messages": [*CALLED, *CHAT[-1:]], "tools": [TOOL]}, {"messages": CHAT}]),
    "dpo": (PREFERENCES, [{"prompt": CALLED, "chosen": CHAT[-1:], "rejected": BAD[-1:], "tools": [TOOL]}]),
    "kto": (PREFERENCES, [{"prompt": CALLED, "completion": CHAT[-1:], "label": label} for label in (True, False)]),
    "grpo": (PROMPTS, [{"prompt": CALLED, "tools": [TOOL]}, {"prompt": ASKED}]),
}


@pytest.mark.parametrize("task", BY_TASK)
@pytest.mark.parametrize("kind", ["json", "json.gz", "jsonl.gz", "jsonl.zst", "parquet", "save_to_disk"])
def test_every_task_reads_every_kind_of_file(task, kind, tmp_path):
    """With the values that lines of JSON have."""
    purpose, records = BY_TASK[task]

    def read(name: str):
        path = saved(tmp_path / name, name, records=records)
        return read_records([str(path)], make=partial(unified, purpose=purpose))

    found = read(kind)
    assert found == read("jsonl") and len(found) == len(records)
    assert CALL in [call for message in conversation_of(found[0]) for call in message.get("tool_calls", [])]


def conversation_of(record):
    return record.get("messages", record.get("prompt"))


def test_splits_and_broken_files_are_named(tmp_path):
    path = saved(tmp_path / "data", "splits")
    with pytest.raises(ValueError, match=rf"has the splits train; name one, such as data.path={path}/train"):
        examples(str(path), kind="chat")
    assert len(examples(f"{path}/train", kind="chat")) == 2
    for name, said in (
        ("a.parquet", "cannot be read as parquet"),
        ("a.arrow", "as a stream of arrow"),
        ("a.jsonl.gz", "cannot be read"),
    ):
        (tmp_path / name).write_bytes(b"no such thing")
        with pytest.raises(ValueError, match=said):
            examples(str(tmp_path / name), kind="chat")
    (tmp_path / "a.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"a.json, record 1: must be a JSON object"):
        examples(str(tmp_path / "a.json"), kind="chat")


@pytest.mark.parametrize(
    ("chosen", "rejected"),
    [
        ("The sky is blue.", "The sky is green."),
        ("2+2=4", "2+2=5"),
        ("ab", "abc"),
        ("a  b", "a  c"),
        ("Q: hi A: yes", "Q: hi A: no"),
    ],
)
def test_the_prompt_of_two_texts_is_trls(chosen, rejected):
    trl = pytest.importorskip("trl")
    record = {"chosen": chosen, "rejected": rejected}
    assert dict(unified(record, purpose=PREFERENCES)) == trl.extract_prompt(record)
