"""What a user chooses about answers: how sequences share the engine, and how one is drawn. Ranges of both, once."""

from collections.abc import Iterator
from typing import Any

from ztk.core.policies.ranges import COUNT, COUNT_OR_ZERO, INT32_MAX, INT64_MAX, SIZE, Range

WEIGHTS = ("stored", "int8", "int4")
BLOCK_WEIGHTS = (*WEIGHTS, "bf16", "fp8")  # of the engine over a cache of blocks
CACHES = ("slabs", "blocks")
CACHE_DTYPES = ("stored", "fp8")
RANGES = {
    "max_sequences": COUNT,
    "max_step_tokens": COUNT,
    "max_model_len": COUNT,
    "lookup_tokens": COUNT_OR_ZERO,
    "cache_tokens": COUNT,
    "draft_tokens": COUNT_OR_ZERO,
    "memory_bytes": SIZE,
}
ONLY_NVME = "answers are computed on the CPU, where main memory is what the weights would leave; use offload=nvme, or leave offload out"
# Values that go with a cache of slabs.
_OF_SLABS = {"weights": WEIGHTS, "cache_dtype": (None, "stored"), "exact": (None, True)}
SAMPLING_RANGES = {
    "max_tokens": COUNT,
    "temperature": Range(low=1e-6, zero=True),  # logits over less are infinite in float32
    "top_k": COUNT_OR_ZERO,
    "top_p": Range(low=0, high=1, above=True),
    "min_p": Range(low=0, high=1),
    "repetition_penalty": Range(low=0, above=True),
    "presence_penalty": Range(low=-2, high=2),
    "frequency_penalty": Range(low=-2, high=2),
    "n": COUNT,
    "seed": Range(low=0, high=INT64_MAX),
    "logprobs": COUNT_OR_ZERO,
}
LOGIT_BIAS = Range(low=-1e9, high=1e9)
EVAL_RANGES = {"seq_len": Range(low=2, high=INT32_MAX), "stride": COUNT}
SERVE_RANGES = {
    "port": Range(low=0, high=65_535),
    "max_waiting": COUNT,
    "drain_seconds": Range(low=0, high=86_400),
    "max_body_bytes": COUNT,
    "max_answers": COUNT,
    "max_logprobs": COUNT_OR_ZERO,
    "max_stops": COUNT_OR_ZERO,
}


def cache_of(cache: str | None, *, device: str) -> str:
    """slabs or blocks: what is chosen, else blocks on a GPU. device: cpu or cuda."""
    return cache or ("slabs" if device == "cpu" else "blocks")


def cache_faults(options: Any, *, device: str, streams: bool) -> Iterator[str]:
    """What goes with the other kind of cache or another device, one line each with its fix.

    options: has `cache`, `cache_tokens`, `cache_dtype`, `exact`, `memory_bytes` and `weights` as `InferencePolicy` has them, None where
    nothing is chosen.
    device: cpu or cuda. streams: offload=nvme is chosen.
    """
    if cache_of(options.cache, device=device) == "blocks":
        if streams and options.cache is None:  # a model that lies on a GPU
            yield (
                "offload=nvme: layers stream on the CPU, over slabs; use launch.device=cpu, or inference.cache=blocks, which keeps the layers "
                "and writes the blocks of preempted sequences to files"
            )
        if streams and options.memory_bytes is not None:
            yield f"inference.memory_bytes={options.memory_bytes} is for layers that stream: use inference.cache_tokens, or leave it out"
        if options.weights == "bf16" and device == "cpu":
            yield "inference.weights=bf16 is for GPUs: the CPU computes in fp32; use weights=int8, or leave it out"
        return
    if streams and options.cache_tokens is not None:
        yield (
            f"inference.cache_tokens={options.cache_tokens}: with offload=nvme the plan gives the cache its memory; use "
            "inference.memory_bytes, inference.max_sequences or inference.max_model_len"
        )
    if device != "cpu":
        yield f"inference.cache=slabs is of the CPU, and the model is on {device}: use inference.cache=blocks"
    for name, usual in _OF_SLABS.items():
        if (value := getattr(options, name)) not in usual:
            shown = str(value).lower() if isinstance(value, bool) else value
            yield f"inference.{name}={shown} is of the cache of blocks: add inference.cache=blocks, or leave it out"
