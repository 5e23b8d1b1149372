"""Texts of every task compared token by token with transformers and TRL, for ten tokenizers."""

import json

import pytest
import transformers
from trl.data_utils import _tokenize, common_prefix_length

from tests.rl.align.ten import TEN, save_one
from ztk.data import SubwordTokenizer
from ztk.rl.align import Encoding, RecordFormat, read_examples, read_prompts
from ztk.serve.tokenizers import Pretrained, Subword

PAIRS = [  # the first four are divided inside a token of some tokenizer
    ("hello wor", "ld you"),
    ("hello", " world"),
    ("2 + 2 = ", "four"),
    ("caf", "\u00e9 na\u00efve"),
    ("hello world,", "how are you?\n\n"),
    ("a\n", "\n\n  indented \u2211 \U0001f600"),
    ("<|im_start|>user\nhi<|im_end|>", "you </s>"),
    (" ", "x"),
]
CHATS = [
    [{"role": "user", "content": "2 + 2 ?"}, {"role": "assistant", "content": "it is 4"}],
    [
        {"role": "user", "content": "hello <|im_end|> you"},
        {"role": "assistant", "content": "na\u00efve \U0001f600 "},
        {"role": "user", "content": "\n\nand"},
        {"role": "assistant", "content": " fine\n"},
    ],
]


@pytest.fixture(scope="module", params=TEN)
def opened(request, tmp_path_factory):
    """ztk's tokenizer and transformers'."""
    path = save_one(request.param, path=tmp_path_factory.mktemp("ten") / "tokenizer")
    return SubwordTokenizer.open(path), transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)


def write(folder, records):
    file = folder / "records.jsonl"
    file.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))
    return [str(file)]


def theirs_of(theirs, prompt, answer, *, after):
    """TRL's tokens of a prompt and an answer, and how many are the prompt's. TRL writes the end token and lets the tokenizer add another; ztk
    leaves the second one out."""
    end = theirs.eos_token
    completion = answer if answer.endswith(end) else answer + end
    tokens = list(_tokenize(theirs, prompt + completion)["input_ids"])
    tokens = tokens[: len(tokens) - len(after)]
    return tokens, common_prefix_length(_tokenize(theirs, prompt)["input_ids"], tokens)


def test_a_text_is_read_as_transformers_reads_it(opened, tmp_path):
    tokenizer, theirs = opened
    for text in [prompt + answer for prompt, answer in PAIRS]:
        assert [*tokenizer.begin, *tokenizer.read(text).tokens, *tokenizer.after] == theirs(text)["input_ids"]
        assert tokenizer.read(text).tokens == theirs(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.vocab_size == max(theirs.get_vocab().values()) + 1


def test_records_of_texts(opened, tmp_path):
    tokenizer, theirs = opened
    paths = write(tmp_path, [{"prompt": prompt, "answer": answer} for prompt, answer in PAIRS])
    options = {"seq_len": 200, "encoding": Encoding(tokenizer=tokenizer, by_template=True)}
    chats = read_examples(paths, record_format=RecordFormat.chat, **options)
    for (prompt, answer), example in zip(PAIRS, chats, strict=True):
        (text,) = example.texts
        tokens, learnt_from = theirs_of(theirs, prompt, answer, after=tokenizer.after)
        assert text.tokens.tolist() == tokens
        assert text.answer.int().argmax() == max(1, learnt_from) and text.answer[max(1, learnt_from) :].all()
        assert text.tokens[-1] == tokenizer.end
    paths = write(tmp_path, [{"prompt": p, "chosen": a, "rejected": a + "?"} for p, a in PAIRS])
    for (prompt, answer), example in zip(
        PAIRS, read_examples(paths, record_format=RecordFormat.preferences, **options), strict=True
    ):
        for text, own in zip(example.texts, (answer, answer + "?"), strict=True):
            tokens, learnt_from = theirs_of(theirs, prompt, own, after=tokenizer.after)
            assert text.tokens.tolist() == tokens and int(text.answer.sum()) == len(tokens) - max(1, learnt_from)


def test_records_of_messages(opened, tmp_path):
    tokenizer, theirs = opened
    is_marked = "{% generation" in theirs.chat_template
    chats = CHATS
    if is_marked:  # transformers marks nothing where a tokenizer drops an answer's first letter, and the first token alone of its last letter
        chats = [
            [message | {"content": message["content"].strip(" \n\U0001f600")} for message in chat] for chat in CHATS
        ]
    paths = write(tmp_path, [{"messages": chat} for chat in chats])
    options = {"seq_len": 200, "encoding": Encoding(tokenizer=tokenizer, by_template=True)}
    for chat, example in zip(chats, read_examples(paths, record_format=RecordFormat.chat, **options), strict=True):
        (text,) = example.texts
        found = _tokenize(theirs, chat, return_assistant_tokens_mask=True)
        assert text.tokens.tolist() == list(found["input_ids"])
        if is_marked:  # the end, which the template leaves out, is learnt as well
            end = theirs.convert_tokens_to_ids("<|im_end|>")
            marks = found["assistant_masks"]
            expected = [
                mark or (token == end and number > 0 and marks[number - 1])
                for number, (mark, token) in enumerate(zip(marks, found["input_ids"], strict=True))
            ]
            assert text.answer.int().tolist() == [int(bool(one)) for one in expected]
            assert sum(expected) == sum(marks) + sum(message["role"] == "assistant" for message in chat)
        else:
            learnt = theirs.decode(text.tokens[text.answer])
            for message in chat:
                content = theirs.decode(theirs(message["content"], add_special_tokens=False)["input_ids"]).strip()
                assert (content in learnt) == (message["role"] == "assistant")
    pairs = [
        {"prompt": chat[:-1], "chosen": chat[-1]["content"], "rejected": [{**chat[-1], "content": "no"}]}
        for chat in CHATS
    ]
    paths = write(tmp_path, pairs)
    for record, example in zip(
        pairs, read_examples(paths, record_format=RecordFormat.preferences, **options), strict=True
    ):
        prompt = _tokenize(theirs, record["prompt"], add_generation_prompt=True)["input_ids"]
        for text, content in zip(example.texts, (record["chosen"], "no"), strict=True):
            tokens = _tokenize(theirs, [*record["prompt"], {"role": "assistant", "content": content}])["input_ids"]
            assert text.tokens.tolist() == list(tokens)
            assert text.answer.int().argmax() == common_prefix_length(prompt, tokens)


def test_prompts_of_rollouts_and_of_a_server(opened, tmp_path):
    """A run and the folder that it exports ask alike."""
    tokenizer, theirs = opened
    records = [{"prompt": prompt} for prompt, _ in PAIRS]
    encoding = Encoding(tokenizer=tokenizer, by_template=True)
    served = [Subword(tokenizer, has_chats=True, by_template=True), Pretrained(theirs)]
    for record, found in zip(records, read_prompts(write(tmp_path, records), encoding=encoding), strict=True):
        tokens = theirs(record["prompt"])["input_ids"]  # TRL's
        assert [*found.tokens, *tokenizer.after] == tokens and found.text == record["prompt"]
        assert [one.encode(record["prompt"]) for one in served] == [found.tokens] * 2
        assert served[0].encode_text(record["prompt"]) == served[1].encode_text(record["prompt"])
        assert served[0].decode(tokens) == served[1].decode(tokens)
    chats = [{"messages": chat[:-1]} for chat in CHATS]
    for record, found in zip(chats, read_prompts(write(tmp_path, chats), encoding=encoding), strict=True):
        expected = _tokenize(theirs, record["messages"], add_generation_prompt=True)["input_ids"]
        assert found.tokens == list(expected)
        assert found.text == theirs.apply_chat_template(record["messages"], tokenize=False, add_generation_prompt=True)
        assert [one.chat(record["messages"]) for one in served] == [found.tokens] * 2
