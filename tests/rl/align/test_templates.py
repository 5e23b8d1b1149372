"""Chats with a tokenizer's own template: transformers' text and tokens, and loss only on the assistant's text."""

import json
from pathlib import Path

import pytest

from tests.rl.align.chats import CHAT, PLAIN, save_tokenizer, train_tokenizer
from ztk.config import ConfigError, Machine, compose
from ztk.data import SubwordTokenizer
from ztk.rl.align import (
    ChatTemplate,
    ChatTemplateError,
    Encoding,
    RecordFormat,
    answer_end,
    read_examples,
    read_prompts,
)

MARKED = (  # the same text; this template marks answers
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}<|im_end|>\n{% endgeneration %}"
    "{% else %}{{ message['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LAST_ALONE = PLAIN.replace(
    "{{ message['content'] }}", "{% if loop.last %}think {% endif %}{{ message['content'] }}"
)  # as templates that drop earlier reasoning
STRICT = "{% if messages[0]['role'] != 'user' %}{{ raise_exception('a user begins') }}{% endif %}" + PLAIN


@pytest.fixture(scope="module")
def trained():
    return train_tokenizer()


@pytest.fixture
def folder(trained, tmp_path):
    return lambda template: save_tokenizer(trained, path=tmp_path / "tokenizer", template=template)


def encoding_of(folder: Path) -> Encoding:
    return Encoding(tokenizer=SubwordTokenizer.open(folder), by_template=True)


def written(tmp_path: Path, *records: dict) -> str:
    file = tmp_path / "records.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(file)


def read(file: str, *, folder: Path, kind: RecordFormat = RecordFormat.chat, seq_len: int = 200):
    return read_examples([file], record_format=kind, seq_len=seq_len, encoding=encoding_of(folder))


@pytest.mark.parametrize("template", [PLAIN, MARKED], ids=["plain", "marked"])
def test_tokens_equal_transformers_and_only_answers_count(trained, folder, tmp_path, template):
    path = folder(template)
    (example,) = read(written(tmp_path, {"messages": CHAT}), folder=path)
    (text,) = example.texts
    expected = trained.apply_chat_template(CHAT, tokenize=True, return_dict=False)
    assert text.tokens.tolist() == expected
    learnt = trained.decode(text.tokens[text.answer])
    assert learnt == "it is 4<|im_end|>\n6<|im_end|>\n"
    assert ChatTemplate.open(path).end == trained.eos_token
    asked = trained.apply_chat_template(CHAT[:4], tokenize=True, add_generation_prompt=True, return_dict=False)
    assert encoding_of(path).prompt(CHAT[:4]).tokens == asked


def test_pairs_share_a_prompt_of_messages(trained, folder, tmp_path):
    record = {"prompt": CHAT[:4], "chosen": "6", "rejected": [{"role": "assistant", "content": "7"}]}
    (example,) = read(written(tmp_path, record), folder=folder(PLAIN), kind=RecordFormat.preferences)
    for text, answer in zip(example.texts, "67", strict=True):
        chat = [*CHAT[:4], {"role": "assistant", "content": answer}]
        assert text.tokens.tolist() == trained.apply_chat_template(chat, tokenize=True, return_dict=False)
        assert trained.decode(text.tokens[text.answer]) == f"{answer}<|im_end|>\n"


@pytest.mark.parametrize(
    ("template", "messages", "says"),
    [
        (
            LAST_ALONE,
            CHAT,
            r"line 1: message 3: the chat template .* another way when more follows.*\{% generation %\}",
        ),
        (STRICT, CHAT, "line 1: the chat template of .* refuses the messages: a user begins"),
        (PLAIN, CHAT[:2], 'line 1: "messages" has no message of the role "assistant"'),
        (PLAIN, [*CHAT[1:3], "x"], "line 1: message 3: 'x' must be"),
    ],
    ids=["drops", "refuses", "no answer", "no message"],
)
def test_a_chat_that_cannot_be_learnt_is_named(folder, tmp_path, template, messages, says):
    with pytest.raises(ValueError, match=f"(?s){says}"):
        read(written(tmp_path, {"messages": messages}), folder=folder(template))


def test_a_folder_without_a_template_is_refused_with_a_fix(folder, tmp_path):
    path, file = folder(None), written(tmp_path, {"messages": CHAT}, {"messages": CHAT})
    words = ("task=sft", "data=chat", f"data.path={file}", f"data.tokenizer={path}", "data.seq_len=128")
    machine = Machine(gpus=0, cores=2)
    with pytest.raises(ConfigError) as caught:
        compose(*words, output_dir="/run", machine=machine)
    faults = [fault for fault in caught.value.faults if "chat template" in fault]
    assert len(faults) == 1 and "use data.chat_template=roles" in faults[0]
    compose(*words, "data.chat_template=roles", output_dir="/run", machine=machine)
    texts = written(tmp_path, {"prompt": "2 + 2 ?", "answer": "4"}, {"prompt": "3 + 3 ?", "answer": "6"})
    compose(*words[:2], f"data.path={texts}", *words[3:], output_dir="/run", machine=machine)  # nothing to render
    assert not ChatTemplate.has(path)
    with pytest.raises(ChatTemplateError, match='put "chat_template" into its tokenizer_config.json'):
        ChatTemplate.open(path)


@pytest.mark.parametrize("is_special", [True, False])
def test_an_answer_ends_where_its_template_ends_it(folder, tmp_path, is_special):
    """At the first added token after the content, special or not, and not at eos."""
    path = folder(
        PLAIN.replace("<|im_end|>", "<|end|>") + "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}"
    )
    main = json.loads((path / "tokenizer.json").read_text())
    entry = next(token for token in main["added_tokens"] if token["content"] == "<|im_end|>")
    main["added_tokens"].append(entry | {"id": 270, "content": "<|end|>", "special": is_special})
    (path / "tokenizer.json").write_text(json.dumps(main))
    ChatTemplate.open.cache_clear()
    assert ChatTemplate.open(path).end == "<|end|>"
    encoding = encoding_of(path)
    prompts = read_prompts([written(tmp_path, {"messages": CHAT[:4]})], encoding=encoding)
    assert answer_end(prompts, encoding=encoding) == 270 != encoding.tokenizer.end


def test_a_template_without_an_end_is_refused(folder, tmp_path):
    path = folder("{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}")
    file, encoding = written(tmp_path, {"messages": CHAT[:3]}, {"messages": CHAT[:3]}), encoding_of(path)
    with pytest.raises(ChatTemplateError, match="writes no token behind an assistant's message"):
        read(file, folder=path)
    file = written(tmp_path, {"messages": CHAT[:4]})
    prompts = read_prompts([file], encoding=encoding)
    with pytest.raises(ChatTemplateError, match=r"put eos_token there.*data\.chat_template=roles"):
        answer_end(prompts, encoding=encoding)


def test_the_end_behind_a_generation_block_is_learnt(trained, folder, tmp_path):
    early = MARKED.replace("<|im_end|>\n{% endgeneration %}", "{% endgeneration %}{{ '\\n' }}<|im_end|>\n")
    (example,) = read(written(tmp_path, {"messages": CHAT}), folder=folder(early))
    assert trained.decode(example.texts[0].tokens[example.texts[0].answer]) == "it is 4\n<|im_end|>6\n<|im_end|>"
    apart = MARKED.replace("<|im_end|>\n{% endgeneration %}", "{% endgeneration %} over<|im_end|>\n")
    with pytest.raises(ValueError, match=r"leaves '<\|im_end\|>' out of {% generation %}"):
        read(written(tmp_path, {"messages": CHAT}), folder=folder(apart))
