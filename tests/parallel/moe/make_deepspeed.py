"""Records results of DeepSpeed's expert layer for `test_beside_deepspeed.py`. Run it where DeepSpeed 0.19.8 is installed:

python -m tests.parallel.moe.make_deepspeed      writes tests/parallel/moe/data/deepspeed.json
"""

import json
import os
from pathlib import Path

import torch
from torch import nn

DATA = Path(__file__).parent / "data" / "deepspeed.json"
WIDTH, EXPERTS, TOKENS = 4, 4, 12
CASES: dict[str, dict] = {
    "top1": {"k": 1, "use_rts": False, "capacity_factor": 4.0},
    "top1, chance drops": {"k": 1, "min_capacity": 2},
    "top1, nothing dropped": {"k": 1, "drop_tokens": False},
    "top1, sampled": {"k": 1, "noisy_gate_policy": "RSample", "min_capacity": 1},
    "top1, jitter": {"k": 1, "noisy_gate_policy": "Jitter", "min_capacity": 1},
    "top1, residual": {"k": 1, "use_residual": True, "capacity_factor": 1.5},
    "top1, evaluation": {"k": 1, "eval_capacity_factor": 0.5, "min_capacity": 1, "use_rts": True},
    "top2": {"k": 2, "top2_2nd_expert_sampling": False, "min_capacity": 1},
    "top2, second sampled": {"k": 2, "capacity_factor": 0.75, "min_capacity": 1},
    "top2, nothing dropped": {"k": 2, "drop_tokens": False},
    "top3": {"k": 3, "capacity_factor": 0.75, "min_capacity": 1},
    "top3, nothing dropped": {"k": 3, "drop_tokens": False},
    "top4, jitter": {"k": 4, "noisy_gate_policy": "Jitter", "capacity_factor": 1.1},
}


def make_layer(kind: type, *, case: str) -> nn.Module:
    """The layer of a case, `kind` being DeepSpeed's MoE or ztk's, with the same values under either's names."""
    torch.manual_seed(0)
    expert = nn.Sequential(nn.Linear(WIDTH, 6), nn.GELU(), nn.Linear(6, WIDTH))
    layer = kind(WIDTH, expert, num_experts=EXPERTS, **CASES[case])
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.7)
    return layer


def run(layer: nn.Module, *, case: str) -> dict:
    """One forward and backward: output, l_aux, counts, and the gradients of all parameters in the order of definition."""
    layer.train("evaluation" not in case)
    hidden = torch.randn(2, TOKENS // 2, WIDTH, generator=torch.Generator().manual_seed(2)).requires_grad_()
    torch.manual_seed(3)
    output, l_aux, counts = layer(hidden)
    (output.square().sum() + l_aux).backward()
    gradients = [parameter.grad for parameter in layer.parameters()] + [hidden.grad]
    return {
        "output": output.flatten().tolist(),
        "l_aux": l_aux.item(),
        "counts": counts.tolist(),
        "gradients": [None if gradient is None else gradient.flatten().tolist() for gradient in gradients],
    }


def main() -> None:
    import deepspeed
    from deepspeed.moe.layer import MoE

    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="localhost", MASTER_PORT="29731")
    deepspeed.init_distributed("gloo")
    recorded = {}
    for case in CASES:
        layer = make_layer(MoE, case=case)
        layer.set_deepspeed_parallelism()
        recorded[case] = run(layer, case=case)
    DATA.parent.mkdir(exist_ok=True)
    DATA.write_text(json.dumps({"deepspeed": deepspeed.__version__, "cases": recorded}) + "\n")


if __name__ == "__main__":
    main()
