"""Answers in a grammar: schemas, choices, regular expressions, and refused grammars."""

import asyncio
import importlib
import json
import random
import re

import httpx
import jsonschema
import pytest
import torch

from tests.serve.test_server import HTTP, Chatting, start
from ztk.inference import Generator, InferencePolicy, SamplingParams
from ztk.nn import Decoder, DecoderConfig
from ztk.serve.structured import Grammars, read_structure
from ztk.serve.tokenizers import Bytes
from ztk.serve.values import BadRequest

USER = [{"role": "user", "content": "x"}]


@pytest.fixture(scope="module")
def running():
    found = start(tokenizer=Chatting())
    yield found
    found.stop()


def chosen(running, body):
    found = HTTP.post(
        f"{running.url}/v1/completions", json={"prompt": "abc", "max_tokens": 60, "seed": 1} | body, timeout=60
    )
    assert found.status_code == 200, found.text
    return found.json()["choices"][0]


def random_schema(chance: random.Random, *, depth: int = 0) -> dict:
    """Random schemas, small enough that answers end."""
    kinds = ["integer", "number", "boolean", "null", "enum", "const", "string", "pattern"]
    kind = chance.choice(kinds + ["object", "array", "anyOf"] * (depth < 3))
    if depth == 0:
        kind = chance.choice(["object", "array", "anyOf"])
    if kind == "integer":
        return {"type": "integer", "minimum": chance.randint(-9, 0), "maximum": chance.randint(1, 99)}
    if kind == "number":
        return {"type": "number", "minimum": 0, "maximum": 5}
    if kind == "enum":
        return {"enum": chance.sample(["a", "bb", 1, 2.5, None, True, "ü"], 3)}
    if kind == "const":
        return {"const": chance.choice(["x", 7, False])}
    if kind == "string":
        return {"type": "string", "minLength": chance.randint(0, 2), "maxLength": chance.randint(2, 5)}
    if kind == "pattern":
        return {"type": "string", "pattern": chance.choice(["^[a-c]{1,3}$", "^x[0-9]{2}$", "^(yes|no)$"])}
    if kind == "object":
        names = chance.sample(["id", "name", "age", "tags", "ok"], chance.randint(1, 3))
        return {
            "type": "object",
            "properties": {name: random_schema(chance, depth=depth + 1) for name in names},
            "required": names[: chance.randint(0, len(names))],
            "additionalProperties": False,
        }
    if kind == "array":
        most = chance.randint(1, 3)
        return {"type": "array", "items": random_schema(chance, depth=depth + 1), "minItems": 1, "maxItems": most}
    if kind == "anyOf":
        return {"anyOf": [random_schema(chance, depth=depth + 1) for _ in range(2)]}
    return {"type": kind}


def test_every_answer_to_200_random_schemas_is_valid():
    torch.manual_seed(0)
    model = Decoder(
        DecoderConfig(vocab_size=300, dim=16, layers=1, heads=1, kv_heads=1, hidden_dim=32, max_seq_len=512)
    )
    chance, grammars = random.Random(7), Grammars(Bytes(), vocabulary=256, ends=())
    schemas = [random_schema(chance) for _ in range(200)]
    sampling = [
        SamplingParams(
            max_tokens=300,
            seed=number,
            temperature=1.5,
            vocabulary=256,
            grammar=grammars.compiled(read_structure({"guided_json": schema})),
        )
        for number, schema in enumerate(schemas)
    ]
    generator = Generator(model.eval(), policy=InferencePolicy(max_sequences=64))
    answers = generator.generate([[1, 2]] * len(schemas), sampling=sampling)
    grammars.close()
    ended = 0
    for schema, [answer] in zip(schemas, answers, strict=True):
        assert answer.finish_reason in ("stop", "length"), answer.error
        if answer.finish_reason == "stop":
            ended += 1
            jsonschema.validate(json.loads(bytes(answer.tokens).decode()), schema)
    assert ended > 150


@pytest.mark.parametrize(
    ("body", "is_good"),
    [
        ({"guided_regex": "[0-9]{3}-[a-f]+x"}, lambda text: re.fullmatch("[0-9]{3}-[a-f]+x", text)),
        ({"guided_choice": ["red", 'say "no"', "green"]}, lambda text: text in ("red", 'say "no"', "green")),
        ({"guided_grammar": 'root ::= "a" "b"{2,4} "c"'}, lambda text: re.fullmatch("ab{2,4}c", text)),
        ({"guided_grammar": 'start: "a" /[0-9]/ "!"'}, lambda text: re.fullmatch("a[0-9]!", text)),
        ({"grammar": 'root ::= "x" | "y"'}, lambda text: text in ("x", "y")),
        ({"structured_outputs": {"choice": ["on", "off"]}}, lambda text: text in ("on", "off")),
        ({"structured_outputs": {"regex": "(ab){2}"}}, lambda text: text == "abab"),
        ({"guided_json": {"enum": [1, "b"]}}, lambda text: json.loads(text) in (1, "b")),
        ({"guided_json": '{"const": 5}'}, lambda text: text == "5"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"const": "e"}}}},
            lambda text: json.loads(text) == "e",
        ),
    ],
)
def test_each_kind_of_grammar_is_kept_to(running, body, is_good):
    found = chosen(running, body)
    assert found["finish_reason"] == "stop" and is_good(found["text"]), found


def test_a_json_object_begins_as_one_and_streams(running):
    body = {"response_format": {"type": "json_object"}, "messages": USER, "max_tokens": 30, "seed": 3, "stream": True}
    with HTTP.stream("POST", f"{running.url}/v1/chat/completions", json=body) as found:
        events = [json.loads(line[6:]) for line in found.iter_lines() if line.startswith("data: {")]
    text = "".join(event["choices"][0]["delta"]["content"] for event in events)
    assert text.startswith("{") and len(text) <= 30


def test_answers_next_to_a_grammar_are_those_without_it(running):
    body = {"prompt": ["abc", "abd"], "seed": 5, "max_tokens": 20}
    before = HTTP.post(f"{running.url}/v1/completions", json=body).json()["choices"]
    grammar = httpx.AsyncClient(timeout=60)

    async def both():
        one = grammar.post(f"{running.url}/v1/completions", json={"prompt": "q", "guided_regex": "[ab]{40}"})
        other = grammar.post(f"{running.url}/v1/completions", json=body)
        return await asyncio.gather(one, other)

    guided, plain = asyncio.run(both())
    assert plain.json()["choices"] == before and guided.status_code == 200


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type=xml: must be text, json_object or json_schema"),
        ({"response_format": {"type": "json_schema"}}, "must have a JSON schema"),
        ({"response_format": []}, "response_format must be an object"),
        ({"guided_json": [1]}, "guided_json must have a JSON schema"),
        ({"guided_json": {"type": "strange"}}, "guided_json: Invalid type"),
        ({"guided_json": {"$ref": "http://x.y/z"}}, "guided_json: Resource"),
        ({"guided_choice": []}, "guided_choice must be a list of texts"),
        ({"guided_choice": ["a"] * 2000}, "may have 1024 texts at most"),
        ({"guided_regex": "("}, "guided_regex: "),
        ({"guided_regex": "(" * 5000}, "nested brackets at most"),
        ({"guided_regex": "a" * 100_000}, "65536 characters"),
        ({"guided_grammar": "x ::="}, "guided_grammar: "),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "exclude each other"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag is not supported"),
        (
            {"structured_outputs": {"json_object": True, "disable_any_whitespace": True}},
            "structured_outputs.disable_any_whitespace=true is not supported",
        ),
        ({"guided_json": {"$ref": "#"}}, "guided_json: no finite answer matches it"),
    ],
)
def test_what_is_no_grammar_gets_400(running, body, message):
    found = HTTP.post(f"{running.url}/v1/completions", json={"prompt": "abc"} | body, timeout=60)
    assert found.status_code == 400 and message in found.json()["error"]["message"], found.text


def test_without_the_library_the_error_names_the_package(monkeypatch):
    def missing(name):
        raise ImportError(name)

    grammars = Grammars(Bytes(), vocabulary=128, ends=())
    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(BadRequest, match=re.escape('pip install "ztk[serve]"')) as error:
        grammars.compiled(read_structure({"guided_regex": "a"}))
    assert error.value.status == 501
