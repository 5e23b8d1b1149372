"""Replaces `deepspeed` when a document's script runs in plain PyTorch: replicated parameters, torch.optim.AdamW, gradients
averaged by all_reduce. It reads only configuration keys that change numbers."""

import contextlib
import json
import math
import re
import types
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler


class PlainEngine(nn.Module):
    """fp32 master weights, a model in the configuration's dtype, and in fp16 a dynamic loss scale that skips steps."""

    def __init__(
        self,
        model: nn.Module,
        *,
        config: dict,
        parameters: list[nn.Parameter] | None,
        schedule: Callable | None = None,
    ) -> None:
        super().__init__()
        half = [
            dtype
            for key, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16))
            if config.get(key, {}).get("enabled")
        ]
        self.dtype = half[0] if half else torch.float32
        self.module = model
        for parameter in model.parameters():
            dist.broadcast(parameter.data, src=0)
        chosen = {id(parameter) for parameter in parameters or model.parameters()}
        self._masters = {
            p: p.detach().float().clone() for p in model.parameters() if p.requires_grad and id(p) in chosen
        }
        model.to(self.dtype)
        self.device, self.local_rank, self.global_steps = torch.device("cpu"), dist.get_rank(), 0
        self._accumulation = batch_sizes(config)[1]
        self._clip = config.get("gradient_clipping", 1.0)
        self._scale = LossScale(config["fp16"]) if half == [torch.float16] else None
        section = config["optimizer"]["params"] if "optimizer" in config else {}
        self.optimizer = torch.optim.AdamW(
            self._masters.values(),
            lr=section.get("lr", 1e-3),
            betas=tuple(section.get("betas", (0.9, 0.999))),
            eps=section.get("eps", 1e-8),
            weight_decay=section.get("weight_decay", 0.0),
        )
        self._rate = rates(config.get("scheduler"))
        self.lr_scheduler = schedule and schedule(self.optimizer)
        self._micro, self._skipped = 0, 0

    def forward(self, *args, **kwargs):
        return self.module(*map(self._cast, args), **{name: self._cast(value) for name, value in kwargs.items()})

    def _cast(self, value: object) -> object:
        return value.to(self.dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    def backward(self, loss: Tensor) -> None:
        (loss.float() * (self._scale.value if self._scale else 1.0) / self._accumulation).backward()

    def step(self) -> None:
        self._micro += 1
        if self._micro % self._accumulation:
            return
        for parameter, master in self._masters.items():
            master.grad = torch.zeros_like(master) if parameter.grad is None else parameter.grad.float()
            dist.all_reduce(master.grad)
            master.grad /= dist.get_world_size() * (self._scale.value if self._scale else 1.0)
            parameter.grad = None
        self.global_steps += 1
        if self._scale and self._scale.skips([master.grad for master in self._masters.values()]):
            self._skipped += 1
            return
        torch.nn.utils.clip_grad_norm_(self._masters.values(), self._clip or math.inf)
        if self._rate is not None:
            for group in self.optimizer.param_groups:
                group["lr"] = self._rate(self.global_steps - 1 - self._skipped)
        self.optimizer.step()
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()
        for parameter, master in self._masters.items():
            parameter.data.copy_(master)

    def weights(self) -> dict[str, Tensor]:
        """fp32, by name."""
        return {name: self._masters.get(p, p).detach().float().clone() for name, p in self.module.named_parameters()}


class LossScale:
    """Halves when a gradient is not finite, once so many of them have come (hysteresis); doubles after a window without any."""

    def __init__(self, section: dict) -> None:
        self.value = float(section.get("loss_scale", 0)) or 2.0 ** section.get("initial_scale_power", 16)
        self._dynamic = not section.get("loss_scale", 0)
        self._window, self._floor = section.get("loss_scale_window", 1000), section.get("min_loss_scale", 1)
        self._tolerated = self._left = section.get("hysteresis", 2)
        self._since = 0

    def skips(self, gradients: list[Tensor]) -> bool:
        """Whether this step is to be skipped; the scale follows."""
        if all(gradient.isfinite().all() for gradient in gradients):
            self._since += 1
            if self._dynamic and self._since % self._window == 0:
                self.value, self._left = self.value * 2, self._tolerated
            return False
        self._since = 0
        if self._left > 1:
            self._left -= 1
        else:
            self.value = max(self.value / 2, self._floor)
        return True


def batch_sizes(config: dict) -> tuple[int, int]:
    """Samples per micro-batch and rank, and micro-batches per step."""
    accumulation = config.get("gradient_accumulation_steps", 1)
    full = config.get("train_batch_size")
    micro = config.get("train_micro_batch_size_per_gpu") or full // accumulation // dist.get_world_size()
    return micro, full // micro // dist.get_world_size() if full else accumulation


def rates(section: dict | None) -> Callable[[int], float] | None:
    """The learning rate by number of updates: the first is made at the lowest rate, then the warm-up counts from zero."""
    if section is None:
        return None
    params = section["params"]
    low, high, warmup = params.get("warmup_min_lr", 0.0), params["warmup_max_lr"], max(2, params["warmup_num_steps"])

    def rate(update: int) -> float:
        if update == 0:
            return low
        step = update - 1
        if step < warmup:
            share = step / warmup if params.get("warmup_type") == "linear" else math.log(step + 1) / math.log(warmup)
        elif section["type"] == "WarmupDecayLR":
            total = params["total_num_steps"]
            share = max(0.0, (total - step) / max(1.0, total - warmup))
        else:
            share = 1.0
        return low + (high - low) * share

    return rate


def initialize(
    args=None,
    model=None,
    optimizer=None,
    model_parameters=None,
    training_data=None,
    lr_scheduler=None,
    config=None,
    **_,
) -> tuple:
    """(engine, optimizer, dataloader, lr_scheduler)."""
    config = config if config is not None else args.deepspeed_config
    if isinstance(config, str):
        with open(config) as file:
            config = json.loads(re.sub(r"//.*", "", file.read()))
    parameters = None if model_parameters is None else list(model_parameters)
    engine = PlainEngine(model, config=config, parameters=parameters, schedule=lr_scheduler)
    loader = None
    if training_data is not None:
        loader = DataLoader(training_data, batch_size=batch_sizes(config)[0], sampler=DistributedSampler(training_data))
    return engine, engine.optimizer, loader, engine.lr_scheduler


def add_config_arguments(parser):
    """--deepspeed, which has no meaning here."""
    parser.add_argument("--deepspeed", action="store_true")
    return parser


def modules() -> dict[str, types.ModuleType]:
    """`deepspeed` and the submodules that blocks import."""
    nothing = types.SimpleNamespace(
        Init=lambda **_: contextlib.nullcontext(), GatheredParameters=lambda _: contextlib.nullcontext()
    )
    checkpointing = types.SimpleNamespace(checkpoint=lambda function, *args: function(*args))
    made = {
        name: types.ModuleType(name)
        for name in ("deepspeed", "deepspeed.runtime", "deepspeed.runtime.activation_checkpointing")
    }
    made["deepspeed"].__dict__.update(
        initialize=initialize, zero=nothing, init_distributed=lambda: None, add_config_arguments=add_config_arguments
    )
    made["deepspeed.runtime.activation_checkpointing"].checkpointing = checkpointing
    return made
