"""Rank functions of `test_exports`: checkpoints written by an engine and partly loaded back."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ztk.deepspeed as deepspeed
from tests.deepspeed import scripts
from ztk.core.runtime import Process


class Adapted(nn.Module):
    """A frozen base, an adapter, a tied head, a buffer, and a parameter and a buffer without elements."""

    def __init__(self, *, width: int = 24) -> None:
        super().__init__()
        self.base = nn.Linear(28, width).requires_grad_(False)
        self.down, self.up = nn.Linear(28, 4, bias=False), nn.Linear(4, width, bias=False)
        self.head, self.again = nn.Linear(width, 10, bias=False), nn.Linear(width, 10, bias=False)
        self.again.weight = self.head.weight
        self.register_buffer("scale", torch.full((), 0.5))
        self.prompt = nn.Parameter(torch.empty(0, 28))
        self.register_buffer("places", torch.empty(0, 2, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.base(x) + self.up(self.down(x)))
        return self.scale * (self.head(x) + self.again(x))


def make(*, seed: int = 0, **options) -> Adapted:
    torch.manual_seed(seed)
    return Adapted(**options)


def engine_of(model: nn.Module, *, stage: int, bf16: bool = False):
    zero = {"stage3_gather_16bit_weights_on_model_save": True} if stage == 3 else {}
    config = scripts.config(stage=stage, zero=zero, bf16={"enabled": True} if bf16 else None)
    return deepspeed.initialize(model=model, config=config)[0]


def full(engine) -> dict[str, Tensor]:
    """fp32 weights, tied names and buffers too."""
    module = engine.module
    state = {n: deepspeed.safe_get_full_fp32_param(p) for n, p in module.named_parameters(remove_duplicate=False)}
    return state | {name: buffer.clone() for name, buffer in module.named_buffers()}


def save(process: Process, *, folder: str, stage: int, bf16: bool, trained_only: bool) -> dict[str, Tensor]:
    engine = engine_of(make(), stage=stage, bf16=bf16)
    scripts.loop(process, engine, steps=3)
    engine.save_checkpoint(folder, exclude_frozen_parameters=trained_only)
    engine.save_fp16_model(folder, "trained.bin", exclude_frozen_parameters=True)
    consolidated = engine._zero3_consolidated_16bit_state_dict()
    state = engine.module_state_dict(prefix="model.", exclude_frozen_parameters=True)
    found = full(engine) | {"losses": torch.tensor(scripts.loop(process, engine, steps=2, start=3))}
    engine.destroy()
    return {
        "full": found,
        "consolidated": None if consolidated is None else sorted(consolidated),
        "module": {name: tuple(value.shape) for name, value in state.items()},
    }


def resume(process: Process, *, folder: str, stage: int) -> dict[str, Tensor]:
    """From a checkpoint of the trained parameters alone, as peft and the Trainer do."""
    engine = engine_of(make(), stage=stage)
    engine.load_checkpoint(folder, load_module_strict=False)
    found = full(engine) | {"losses": torch.tensor(scripts.loop(process, engine, steps=2, start=3))}
    engine.destroy()
    return found


class Renamed(nn.Module):
    """The same parameters under other names, and one more."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.extra = make(seed=1), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + 0.0 * self.extra.weight.sum()


def partial(process: Process, *, folder: str, stage: int) -> dict:
    """Loads the matching parts of a checkpoint, and a checkpoint with the script's own function."""
    model = make(seed=1)
    model.more = nn.Linear(3, 3)
    engine = engine_of(model, stage=stage)
    before = full(engine)
    engine.load_checkpoint(folder, load_module_strict=False, load_optimizer_states=False)
    lenient = full(engine)
    try:
        engine.load_checkpoint(folder, load_optimizer_states=False)
        strict = ""
    except ValueError as error:
        strict = str(error)
    engine.destroy()

    engine = engine_of(Renamed(), stage=stage)

    def rename(src: dict[str, Tensor], dst: nn.Module) -> None:
        dst.inner.load_state_dict(src)

    engine.load_checkpoint(folder, load_module_only=True, custom_load_fn=rename)
    renamed = full(engine)
    state = {name: torch.full_like(value, 0.25) for name, value in renamed.items()}
    engine.load_module_state_dict({"module": state})
    loaded = full(engine)
    state.pop("extra.bias")
    try:
        engine.load_module_state_dict({"module": state})
        missing = ""
    except ValueError as error:
        missing = str(error)
    engine.load_module_state_dict({"module": {"extra.bias": torch.ones(3)}}, strict=False)
    bias = deepspeed.safe_get_full_fp32_param(engine.module.extra.bias)
    engine.destroy()
    return {"before": before, "lenient": lenient, "strict": strict, "renamed": renamed, "loaded": loaded,
            "missing": missing, "bias": bias}  # fmt: skip
