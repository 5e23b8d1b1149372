"""Measures the seconds from a loaded model to its first token: opening `ztk.Generator`, then a first prompt.

    python scripts/bench_first_token.py
    python scripts/bench_first_token.py --size 4m 100m --weights stored int8 int4

Each measurement is a new process with cold libraries and caches, as at the start of a server. The clock starts with a randomly initialised
model in memory. Opening copies or quantises the layers and runs the checks of a new model; then a prompt of 32 tokens gets one token.
Prints medians and their ratio to the goal of 5 seconds.
"""

import json
import statistics
import sys
import time
from pathlib import Path

from random_llama import SIZES, random_llama
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.bench import measured_apart, parser_of, table

GOAL_SECONDS = 5.0
_PROMPT = 32


def main() -> int:
    """Prints a row per size and format."""
    parser = parser_of(__doc__)
    parser.add_argument("--size", nargs="+", choices=SIZES, default=["4m", "100m"])
    parser.add_argument("--weights", nargs="+", choices=["stored", "int8", "int4"], default=["stored", "int8", "int4"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--one", action="store_true", help="measure the first size and format here, print JSON")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.size[0], weights=options.weights[0], threads=options.threads)))
        return 0
    rows = []
    for size in options.size:
        for weights in options.weights:
            words = ("--one", "--size", size, "--weights", weights, "--threads", str(options.threads))
            found = [measured_apart(sys.executable, __file__, *words) for _ in range(options.rounds)]
            opening, first = (statistics.median(column) for column in zip(*found, strict=True))
            both = statistics.median(map(sum, found))
            numbers = (f"{opening:.2f}", f"{first:.3f}", f"{both:.2f}", f"{both / GOAL_SECONDS:.2f}")
            rows.append((size, weights, *numbers))
    columns = ("size", "weights", "opening (s)", "first prompt (s)", "together (s)", f"of {GOAL_SECONDS:.0f} s")
    Console(width=140).print(table("", columns, rows, left=columns))
    return 0


def measure(size: str, *, weights: str, threads: int) -> tuple[float, float]:
    """Seconds until the engine is open, and seconds from then to the first token."""
    import torch

    from ztk.inference import Generator, InferencePolicy, SamplingParams

    torch.set_num_threads(threads)
    model = random_llama(size)
    started = time.perf_counter()
    generator = Generator(model, policy=InferencePolicy(weights=weights))
    opened = time.perf_counter()
    prompt = [number % model.config.vocab_size for number in range(_PROMPT)]
    [[answer]] = generator.generate([prompt], sampling=SamplingParams(max_tokens=1))
    assert len(answer.tokens) == 1, answer.error
    return opened - started, time.perf_counter() - opened


if __name__ == "__main__":
    sys.exit(main())
