"""Compares greedy tokens of the inference engine with transformers' `generate`, for every family and every placement of the weights.

    python scripts/check_answers.py                        17 families and some that run their own modules, 64 tokens, about 10 minutes
    python scripts/check_answers.py --families llama gpt2 --tokens 16

Tiny fp32 models with random weights answer three prompts of different lengths at once, in steps of 48 tokens. Columns: all weights in memory;
every layer read from a file in every pass; each layer sharded over two ranks, with slabs and with blocks. `=`: all tokens equal transformers';
`-`: not available for models that run their own modules. Exit code 1 if a token differs.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.inference.models import FAMILIES, VOCABULARY, build, greedy
from tests.inference.test_own_modules import OTHERS, build_other
from tests.ranks import RankPool
from ztk.core.policies.offload import OffloadPolicy
from ztk.inference import Generator, InferencePolicy, SamplingParams

PROMPTS = [[3, 1, 4], [5] * 20, [(7 * i + 3) % VOCABULARY for i in range(70)]]
COLUMNS = ("memory", "nvme", "tp2", "tp2, blocks")
LAYERS = 6  # more than the ring has buffers


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*FAMILIES, *OTHERS]
    parser.add_argument("--families", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--tokens", type=int, default=64, help="tokens per answer")
    given = parser.parse_args()
    pool, wrong = RankPool(2), 0
    print(f"{'':12s}" + "".join(f"{name:>13s}" for name in COLUMNS))
    for name in given.families:
        expected = [greedy(made(name), prompt=prompt, count=given.tokens) for prompt in PROMPTS]
        found = {"memory": answers(Generator(made(name), policy=policy()), count=given.tokens)}
        found["nvme"] = streamed(name, count=given.tokens)
        found["tp2"] = pool.run(shared, name=name, count=given.tokens)[0]
        if name in FAMILIES:
            found["tp2, blocks"] = pool.run(shared, name=name, count=given.tokens, cache="blocks")[0]
        marks = ["-" if column not in found else "=" if found[column] == expected else "differs" for column in COLUMNS]
        wrong += marks.count("differs")
        print(f"{name:12s}" + "".join(f"{mark:>13s}" for mark in marks), flush=True)
    pool.close()
    return int(wrong > 0)


def made(name: str) -> torch.nn.Module:
    if name in OTHERS:
        return build_other(name, **{"n_layer" if name == "gpt_bigcode" else "num_hidden_layers": LAYERS})
    if name in ("gpt2", "bloom"):
        return build(name, n_layer=LAYERS)
    own = {"layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2)} if name == "gemma3" else {}
    return build(name, num_hidden_layers=LAYERS, **own)


def policy(**more) -> InferencePolicy:
    return InferencePolicy(max_step_tokens=48, max_sequences=4, **more)


def answers(generator: Generator, *, count: int) -> list[list[int]]:
    found = generator.generate(PROMPTS, sampling=SamplingParams(max_tokens=count, temperature=0))
    generator.close()
    return [answer.tokens for [answer] in found]


def streamed(name: str, *, count: int) -> list[list[int]]:
    """Answers with memory for the ring of buffers only, so that every pass reads every layer."""
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        place = OffloadPolicy(parameters="nvme", nvme_path=folder, block_bytes=1 << 20, threads=2, direct_io=True)
        roomy = Generator(made(name), policy=policy(offload=place))
        plan = roomy.plan
        roomy.close()
        assert plan is not None, "no layer is streamed"
        sizes = plan.sizes
        memory = sizes.fixed + 3 * sizes.layer + plan.sequences * sizes.sequence
        memory += sizes.working(sequences=plan.sequences, rows=plan.step_tokens)
        generator = Generator(made(name), policy=policy(offload=place, memory_bytes=memory))
        assert generator.plan is not None and generator.plan.resident == 0, "some layers stay in memory"
        return answers(generator, count=count)


def shared(process, *, name: str, count: int, cache: str | None = None) -> list[list[int]] | None:
    generator = Generator(made(name), policy=policy(cache=cache, max_model_len=192), comm=process.comm)
    if generator.follows:
        generator.follow()
        return None
    return answers(generator, count=count)


if __name__ == "__main__":
    sys.exit(main())
