"""Compares layers streamed from a disk with Accelerate's disk offload and DeepSpeed's stage 3 on NVMe (ZeRO-Inference), in tokens per second.

    python scripts/bench_streaming.py FOLDER                                       FOLDER is on the disk; needs 1 GB there and frees it
    python scripts/bench_streaming.py FOLDER --deepspeed PYTHON --sequences 2

A randomly initialised Llama answers the same prompts greedily, each library in a process of its own; the time of the first token of every
sequence is left out. Accelerate reads through the page cache, which is emptied before every token, as if the model were larger than memory.
PYTHON needs deepspeed, torch and transformers. Its first run compiles its `async_io` (needs ninja; Debian: libaio-dev, g++).
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

import torch

DIM, HEADS, INNER, VOCABULARY, LENGTH = 1024, 16, 2816, 8000, 256
SIZES = {  # with transformers' names
    "vocab_size": VOCABULARY,
    "hidden_size": DIM,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "max_position_embeddings": LENGTH,
}
THREADS, BLOCK, QUEUE = 4, 8 << 20, 4  # of DeepSpeed's reads, as of ztk's
BUFFERS = 24  # of a parameter's size; DeepSpeed needs enough for two layers and the prefetched ones


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="an existing folder on the disk")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument(
        "--memory", type=int, default=600_000_000, help="bytes for ztk's layers, caches and activations"
    )
    parser.add_argument("--sequences", type=int, help="default: the choice of ztk's plan")
    parser.add_argument("--tokens", type=int, default=12, help="tokens per sequence and round")
    parser.add_argument("--deepspeed", metavar="PYTHON", help="interpreter of an environment with DeepSpeed")
    parser.add_argument("--measure", choices=MEASURED, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        print(json.dumps(MEASURED[given.measure](given)))
    else:
        compare(given)


def compare(given: argparse.Namespace) -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from scripts.bench import measured_apart

    def measured(library: str, *, python: str = sys.executable) -> dict[str, float]:
        with tempfile.TemporaryDirectory(dir=given.folder) as folder:
            words = ["--layers", given.layers, "--memory", given.memory, "--tokens", given.tokens, "--measure", library]
            words += [] if given.sequences is None else ["--sequences", given.sequences]
            # ninja is installed next to Python.
            path = os.pathsep.join([str(Path(python).parent), os.environ["PATH"]])
            return measured_apart(python, __file__, folder, *words, OMP_NUM_THREADS="1", PATH=path)

    own = measured("ztk")
    given.sequences, speed = int(own["sequences"]), own["tokens_per_second"]
    peers = {"Accelerate's disk offload": measured("accelerate")}
    if given.deepspeed:
        peers["DeepSpeed's stage 3 on NVMe"] = measured("deepspeed", python=given.deepspeed)
    for name, found in peers.items():
        other = found["tokens_per_second"]
        print(f"{name}, {given.sequences} sequences: {other:.2f} tokens/s; ztk {speed:.2f}, {speed / other:.1f} times")


def prompts(count: int) -> list[list[int]]:
    return [[(7 * number + place) % VOCABULARY for place in range(16)] for number in range(count)]


@torch.no_grad()
def rate(model, *, sequences: int, count: int) -> dict[str, float]:
    """Tokens per second of greedy decoding by transformers' `generate`, `count` tokens per sequence."""
    tokens = torch.tensor(prompts(sequences))
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "attention_mask": torch.ones_like(tokens)}

    def seconds(new: int) -> float:
        started = time.perf_counter()
        model.generate(tokens, max_new_tokens=new, min_new_tokens=new, **options)
        return time.perf_counter() - started

    first = seconds(1)
    return {"tokens_per_second": len(tokens) * (count - 1) / (seconds(count) - first)}


# Libraries, each in a process of its own


def measure_ztk(given: argparse.Namespace) -> dict[str, float]:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from tests.slow.test_streaming import measure, write_model

    model = write_model(given.folder / "ztk", layers=given.layers)
    return measure(model, scratch=given.folder, memory=given.memory, sequences=given.sequences, tokens=given.tokens)


def measure_accelerate(given: argparse.Namespace) -> dict[str, float]:
    """fp32, greedy, the same prompts in one padded batch."""
    import accelerate
    import transformers

    torch.manual_seed(0)
    folder = given.folder / "accelerate"
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=given.layers, **SIZES)).eval()
    accelerate.disk_offload(model, offload_dir=str(folder), execution_device=torch.device("cpu"))
    os.sync()
    model.register_forward_pre_hook(lambda module, own: empty_cache(folder))
    found = rate(model, sequences=given.sequences, count=max(2, given.tokens // 4))
    shutil.rmtree(folder)
    return found


def empty_cache(folder: Path) -> None:
    """Drops a folder's files from the page cache."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure_deepspeed(given: argparse.Namespace) -> dict[str, float]:
    """Parameters on disk: two layers are prefetched and no layer stays in memory."""
    import deepspeed
    from transformers import LlamaConfig, LlamaForCausalLM  # outside Init, which replaces tensor constructors
    from transformers.integrations import HfDeepSpeedConfig

    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29631"}
    os.environ.update(alone)
    layer = 4 * DIM**2 + 3 * DIM * INNER
    place = {"device": "nvme", "nvme_path": str(given.folder), "pin_memory": False}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {
            "stage": 3,
            "stage3_prefetch_bucket_size": 2 * layer,
            "stage3_max_live_parameters": 3 * layer,
            "stage3_max_reuse_distance": 0,
            "stage3_param_persistence_threshold": 0,
            "offload_param": place | {"buffer_count": BUFFERS, "buffer_size": VOCABULARY * DIM},
        },
        "aio": {"block_size": BLOCK, "queue_depth": QUEUE, "intra_op_parallelism": THREADS, "overlap_events": True},
    }
    reference = HfDeepSpeedConfig(config)  # transformers uses it while this reference exists
    torch.manual_seed(0)
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=given.layers, **SIZES))
    engine, *_ = deepspeed.initialize(model=model.eval(), config=config)
    del reference
    return rate(engine.module.eval(), sequences=given.sequences, count=max(2, given.tokens // 2))


MEASURED = {"ztk": measure_ztk, "accelerate": measure_accelerate, "deepspeed": measure_deepspeed}


if __name__ == "__main__":
    main()
