"""Tools of chats: read, shown to the model, called by a grammar, and found in answers of three formats."""

import json
import random

import openai
import pytest
import transformers

from tests.inference.models import save_letters
from tests.serve.test_server import HTTP, Chatting, start
from ztk.inference import SamplingParams
from ztk.serve.bodies import read_body
from ztk.serve.messages import PLAIN, ChatOptions, read_options
from ztk.serve.tokenizers import Pretrained
from ztk.serve.tools import CallStream, Format, call_structure, format_of, read_tools, told, with_pieces
from ztk.serve.values import BadRequest, parsed

USER = [{"role": "user", "content": "weather?"}]
CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"], "additionalProperties": False}  # fmt: skip
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "d", "parameters": CITY}},
    {"type": "function", "function": {"name": "now"}},
]
ASKED = read_tools({"tools": TOOLS})


class Knowing(Chatting):
    """Its template shows the names of the tools."""

    template = "{{ tools }}"

    def chat(self, messages, *, options=PLAIN):
        names = " ".join(tool["function"]["name"] for tool in options.tools)
        return self.encode(names) + super().chat(messages, options=options)


@pytest.fixture(scope="module")
def running():
    found = start(tokenizer=Knowing(), max_sequences=8)
    yield found
    found.stop()


def found_in(text, *, format, asked=ASKED, seed=0, in_pieces=False):
    """Content and calls, from pieces of random lengths."""
    stream, chance = CallStream(format, tools=asked, in_pieces=in_pieces), random.Random(seed)
    content, pieces = "", []
    while text:
        size = chance.randint(1, 6)
        own, more = stream.push(text[:size])
        content, pieces, text = content + own, pieces + more, text[size:]
    own, more = stream.finish()
    calls = with_pieces([], pieces=pieces + more)
    return content + own, [(call.name, json.loads(call.arguments)) for call in calls]


ROME, OSLO = ("weather", {"city": "Rome"}), ("weather", {"city": "Oslo"})
ONE = '{"name": "weather", "arguments": {"city": "Rome"}}'
TWO = '{"name": "weather", "arguments": {"city": "Oslo"}}'


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("format", "text", "content", "calls"),
    [
        ("hermes", f"Let me see.\n<tool_call>\n{ONE}\n</tool_call>", "Let me see.\n", [ROME]),
        ("hermes", f"<tool_call>{ONE}</tool_call>\n<tool_call>\n{TWO}\n</tool_call>", "", [ROME, OSLO]),
        ("hermes", f"<tool_call>\n{ONE}", "", [ROME]),
        ("hermes", "<tool_call>\nno json\n</tool_call> a", "<tool_call>\nno json\n</tool_call> a", []),
        ("hermes", "1 < 2 and <tool", "1 < 2 and <tool", []),
        ("llama3", '{"name": "weather", "parameters": {"city": "Rome"}}', "", [ROME]),
        ("llama3", f"<|python_tag|>{ONE}; {TWO}", "", [ROME, OSLO]),
        ("llama3", '{"a": 1}', '{"a": 1}', []),
        ("llama3", "It is {warm}", "It is {warm}", []),
        ("mistral", f"[TOOL_CALLS] [{ONE}, {TWO}]", "", [ROME, OSLO]),
        ("mistral", 'Hm [TOOL_CALLS]weather{"city": "Rome"}', "Hm ", [ROME]),
        ("mistral", '[TOOL_CALLS]weather[ARGS]{"city": "Rome"}[TOOL_CALLS]now[ARGS]{}', "", [ROME, ("now", {})]),
        ("mistral", "[1, 2] [TOOL", "[1, 2] [TOOL", []),
    ],
)
def test_calls_are_found_in_pieces(format, text, content, calls, seed):
    for in_pieces in (False, True):
        assert found_in(text, format=Format(format), seed=seed, in_pieces=in_pieces) == (content, calls)


@pytest.mark.parametrize("in_pieces", [False, True])
def test_one_call_alone_is_kept_where_several_are_not_wanted(in_pieces):
    asked = read_tools({"tools": TOOLS, "parallel_tool_calls": False})
    options = {"asked": asked, "in_pieces": in_pieces}
    text = f"<tool_call>{ONE}</tool_call><tool_call>{TWO}</tool_call>"
    assert found_in(text, format=Format.hermes, **options) == ("", [ROME])
    assert found_in(f"[TOOL_CALLS] [{ONE}, {TWO}]", format=Format.mistral, **options) == ("", [ROME])


HARD = '{"city": "a \\"}{\\\\", "more": [{"x": "]"}, "\\u007d"]}'


@pytest.mark.parametrize(
    ("format", "text"),
    [
        ("hermes", f'<tool_call>\n{{"name": "weather", "arguments": {HARD}}}\n</tool_call>'),
        ("llama3", f'{{"name": "weather", "parameters": {HARD}}}'),
        ("llama3", f'<|python_tag|>{{"name": "weather", "parameters": {HARD}, "x": {{}}}}'),
        ("mistral", f'[TOOL_CALLS] [{{"name": "weather", "arguments": {HARD}}}]'),
        ("mistral", f"[TOOL_CALLS]weather[ARGS]{HARD}"),
    ],
)
def test_a_stream_has_the_name_first_and_then_the_arguments_as_they_are_written(format, text):
    stream, found = CallStream(Format(format), tools=ASKED, in_pieces=True), []
    for place, letter in enumerate(text):
        content, pieces = stream.push(letter)
        assert not content.strip()
        found += [(place, piece) for piece in pieces]
    assert stream.finish() == ("", [])
    (at, first), *others = found
    assert (first.name, first.arguments) == ("weather", "") and first.id.startswith("call_")
    assert text.startswith(HARD, at) and len(others) == len(HARD)  # a piece for each letter
    assert "".join(piece.arguments for _, piece in others) == HARD and json.loads(HARD)
    assert all(piece.name is None and piece.id is None for _, piece in others)


def test_a_truncated_call_keeps_its_streamed_part():
    stream = CallStream(Format.hermes, tools=ASKED, in_pieces=True)
    content, pieces = stream.push('Hm <tool_call>{"name": "weather", "arguments": {"city": "Ro')
    assert content == "Hm " and stream.finish() == ("", [])
    [call] = with_pieces([], pieces=pieces)
    assert (call.name, call.arguments) == ("weather", '{"city": "Ro')


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("format", "text", "content"),
    [
        ("hermes", f"<tool_call>\n{ONE} and more\n</tool_call> Bye", "and more\n Bye"),
        ("llama3", f"<|python_tag|>{ONE} I call [it].", "I call [it]."),
        ("mistral", f"[TOOL_CALLS] [{ONE}] I call [it].", "I call [it]."),
        ("hermes", f"<tool_call>\n{ONE}}}\n</tool_call>", ""),  # a bracket too many
    ],
)
def test_text_behind_a_call_that_was_streamed_is_kept(format, text, content, seed):
    assert found_in(text, format=Format(format), seed=seed, in_pieces=True) == (content, [ROME])


@pytest.mark.parametrize("size", [1, 5, 100])
@pytest.mark.parametrize("in_pieces", [False, True])
def test_the_end_of_a_call_does_not_count_in_its_texts(size, in_pieces):
    call = '{"name": "weather", "arguments": {"city": "a</tool_call>\\"</tool_call>"}}'
    text, pieces = f"<tool_call>{call}</tool_call><tool_call>{ONE}</tool_call>", []
    stream = CallStream(Format.hermes, tools=ASKED, in_pieces=in_pieces)
    for at in range(0, len(text), size):
        pieces += stream.push(text[at : at + size])[1]
    first, second = with_pieces([], pieces=[*pieces, *stream.finish()[1]])
    assert json.loads(first.arguments) == {"city": 'a</tool_call>"</tool_call>'}
    assert (second.name, json.loads(second.arguments)) == ROME


def test_a_template_names_its_format():
    assert format_of("... [TOOL_CALLS] ...") == "mistral" and format_of('x <|python_tag|> "parameters"') == "llama3"
    assert format_of("<tool_call>") == format_of(None) == "hermes"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"tools": {}}, "tools must be a list"),
        ({"tools": [{"type": "function"}]}, r"tools\[0\] must be"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": 5}}]}, r"tools\[0\] must be"),
        ({"tools": [{"type": "function", "function": {"name": "a" * 65}}]}, "a name of 64"),
        ({"tools": TOOLS * 100}, "128 functions at most"),
        ({"tools": TOOLS, "tool_choice": "maybe"}, "tool_choice must be"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "names x, which is not"),
        ({"tool_choice": "required"}, "tool_choice=required goes with tools"),
        ({"tools": TOOLS, "tool_choice": "required", "guided_regex": "a"}, "exclude each other"),
    ],
)
def test_tools_of_another_form_are_refused(body, message):
    with pytest.raises(BadRequest, match=message):
        read_body(parsed(json.dumps({"messages": USER} | body).encode()), chat=True, usual=SamplingParams())


def test_a_template_without_tools_gets_them_as_text(tmp_path):
    called = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "now", "arguments": {}}}]}
    found = told([*USER, called, {"role": "tool", "content": "5"}], tools=TOOLS)
    assert [message["role"] for message in found] == ["system", "user", "assistant", "user"]
    assert json.dumps(TOOLS[0]) in found[0]["content"] and "<tool_response>\n5" in found[3]["content"]
    assert found_in(found[2]["content"], format=Format.hermes) == ("", [("now", {})])
    save_letters(tmp_path)
    inner = transformers.AutoTokenizer.from_pretrained(tmp_path)
    inner.chat_template = (
        "{{ tools | length }}{{ colour }}{% for m in messages %}{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}!{% endif %}"
    )
    own = Pretrained(inner)
    options = read_options({"chat_template_kwargs": {"colour": "r", "documents": []}}, tools=tuple(TOOLS))
    assert own.chat(USER, options=options) == own.encode_text("2rweather?!")
    assert own.chat(USER, options=ChatOptions(begins=False, tools=tuple(TOOLS))) == own.encode_text("2weather?")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_call_that_must_be_made_is_made(running, choice, stream):
    """By OpenAI's client, from a random model."""
    client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)
    asked = {"model": "tiny", "messages": USER, "tools": TOOLS[:1], "tool_choice": choice, "max_tokens": 200, "seed": 2}
    asked |= {"parallel_tool_calls": False, "temperature": 0.7}
    if stream:
        chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**asked, stream=True)]
        pieces = [call for chunk in chunks for call in chunk.delta.tool_calls or ()]
        assert {piece.index for piece in pieces} == {0} and pieces[0].function.arguments == ""
        assert len(pieces) > 3 and [piece.id for piece in pieces[1:]] == [None] * (len(pieces) - 1)
        pieces[0].function.arguments = "".join(piece.function.arguments for piece in pieces)
        calls = pieces[:1]
        reason, content = chunks[-1].finish_reason, "".join(chunk.delta.content or "" for chunk in chunks)
    else:
        found = client.chat.completions.create(**asked).choices[0]
        calls, reason, content = found.message.tool_calls, found.finish_reason, found.message.content or ""
    [call] = calls
    assert call.function.name == "weather" and json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")
    assert (
        reason == ("tool_calls" if choice == "required" else "stop") and content == "" and call.id.startswith("call_")
    )


@pytest.mark.parametrize("stream", [False, True])
def test_tools_that_may_not_be_called_stay_in_the_prompt(running, stream):
    """As in vLLM, tool_choice=none takes no tool out of the prompt, and an answer that is written like a call is text."""
    client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)
    text = written(ONE, format=Format.hermes)
    asked = {"model": "tiny", "messages": USER, "max_tokens": 200, "extra_body": {"guided_choice": [text]}}

    def ask(**more):
        if not stream:
            found = client.chat.completions.create(**asked, **more)
            message = found.choices[0].message
            return found.usage.prompt_tokens, message.content or "", message.tool_calls or []
        *chunks, last = client.chat.completions.create(
            **asked, **more, stream=True, stream_options={"include_usage": True}
        )
        deltas = [chunk.choices[0].delta for chunk in chunks]
        calls = [call for delta in deltas for call in delta.tool_calls or ()]
        return last.usage.prompt_tokens, "".join(delta.content or "" for delta in deltas), calls

    without, _, _ = ask()
    allowed, content, calls = ask(tools=TOOLS)
    assert calls and content == "" and allowed > without
    assert ask(tools=TOOLS, tool_choice="none") == (allowed, text, [])


@pytest.mark.parametrize("format", list(Format))
def test_calls_from_each_formats_grammar_are_parsed(running, format):
    """A matcher of the library takes the text of a call, and nothing after it."""
    text = written(ONE, format=format)
    assert follows(running, tools=TOOLS, format=format, text=text)
    assert found_in(text, format=format) == ("", [ROME])


@pytest.mark.parametrize("format", list(Format))
def test_parameters_may_refer_to_their_own_parts(running, format):
    """As pydantic writes nested models: `#` is the function's schema, wherever the grammar has it."""
    place = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    place["additionalProperties"] = False
    parameters = {"type": "object", "$defs": {"Place": place}, "properties": {"to": {"$ref": "#/$defs/Place"}}}
    tools = [*TOOLS, {"type": "function", "function": {"name": "go", "parameters": parameters}}]
    for value, is_good in (("2", True), ('"2"', False)):
        text = written(f'{{"name": "go", "arguments": {{"to": {{"x": {value}}}}}}}', format=format)
        assert follows(running, tools=tools, format=format, text=text) == is_good


def written(call, *, format):
    """A call as a model writes it."""
    texts = {
        Format.hermes: f"<tool_call>\n{call}\n</tool_call>",
        Format.llama3: call.replace("arguments", "parameters"),
        Format.mistral: f"[TOOL_CALLS][{call}]",
    }
    return texts[format]


def follows(running, *, tools, format, text):
    """The grammar of one required call leads to `text`, and ends there."""
    asked = read_tools({"tools": tools, "tool_choice": "required", "parallel_tool_calls": False})
    structure = call_structure(asked, format=format, special={})
    state = running.server._reader._grammars.compiled(structure).begin()
    answer, is_done = [], False
    for token in text.encode():
        mask = state.mask(answer)
        if not int(mask[token // 32]) >> token % 32 & 1:
            return False
        answer.append(token)
        is_done = state.advance(answer)
    return is_done


def test_results_of_tools_are_messages(running):
    call = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": '{"a": 1}'}}
    messages = [*USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
    messages.append({"role": "tool", "tool_call_id": "c1", "content": "noon"})
    found = HTTP.post(
        f"{running.url}/v1/chat/completions", json={"messages": messages, "tools": TOOLS, "max_tokens": 3}, timeout=60
    )
    assert found.status_code == 200 and found.json()["choices"][0]["finish_reason"] == "length"
    assert found.json()["usage"]["prompt_tokens"] > len("weather?noon")
