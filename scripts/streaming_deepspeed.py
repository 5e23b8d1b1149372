"""Part of `check_streaming.py`: DeepSpeed's stage 3 with parameters on NVMe (ZeRO-Inference) answers prompts with a random Llama.

    PYTHON scripts/streaming_deepspeed.py FOLDER '{"layers": 16, "sequences": 2, ...}'

PYTHON needs deepspeed, torch and transformers. The first run compiles its `async_io` (needs ninja; Debian: libaio-dev, g++). The last line
has the tokens per second as JSON, without the first token of every sequence.
"""

import json
import os
import sys
import time

import torch

THREADS, BLOCK, QUEUE = 4, 8 << 20, 4
BUFFERS = 24  # of a parameter's size; DeepSpeed needs enough for two layers and the prefetched ones


def main() -> None:
    folder, given = sys.argv[1], json.loads(sys.argv[2])
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29631"}
    os.environ.update(alone)
    model = stored(folder, layers=given["layers"], sizes=given["sizes"])
    tokens = torch.tensor(given["prompts"])
    print(json.dumps({"tokens_per_second": rate(model, tokens=tokens, count=given["tokens"])}))


def stored(folder: str, *, layers: int, sizes: dict):
    """The model with parameters on disk: two layers are prefetched and no layer stays in memory."""
    import deepspeed
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
    )  # outside Init, which replaces tensor constructors
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
    reference = HfDeepSpeedConfig(config)  # transformers uses it while this reference exists
    torch.manual_seed(0)
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, **sizes))
    engine, *_ = deepspeed.initialize(model=model.eval(), config=config)
    del reference
    return engine.module.eval()


@torch.no_grad()
def rate(model, *, tokens: torch.Tensor, count: int) -> float:
    """Tokens per second of greedy decoding, `count` tokens per sequence. tokens: int64 [sequences, length]."""
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "attention_mask": torch.ones_like(tokens)}

    def seconds(new: int) -> float:
        started = time.perf_counter()
        model.generate(tokens, max_new_tokens=new, min_new_tokens=new, **options)
        return time.perf_counter() - started

    first = seconds(1)
    return len(tokens) * (count - 1) / (seconds(count) - first)


if __name__ == "__main__":
    main()
