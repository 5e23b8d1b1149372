"""Scripts with experts in the style of DeepSpeed's documents."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ztk.deepspeed as deepspeed
from tests.parallel.moe.hugging_face import build
from tests.parallel.moe.runs import batch
from ztk.deepspeed.names import lookup

WIDTH, BATCH, STEPS = 16, 8, 6


class FeedForward(nn.Module):
    def __init__(self, hidden_size: int, inner: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(hidden_size, inner), nn.GELU(), nn.Linear(inner, hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class MoETransformerBlock(nn.Module):
    """The documents' block (002, 9.1), with their arguments; the attention is a linear layer."""

    def __init__(self, hidden_size: int, num_experts: int, *, top_k: int, ep_size: int) -> None:
        super().__init__()
        MoE = lookup("moe").layer.MoE
        self.attention = nn.Linear(hidden_size, hidden_size)
        self.moe_layer = MoE(
            hidden_size=hidden_size,
            expert=FeedForward(hidden_size, hidden_size * 4),
            num_experts=num_experts,
            ep_size=ep_size,
            k=top_k,
            capacity_factor=4.0,
            eval_capacity_factor=4.0,
            min_capacity=4,
            use_residual=False,
            top2_2nd_expert_sampling=False,
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.attention(x)
        x, l_aux, _ = self.moe_layer(x)
        return x, l_aux


def create_moe_param_groups(model: nn.Module) -> list[dict]:
    """The documents' own helper (002, 9.2), word for word but for the import."""
    MoE = lookup("moe").layer.MoE
    parameters = {"params": [], "name": "parameters"}
    moe_parameters = {"params": [], "moe": True, "name": "moe_parameters"}
    for _, module in model.named_modules():
        if isinstance(module, MoE):
            moe_parameters["params"].extend([p for n, p in module.named_parameters() if "expert" in n])
        else:
            parameters["params"].extend(module.parameters(recurse=False))
    return [parameters, moe_parameters]


def split_by_deepspeed(model: nn.Module) -> list[dict]:
    split = lookup("moe").utils.split_params_into_different_moe_groups_for_optimizer
    return split({"params": list(model.parameters()), "name": "parameters"})


def data(step: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(BATCH, 4, WIDTH, generator=torch.Generator().manual_seed(step))
    return x, x[..., :8].argmax(-1)


def built(*, ep_size: int) -> nn.Sequential:
    """The block and a head. Equal experts, as DeepSpeed makes them, give the gate a gradient that consists of rounding errors, which AdamW
    makes as large as any other: here they differ."""
    torch.manual_seed(0)
    model = nn.Sequential()
    model.block = MoETransformerBlock(WIDTH, 4, top_k=2, ep_size=ep_size)
    model.head = nn.Linear(WIDTH, 8)
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            expert = int(name.split(".")[3])
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(expert))
    return model


def train(
    process, *, ep_size: int, stage: int, groups: str, dtype: str = "fp32", more: dict | None = None
) -> tuple[list[float], list[str], int]:
    """(mean losses over ranks, this rank's names of experts, how many groups the optimizer has). more: of the configuration."""
    model = built(ep_size=ep_size)
    parameters = {"seed": create_moe_param_groups, "deepspeed": split_by_deepspeed, "none": lambda model: None}[groups](
        model
    )
    config = {
        "train_batch_size": BATCH,
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "bf16": {"enabled": dtype == "bf16"},
        **(more or {}),
    }
    engine, optimizer, _, _ = deepspeed.initialize(model=model, model_parameters=parameters, config=config)
    losses = []
    for step in range(STEPS):
        x, y = (part.chunk(process.world_size)[process.rank] for part in data(step))
        out, l_aux = engine.module.block(x.to(torch.bfloat16) if dtype == "bf16" else x)
        loss = F.cross_entropy(engine.module.head(out).float().flatten(0, 1), y.flatten())
        engine.backward(loss + 0.0 * l_aux)  # a rank's own balance would differ from the one-rank run's
        engine.step()
        losses.append(float(process.comm.gather_scalars(loss.detach().view(1), label="loss").mean()))
    names = sorted({name.split(".")[3] for name, _ in model.named_parameters() if ".experts." in name})
    return losses, names, len(optimizer.param_groups)


def train_hub(process, *, section: dict) -> tuple[list[float], dict[str, tuple[int, ...]]]:
    """(losses, shapes of this rank's parameters) of a Mixtral under `expert_parallel: section`."""
    model = build("mixtral")
    config = {
        "train_batch_size": 8,
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "expert_parallel": section,
    }
    engine, *_ = deepspeed.initialize(model=model, config=config)
    losses = []
    for step in range(4):
        tokens = batch(step, rank=process.rank, world=process.world_size)
        logits = engine(input_ids=tokens[:, :-1]).logits
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        engine.backward(loss)
        engine.step()
        losses.append(float(process.comm.gather_scalars(loss.detach().view(1), label="loss").mean()))
    return losses, {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def built_sharded(process, *, ep_size: int) -> str:
    """A model whose experts were built under `zero.Init`: the name of its loss, or the refusal."""
    torch.manual_seed(0)
    with deepspeed.zero.Init():
        model = nn.ModuleDict({"block": MoETransformerBlock(WIDTH, 4, top_k=2, ep_size=ep_size)})
    config = {
        "train_batch_size": BATCH,
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    }
    try:
        engine, *_ = deepspeed.initialize(model=model, config=config)
    except ValueError as refusal:
        return str(refusal)
    out, l_aux = model["block"](data(0)[0].chunk(process.world_size)[process.rank])
    engine.backward(out.square().mean() + l_aux)
    engine.step()
    return f"finite: {bool(out.isfinite().all())}"
