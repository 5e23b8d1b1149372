"""Small Hugging Face models with experts, and a training run on them."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.parallel.moe.runs import VOCABULARY, batch
from ztk.core.policies.zero import ZeroPolicy
from ztk.core.runtime import Process, Topology
from ztk.optim import OptimizerPolicy
from ztk.parallel.apply import parallelize

COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 32,
}


def build(kind: str) -> nn.Module:
    import transformers as hf

    torch.manual_seed(7)
    match kind:
        case "mixtral":
            return hf.MixtralForCausalLM(hf.MixtralConfig(num_local_experts=4, **COMMON))
        case "qwen2_moe":  # shared and routed experts
            widths = {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
            return hf.Qwen2MoeForCausalLM(hf.Qwen2MoeConfig(num_experts=4, **widths, **COMMON))
        case "gpt_oss":  # stacked biases, other names of the arguments
            return hf.GptOssForCausalLM(hf.GptOssConfig(num_local_experts=4, head_dim=16, **COMMON))


def train(
    process: Process, *, topology: Topology, kind: str, stage: int = 0, steps: int = 8, experts: str | None = None
) -> tuple[list[float], dict[str, tuple[int, ...]], dict[str, int]]:
    """(losses, shapes of this rank's parameters, calls of collectives)."""
    process = process.arrange(topology)
    mesh = process.mesh
    model = build(kind)
    engine = parallelize(
        model,
        process=process,
        optimizer=OptimizerPolicy(lr=1e-2, clip_grad_norm=0.5),
        zero=ZeroPolicy(stage=stage, bucket_size=3000),
        experts=experts,
    )
    losses = []
    for step in range(steps):
        tokens = batch(step, rank=mesh.replica, world=mesh.replicas)
        logits = engine(input_ids=tokens[:, :-1]).logits
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        engine.backward(loss)
        engine.step()
        losses.append(float(mesh.world.gather_scalars(loss.detach().view(1), label="loss").mean()))
    shapes, calls = {name: tuple(p.shape) for name, p in model.named_parameters()}, dict(mesh.counters.calls)
    engine.close()
    return losses, shapes, calls
