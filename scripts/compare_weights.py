"""Measures the cost of weight and cache formats: perplexity and greedy tokens of a small trained model, or bits per byte of a real one.

    python scripts/compare_weights.py
    python scripts/compare_weights.py --model FOLDER

With `--model` the text is 30,000 bytes of the help texts of Python's keywords, in windows of 1,024 tokens. A file of quantised weights lies
on the grid of its own format, where another 4-bit format may be exact. Each matrix therefore gets noise first: 2 % of its standard deviation,
and 10 %, which removes the grid.

Without it, a decoder of 0.2 million parameters learns bytes of one file of Python's standard library for 120 steps and is evaluated on 2,048
bytes of another file. 48 tokens after each of 8 prompts are compared with unquantised weights. fp8 is the format of the block cache. The last
two rows scale keys by 4,096 and queries by the inverse, which is exact in fp32: with an fp8 cache, and with an fp8 cache without scales.
"""

import argparse
import math
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from pydoc_data.topics import topics
from unittest import mock

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.inference.trained import held_out, trained_decoder
from ztk.inference import Generator, InferencePolicy, SamplingParams, memory, perplexity
from ztk.nn import Decoder
from ztk.serve.models import open_model

PROMPTS, ANSWER = 8, 48
FP8_CACHE = "stored, fp8 cache"
LARGER = ("large keys, fp8 cache", "large keys, fp8 cache without scales")
FACTOR = 2.0**12
POLICIES = {
    "stored": InferencePolicy(),
    "int8": InferencePolicy(weights="int8"),
    "int4": InferencePolicy(weights="int4"),
    "fp8": InferencePolicy(weights="fp8", cache="blocks"),
    FP8_CACHE: InferencePolicy(cache="blocks", cache_dtype="fp8"),
}


NOISE = (0.02, 0.1)
TEXT_BYTES, WINDOW = 30_000, 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", help="folder of a transformers model, for example from scripts/get_model.py")
    folder = parser.parse_args().model
    torch.set_num_threads(1)
    if folder is None:
        compare_trained()
    else:
        compare_real(folder)


def compare_real(folder: str) -> None:
    """Prints one line per noise and format."""
    opened = open_model(folder)
    module = opened.module
    if not isinstance(module, nn.Module):
        sys.exit(f"{folder} has packed weights: name the original model")
    text = "\n\n".join(topics[name] for name in sorted(topics))[:TEXT_BYTES]
    tokens = opened.tokenizer.encode_text(text)
    weights = {name: value.clone() for name, value in module.named_parameters() if value.dim() == 2}
    print(f"{folder}: {len(text.encode())} bytes, {len(tokens)} tokens")
    for noise in NOISE:
        add_noise(module, weights=weights, noise=noise)
        first = None
        for name in ("stored", "int8", "int4"):
            start = time.process_time()
            generator = Generator(module, policy=InferencePolicy(weights=name, max_model_len=WINDOW))
            loading = time.process_time() - start
            scored = len(tokens) - -(-len(tokens) // WINDOW)
            bits = math.log2(perplexity(generator, tokens=tokens)) * scored / len(text.encode())
            first = first or bits
            print(
                f"noise {noise:4.0%}  {name:8s} {bits:.4f} bits per byte ({100 * (bits / first - 1):+.2f} %), loaded in {loading:.1f} s of CPU",
                flush=True,
            )


@torch.no_grad()
def add_noise(model: nn.Module, *, weights: dict[str, torch.Tensor], noise: float) -> None:
    """Sets the model's matrices to `weights` plus noise."""
    generator = torch.Generator().manual_seed(0)
    parameters = dict(model.named_parameters())
    for name, value in weights.items():
        drawn = torch.randn(value.shape, generator=generator)
        parameters[name].copy_(value + noise * value.std() * drawn)


def compare_trained() -> None:
    """Trains a small decoder and prints one line per format."""
    model, text, first = trained_decoder(), held_out(), None
    prompts = [text[200 * number : 200 * number + 32] for number in range(PROMPTS)]
    for name, policy in [*POLICIES.items(), *((name, POLICIES[FP8_CACHE]) for name in LARGER)]:
        if name == LARGER[0]:
            enlarge_keys(model)
        without = mock.patch.object(memory, "find_scales", lambda model, *, cache: None)
        with without if name == LARGER[1] else nullcontext():
            generator = Generator(model, policy=policy)
        cost = perplexity(generator, tokens=text)
        found = generator.generate(prompts, sampling=SamplingParams(max_tokens=ANSWER, temperature=0))
        tokens = [token for [answer] in found for token in answer.tokens]
        first = first or (cost, tokens)
        equal = sum(map(int.__eq__, tokens, first[1]))
        print(
            f"{name:36s} perplexity {cost:.2f} ({100 * (cost / first[0] - 1):+.2f} %), {equal} of {len(tokens)} tokens"
        )


def enlarge_keys(model: Decoder) -> None:
    """Scales keys up and queries down, so that their products stay equal."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("attention.key.weight"):
                parameter.mul_(FACTOR)
            elif name.endswith("attention.query.weight"):
                parameter.div_(FACTOR)


if __name__ == "__main__":
    main()
