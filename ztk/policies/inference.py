"""What a user chooses about answers: how sequences share the engine, and how one is drawn. Ranges of both, once."""

from ztk.policies.ranges import COUNT, COUNT_OR_ZERO, INT32_MAX, INT64_MAX, SIZE, Range

WEIGHTS = ("stored", "int8", "int4")
BLOCK_WEIGHTS = (*WEIGHTS, "fp8")  # of the engine over a cache of blocks
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
SAMPLING_RANGES = {
    "max_tokens": COUNT,
    "temperature": Range(low=0),
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
EVAL_RANGES = {"seq_len": Range(low=2, high=INT32_MAX), "stride": COUNT}
SERVE_RANGES = {"port": Range(low=0, high=65_535), "max_waiting": COUNT, "drain_seconds": Range(low=0, high=86_400)}
