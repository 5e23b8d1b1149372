"""The metrics of /metrics, with prometheus_client: vLLM's names, so that its dashboards work, and a few of ztk's own."""

import time
from collections.abc import Callable
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from ztk.inference import Output

_Metric = TypeVar("_Metric", Counter, Gauge, Histogram)
_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
_SECOND_HISTOGRAMS = {
    "time_to_first_token_seconds": "from a request's arrival to its first token",
    "inter_token_latency_seconds": "between tokens of an answer",
    "request_time_per_output_token_seconds": "per token of an answer after its first, at its end",
    "e2e_request_latency_seconds": "from a request's arrival to the end of its answers",
    "request_queue_time_seconds": "from a request's arrival until the engine computes it",
}


class Timed:
    """The timestamps of one prompt."""

    def __init__(self) -> None:
        self.asked = 0.0
        self.first: float | None = None  # its first token
        self.last: dict[int, float] = {}  # the last token of each answer
        self.counts: dict[int, int] = {}


class Metrics:
    """Counters and times of one server. running, waiting, usage: read the engine's values on demand.

    Each method must be called from a single thread.
    """

    def __init__(
        self, name: str, *, running: Callable[[], int], waiting: Callable[[], int], usage: Callable[[], float]
    ) -> None:
        self._registry, self._name = CollectorRegistry(), name
        self._times = {
            one: self._metric(Histogram, f"vllm:{one}", text=f"Seconds {text}.", buckets=_SECONDS)
            for one, text in _SECOND_HISTOGRAMS.items()
        }
        self._lengths = {
            one: self._metric(Histogram, f"vllm:request_{one}_tokens", text=f"Tokens of {text}.", buckets=_TOKENS)
            for one, text in (("prompt", "a prompt"), ("generation", "an answer"))
        }
        self._prompt_tokens = self._metric(Counter, "vllm:prompt_tokens", text="Tokens of prompts.")
        self._drawn_tokens = self._metric(Counter, "vllm:generation_tokens", text="Tokens of answers.")
        self._ended = Counter(
            "vllm:request_success",
            "Answers that have ended.",
            ["model_name", "finished_reason"],
            registry=self._registry,
        )
        self._own = {
            one: self._metric(Counter, f"ztk_{one}", text=text)
            for one, text in (
                ("requests", "Prompts that were queued."),
                ("refused", "Prompts that were refused because too many wait."),
                ("cancelled", "Prompts whose client has left, or that a stop text has ended."),
                ("failed", "Answers that have ended by an error."),
                ("seconds", "Seconds that the engine has computed."),
            )
        }
        for one, text, read in (
            ("num_requests_running", "Prompts that are computed.", lambda: running() - waiting()),
            ("num_requests_waiting", "Prompts without a token.", waiting),
            ("kv_cache_usage_perc", "Part of the cache of keys and values that has a sequence, from 0 to 1.", usage),
        ):
            self._metric(Gauge, f"vllm:{one}", text=text).set_function(read)

    def text(self) -> bytes:
        """Returns metrics in Prometheus' format."""
        return generate_latest(self._registry)

    def show_opening(self, seconds: float) -> None:
        """Records the time from the loaded model to its first token."""
        self._metric(Gauge, "ztk_first_token_seconds", text="Seconds from the loaded model to its first token.").set(
            seconds
        )

    def count(self, name: str, *, by: float = 1) -> None:
        """Increases one of ztk's own counters."""
        self._own[name].inc(by)

    def ask(self, timed: Timed, *, prompt_tokens: int) -> None:
        """Records a queued prompt."""
        timed.asked = time.perf_counter()
        self.count("requests")
        self._prompt_tokens.inc(prompt_tokens)
        self._lengths["prompt"].observe(prompt_tokens)

    def begin(self, timed: Timed, *, at: float) -> None:
        """Records that the engine took a prompt in the step that began at `at`."""
        self._times["request_queue_time_seconds"].observe(max(0.0, at - timed.asked))

    def draw(self, timed: Timed, *, output: Output) -> None:
        """Records a token of an answer, or the answer's error."""
        if output.finish_reason == "error":
            self.count("failed")
        if output.token is not None:
            self._draw(timed, sample=output.sample)
        if output.finish_reason is not None:
            self._end(timed, output=output)

    def end(self, timed: Timed) -> None:
        """Records the end of all answers to a prompt."""
        self._times["e2e_request_latency_seconds"].observe(time.perf_counter() - timed.asked)

    def _draw(self, timed: Timed, *, sample: int) -> None:
        now, before = time.perf_counter(), timed.last.get(sample)
        self._drawn_tokens.inc()
        if timed.first is None:
            timed.first = now
            self._times["time_to_first_token_seconds"].observe(now - timed.asked)
        if before is not None:
            self._times["inter_token_latency_seconds"].observe(now - before)
        timed.last[sample], timed.counts[sample] = now, timed.counts.get(sample, 0) + 1

    def _end(self, timed: Timed, *, output: Output) -> None:
        count = timed.counts.get(output.sample, 0)
        self._ended.labels(model_name=self._name, finished_reason=output.finish_reason).inc()
        self._lengths["generation"].observe(count)
        if timed.first is not None and count > 1:
            each = (timed.last[output.sample] - timed.first) / (count - 1)
            self._times["request_time_per_output_token_seconds"].observe(each)

    def _metric(self, kind: type[_Metric], name: str, *, text: str, **options: Any) -> _Metric:
        return kind(name, text, ["model_name"], registry=self._registry, **options).labels(model_name=self._name)
