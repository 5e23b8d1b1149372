"""Compares decode and prompt speed of `ztk.Generator` with transformers' `generate` and continuous batching, in one process.

    python scripts/bench_inference.py                        100M parameters, fp32, one thread
    python scripts/bench_inference.py --size 4m 100m --json experiments/results/cpu/inference.jsonl
    python scripts/bench_inference.py --size 4m 100m --first-token      seconds from a loaded model to its first token

All three decode the same randomly initialised Llama greedily. Each round runs, one after the other: batch 1, 8 rows of equal length, 32
requests with prompts and answers of different lengths (`generate` pads them into one batch and runs until the longest answer ends), 16 prompts
with a common prefix, and one long prompt. A ratio divides ztk's tokens per CPU second by transformers'; the long prompt counts prompt tokens,
the others count answer tokens. The result is the median over rounds. ztk stores weights unchanged, in int8 and in int4. With random weights the
number of equal tokens has no meaning.

--first-token measures new processes with cold libraries and caches, as at the start of a server. The clock starts with a model in memory.
Opening copies or quantises the layers and runs the checks of a new model; then a prompt of 32 tokens gets one token.
"""

import argparse
import copy
import json
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.bench import append_rows, measured_apart, parser_of, table
from ztk.core.policies.inference import WEIGHTS
from ztk.inference import Generator, InferencePolicy, SamplingParams

SIZES = {  # name -> width, layers, heads, inner width, vocabulary
    "4m": (256, 4, 4, 704, 2000),
    "30m": (512, 8, 8, 1408, 8000),
    "100m": (768, 12, 12, 2048, 16000),
}
FIRST_TOKEN_GOAL = 5.0  # seconds
GOALS = {  # by size, work and weights
    ("100m", "batch 1", "stored"): 0.95,
    ("100m", "batch 1", "int8"): 1.6,
    ("100m", "batch 1", "int4"): 2.0,
    ("4m", "batch 1", "stored"): 1.2,
    ("100m", "8 rows", "stored"): 1.2,
    ("100m", "32 ragged", "stored"): 1.6,
    ("100m", "prefix", "stored"): 3.0,
}


def random_llama(size: str) -> Any:
    """A Llama of transformers with random weights in fp32, equal in every call."""
    from transformers import LlamaConfig, LlamaForCausalLM

    dim, layers, heads, inner, vocabulary = SIZES[size]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=dim,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=1024,
        initializer_range=0.05,
    )
    return LlamaForCausalLM(config).eval()


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """Prompts of token ids with the lengths of their answers. by_prompt: rates count prompt tokens instead of answer tokens."""

    name: str
    prompts: list[list[int]]
    counts: list[int]
    by_prompt: bool = False

    @property
    def tokens(self) -> int:
        """The number of tokens that a rate counts."""
        return sum(map(len, self.prompts)) if self.by_prompt else sum(self.counts)


def make_works(*, vocabulary: int, answer: int) -> list[Work]:
    chance = random.Random(0)

    def text(length: int) -> list[int]:
        return [chance.randrange(vocabulary) for _ in range(length)]

    common = text(448)
    ragged = [(chance.randint(8, 192), chance.randint(max(1, answer // 8), 2 * answer)) for _ in range(32)]
    return [
        Work(name="batch 1", prompts=[text(32)], counts=[2 * answer]),
        Work(name="8 rows", prompts=[text(32) for _ in range(8)], counts=[answer] * 8),
        Work(name="32 ragged", prompts=[text(length) for length, _ in ragged], counts=[count for _, count in ragged]),
        Work(name="prefix", prompts=[common + text(16) for _ in range(16)], counts=[answer // 2] * 16),
        Work(name="prompt", prompts=[text(512)], counts=[1], by_prompt=True),
    ]


def by_transformers(model: Any, *, work: Work) -> list[list[int]]:
    """Decodes one padded batch until the longest answer ends."""
    longest = max(map(len, work.prompts))
    tokens = torch.zeros(len(work.prompts), longest, dtype=torch.long)
    mask = torch.zeros_like(tokens)
    for row, prompt in enumerate(work.prompts):
        tokens[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    count = max(work.counts)
    found = model.generate(
        tokens,
        attention_mask=mask,
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return [row[longest : longest + own].tolist() for row, own in zip(found, work.counts, strict=True)]


class ContinuousBatching:
    """transformers' continuous batching. It replaces the attention of a copy of the model and reuses prefixes of earlier rounds."""

    def __init__(self, model: Any) -> None:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        settings = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=512)
        memory = ContinuousBatchingConfig(block_size=32, num_blocks=1024, max_batch_tokens=512)
        own: Any = copy.deepcopy(model)
        self._manager = own.init_continuous_batching(generation_config=settings, continuous_batching_config=memory)
        self._manager.start()

    def __call__(self, *, work: Work) -> list[list[int]]:
        names = [
            self._manager.add_request(prompt, max_new_tokens=count)
            for prompt, count in zip(work.prompts, work.counts, strict=True)
        ]
        found: dict[str, list[int]] = {}
        while len(found) < len(names):
            result = self._manager.get_result(timeout=1)
            if result is None and not self._manager.is_running():
                raise RuntimeError("transformers' continuous batching has ended")
            if result is not None and result.is_finished():
                found[result.request_id] = result.generated_tokens
        return [found[name] for name in names]

    def stop(self) -> None:
        """Stops the manager's thread."""
        self._manager.stop(block=True)


def by_ztk(generator: Generator, *, work: Work) -> list[list[int]]:
    """Answers of a new engine, so that no prefix of an earlier round is reused."""
    generator.forget_prefixes()
    sampling = [SamplingParams(max_tokens=count, temperature=0.0) for count in work.counts]
    return [answers[0].tokens for answers in generator.generate(work.prompts, sampling=sampling)]


def timed(compute: Callable[[], list[list[int]]]) -> tuple[float, list[list[int]]]:
    """Returns the CPU seconds of this process and the answers."""
    start = time.process_time()
    found = compute()
    return time.process_time() - start, found


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """Tokens per CPU second of the three engines, ztk's ratio to both peers, and the number of answers equal to `generate`'s."""

    theirs: float
    batching: float
    own: float
    ratio: float
    batching_ratio: float
    equal: int


def measure(
    work: Work, *, model: nn.Module, batching: ContinuousBatching, generators: dict[str, Generator], rounds: int
) -> dict[str, Result]:
    """Results by weight format; transformers computes in fp32 for all of them."""
    computes = {"transformers": partial(by_transformers, model, work=work), "batching": partial(batching, work=work)}
    computes |= {weights: partial(by_ztk, generator, work=work) for weights, generator in generators.items()}
    seconds: dict[str, list[float]] = {name: [] for name in computes}
    answers: dict[str, list[list[int]]] = {}
    for number in range(rounds + 1):
        for name, compute in computes.items():
            taken, answers[name] = timed(compute)
            if number:  # the first round warms up
                seconds[name].append(taken)
    theirs, batched = seconds.pop("transformers"), seconds.pop("batching")
    return {
        name: Result(
            theirs=work.tokens / statistics.median(theirs),
            batching=work.tokens / statistics.median(batched),
            own=work.tokens / statistics.median(own),
            ratio=statistics.median(other / mine for other, mine in zip(theirs, own, strict=True)),
            batching_ratio=statistics.median(other / mine for other, mine in zip(batched, own, strict=True)),
            equal=sum(map(list.__eq__, answers["transformers"], answers[name])),
        )
        for name, own in seconds.items()
    }


def first_token(size: str, *, weights: str) -> tuple[float, float]:
    """Seconds until the engine is open, and seconds from then to the first token."""
    model = random_llama(size)
    started = time.perf_counter()
    generator = Generator(model, policy=InferencePolicy(weights=weights))
    opened = time.perf_counter()
    prompt = [number % model.config.vocab_size for number in range(32)]
    [[answer]] = generator.generate([prompt], sampling=SamplingParams(max_tokens=1))
    assert len(answer.tokens) == 1, answer.error
    return opened - started, time.perf_counter() - opened


def first_tokens(options: argparse.Namespace) -> None:
    """Prints a row per size and format, each measured in processes of its own."""
    rows = []
    for size, weights in product(options.size, options.weights):
        words = ("--measure", size, weights, "--threads", options.threads)
        found = [measured_apart(sys.executable, __file__, *words) for _ in range(options.rounds)]
        opening, first = (statistics.median(column) for column in zip(*found, strict=True))
        both = statistics.median(map(sum, found))
        numbers = (f"{opening:.2f}", f"{first:.3f}", f"{both:.2f}", f"{both / FIRST_TOKEN_GOAL:.2f}")
        rows.append((size, weights, *numbers))
    columns = ("size", "weights", "opening (s)", "first prompt (s)", "together (s)", f"of {FIRST_TOKEN_GOAL:.0f} s")
    Console(width=140).print(table("", columns, rows, left=columns))


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--size", nargs="+", choices=SIZES, default=["100m"])
    parser.add_argument("--work", nargs="+", help="run only these: batch 1, 8 rows, 32 ragged, prefix, prompt")
    parser.add_argument("--weights", nargs="+", choices=WEIGHTS, default=list(WEIGHTS), help="formats of ztk's weights")
    parser.add_argument("--answer", type=int, default=32, help="approximate tokens per answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="append the results to this file")
    parser.add_argument("--first-token", action="store_true", help="measure only the seconds to the first token")
    parser.add_argument("--measure", nargs=2, metavar=("SIZE", "WEIGHTS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.measure:
        size, weights = options.measure
        print(json.dumps(first_token(size, weights=weights)))
        return 0
    if options.first_token:
        first_tokens(options)
        return 0
    lines = []
    for size in options.size:
        model = random_llama(size)
        batching = ContinuousBatching(model)
        count = sum(parameter.numel() for parameter in model.parameters())
        generators = {
            weights: Generator(model, policy=InferencePolicy(max_sequences=32, weights=weights))
            for weights in options.weights
        }
        for work in make_works(vocabulary=SIZES[size][-1], answer=options.answer):
            if options.work and work.name not in options.work:
                continue
            measured = measure(work, model=model, batching=batching, generators=generators, rounds=options.rounds)
            for weights, result in measured.items():
                goal = GOALS.get((size, work.name, weights))
                lines.append([
                    *(f"{count / 1e6:.0f}M", work.name, weights),
                    *(f"{rate:.1f}" for rate in (result.theirs, result.batching, result.own)),
                    *(f"{result.ratio:.2f}", "" if goal is None else f"{goal}", f"{result.batching_ratio:.2f}"),
                    f"{result.equal}/{len(work.prompts)}",
                ])  # fmt: skip
                if options.json:
                    row = {
                        "parameters": count,
                        "weights": weights,
                        "work": work.name,
                        "rounds": options.rounds,
                        "transformers_tokens_per_cpu_second": result.theirs,
                        "continuous_batching_tokens_per_cpu_second": result.batching,
                        "ztk_tokens_per_cpu_second": result.own,
                        "ratio": result.ratio,
                        "ratio_to_continuous_batching": result.batching_ratio,
                        "goal": goal,
                        "equal_answers": result.equal,
                        "answers": len(work.prompts),
                    }
                    machine = f"{platform.machine()} {options.threads} threads"
                    append_rows(options.json, [row], torch=torch.__version__, machine=machine)
        batching.stop()
    columns = ("model", "work", "weights", "generate", "continuous", "ztk", "ratio", "goal", "to continuous", "equal")
    title = f"tokens per CPU second, {options.threads} threads, median of {options.rounds} rounds"
    Console(width=140).print(table(title, columns, lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
