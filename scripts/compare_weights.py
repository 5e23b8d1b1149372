"""Perplexity and greedy tokens of a model that is trained here, by format of weights and of the cache: `python scripts/compare_weights.py`.

A decoder of 0.2 million parameters learns bytes of one file of Python's standard library for 120 steps; judged are 2,048 bytes of another
one. Tokens are 48 after each of 8 prompts, beside those of the weights as stored. fp8 is of the cache of blocks. Last the same model whose
keys are 4,096 times as large and queries as much smaller, which changes nothing in fp32: with an fp8 cache, and with one without scales.
"""

import sys
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.inference.trained import held_out, trained_decoder
from ztk.inference import Generator, InferencePolicy, SamplingParams, memory, perplexity
from ztk.nn import Decoder

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


def main() -> None:
    torch.set_num_threads(1)
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
    """Scores, products of both, stay as they are."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("attention.key.weight"):
                parameter.mul_(FACTOR)
            elif name.endswith("attention.query.weight"):
                parameter.div_(FACTOR)


if __name__ == "__main__":
    main()
