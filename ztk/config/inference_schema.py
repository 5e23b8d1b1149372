"""The keys of `task=generate` and `task=serve`, and of the model of `task=eval`."""

from dataclasses import dataclass
from enum import StrEnum

from ztk.config.key import key


class WeightFormat(StrEnum):
    """inference.weights: how weights are stored."""

    stored = "stored"
    int8 = "int8"
    int4 = "int4"
    bf16 = "bf16"
    fp8 = "fp8"


class CacheKind(StrEnum):
    """inference.cache: how keys and values are kept."""

    slabs = "slabs"
    blocks = "blocks"


class CacheFormat(StrEnum):
    """inference.cache_dtype: the format of keys and values in blocks."""

    stored = "stored"
    fp8 = "fp8"


@dataclass(kw_only=True)
class InferenceConfig:
    """Which model answers, and how sequences share it."""

    model: str | None = key(
        "a run folder, a checkpoint, or a folder that transformers reads; with task=generate, serve and eval it must be given",
        default=None,
    )
    prompts: str | None = key(
        'a jsonl file, each line {"prompt": "text"} or {"tokens": [1, 2]}, with sampling keys of its own where it has them; null: one '
        "prompt, a line break, and the answer is printed",
        default=None,
    )
    max_sequences: int | None = key(
        "sequences that are computed in one step; others wait; null: 32, with offload=nvme as many as its plan finds",
        default=None,
    )
    max_step_tokens: int | None = key(
        "tokens of one step; a longer prompt is computed in several; null: 512, with offload=nvme what its plan finds",
        default=None,
    )
    memory_bytes: int | None = key(
        "with offload=nvme: memory for layers, caches and activations; null: 80 % of what is free", default=None
    )
    max_model_len: int | None = key(
        "tokens of one sequence, prompt and answer; null: what the model was made for", default=None
    )
    lookup_tokens: int | None = key(
        "draft tokens per step, found in the text itself; 0: none. They change no token", default=None
    )
    draft_model: str | None = key(
        "a smaller model with the same tokens, run folder or folder of transformers, which drafts where nothing was looked up; null: none",
        default=None,
    )
    draft_tokens: int | None = key("draft tokens per step of inference.draft_model. They change no token", default=None)
    weights: WeightFormat | None = key(
        "stored: as the model's folder has them, or fp32 on the CPU; int8: a scale per output channel; int4: groups of 128 inputs, the head in "
        "int8; on a GPU also bf16, and with a cache of blocks fp8 (e4m3)",
        default=None,
    )
    cache: CacheKind | None = key(
        "slabs: one per sequence, on the CPU alone; blocks: of 64 tokens, shared by sequences that begin alike; null: blocks on a GPU",
        default=None,
    )
    cache_tokens: int | None = key(
        "tokens of all sequences together that there is memory for; others wait; null: what fits into the free memory",
        default=None,
    )
    cache_dtype: CacheFormat | None = key(
        "keys and values of a cache of blocks: stored (that of the computation) or fp8; null: stored", default=None
    )
    exact: bool | None = key(
        "over blocks, a sequence has the same bits whatever is computed beside it; false: products of up to eight rows are faster on a GPU; "
        "null: true",
        default=None,
    )
    ema: bool | None = key(
        "take the moving average of the weights, which a run with ema.decay keeps; null: false, the weights that trained",
        default=None,
    )
    generation_config: bool | None = key(
        "sampling.* that is not given comes from generation_config.json in the model's folder; null: true", default=None
    )
    held_out: str | None = key(
        "a text file; its first 2,048 tokens say how much int8 or int4 weights change the perplexity", default=None
    )


@dataclass(kw_only=True)
class SamplingConfig:
    """How an answer is drawn. A request may say otherwise."""

    max_tokens: int | None = key("tokens of an answer at most; null: the rest of the context", default=None)
    temperature: float | None = key("divides the logits; 0: the likeliest token", default=None)
    top_k: int | None = key("only so many of the likeliest tokens; 0: all", default=None)
    top_p: float | None = key("only the likeliest tokens that together have this probability", default=None)
    min_p: float | None = key("only tokens with at least this part of the likeliest one's probability", default=None)
    repetition_penalty: float | None = key(
        "divides positive logits of tokens in prompt and answer, multiplies negative ones", default=None
    )
    presence_penalty: float | None = key("taken off the logits of tokens in the answer", default=None)
    frequency_penalty: float | None = key("the same, times how often the token is there", default=None)
    n: int | None = key("answers to each prompt", default=None)
    seed: int | None = key("a draw is a function of it, the number of the answer and the position", default=None)
    stop: list[str] | None = key("texts that end an answer, as in [END]; they are left out of it", default=None)
    logprobs: int | None = key("log-probabilities of so many of the likeliest tokens are written, too", default=None)


@dataclass(kw_only=True)
class ServeConfig:
    """The HTTP server of `task=serve`."""

    host: str | None = key("address to listen on; 0.0.0.0: all of this machine's", default=None)
    port: int | None = key("port to listen on; 0: a free one, which is printed", default=None)
    model_name: str | None = key(
        "the model's name in /v1/models, which requests may send; null: that of its folder", default=None
    )
    api_key_variable: str | None = key(
        "environment variable whose value clients must send as Authorization: Bearer VALUE; null: nothing is asked for",
        default=None,
    )
    max_waiting: int | None = key("requests that wait for a place; more are refused with 429", default=None)
    drain_seconds: float | None = key("after SIGTERM running answers have so long to end", default=None)
    max_body_bytes: int | None = key("bytes of a request; longer ones are refused with 413", default=None)
    max_answers: int | None = key("answers to one request, prompts times n; more are refused with 400", default=None)
    max_logprobs: int | None = key("likely tokens per position that a request may ask for", default=None)
    max_stops: int | None = key("stop texts that a request may have", default=None)
