"""The table of fields in docs/serving.md: each field is sent to a server, which acts on it, ignores it by its name, or refuses it.

python -m tests.serve.test_field_table    writes the table again
"""

from pathlib import Path

import httpx

from tests.serve.test_server import Chatting, start

PAGE = Path(__file__).parents[2] / "docs" / "serving.md"
BEGIN, END = "<!-- fields: written by tests/serve/test_field_table.py -->", "<!-- end of fields -->"
TOOL = {"type": "function", "function": {"name": "now"}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": [1, 2]}}}
YES, NO, IGNORED, REFUSED = "acts", "-", "ignored", "refused"
# The field, a value, and what vLLM and llama.cpp's server do with it by their documentation. Chats, unless "prompt" is given.
FIELDS: list[tuple[str, object, str, str]] = [
    ("max_tokens", 5, YES, YES),
    ("max_completion_tokens", 5, YES, YES),
    ("temperature", 0.5, YES, YES),
    ("top_p", 0.5, YES, YES),
    ("top_k", 5, YES, YES),
    ("min_p", 0.1, YES, YES),
    ("repetition_penalty", 1.1, YES, IGNORED),
    ("repeat_penalty", 1.1, IGNORED, YES),
    ("presence_penalty", 0.5, YES, YES),
    ("frequency_penalty", 0.5, YES, YES),
    ("logit_bias", {"65": 5}, YES, YES),
    ("seed", 5, YES, YES),
    ("n", 2, YES, YES),
    ("stop", ["x"], YES, YES),
    ("stop_token_ids", [65], YES, IGNORED),
    ("include_stop_str_in_output", True, YES, IGNORED),
    ("min_tokens", 2, YES, IGNORED),
    ("ignore_eos", True, YES, YES),
    ("bad_words", ["x"], YES, IGNORED),
    ("allowed_token_ids", [65, 66], YES, IGNORED),
    ("skip_special_tokens", False, YES, IGNORED),
    ("logprobs", True, YES, YES),
    ("prompt_logprobs", 1, YES, IGNORED),
    ("return_token_ids", True, YES, IGNORED),
    ("stream", True, YES, YES),
    ("stream_options", {"include_usage": True}, YES, YES),
    ("response_format", SCHEMA, YES, YES),
    ("structured_outputs", {"choice": ["a", "b"]}, YES, IGNORED),
    ("guided_json", {"enum": [1]}, "to 0.11", IGNORED),
    ("guided_regex", "[ab]{3}", "to 0.11", IGNORED),
    ("guided_choice", ["a", "b"], "to 0.11", IGNORED),
    ("guided_grammar", 'root ::= "a"', "to 0.11", IGNORED),
    ("grammar", 'root ::= "a"', IGNORED, YES),
    ("json_schema", {"enum": [1]}, IGNORED, YES),
    ("tools", [TOOL], YES, YES),
    ("tool_choice", "none", YES, YES),
    ("parallel_tool_calls", False, YES, YES),
    ("chat_template_kwargs", {}, YES, YES),
    ("add_generation_prompt", True, YES, YES),
    ("continue_final_message", False, YES, NO),
    ("chat_template", "{{ 1 }}", YES, NO),
    ("truncate_prompt_tokens", 5, YES, IGNORED),
    ("use_beam_search", True, YES, IGNORED),
    ("typical_p", 0.5, IGNORED, YES),
    ("mirostat", 1, IGNORED, YES),
    ("functions", [TOOL], IGNORED, IGNORED),
    ("user", "u", IGNORED, IGNORED),
    ("metadata", {}, IGNORED, IGNORED),
    ("store", True, IGNORED, IGNORED),
    ("service_tier", "auto", IGNORED, IGNORED),
    ("prompt_cache_key", "k", IGNORED, IGNORED),
    ("reasoning_effort", "low", "by model", "by model"),
    ("priority", 1, YES, IGNORED),
    ("cache_prompt", True, IGNORED, YES),
    ("echo (/completions)", True, YES, NO),
    ("best_of (/completions)", 3, "to 0.8", IGNORED),
    ("add_special_tokens (/completions)", False, YES, IGNORED),
    ("suffix (/completions)", "x", REFUSED, REFUSED),
]


def table() -> str:
    """The server acts on each field, ignores it, or refuses it."""
    server = start(tokenizer=Chatting(), max_sequences=8)
    lines = ["| field | vLLM | llama.cpp | ztk |", "| --- | --- | --- | --- |"]
    try:
        for shown, value, vllm, llama in FIELDS:
            field, *route = shown.split()
            own = _sent(server, field, value, is_chat=not route)
            lines.append(f"| {' '.join([f'`{field}`', *route])} | {vllm} | {llama} | {own} |")
    finally:
        server.stop()
    return "\n".join(lines)


def _sent(server, field: str, value: object, *, is_chat: bool) -> str:
    body = {"messages": [{"role": "user", "content": "x"}]} if is_chat else {"prompt": "abc"}
    path = "chat/completions" if is_chat else "completions"
    found = httpx.post(f"{server.url}/v1/{path}", json={"max_tokens": 4} | body | {field: value}, timeout=60)
    if found.status_code == 400:
        assert found.json()["error"]["param"] == field, found.text
        return REFUSED
    assert found.status_code == 200, found.text
    return IGNORED if field in found.headers.get("x-ztk-ignored-fields", "").split(", ") else YES


def test_the_page_has_what_the_server_does_with_each_field():
    page = PAGE.read_text(encoding="utf-8")
    assert page[page.index(BEGIN) + len(BEGIN) : page.index(END)].strip() == table(), (
        "python -m tests.serve.test_field_table"
    )


if __name__ == "__main__":
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(
        f"{page[: page.index(BEGIN) + len(BEGIN)]}\n\n{table()}\n\n{page[page.index(END) :]}", encoding="utf-8"
    )
