"""DeepSpeed's stage 3 with parameters on NVMe (ZeRO-Inference) answers prompts by a Llama of random weights: a part of `check_streaming.py`.

    PYTHON scripts/streaming_deepspeed.py FOLDER '{"layers": 16, "sequences": 2, ...}'

PYTHON has deepspeed, torch and transformers; its `async_io` is compiled in the first run (needs ninja; Debian: libaio-dev, g++). Prints tokens
per second as JSON in the last line; the first token of every sequence is left out.
"""

import json
import os
import sys
import time

import torch

THREADS, BLOCK, QUEUE = 4, 8 << 20, 4
BUFFERS = 24  # of a parameter's size: fewer than two layers and what is read ahead have is an error


def main() -> None:
    folder, given = sys.argv[1], json.loads(sys.argv[2])
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29631"}
    os.environ.update(alone)
    model = stored(folder, layers=given["layers"], sizes=given["sizes"])
    tokens = torch.tensor(given["prompts"])
    print(json.dumps({"tokens_per_second": rate(model, tokens=tokens, count=given["tokens"])}))


def stored(folder: str, *, layers: int, sizes: dict):
    """The model, whose parameters are on the disk: two layers are read ahead, and no layer stays."""
    import deepspeed
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
    )  # not inside Init, which replaces the constructors of tensors
    from transformers.integrations import HfDeepSpeedConfig

    layer = 4 * sizes["hidden_size"] ** 2 + 3 * sizes["hidden_size"] * sizes["intermediate_size"]
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {
            "stage": 3,
            "stage3_prefetch_bucket_size": 2 * layer,
            "stage3_max_live_parameters": 3 * layer,
            "stage3_max_reuse_distance": 0,
            "stage3_param_persistence_threshold": 0,
            "offload_param": {
                "device": "nvme",
                "nvme_path": folder,
                "pin_memory": False,
                "buffer_count": BUFFERS,
                "buffer_size": sizes["vocab_size"] * sizes["hidden_size"],
            },
        },
        "aio": {"block_size": BLOCK, "queue_depth": QUEUE, "intra_op_parallelism": THREADS, "overlap_events": True},
    }
    reference = HfDeepSpeedConfig(config)  # transformers asks for it while it lives
    torch.manual_seed(0)
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, **sizes))
    engine, *_ = deepspeed.initialize(model=model.eval(), config=config)
    del reference
    return engine.module.eval()


@torch.no_grad()
def rate(model, *, tokens: torch.Tensor, count: int) -> float:
    """Tokens per second, greedily, of `count` tokens per sequence of int64 [sequences, length]."""
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "attention_mask": torch.ones_like(tokens)}

    def seconds(new: int) -> float:
        started = time.perf_counter()
        model.generate(tokens, max_new_tokens=new, min_new_tokens=new, **options)
        return time.perf_counter() - started

    first = seconds(1)
    return len(tokens) * (count - 1) / (seconds(count) - first)


if __name__ == "__main__":
    main()
