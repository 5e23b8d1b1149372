"""Keys of inference and sampling: how sequences share the engine, and how answers are sampled. Both validate ranges in one place."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar

from ztk.core.policies.key import Changes, When, key, key_faults, section, tasks, written
from ztk.core.policies.offload import OffloadPolicy
from ztk.core.policies.paths import Paths
from ztk.core.policies.ranges import COUNT, COUNT_OR_ZERO, INT64_MAX, POSITIVE, SIZE, Range, refuse
from ztk.core.policies.runs import ANSWERING, infers, offloads, streams_layers
from ztk.core.policies.tier import Tier

if TYPE_CHECKING:
    from ztk.core.policies.config import Config

WEIGHTS = ("stored", "int8", "int4")
ALL_WEIGHTS = (*WEIGHTS, "bf16", "fp8")  # of ztk's kernels
CACHE_DTYPES = ("stored", "fp8")


class WeightFormat(StrEnum):
    """inference.weights: how weights are stored."""

    stored = "stored"
    int8 = "int8"
    int4 = "int4"
    bf16 = "bf16"
    fp8 = "fp8"


class CacheFormat(StrEnum):
    """inference.cache_dtype: the format of keys and values."""

    stored = "stored"
    fp8 = "fp8"


class ToolFormat(StrEnum):
    """serve.tool_parser: how a model writes calls of tools."""

    hermes = "hermes"
    llama3 = "llama3"
    mistral = "mistral"


_MODEL = "task=generate, task=serve or task=eval"
ANSWERS = When(_MODEL, lambda config, machine: config.task.name in ANSWERING)
_NAMED = When(f"{_MODEL}, and inference.model=FOLDER", ANSWERS.test)
_INFERS = When(f"{_MODEL}, and without eval.engine=training", lambda config, machine: infers(config))
_STREAMS = When(
    "task=generate, serve or eval and offload=nvme or cpu",
    lambda config, machine: infers(config) and (offloads(config, tier=Tier.nvme) or offloads(config, tier=Tier.cpu)),
)
_PROMPTED, _GENERATES, _SERVES = tasks("generate", "serve"), tasks("generate"), tasks("serve")
_IN_MEMORY = When(
    "task=generate or serve, without offload",
    lambda config, machine: _PROMPTED.test(config, machine) and not _STREAMS.test(config, machine),
)


def _adapters(config: "Config") -> Iterator[str]:
    chosen, dtype = config.inference.adapters, config.inference.cache_dtype
    if not isinstance(chosen, Mapping) or not chosen or not all(isinstance(path, str) for path in chosen.values()):
        yield f"inference.adapters={written(chosen)}: must name a folder for each adapter; use inference.adapters={{NAME: FOLDER}}"
        return
    yield from adapter_faults(chosen, cache_dtype=dtype, streams=streams_layers(config))


def _calibration(config: "Config") -> Iterator[str]:
    yield from calibration_faults(config.inference.weights, adapters=config.inference.adapters)


def _held_out(config: "Config") -> Iterator[str]:
    if config.inference.weights is WeightFormat.stored:
        yield (
            f"inference.held_out={config.inference.held_out} has no effect with weights as stored: add weights=int8 or weights=int4, or leave "
            "it out"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class InferencePolicy:
    """How sequences share the engine. Only `weights` and `cache_dtype` change a token: [Note: Exactness] in
    ztk/kernels/shared/cached_attention.py.

    step_seconds: the limit follows measured steps, so prompts are cut differently from run to run. There is none by default, so a
        schedule depends on the requests alone; task=generate and serve set 0.5.
    lookup_tokens: the last two tokens are looked up in the sequence itself (Saxena 2023, prompt lookup decoding). A draft is accepted only
        if it is the token that would have been drawn.
    weights: see [Note: Quantised weights] in ztk/inference/quantised.py. By kernels stored is the dtype of the module's parameters on a GPU,
        and fp8 needs kernels, see `ztk.kernels.shared`.
    calibration: with int4, tokens of a text. Weights are chosen for small errors of each layer's outputs on it, see
        [Note: Compensated errors] in ztk/kernels/shared/fitting.py, instead of small errors of the weights.
    offload: layers that do not fit into memory are read in every pass. Its key `parameters` is nvme, or cpu on a GPU, where main memory then
        has all layers; `nvme_path`, `block_bytes`, `threads`, `direct_io` and `pin_memory` apply. Files are read past the page cache. Models
        that are not a packed folder are first packed into `nvme_path`, and the copy is deleted with the generator. On a GPU, layers that fit
        stay there; with nvme, the blocks of preempted sequences are then written to a file.
    device: cpu or cuda. Defaults to the device of the module's parameters.
    kernels: whether ztk's kernels compute products and draws. Defaults to a GPU and to weights in fp8. On a CPU that is slower, and shows
        what a GPU computes.
    cache_tokens: in blocks of 64. Blocks of the newest sequences move to main memory when there are not enough. With `offload` the default
        is the plan's number.

    Raises:
        ValueError: a number is out of range, or an offload that does not apply.
    """

    acts: ClassVar = _INFERS
    changes: ClassVar = Changes.experiment

    max_sequences: int | None = key(
        "sequences that are computed in one step; others wait; null: 32, with offload=nvme as many as its plan finds",
        range=COUNT,
        optional=True,
    )
    max_step_tokens: int | None = key(
        "tokens of one step; a longer prompt is split over several; null: 512, with offload=nvme the number that its plan finds",
        range=COUNT,
        optional=True,
    )
    step_seconds: float | None = key(
        "time limit of a step while answers are drawn: it processes fewer prompt tokens to keep it; null: no limit",
        range=POSITIVE,
        acts=_IN_MEMORY,
        optional=True,
    )
    memory_bytes: int | None = key(
        "with offload=nvme, or cpu on a GPU: memory for layers, caches and activations; null: 80 % of the free memory",
        range=SIZE,
        acts=_STREAMS,
        optional=True,
    )
    max_model_len: int | None = key(
        "tokens of one sequence, prompt and answer; null: the model's own limit",
        range=COUNT,
        acts=_PROMPTED,
        optional=True,
    )
    lookup_tokens: int = key(
        "draft tokens per step, found in the text itself; 0: none. They change no token",
        default=0,
        range=COUNT_OR_ZERO,
        acts=_PROMPTED,
    )
    weights: str = key(
        "stored: as the model's folder has them, or fp32 on the CPU; int8: a scale per output channel; int4: groups of 32 inputs, the head in "
        "int8; fp8: e4m3 with a scale per output; on a GPU also bf16",
        default="stored",
        line=WeightFormat,
    )
    cache_tokens: int | None = key(
        "tokens of all sequences together that the cache holds; others wait; null: as many as fit into the free memory",
        range=COUNT,
        optional=True,
    )
    cache_dtype: str = key(
        "keys and values: stored (the dtype of the computation) or fp8; null: stored",
        default="stored",
        optional=True,
        line=CacheFormat,
    )
    exact: bool = key(
        "on a GPU, a sequence's bits do not depend on its batch; false: products of up to 8 rows are faster on a GPU; "
        "null: true",
        default=True,
        optional=True,
    )
    calibration: tuple[int, ...] = ()
    offload: OffloadPolicy | None = None
    device: str | None = None
    kernels: bool | None = None

    def __post_init__(self) -> None:
        for name, known in (("weights", ALL_WEIGHTS), ("cache_dtype", CACHE_DTYPES)):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"inference.{name}={getattr(self, name)}: must be {', '.join(known[:-1])} or {known[-1]}"
                )
        refuse(key_faults(self, section="inference"))
        if self.calibration:
            for fault in calibration_faults(self.weights, adapters=None):
                raise ValueError(fault)
        if self.memory_bytes is not None and self.offload is None:
            raise ValueError(
                f"inference.memory_bytes={self.memory_bytes} has no effect where nothing is streamed: add offload=nvme, or leave it out"
            )
        if self.offload is not None and self.offload.parameters is Tier.none:
            raise ValueError("offload.parameters=none: use nvme, or cpu for a GPU, or leave offload out")


@section
class InferenceConfig(InferencePolicy):
    """The model that answers, and how sequences share it."""

    model: str | None = key(
        "a run folder, a checkpoint, a GGUF file, or a folder that transformers reads; required with task=generate, serve and eval",
        acts=_NAMED,
        paths=Paths(
            kind="run",
            fix="name a run folder, a checkpoint, or a folder with the config.json and weights of a model of transformers",
        ),
    )
    prompts: str | None = key(
        'a jsonl file, each line {"prompt": "text"}, {"messages": [...]} or {"tokens": [1, 2]}, optionally with sampling keys of its own'
        "; null: one prompt, a line break, and the answer is printed",
        acts=_GENERATES,
        optional=True,
        paths=Paths(kind="file", fix='name a jsonl file whose lines are {"prompt": "text"}'),
    )
    adapters: Any = key(
        "LoRA adapters next to the model by name, as in {sql: FOLDER}: folders that peft has saved, or runs with lora=adapter. A request names "
        "one as its model, a line of inference.prompts as its adapter; null: none",
        acts=_PROMPTED,
        optional=True,
        paths=Paths(kind="folder", named=True, fix="name one that peft has saved, or a run with lora=adapter"),
        contradicts=_adapters,
    )
    calibration: str | None = key(
        "with int4: a text, jsonl or parquet file, of whose first 8,192 tokens each layer's outputs keep small errors; null: the weights do",
        optional=True,
        paths=Paths(kind="file", fix="name a text, jsonl or parquet file, or leave it out"),
        contradicts=_calibration,
    )
    ema: bool | None = key(
        "take the moving average of the weights, which a run with ema.decay keeps; null: false, the weights that trained",
        acts=ANSWERS,
        optional=True,
    )
    generation_config: bool | None = key(
        "sampling.* that is not given comes from generation_config.json in the model's folder; null: true",
        acts=_PROMPTED,
        optional=True,
    )
    held_out: str | None = key(
        "a text file; its first 2,048 tokens measure the change of perplexity by int8 or int4 weights",
        acts=_PROMPTED,
        optional=True,
        paths=Paths(kind="file", fix="name a text file, or leave it out"),
        contradicts=_held_out,
    )


@dataclass(kw_only=True)
class SamplingConfig:
    """How an answer is sampled. A request may override each key."""

    acts: ClassVar = _PROMPTED
    changes: ClassVar = Changes.experiment

    max_tokens: int | None = key(
        "tokens of an answer at most; null: the rest of the context", range=COUNT, optional=True
    )
    temperature: float | None = key(
        "divides the logits; 0: the likeliest token", default=0.8, range=Range(low=1e-6, zero=True)
    )
    top_k: int | None = key("only so many of the likeliest tokens; 0: all", default=0, range=COUNT_OR_ZERO)
    top_p: float | None = key(
        "only the likeliest tokens that together have this probability",
        default=1.0,
        range=Range(low=0, high=1, above=True),
    )
    min_p: float | None = key(
        "only tokens with at least this part of the likeliest one's probability",
        default=0.0,
        range=Range(low=0, high=1),
    )
    repetition_penalty: float | None = key(
        "divides positive logits of tokens in prompt and answer, multiplies negative ones",
        default=1.0,
        range=Range(low=0, above=True),
    )
    presence_penalty: float | None = key(
        "subtracted from the logits of tokens in the answer", default=0.0, range=Range(low=-2, high=2)
    )
    frequency_penalty: float | None = key(
        "the same, times the token's count in the answer", default=0.0, range=Range(low=-2, high=2)
    )
    n: int | None = key("answers to each prompt", default=1, range=COUNT)
    seed: int | None = key(
        "a draw is a function of it, the number of the answer and the position",
        default=0,
        range=Range(low=0, high=INT64_MAX),
    )
    stop: list[str] | None = key("texts that end an answer, as in [END]; they are left out of it", optional=True)
    logprobs: int | None = key(
        "log-probabilities of so many of the likeliest tokens are written, too", default=0, range=COUNT_OR_ZERO
    )


def _weights_faults(config: "Config") -> Iterator[str]:
    if config.serve.weights_path is not None and streams_layers(config):
        yield (
            f"serve.weights_path={config.serve.weights_path} with offload=nvme, whose packed layers are final: leave one of them out"
        )


@dataclass(kw_only=True)
class ServeConfig:
    """The HTTP server of `task=serve`."""

    acts: ClassVar = _SERVES
    changes: ClassVar = Changes.experiment

    host: str | None = key("address to listen on; 0.0.0.0: all of this machine's")
    port: int | None = key("port to listen on; 0: a free one, which is printed", range=Range(low=0, high=65_535))
    weights_path: str | None = key(
        "folder through which the server takes new weights while it runs, by /v1/weights, as tensors or as files in it; every rank reads it. "
        "null: it takes none",
        optional=True,
        paths=Paths(),
        contradicts=_weights_faults,
    )
    model_name: str | None = key(
        "the model's name in /v1/models, which requests may send; null: its folder's name", optional=True
    )
    api_key_variable: str | None = key(
        "environment variable whose value clients must send as Authorization: Bearer VALUE; null: no key is required",
        optional=True,
    )
    max_waiting: int | None = key("requests that wait for a place; more are refused with 429", range=COUNT)
    drain_seconds: float | None = key(
        "seconds that running answers have to finish after SIGTERM", range=Range(low=0, high=86_400)
    )
    max_body_bytes: int | None = key("bytes of a request; longer ones are refused with 413", range=COUNT)
    max_answers: int | None = key("answers to one request, prompts times n; more are refused with 400", range=COUNT)
    max_logprobs: int | None = key("limit of a request's logprobs, in tokens per position", range=COUNT_OR_ZERO)
    max_stops: int | None = key("stop texts that a request may have", range=COUNT_OR_ZERO)
    tool_parser: ToolFormat | None = key(
        "how the model writes calls of tools: hermes (also Qwen), llama3 or mistral; null: detected from its chat template",
        optional=True,
    )
    allowed_hosts: list[str] | None = key(
        "names in the Host header that are answered without a key, next to addresses, localhost and this machine's name",
        optional=True,
    )
    cors_origins: list[str] | None = key(
        "web pages that may send requests, as in [https://app.example]; '*': all", optional=True
    )
    tls_certificate: str | None = key("a PEM file; answers come over https", optional=True, paths=Paths())
    tls_key: str | None = key(
        "its private key, a PEM file; null: in the certificate's file", optional=True, paths=Paths()
    )


_ONLY_NVME = "answers are computed on the CPU, and offload=cpu would save no memory there; use offload=nvme, or leave offload out"
LOGIT_BIAS = Range(low=-1e9, high=1e9)


def adapter_faults(adapters: Any, *, cache_dtype: str | None, streams: bool) -> Iterator[str]:
    """One line with its fix per option that conflicts with adapters by request. adapters: by name. streams: every pass reads the layers."""
    if not adapters:
        return
    chosen = f"inference.adapters={{{', '.join(map(str, adapters))}}}"
    if streams:
        yield f"{chosen} with offload=nvme: layers that stream have the weights of one model; leave offload out, or merge the adapter"
    if cache_dtype == "fp8":
        yield (
            f"{chosen} with inference.cache_dtype=fp8: its scales follow from the weights of one model; leave cache_dtype out, or merge the "
            "adapter"
        )


def calibration_faults(weights: str | None, *, adapters: Any) -> Iterator[str]:
    """One line with its fix per option that a text for calibration excludes. weights: the format. adapters: by name."""
    if weights != WeightFormat.int4:
        reason = "changes 4-bit weights alone; int8 and fp8 round each weight by less than their outputs show"
        yield f"inference.calibration with weights={weights}: it {reason}; use weights=int4, or leave it out"
    if adapters:
        yield (
            f"inference.calibration with inference.adapters={{{', '.join(map(str, adapters))}}}: layers with an adapter have other inputs; "
            "merge the adapter, or leave calibration out"
        )


def stream_faults(options: Any, *, adapters: Any) -> Iterator[str]:
    """One line with its fix for each option that layers which stream exclude. options: has `cache_tokens` and `cache_dtype` as in
    `InferencePolicy`. adapters: by name."""
    if adapters:
        yield from adapter_faults(adapters, cache_dtype=options.cache_dtype, streams=True)
    if options.cache_tokens is not None:
        yield (
            f"inference.cache_tokens={options.cache_tokens}: with layers that stream the plan gives the cache its memory; use "
            "inference.memory_bytes, inference.max_sequences or inference.max_model_len"
        )


def device_faults(options: Any, *, device: str, tier: Tier, by_kernels: bool = False) -> Iterator[str]:
    """One line with its fix for each option that needs another device.

    options: has `cache_dtype`, `cache_tokens`, `exact` and `weights` as in `InferencePolicy`, None if not given. device: cpu or cuda.
    tier: tier of layers that do not fit. On a CPU all layers stream with it; on a GPU, or with `by_kernels`, only the opened model shows
    whether they do.
    """
    if options.weights == "bf16" and device == "cpu":
        yield "inference.weights=bf16 is for GPUs: the CPU computes in fp32; use weights=int8, or leave it out"
    if device != "cpu" or by_kernels:
        return
    if options.exact is False and options.weights != "fp8":
        yield "inference.exact=false is for GPUs: the CPU's products are exact and no faster without; leave it out"
    if tier is Tier.none:
        return
    if tier is Tier.cpu:
        yield f"offload=cpu: {_ONLY_NVME}"
    if options.weights == "fp8":
        yield "inference.weights=fp8 with offload=nvme: layers stream as stored, in int8 or in int4; use weights=int8, or leave offload out"
    yield from stream_faults(options, adapters=None)
    if options.cache_dtype == "fp8":
        yield "inference.cache_dtype=fp8 with offload=nvme: the plan counts keys and values in fp32; leave cache_dtype out"
