"""Rank functions for `zero.Init`: models that are built sharded."""

import copy
import math
import tempfile
import weakref

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ztk.deepspeed as deepspeed
from tests.deepspeed import scripts
from ztk.core.runtime import Process
from ztk.zero.parameters.partitioned import partitioned_of
from ztk.zero.parameters.released import is_released

WIDTH, WORDS = 16, 20


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.rand(WIDTH))
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        nn.init.normal_(self.down.weight, std=0.02 / math.sqrt(2))  # a child's parameter, sharded by now

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x * self.gain)))


class Model(nn.Module):
    """It changes its children's parameters in every way that a parent can."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH, padding_idx=0)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.blocks.append(copy.deepcopy(self.blocks[0]))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("positions", torch.arange(4.0))
        self.apply(self.fill)
        for name, parameter in self.named_parameters():
            if name.endswith("up.weight"):
                parameter.data.mul_(0.5)
        with torch.no_grad():
            self.embedding.weight[0].zero_()
        held = self.blocks[1].gain.data  # written to after another module was built
        self.extra = nn.Linear(WIDTH, WIDTH)
        held.fill_(0.75)

    def fill(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.trunc_normal_(module.weight, std=0.05)
            module.bias.data.uniform_(-0.1, 0.1)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embedding(words)
        for block in self.blocks:
            x = block(x)
        return self.head(self.extra(x))


def values(model: nn.Module) -> dict[str, Tensor]:
    with deepspeed.zero.GatheredParameters(model.parameters()):
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def build(process: Process, *, seed_of_rank: int = 0, **init) -> dict:
    """A model built under Init: its appearance and the values of its parameters."""
    torch.manual_seed(1 + seed_of_rank * process.rank)
    with deepspeed.zero.Init(**init):
        model = Model()
    parameters = dict(model.named_parameters())
    some = model.blocks[0].up.weight
    return {
        "partitioned": all(partitioned_of(parameter) is not None for parameter in parameters.values()),
        "bytes": sum(parameter.untyped_storage().nbytes() for parameter in parameters.values()),
        "nan": all(is_released(parameter) for parameter in parameters.values()),
        "ids": [parameter.ds_id for parameter in parameters.values()],
        "status": some.ds_status.name,
        "shape": tuple(some.ds_shape),
        "slice": some.ds_tensor,
        "dtype": some.dtype,
        "values": values(model),
        "next": torch.rand(3),
        "tied": model.head.weight is model.embedding.weight,
        "buffer": model.positions,
        "clean": "__init_subclass__" not in nn.Module.__dict__ and not hasattr(nn.Linear.__init__, "__wrapped__"),
    }


def peak(process: Process, *, under_init: bool) -> dict:
    """The most bytes that parameters took at one time while a model was built."""
    found: list[weakref.ref] = []
    most = 0

    def count(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        nonlocal most
        found.append(weakref.ref(parameter))
        alive = {id(p): p for ref in found if (p := ref()) is not None}
        most = max(most, sum(p.untyped_storage().nbytes() for p in alive.values()))

    handle = nn.modules.module.register_module_parameter_registration_hook(count)
    try:
        with deepspeed.zero.Init(enabled=under_init):
            model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(20)))
            model.apply(lambda module: [nn.init.ones_(p) for p in module.parameters(recurse=False)])
    finally:
        handle.remove()
    return {"peak": most, "model": sum(4 * parameter.numel() for parameter in model.parameters())}


def train(process: Process, *, under_init: bool, stage: int, bf16: bool, offload: str) -> dict:
    """Losses and weights of a run whose model was, or was not, built under Init."""
    with tempfile.TemporaryDirectory() as folder:
        zero: dict = {"stage": stage}
        if offload != "none" and stage == 3:
            zero["offload_param"] = {"device": offload, **({"nvme_path": folder} if offload == "nvme" else {})}
        config = scripts.config(stage=stage, zero=zero, bf16={"enabled": bf16} if bf16 else None)
        torch.manual_seed(1)
        with deepspeed.zero.Init(config_dict_or_path=config, enabled=under_init):
            model = Model()
        engine, *_ = deepspeed.initialize(model=model, config=config)
        left = [name for name, parameter in model.named_parameters() if partitioned_of(parameter) is not None]
        first = {name: deepspeed.safe_get_full_fp32_param(p).cpu() for name, p in model.named_parameters()}
        losses = []
        for step in range(4):
            words = torch.randint(WORDS, (4, 5), generator=torch.Generator().manual_seed(10 * step + process.rank))
            logits = engine(words)
            loss = F.cross_entropy(logits.float().flatten(0, 1), words.flatten())
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        found = {"losses": losses, "first": first, "left": left, "weights": scripts.weights(engine)}
        engine.destroy()
        return found


def gathered_before_initialize(process: Process) -> dict:
    """Reading, changing and nesting, before there is an engine."""
    torch.manual_seed(1)
    with deepspeed.zero.Init():
        model = Model()
    before = values(model)
    weight, gain = model.extra.weight, model.blocks[0].gain
    every = list(model.parameters())
    with deepspeed.zero.GatheredParameters(every if process.rank else every[::-1]):
        with deepspeed.zero.GatheredParameters([weight, gain], modifier_rank=1):
            if process.rank == 1:
                weight.data.fill_(2.0)
        inner = weight.detach().clone()
        still = every[0].ds_status.name
    refused = ""
    try:
        with deepspeed.zero.GatheredParameters(gain), torch.no_grad():
            gain.fill_(3.0)  # lost: no modifier_rank
    except RuntimeError as error:
        refused = str(error)
    state = {name: torch.full_like(value, 0.5) for name, value in before.items() if name.startswith("blocks.2.")}
    for prefix, module in model.named_modules(prefix=""):  # as DeepSpeed's documents load a checkpoint
        own = list(module.parameters(recurse=False))
        with deepspeed.zero.GatheredParameters(own, modifier_rank=0):
            if process.rank == 0:
                module._load_from_state_dict(state, f"{prefix}.", {}, False, [], [], [])
    model.extra.weight.all_gather()
    status = weight.ds_status.name
    model.extra.weight.partition()
    after = values(model)
    return {"before": before, "after": after, "inner": inner, "still": still, "status": status, "refused": refused}


def other_ways(process: Process) -> dict:
    """Init of a finished module, inside another Init, and left by an exception."""
    torch.manual_seed(1)
    module = Model()
    expected = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    config = {"zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": "auto"}, "train_batch_size": "auto"}
    deepspeed.zero.Init(module=module, config_dict_or_path=config)
    torch.manual_seed(1)
    with deepspeed.zero.Init(remote_device="cpu"), deepspeed.zero.Init():
        nested = Model()
    try:
        with deepspeed.zero.Init():
            half = nn.Linear(3, 3)
            raise KeyError("left")
    except KeyError:
        pass
    with deepspeed.zero.Init(dtype=torch.bfloat16):
        small = nn.Linear(8, 8)
    try:
        copy.deepcopy(small)
        said = "copied"
    except RuntimeError as error:
        said = str(error)
    with deepspeed.zero.GatheredParameters(list(small.parameters())):
        copied = copy.deepcopy(small)
        is_same = torch.equal(copied.weight, small.weight)
    return {
        "refused copy": said,
        "same copy": is_same and torch.equal(copied.weight, copied.weight.detach().clone()),
        "expected": expected,
        "module": values(module),
        "nested": values(nested),
        "half": values(half)["weight"].isfinite().all().item(),
        "clean": not hasattr(nn.Linear.__init__, "__wrapped__"),
        "dtype": values(small)["weight"].dtype,
        "copy": type(copied.weight).__name__,
    }


def generate(engine, x: Tensor) -> bool:
    """As TRL does around generation: everything full, hooks off, many forwards, hooks on."""
    with torch.no_grad():
        expected = engine(x)
    offload = engine.optimizer.parameter_offload
    with deepspeed.zero.unwrap_model_for_generation(engine) as unwrapped:
        named = (*offload.module.named_parameters(), *offload.module.ds_external_parameters())
        for _, parameter in named:
            parameter.ds_active_sub_modules.clear()
        for hook in (*offload.forward_hooks, *offload.backward_hooks):
            hook.remove()
        offload.forward_hooks, offload.backward_hooks = [], []
        with torch.no_grad():
            outputs = [unwrapped.module(x) for _ in range(2)]
        assert offload.param_coordinator.is_invalid_trace()
        offload._register_deepspeed_module(offload.module)
    return all(torch.equal(output, expected) for output in outputs)


def pinned(process: Process) -> dict:
    """Passes of the model inside GatheredParameters."""
    config = scripts.config(stage=3)
    engine, *_ = deepspeed.initialize(model=scripts.build(), config=config)
    x, y = scripts.data(process.rank)
    parameters = list(engine.module.parameters())
    counters = engine.engine.comm.counters
    with deepspeed.zero.GatheredParameters(parameters):
        moved = counters.elements["all_gather"]
        with torch.no_grad():
            outputs = [engine(x) for _ in range(3)]
        full = all(parameter.ds_status.name == "AVAILABLE" for parameter in parameters)
        moved = counters.elements["all_gather"] - moved
        engine.backward(F.cross_entropy(engine(x), y))
        try:
            engine.step()
            refused = ""
        except RuntimeError as error:
            refused = str(error)
    released = all(parameter.ds_status.name == "NOT_AVAILABLE" for parameter in parameters)
    engine.step()
    generated = generate(engine, x)
    found = {
        "same": torch.equal(outputs[0], outputs[2]),
        "full": full,
        "moved": moved,
        "refused": refused,
        "released": released,
        "steps": engine.global_steps,
        "generated": generated,
        "ids": [parameter.ds_id for parameter in parameters],
        "slices": [parameter.ds_tensor.numel() for parameter in parameters],
        "sizes": [parameter.ds_numel for parameter in parameters],
    }
    engine.destroy()
    return found
