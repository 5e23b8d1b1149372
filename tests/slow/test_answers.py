"""Greedy answers are transformers' own, token by token, for 20 families: with all weights in memory, streamed from the disk and on two ranks.

Tiny fp32 models with random weights answer three prompts of different lengths at once, in steps of 48 tokens. Models that run their own
modules have no cache of blocks on two ranks. About 10 minutes on 2 cores; `-k llama` runs one family.
"""

from pathlib import Path

import pytest
import torch

from tests.inference.models import FAMILIES, VOCABULARY, build, greedy
from tests.inference.test_own_modules import OTHERS, build_other
from ztk.core.policies.offload import OffloadPolicy
from ztk.inference import Generator, InferencePolicy, SamplingParams

PROMPTS = [[3, 1, 4], [5] * 20, [(7 * i + 3) % VOCABULARY for i in range(70)]]
TOKENS = 64
LAYERS = 6  # more than the ring has buffers


def made(name: str) -> torch.nn.Module:
    if name in OTHERS:
        return build_other(name, **{"n_layer" if name == "gpt_bigcode" else "num_hidden_layers": LAYERS})
    if name in ("gpt2", "bloom"):
        return build(name, n_layer=LAYERS)
    own = {"layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2)} if name == "gemma3" else {}
    return build(name, num_hidden_layers=LAYERS, **own)


def policy(**more) -> InferencePolicy:
    return InferencePolicy(max_step_tokens=48, max_sequences=4, **more)


def answers(generator: Generator) -> list[list[int]]:
    found = generator.generate(PROMPTS, sampling=SamplingParams(max_tokens=TOKENS, temperature=0))
    generator.close()
    return [answer.tokens for [answer] in found]


def streamed(name: str, *, folder: Path) -> list[list[int]]:
    """Answers with memory for the ring of buffers only, so that every pass reads every layer."""
    place = OffloadPolicy(parameters="nvme", nvme_path=str(folder), block_bytes=1 << 20, threads=2, direct_io=True)
    roomy = Generator(made(name), policy=policy(offload=place))
    plan = roomy.plan
    roomy.close()
    sizes = plan.sizes
    memory = sizes.fixed + 3 * sizes.layer + plan.sequences * sizes.sequence
    memory += sizes.working(sequences=plan.sequences, rows=plan.step_tokens)
    generator = Generator(made(name), policy=policy(offload=place, memory_bytes=memory))
    assert generator.plan.resident == 0, "some layers stay in memory"
    return answers(generator)


def shared(process, *, name: str, kernels: bool) -> list[list[int]] | None:
    generator = Generator(made(name), policy=policy(kernels=kernels, max_model_len=192), comm=process.comm)
    if generator.follows:
        generator.follow()
        return None
    return answers(generator)


@pytest.mark.parametrize("name", [*FAMILIES, *OTHERS])
def test_greedy_tokens_are_those_of_transformers(ranks, tmp_path, name):
    expected = [greedy(made(name), prompt=prompt, count=TOKENS) for prompt in PROMPTS]
    assert answers(Generator(made(name), policy=policy())) == expected
    assert streamed(name, folder=tmp_path) == expected
    for kernels in (False, True) if name in FAMILIES else (False,):
        assert ranks(2).run(shared, name=name, kernels=kernels)[0] == expected, kernels
