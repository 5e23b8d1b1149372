"""A script that trains and generates in turn, on a rank."""

import copy

import torch
from torch import nn

import ztk.deepspeed as deepspeed
from ztk.core.runtime import Process

PAD, END = 0, 1
LR = 1e-2


class LowRank(nn.Module):
    """An adapter with the names that DeepSpeed-Chat's has."""

    def __init__(self, layer: nn.Linear, *, rank: int) -> None:
        super().__init__()
        self.weight, self.bias, self.lora_scaling, self.fuse_lora = layer.weight, layer.bias, 0.5, False
        self.lora_right_weight = nn.Parameter(torch.randn(layer.in_features, rank) / 8)
        self.lora_left_weight = nn.Parameter(torch.randn(rank, layer.out_features) / 8)
        self.weight.requires_grad = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = nn.functional.linear(x, self.weight, self.bias)
        return out if self.fuse_lora else out + x @ self.lora_right_weight @ self.lora_left_weight * self.lora_scaling


def tiny(*, adapters: bool = False) -> nn.Module:
    """An OPT with two layers of width 32."""
    from transformers import OPTConfig, OPTForCausalLM

    torch.manual_seed(0)
    shape = {"vocab_size": 32, "hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 64, "num_hidden_layers": 2}
    tokens = {"pad_token_id": PAD, "bos_token_id": END, "eos_token_id": END}
    model = OPTForCausalLM(OPTConfig(**shape, **tokens, num_attention_heads=2, max_position_embeddings=64, dropout=0.0))
    model.get_input_embeddings().weight.data.mul_(20)  # so that different contexts lead to different tokens
    if adapters:
        for layer in model.model.decoder.layers:
            layer.fc1, layer.fc2 = LowRank(layer.fc1, rank=4), LowRank(layer.fc2, rank=4)
    return model


def settings(*, stage: int, offload: bool = False, **hybrid) -> dict:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    if offload:
        zero |= {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": {"lr": LR}},
        "hybrid_engine": {"enabled": True, **hybrid},
    }


def train_and_generate(process: Process, *, config: dict, adapters: bool = False, generates: bool = True) -> dict:
    """Two updates with a generation before each and after them; greedy tokens are compared with transformers on the full weights."""
    model = tiny(adapters=adapters)
    reference = copy.deepcopy(model)
    engine, *_ = deepspeed.initialize(model=model, config=config)
    prompts = torch.tensor([[PAD, PAD, 5, 6], [7, 8, 9, 10 + process.rank]])
    options = {"attention_mask": (prompts != PAD).long(), "do_sample": False, "pad_token_id": PAD}
    options["max_new_tokens"] = 3 + 3 * process.rank  # ranks end after different numbers of tokens
    same, modes, losses = [], [], []
    for _ in range(3):
        if generates:
            engine.eval()
            tokens = engine.module.generate(prompts, **options)
            modes.append(engine.module.training)
            state = {name: value.clone() for name, value in engine.engine.zero.full_parameters()}
            reference.load_state_dict(state, strict=False)
            same.append(bool(torch.equal(tokens, reference.eval().generate(prompts, **options))))
            engine.train()
            modes.append(engine.module.training)
        if len(losses) < 2:
            batch = torch.randint(2, 32, (2, 12), generator=torch.Generator().manual_seed(process.rank + len(losses)))
            loss = engine(input_ids=batch, labels=batch).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    weights = {name: value.clone() for name, value in engine.engine.zero.full_parameters()}
    engine.destroy()
    return {"same": same, "modes": modes, "losses": losses, "weights": weights}


def disagrees(process: Process) -> dict:
    """Rank 1 requests beams. Then both sample."""
    model = tiny()
    reference = copy.deepcopy(model).eval()
    engine, *_ = deepspeed.initialize(model=model, config=settings(stage=3))
    prompts = torch.tensor([[5, 6, 7], [8, 9, 10]])
    options = {"attention_mask": torch.ones_like(prompts), "max_new_tokens": 6, "pad_token_id": PAD, "do_sample": False}
    beams = {"num_beams": 2} if process.rank == 1 else {}
    same = torch.equal(engine.generate(prompts, **options, **beams), reference.generate(prompts, **options, **beams))
    drawn = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        drawn.append(engine.generate(prompts, **options | {"do_sample": True, "temperature": 20.0}))
    engine.destroy()
    return {"same": same, "drawn": drawn}


def weight_of(engine: deepspeed.DeepSpeedEngine, *, name: str) -> torch.Tensor:
    """A copy of a full parameter; every rank calls it."""
    return {key: value.clone() for key, value in engine.engine.zero.full_parameters()}[name]


def merges(process: Process, *, stage: int) -> dict:
    """Adapters merged and taken out by hand."""
    engine, *_ = deepspeed.initialize(model=tiny(adapters=True), config=settings(stage=stage))
    batch = torch.arange(2, 14).repeat(2, 1)
    name = "model.decoder.layers.0.fc1.weight"
    with torch.no_grad():
        before, base = engine(input_ids=batch).logits, weight_of(engine, name=name)
        layer = engine.module.model.decoder.layers[0].fc1
        with deepspeed.zero.GatheredParameters(list(layer.parameters())):
            expected = layer.weight + 0.5 * (layer.lora_right_weight @ layer.lora_left_weight).t()
        engine.fuse_lora_weight()
        engine.fuse_lora_weight()
        fused, merged = layer.weight.clone(), engine(input_ids=batch).logits
    loss = engine(input_ids=batch, labels=batch).loss
    try:
        engine.backward(loss)
    except RuntimeError as error:
        refused = str(error)
    engine.unfuse_lora_weight()
    engine.unfuse_lora_weight()
    after = weight_of(engine, name=name)
    engine.backward(engine(input_ids=batch, labels=batch).loss)
    engine.step()
    trained = weight_of(engine, name=name)
    found = {
        "fused": float((fused - expected).abs().max()),
        "moved": float((fused - base).abs().max()),
        "logits": float((merged - before).abs().max()),
        "refused": refused,
        "bits": bool(torch.equal(after, base) and torch.equal(trained, base)),
        "flag": layer.fuse_lora,
    }
    engine.destroy()
    return found


def refusals(process: Process) -> dict[str, str]:
    """The errors that a script gets."""
    errors = {}
    try:
        deepspeed.initialize(model=nn.Linear(4, 4), config=settings(stage=0))
    except ValueError as error:
        errors["model"] = str(error)
    engine, *_ = deepspeed.initialize(model=tiny(), config=settings(stage=0, max_out_tokens=8))
    prompts = torch.tensor([[5, 6, 7]])
    assert engine.generate(prompts, max_new_tokens=5, do_sample=False).shape[1] <= 8
    for name, options in {"new": {"max_new_tokens": 6}, "all": {"max_length": 9}}.items():
        try:
            engine.generate(prompts, do_sample=False, **options)
        except ValueError as error:
            errors[name] = str(error)
    own = type(engine.module).generate
    engine.destroy()
    errors["restored"] = engine.module.generate.__func__ is own
    return errors


def overflow(process: Process, *, stage: int) -> dict:
    """Rank 1's gradient of the second step is not finite; the third one is skipped by hand. fp16 with a dynamic loss scale."""
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "fp16": {"enabled": True, "initial_scale_power": 4, "hysteresis": 1},
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": LR}},
    }
    engine, optimizer, *_ = deepspeed.initialize(model=nn.Linear(4, 4), config=config)
    rows, timer = [], engine.tput_timer
    for step in range(4):
        x = torch.ones(1, 4)
        if step == 1 and process.rank == 1:
            x = x * float("inf")
        engine.backward(engine(x).float().square().mean())
        found = optimizer.check_overflow(external=True)
        optimizer.skip_step = step == 2
        before = [value.clone() for _, value in engine.engine.zero.full_parameters()]
        engine.step()
        after = [value.clone() for _, value in engine.engine.zero.full_parameters()]
        moved = any(not torch.equal(*pair) for pair in zip(before, after, strict=True))
        rows.append((found, optimizer.overflow, moved, optimizer.cur_scale, engine.skipped_steps, engine.global_steps))
    timer.update_epoch_count()
    engine.destroy()
    return {"rows": rows, "timed": timer.global_step_count}


def frozen_as_int8(process: Process, *, zero: dict) -> dict:
    """Weights as a rank computes with them, those that train, and the losses of two updates."""
    config = settings(stage=3)
    config["zero_optimization"] |= zero
    model = tiny(adapters=True)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora" in name)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    engine, optimizer, *_ = deepspeed.initialize(model=model, config=config)
    refused = ""
    try:
        optimizer.quantize_nontrainable_params()
    except RuntimeError as error:
        refused = str(error)
    weights = {name: value.clone() for name, value in engine.engine.zero.full_parameters()}
    losses = []
    for step in range(2):
        batch = torch.randint(2, 32, (2, 12), generator=torch.Generator().manual_seed(process.rank + step))
        loss = engine(input_ids=batch, labels=batch).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        pass  # values that arrive rounded are no writes
    engine.destroy()
    return {"weights": weights, "trained": trained, "losses": losses, "refused": refused}
