"""torch's own data parallelism behind the engine's surface trains the same model to the same losses."""

import contextlib
from collections import Counter

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from ztk.core.policies.zero import ZeroPolicy
from ztk.core.precision import LossScalePolicy, PrecisionPolicy
from ztk.core.runtime import Process, Tier
from ztk.core.runtime.seed import generator
from ztk.optim import OptimizerPolicy
from ztk.parallel.apply import parallelize
from ztk.train.engine.peers import parallelize_peer

STEPS, ACCUMULATION, VOCABULARY, WIDTH = 10, 2, 11, 24
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """A tied head, an odd number of rows, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("table", torch.ones(WIDTH), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = x * self.table.to(x.dtype)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).float().flatten(0, 1), tokens.roll(1, dims=1).flatten())

    def materialise_buffers(self, device: torch.device) -> None:
        self.table = torch.ones(WIDTH, device=device)


def initial_values(*, name: str, start: int, stop: int) -> Tensor:
    """Any slice of any parameter's first values."""
    return torch.randn(10_000, generator=generator("initial", name))[start:stop] * 0.2


def make_engine(
    process: Process, *, kind: str, dtype: str = "fp32", clip: float = 0.5, accumulation: int = ACCUMULATION
):
    with torch.device("meta"):
        model = Model()
    loss_scale = LossScalePolicy(initial=2.0**18, window=4, hysteresis=2) if dtype == "fp16" else None
    common = {
        "process": process,
        "optimizer": OptimizerPolicy(lr=1e-2, weight_decay=0.1, clip_grad_norm=clip),
        "lr_table": torch.linspace(1, 0.1, STEPS),
        "precision": PrecisionPolicy(dtype=DTYPES[dtype], loss_scale=loss_scale),
        "accumulation_steps": accumulation,
        "initial_values": initial_values,
    }
    if kind == "ztk":
        return parallelize(model, zero=ZeroPolicy(stage=0), **common)
    return parallelize_peer(model, kind=kind, **common)


def batches(process: Process, *, count: int):
    for number in range(count):
        yield torch.randint(VOCABULARY, (4, 6), generator=generator("batch", process.rank, number))


def train(process: Process, *, kind: str, dtype: str = "fp32", clip: float = 0.5) -> dict:
    engine = make_engine(process, kind=kind, dtype=dtype, clip=clip)
    losses, norms, rates = [], [], []
    for tokens in batches(process, count=STEPS * ACCUMULATION):
        loss = engine(tokens)
        engine.backward(loss)
        losses.append(float(loss))
        if engine.step():
            metrics = engine.read_metrics()
            norms.append(metrics.grad_norm)
            rates.append(metrics.lr)
    with engine.evaluating():
        losses.append(float(engine(tokens)))
    source = engine.peer if kind != "ztk" else engine.zero
    return {
        "losses": torch.tensor(losses),
        "norms": torch.tensor(norms),
        "rates": rates,
        "weights": {name: value.clone() for name, value in source.full_parameters()},
        "memory": engine.memory.by_category(Tier.device),
        "phases": set(engine.clock.seconds),
        "metrics": engine.read_metrics(),
        "global_steps": engine.global_steps,
        "micro_steps": engine.micro_steps,
    }


@pytest.mark.parametrize("clip", [0.5, 0.0])
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_fp32_equals_stage_0(ranks, kind, clip):
    """Losses within 1e-5 over 10 steps of 2 micro-batches: the same values, groups, clipping and learning rates."""
    pool = ranks(2)
    for ours, theirs in zip(pool.run(train, kind="ztk", clip=clip), pool.run(train, kind=kind, clip=clip), strict=True):
        torch.testing.assert_close(theirs["losses"], ours["losses"], rtol=1e-5, atol=0)
        torch.testing.assert_close(theirs["norms"], ours["norms"], rtol=1e-4, atol=0)
        assert theirs["rates"] == pytest.approx(ours["rates"])
        assert theirs["weights"].keys() == ours["weights"].keys()
        for name, value in theirs["weights"].items():
            torch.testing.assert_close(value, ours["weights"][name], rtol=1e-3, atol=1e-5)
        assert theirs["global_steps"] == STEPS and theirs["micro_steps"] == STEPS * ACCUMULATION
        assert theirs["phases"] == {"forward", "backward", "optimizer"}


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_bf16_follows_stage_0(ranks, kind):
    """Not the same arithmetic (autocast), the same training: eps of bf16 times the depth."""
    ours, theirs = (ranks(2).run(train, kind=which, dtype="bf16")[0] for which in ("ztk", kind))
    torch.testing.assert_close(theirs["losses"], ours["losses"], rtol=8 * 2**-8, atol=0)


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_fp16_skips_on_all_ranks_alike(ranks, kind):
    runs = ranks(2).run(train, kind=kind, dtype="fp16")
    assert runs[0]["metrics"].skipped_total == runs[1]["metrics"].skipped_total > 0
    assert runs[0]["metrics"].updates + runs[0]["metrics"].skipped_total == STEPS
    for name, value in runs[0]["weights"].items():
        assert torch.equal(value, runs[1]["weights"][name])
        assert value.isfinite().all()


def test_memory_is_that_of_the_tensors(ranks):
    numel = sum(parameter.numel() for parameter in Model().parameters())
    ddp = ranks(2).run(train, kind="ddp")[0]["memory"]
    assert ddp["parameters"] == ddp["gradients"] == 4 * numel
    assert 8 * numel <= ddp["optimizer"] < 8 * numel + 8 * 32  # and a step count per parameter
    first, second = (run["memory"] for run in ranks(2).run(train, kind="fsdp2"))
    for category in ("parameters", "gradients"):
        assert first[category] + second[category] == 4 * numel
    assert first["parameters"] > second["parameters"]  # 11 rows: 6 and 5


class _SeeCollectives(TorchDispatchMode):
    """Adds up the elements that collectives move, in the units of `CommCounters`."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        match function.name():
            case "c10d::_allgather_base_":
                self.bytes["all_gather"] += args[0].nbytes
            case "c10d::_reduce_scatter_base_":
                self.bytes["reduce_scatter"] += args[1].nbytes
            case "c10d::allreduce_":
                self.bytes["all_reduce"] += 2 * sum(tensor.nbytes for tensor in args[0])
        return function(*args, **(kwargs or {}))


def traffic(process: Process, *, kind: str, dtype: str) -> tuple[dict, dict]:
    engine = make_engine(process, kind=kind, dtype=dtype, clip=0.0)
    seen = _SeeCollectives()
    for number, tokens in enumerate(batches(process, count=8)):
        with engine.no_sync() if number == 4 else contextlib.nullcontext():
            if number == 6:
                with engine.evaluating(), seen:
                    engine(tokens)
            with seen:
                loss = engine(tokens)
                engine.backward(loss)
            engine.step()
    return dict(engine.comm.counters.bytes), dict(seen.bytes)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_counters_equal_the_moved_elements(ranks, kind, dtype):
    for counted, seen in ranks(2).run(traffic, kind=kind, dtype=dtype):
        assert counted == seen


def refusal(process: Process, *, message: str, kind: str = "ddp", **policies) -> None:
    with pytest.raises(ValueError, match=message):
        parallelize_peer(Model(), kind=kind, process=process, **{"optimizer": OptimizerPolicy(), **policies})


@pytest.mark.parametrize(
    ("message", "policies"),
    [
        ("zero.engine=horovod", {"kind": "horovod"}),
        ("optimizer.name=lion", {"optimizer": OptimizerPolicy(name="lion")}),
        ("without precision.bf16_master", {"precision": PrecisionPolicy(dtype=torch.bfloat16, bf16_master=True)}),
        ("bias_correction=false", {"optimizer": OptimizerPolicy(bias_correction=False)}),
        (
            "loss_scale.floor=4",
            {"precision": PrecisionPolicy(dtype=torch.float16, loss_scale=LossScalePolicy(floor=4))},
        ),
        (
            "loss_scale.dynamic=false",
            {"precision": PrecisionPolicy(dtype=torch.float16, loss_scale=LossScalePolicy(dynamic=False))},
        ),
    ],
)
def test_what_torch_lacks_is_refused(ranks, message, policies):
    ranks(2).run(refusal, message=message, **policies)


def from_real_values(process: Process, *, kind: str) -> Tensor:
    """Ranks whose models differ train rank 0's."""
    torch.manual_seed(process.rank)
    engine = parallelize_peer(Model(), kind=kind, process=process, optimizer=OptimizerPolicy())
    with engine.peer.gathered():
        return engine.module.head.weight.detach().clone()


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_rank_0_has_the_first_values(ranks, kind):
    first, second = ranks(2).run(from_real_values, kind=kind)
    torch.manual_seed(0)
    assert torch.equal(first, second) and torch.equal(first, Model().head.weight)
