"""Compares the hybrid engine's generation by ztk's inference engine with transformers' loop over the same weights, on one thread.

    python scripts/compare_hybrid.py

Prints the seconds of both and the median ratio of interleaved runs. Exit code 1 if greedy fp32 tokens differ. Answers run to their last token,
so that both draw the same number; the engine's time includes reading the weights.
"""

import itertools
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from transformers import OPTConfig, OPTForCausalLM

from ztk.deepspeed.engine.deepspeed_engine import DeepSpeedEngine
from ztk.deepspeed.generation.loop import generate
from ztk.deepspeed.start.entry import initialize

ROUNDS, PROMPT, ANSWER = 4, 32, 64
SHAPES = ((256, 4, 2048), (512, 6, 8192))  # width, layers, tokens
WAYS = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "top_k": 0},
    "top-k, top-p": {"do_sample": True, "top_k": 50, "top_p": 0.9},
}


def main() -> int:
    is_equal = True
    print("model                       texts  way             engine  transformers  ratio")
    for (width, layers, vocabulary), dtype in itertools.product(SHAPES, ("fp32", "bf16")):
        engine = opened(width, layers=layers, vocabulary=vocabulary, dtype=dtype)
        for count, (way, options) in itertools.product((2, 16), WAYS.items()):
            prompts = torch.randint(2, vocabulary, (count, PROMPT))
            common = {"attention_mask": torch.ones_like(prompts), "max_new_tokens": ANSWER, "eos_token_id": None}
            own, theirs = [], []
            for _ in range(ROUNDS):
                texts, seconds = timed(engine.generate, prompts, **common, **options)
                own.append(seconds)
                expected, seconds = timed(generate, engine, prompts, **common, **options)
                theirs.append(seconds)
            if way == "greedy" and dtype == "fp32":
                is_equal &= torch.equal(texts, expected)
            ratio = statistics.median(their / mine for mine, their in zip(own, theirs, strict=True))
            name = f"{width} x {layers}, {vocabulary} tokens, {dtype}"
            print(f"{name:28}{count:5}  {way:14} {min(own):7.2f} {min(theirs):13.2f} {ratio:6.2f}", flush=True)
        engine.destroy()
    return int(not is_equal)


def opened(width: int, *, layers: int, vocabulary: int, dtype: str) -> DeepSpeedEngine:
    """An OPT with random weights under the hybrid engine."""
    torch.manual_seed(0)
    sizes = {"hidden_size": width, "word_embed_proj_dim": width, "ffn_dim": 4 * width, "num_hidden_layers": layers}
    tokens = {"vocab_size": vocabulary, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "hybrid_engine": {"enabled": True},
        "bf16": {"enabled": dtype == "bf16"},
        "log_level": "error",
    }
    shape = OPTConfig(**sizes, **tokens, num_attention_heads=width // 64, max_position_embeddings=512)
    return initialize(model=OPTForCausalLM(shape), config=config)[0]


def timed(call: Callable[..., torch.Tensor], *given: object, **options: object) -> tuple[torch.Tensor, float]:
    """Returns the result of the call and its seconds."""
    started = time.perf_counter()
    found = call(*given, **options)
    return found, time.perf_counter() - started


if __name__ == "__main__":
    sys.exit(main())
