"""JSON schemas that a grammar keeps exactly, and refused ones: with llguidance itself, whose answers are compared with the schemas."""

import json
import random

import jsonschema
import pytest

from ztk.serve.schemas import prepared
from ztk.serve.structured import Grammars, read_structure
from ztk.serve.tokenizers import Bytes
from ztk.serve.tools import Format, call_structure, read_tools
from ztk.serve.values import BadRequest

BIG = 2**53 + 1  # no double
PERSON = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}


@pytest.fixture(scope="module")
def grammars():
    found = Grammars(Bytes(), vocabulary=256, ends=())
    yield found
    found.close()


def accepts(grammars, structure, text):
    """Whether `text` is a complete answer."""
    matcher, tokens = grammars.compiled(structure)._matcher.deep_copy(), list(text.encode())
    if matcher.validate_tokens(tokens) < len(tokens):
        return False
    matcher.consume_tokens(tokens)
    return bool(matcher.is_accepting())


def of_schema(schema):
    return read_structure({"guided_json": schema})


def tools_of(parameters):
    given = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    return call_structure(read_tools({"tools": given, "tool_choice": "required"}), format=Format.hermes, special={})


NUMBERS = {
    "const": {"const": BIG},
    "const, negative": {"const": -BIG},
    "const, far": {"const": 123456789012345678},
    "enum": {"enum": ["a", 1, BIG]},
    "enum, inside": {"enum": [{"a": [1, BIG]}]},
    "minimum": {"type": "integer", "minimum": BIG},
    "exclusiveMinimum": {"type": "number", "exclusiveMinimum": -BIG},
    "maximum": {"type": "integer", "maximum": BIG},
    "exclusiveMaximum": {"type": "integer", "exclusiveMaximum": BIG},
    "multipleOf": {"type": "integer", "multipleOf": BIG},
    "digits": {"const": 123456789.12345679},
    "digits of a bound": {"type": "number", "minimum": -91.59563401238995},
    "infinite": {"const": float("inf")},
}


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("place", ["root", "properties", "$defs", "anyOf", "items", "tools", "lark", "response_format"])
def test_numbers_that_would_become_others_are_refused(name, place):
    schema = NUMBERS[name]
    nested = {
        "properties": {"type": "object", "properties": {"const": schema}},
        "$defs": {"$ref": "#/$defs/x", "$defs": {"x": schema}},
        "anyOf": {"anyOf": [{"type": "string"}, schema]},
        "items": {"type": "array", "items": schema},
    }.get(place, schema)
    with pytest.raises(BadRequest, match="would become another number in the grammar"):
        if place == "tools":
            tools_of({"type": "object", "properties": {"x": schema}})
        elif place == "lark":
            read_structure({"guided_grammar": f"start: %json {json.dumps(schema)}"})
        elif place == "response_format":
            read_structure({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}})
        else:
            of_schema(nested)


def test_numbers_that_are_kept_are_forced_exactly(grammars):
    """Random integers and short decimals, the largest doubles, and annotations, which no grammar reads."""
    chance = random.Random(3)
    numbers = [chance.randint(-(2**53), 2**53) for _ in range(50)]
    numbers += [round(chance.uniform(-1e6, 1e6), chance.randint(1, 6)) for _ in range(50)]
    for number in [*numbers, 2**53, -(2**53), 2**60, 1e16, 0.1, -0.0, 10**25]:
        text = bytes(grammars.compiled(of_schema({"const": number}))._matcher.deep_copy().compute_ff_bytes()).decode()
        assert json.loads(text) == number, number
    assert accepts(grammars, of_schema({"type": "integer", "default": BIG, "examples": [BIG]}), str(BIG))


KEYWORDS = {
    "not": {"type": "string", "not": {"const": "a"}},
    "if": {"if": {"type": "string"}, "then": {"const": "a"}, "else": {"const": 1}},
    "uniqueItems": {"type": "array", "uniqueItems": True},
    "contains": {"type": "array", "contains": {"const": 1}},
    "maxContains": {"type": "array", "maxContains": 1},
    "propertyNames": {"type": "object", "propertyNames": {"pattern": "^a"}},
    "dependentRequired": {"dependentRequired": {"a": ["b"]}},
    "dependentSchemas": {"dependentSchemas": {"a": {"required": ["b"]}}},
    "dependencies": {"dependencies": {"a": ["b"]}},
    "unevaluatedProperties": {"type": "object", "unevaluatedProperties": False},
    "overlapping patternProperties": {
        "type": "object",
        "patternProperties": {"^x": {"type": "integer"}, "y$": {"type": "string"}},
    },
    "overlapping oneOf": {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    "minProperties": {"type": "object", "minProperties": 2},
    "minProperties, some required": {**PERSON, "required": ["a"], "minProperties": 3},
    "a format of numbers": {"type": "integer", "format": "int32"},
    "an unknown format": {"type": "string", "format": "regex"},
    "nullable": {"type": "integer", "nullable": True},
    "divisibleBy": {"type": "integer", "divisibleBy": 3},
    "disallow": {"disallow": "string"},
    "extends": {"extends": {"type": "integer"}},
    "contentEncoding": {"type": "string", "contentEncoding": "base64"},
    "required as a flag": {"type": "object", "properties": {"a": {"type": "integer", "required": True}}},
    "the library's options": {"type": "object", "x-guidance": {"lenient": True}, "not": {}},
    "a look-ahead": {"type": "string", "pattern": "(?=a)b"},
    "a look-behind": {"type": "string", "pattern": "(?<!a)b"},
    "a reference to a group": {"type": "string", "pattern": r"(a)\1"},
    "a word boundary": {"type": "string", "pattern": r"\bfoo\b"},
    "a pattern without a text": {"type": "string", "pattern": r"[^\s\S]"},
    "no value": {"enum": []},
    "a remote reference": {"$ref": "http://example.com/x"},
}


@pytest.mark.parametrize("name", KEYWORDS)
def test_constraints_that_are_not_kept_are_refused(grammars, name):
    for schema in (KEYWORDS[name], {"type": "array", "items": KEYWORDS[name], "minItems": 1}):
        with pytest.raises(BadRequest) as error:
            grammars.compiled(of_schema(schema))
        assert "NoExtension" not in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        {"allOf": [{"$ref": "#"}]},
        {"type": "object", "properties": {"n": {"$ref": "#"}}, "required": ["n"]},
        {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
        {"type": "array", "prefixItems": [{"$ref": "#"}], "minItems": 1},
        {"anyOf": [{"$ref": "#"}, {"type": "object", "properties": {"n": {"$ref": "#"}}, "required": ["n"]}]},
    ],
)
def test_references_that_lead_only_to_themselves_are_refused(schema):
    with pytest.raises(BadRequest, match=r"guided_json: no finite answer matches it, because a \$ref"):
        of_schema(schema)


def test_references_that_end_are_kept(grammars):
    tree = {
        "$ref": "#/$defs/n~1o",
        "$defs": {
            "n/o": {
                "type": "object",
                "properties": {"n": {"anyOf": [{"$ref": "#/$defs/n~1o"}, {"type": "null"}]}},
                "required": ["n"],
            }
        },
    }
    assert accepts(grammars, of_schema(tree), '{"n":{"n":null}}')
    assert accepts(grammars, of_schema({"type": "array", "items": {"$ref": "#"}}), "[[],[[]]]")


@pytest.mark.parametrize("text", ["[^\\s\\S]", "a[^\\s\\S]", "(?=a)b", "(a)\\1", "\\bab", "a$b"])
def test_hopeless_expressions_are_refused_with_a_reason(grammars, text):
    with pytest.raises(BadRequest) as error:
        grammars.compiled(read_structure({"guided_regex": text}))
    assert "NoExtension" not in str(error.value)


def test_objects_have_the_properties_that_they_name(grammars):
    """As in xgrammar and vLLM. Parts of one value stay open, because others name its further properties."""
    further = '{"a":1,"c":2}'
    assert not accepts(grammars, of_schema(PERSON), further)
    assert accepts(grammars, of_schema(PERSON), '{"a":1}')
    assert not accepts(grammars, of_schema({"type": "array", "items": PERSON}), f"[{further}]")
    for value in (True, {"type": "integer"}):
        assert accepts(grammars, of_schema(PERSON | {"additionalProperties": value}), further)
    assert accepts(grammars, of_schema({"type": "object"}), further)  # names none
    assert accepts(grammars, read_structure({"response_format": {"type": "json_object"}}), further)
    patterns = of_schema({"type": "object", "patternProperties": {"^x": {"type": "integer"}}})
    assert accepts(grammars, patterns, '{"x1":1}') and not accepts(grammars, patterns, '{"y":1}')
    array = {"type": "array", "prefixItems": [{"type": "integer"}]}
    assert not accepts(grammars, of_schema(array), "[1,2]")
    assert accepts(grammars, of_schema(array | {"items": {"type": "integer"}}), "[1,2]")
    both = {"allOf": [{"$ref": "#/$defs/p"}, {"properties": {"c": {"type": "integer"}}, "required": ["c"]}]}
    assert accepts(grammars, of_schema(both | {"$defs": {"p": PERSON}}), further)
    beside = {"$ref": "#/$defs/p", "$defs": {"p": PERSON}, "properties": {"c": {"type": "integer"}}}
    assert accepts(grammars, of_schema(beside), further)
    alone = {"allOf": [{"$ref": "#/$defs/p"}], "title": "as pydantic 1 writes references", "$defs": {"p": PERSON}}
    assert not accepts(grammars, of_schema(alone), further)
    assert accepts(grammars, of_schema(PERSON | {"required": ["z"]}), '{"z":1}')  # which it does not name


def test_calls_of_tools_have_the_named_arguments(grammars):
    structure = tools_of(PERSON)
    begin, end = '<tool_call>\n{"name":"f","arguments":{"a":1', "}}\n</tool_call>"
    texts = [begin + more + end for more in ("", ',"c":2')]
    assert [accepts(grammars, structure, text) for text in texts] == [True, False]


def test_preparing_changes_no_schema_and_narrows_it_only():
    """Random schemas: values that match the prepared one match the given one."""
    chance = random.Random(5)
    values = [None, 1, "x", [], [1, 2], {}, {"a": 1}, {"a": "x"}, {"a": 1, "c": 2}, {"b": {"a": 1}}, {"c": {"c": 1}}]

    def schema(depth):
        kind = chance.choice(["integer", "string", "object", "array", "any", "all"] if depth else ["integer", "string"])
        if kind == "object":
            named = {name: schema(depth - 1) for name in chance.sample("abc", 2)}
            return {"type": "object", "properties": named, "required": chance.sample("abc", chance.randint(0, 2))}
        if kind == "array":
            return {"type": "array", "prefixItems": [schema(depth - 1)]}
        if kind in ("any", "all"):
            return {f"{kind}Of": [schema(depth - 1) for _ in range(2)]}
        return {"type": kind}

    narrower = 0
    for _ in range(300):
        given = schema(3)
        before = json.dumps(given)
        found = prepared(given, param="x")
        assert json.dumps(given) == before
        for value in values:
            own, full = (jsonschema.Draft202012Validator(one).is_valid(value) for one in (found, given))
            assert full or not own, (given, found, value)
            narrower += full and not own
    assert narrower > 20
