"""docs/serving_fields.md: each field is sent to a server, which acts on it, ignores it by its name, or refuses it.

python -m tests.serve.test_field_table    writes the page again
"""

from pathlib import Path

from tests.serve.test_server import HTTP, Chatting, start

PAGE = Path(__file__).parents[2] / "docs" / "serving_fields.md"
TOOL = {"type": "function", "function": {"name": "now"}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": [1, 2]}}}
YES, IGNORED, REFUSED, FLAG = "acts", "ignored", "refused", "with a flag"
# The versions that the columns of the other servers were read from, and the files.
VLLM, LLAMA = "0.33.0", "0c1e57098"
INTRODUCTION = f"""\
# Fields of requests

Look up whether [the server](serving.md#fields) acts on a field of vLLM or llama.cpp, ignores it, or refuses it.

The column of vLLM follows `ChatCompletionRequest` and `CompletionRequest` of version {VLLM}; a field "{FLAG}" acts where a flag of
`vllm serve` switches it on. The column of llama.cpp follows `tools/server` at commit {LLAMA}: its README, `server-schema.cpp` and
`server-common.cpp`.
"""
# The field, a value, and its treatment by vLLM and llama.cpp's server. Chats, unless "/completions" is given.
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
    ("spaces_between_special_tokens", False, YES, IGNORED),
    ("logprobs", True, YES, YES),
    ("top_logprobs", 2, YES, YES),
    ("prompt_logprobs", 1, YES, IGNORED),
    ("logprob_token_ids", [65], YES, IGNORED),
    ("return_token_ids", True, YES, IGNORED),
    ("return_tokens_as_token_ids", True, YES, IGNORED),
    ("stream", True, YES, YES),
    ("stream_options", {"include_usage": True}, YES, YES),
    ("stream_interval", 2, YES, IGNORED),
    ("response_format", SCHEMA, YES, YES),
    ("structured_outputs", {"choice": ["a", "b"]}, YES, IGNORED),
    ("guided_json", {"enum": [1]}, IGNORED, IGNORED),
    ("guided_regex", "[ab]{3}", IGNORED, IGNORED),
    ("guided_choice", ["a", "b"], IGNORED, IGNORED),
    ("guided_grammar", 'root ::= "a"', IGNORED, IGNORED),
    ("grammar", 'root ::= "a"', IGNORED, YES),
    ("json_schema", {"enum": [1]}, IGNORED, YES),
    ("tools", [TOOL], YES, YES),
    ("tool_choice", "none", YES, YES),
    ("parallel_tool_calls", False, YES, YES),
    ("chat_template_kwargs", {}, YES, YES),
    ("add_generation_prompt", True, YES, YES),
    ("continue_final_message", False, YES, YES),
    ("echo", True, YES, YES),
    ("chat_template", "{{ 1 }}", FLAG, IGNORED),
    ("documents", [{"text": "a"}], YES, IGNORED),
    ("add_special_tokens", True, YES, IGNORED),
    ("reasoning_effort", "low", YES, YES),
    ("include_reasoning", False, FLAG, IGNORED),
    ("thinking_token_budget", 5, YES, IGNORED),
    ("truncate_prompt_tokens", 5, YES, IGNORED),
    ("truncation_side", "right", YES, IGNORED),
    ("use_beam_search", True, YES, IGNORED),
    ("length_penalty", 0.5, YES, IGNORED),
    ("repetition_detection", {"max_pattern_size": 2, "min_count": 2}, YES, IGNORED),
    ("watermarking", True, FLAG, IGNORED),
    ("priority", 1, FLAG, IGNORED),
    ("request_id", "r", YES, IGNORED),
    ("session_id", "s", YES, IGNORED),
    ("cache_salt", "s", YES, IGNORED),
    ("return_prompt_text", True, YES, IGNORED),
    ("mm_processor_kwargs", {}, "by model", IGNORED),
    ("media_io_kwargs", {}, "by model", IGNORED),
    ("mm_payload", "none", IGNORED, IGNORED),
    ("return_mm_kwargs", False, IGNORED, IGNORED),
    ("return_token_offsets", True, IGNORED, IGNORED),
    ("return_weight_versions", True, YES, IGNORED),
    ("routed_experts_prompt_start", 1, FLAG, IGNORED),
    ("ec_transfer_params", {}, FLAG, IGNORED),
    ("vllm_xargs", {"a": 1}, FLAG, IGNORED),
    ("kv_transfer_params", {}, FLAG, IGNORED),
    ("n_predict", 5, IGNORED, YES),
    ("n_probs", 2, IGNORED, YES),
    ("typical_p", 0.5, IGNORED, YES),
    ("mirostat", 1, IGNORED, YES),
    ("dynatemp_range", 0.5, IGNORED, YES),
    ("dry_multiplier", 0.5, IGNORED, YES),
    ("xtc_probability", 0.5, IGNORED, YES),
    ("top_n_sigma", 1.0, IGNORED, YES),
    ("samplers", ["top_k"], IGNORED, YES),
    ("lora", [{"id": 0, "scale": 1}], IGNORED, YES),
    ("cache_prompt", True, IGNORED, YES),
    ("functions", [TOOL], IGNORED, IGNORED),
    ("modalities", ["audio"], IGNORED, IGNORED),
    ("system", "s", IGNORED, IGNORED),
    ("user", "u", IGNORED, IGNORED),
    ("metadata", {}, IGNORED, IGNORED),
    ("store", True, IGNORED, IGNORED),
    ("service_tier", "auto", IGNORED, IGNORED),
    ("prompt_cache_key", "k", IGNORED, IGNORED),
    ("draw_keys", [5], IGNORED, IGNORED),
    ("fp32_logprobs", True, IGNORED, IGNORED),
    ("echo (/completions)", True, YES, REFUSED),
    ("best_of (/completions)", 3, IGNORED, REFUSED),
    ("add_special_tokens (/completions)", False, YES, IGNORED),
    ("prompt_embeds (/completions)", "x", FLAG, IGNORED),
    ("suffix (/completions)", "x", "by model", REFUSED),
]


def page() -> str:
    """The text of the page: the server acts on each field, ignores it, or refuses it."""
    server = start(tokenizer=Chatting(), max_sequences=8)
    lines = [INTRODUCTION, "| field | vLLM | llama.cpp | ztk |", "| --- | --- | --- | --- |"]
    try:
        for shown, value, vllm, llama in FIELDS:
            field, *route = shown.split()
            own = _sent(server, field, value, is_chat=not route)
            lines.append(f"| {' '.join([f'`{field}`', *route])} | {vllm} | {llama} | {own} |")
    finally:
        server.stop()
    return "\n".join(lines) + "\n"


def _sent(server, field: str, value: object, *, is_chat: bool) -> str:
    body = {"messages": [{"role": "user", "content": "x"}]} if is_chat else {"prompt": "abc"}
    body |= {"logprobs": True} if field == "top_logprobs" else {}
    path = "chat/completions" if is_chat else "completions"
    found = HTTP.post(f"{server.url}/v1/{path}", json={"max_tokens": 4} | body | {field: value}, timeout=60)
    if found.status_code == 400:
        assert found.json()["error"]["param"] == field, found.text
        return REFUSED
    assert found.status_code == 200, found.text
    return IGNORED if field in found.headers.get("x-ztk-ignored-fields", "").split(", ") else YES


def test_the_page_lists_the_treatment_of_each_field():
    assert PAGE.read_text(encoding="utf-8") == page(), "python -m tests.serve.test_field_table"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
