"""Perplexity and greedy tokens of a model that is trained here, by format of weights and of the cache: `python scripts/compare_weights.py`.

A decoder of 0.2 million parameters learns bytes of one file of Python's standard library for 120 steps; judged are 2,048 bytes of another
one. Tokens are 48 after each of 8 prompts, beside those of the weights as stored. fp8 is of the cache of blocks.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.inference.trained import held_out, trained_decoder
from ztk.inference import Generator, InferencePolicy, SamplingParams, perplexity

PROMPTS, ANSWER = 8, 48
POLICIES = {
    "stored": InferencePolicy(),
    "int8": InferencePolicy(weights="int8"),
    "int4": InferencePolicy(weights="int4"),
    "fp8": InferencePolicy(weights="fp8", cache="blocks"),
    "stored, fp8 cache": InferencePolicy(cache="blocks", cache_dtype="fp8"),
}


def main() -> None:
    torch.set_num_threads(1)
    model, text, first = trained_decoder(), held_out(), None
    prompts = [text[200 * number : 200 * number + 32] for number in range(PROMPTS)]
    for name, policy in POLICIES.items():
        generator = Generator(model, policy=policy)
        cost = perplexity(generator, tokens=text)
        found = generator.generate(prompts, sampling=SamplingParams(max_tokens=ANSWER, temperature=0))
        tokens = [token for [answer] in found for token in answer.tokens]
        first = first or (cost, tokens)
        equal = sum(map(int.__eq__, tokens, first[1]))
        print(
            f"{name:18s} perplexity {cost:.2f} ({100 * (cost / first[0] - 1):+.2f} %), {equal} of {len(tokens)} tokens"
        )


if __name__ == "__main__":
    main()
