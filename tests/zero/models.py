"""A small model with everything that makes sharding hard, and a training run on it that returns bits."""

import hashlib
import itertools
import os
import tempfile
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ztk.core.policies.zero import ZeroPolicy
from ztk.core.precision import LossScalePolicy, PrecisionPolicy
from ztk.core.runtime import Process, Tier
from ztk.core.runtime.seed import generator
from ztk.optim import OptimizerPolicy
from ztk.parallel.apply import parallelize
from ztk.zero.offload import OffloadPolicy

WIDTH, CLASSES, BATCH = 24, 10, 8


class Block(nn.Module):
    def __init__(self, *, odd: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH + odd)
        self.down = nn.Linear(4 * WIDTH + odd, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Blocks of unequal size, a tied head, a block that only some steps use, a scale used outside its module's forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, WIDTH)
        self.blocks = nn.ModuleList(Block(odd=index) for index in range(3))
        self.sometimes = nn.ModuleList([Block(odd=7)])
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, *, use_all: bool = True, outside: bool = True) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        if use_all:
            x = self.sometimes[0](x)
        if outside:
            x = x * self.blocks[0].norm.weight.mean()  # a parameter outside its module's forward
        logits = self.head(x)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(logits.flatten(0, 1), tokens.roll(1, dims=1).flatten())


def build(seed: int = 0) -> Model:
    """The same model on every call."""
    torch.manual_seed(seed)
    return Model()


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """One memory strategy."""

    stage: int = 0
    offload: str = "none"
    parameters: str = ""  # where they are at stage 3, if not where the optimizer's states are
    fraction: float = 1.0  # of the optimizer's states, offloaded
    zero: dict = field(default_factory=dict)

    @property
    def id(self) -> str:
        return f"stage{self.stage}-{self.offload}-{self.parameters}-{self.fraction}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """The results of a run."""

    losses: list[float]
    grad_norms: list[float]
    weights: dict[str, Tensor]
    digest: str
    elements: dict[str, int]
    calls: dict[str, int]
    memory: dict[str, dict[str, int]]
    skipped: int
    padded: int


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def batches(steps: int, *, rank: int, world: int):
    """Rank's part of each step's global batch of BATCH sequences."""
    for step in range(steps):
        tokens = torch.randint(CLASSES, (BATCH, 6), generator=generator("batch", step))
        yield tokens.chunk(world)[rank]


def make_engine(
    process: Process,
    *,
    layout: Layout,
    dtype: str = "fp32",
    folder: str | None = None,
    buffer_bytes: int = 1 << 15,
    **options,
):
    """The engine of a layout; NVMe files go to a fresh folder."""
    parameters = (layout.parameters or layout.offload) if layout.stage == 3 else "none"
    offload = OffloadPolicy(
        optimizer=layout.offload,
        optimizer_fraction=layout.fraction,
        parameters=parameters,
        nvme_path=folder or tempfile.mkdtemp(dir=os.environ.get("ZTK_TEST_NVME")),
        buffer_bytes=buffer_bytes,
        buffer_count=9,
        threads=2,
        block_bytes=buffer_bytes // 2,
    )
    return parallelize(
        options.pop("model", None) or build(),
        process=process,
        optimizer=options.pop("optimizer", OptimizerPolicy(lr=1e-2, weight_decay=0.1, clip_grad_norm=0.5)),
        precision=options.pop("precision", None)
        or PrecisionPolicy(
            dtype=DTYPES[dtype],
            loss_scale=LossScalePolicy(initial=2.0**17, window=4, hysteresis=1) if dtype == "fp16" else None,
            master=options.pop("master", None),
        ),
        zero=ZeroPolicy(stage=layout.stage, **{"bucket_size": 2000, **layout.zero}),
        offload=offload,
        **options,
    )


def train(
    process: Process, *, layout: Layout, dtype: str = "fp32", steps: int = 20, plain: bool = False, **options
) -> Run:
    """Trains and returns the bits. `plain`: every step uses every module, inside its forward only."""
    process.comm.counters.reset()
    engine = make_engine(process, layout=layout, dtype=dtype, **options)
    accumulation = engine.accumulation_steps
    losses, norms = [], []
    stream = batches(steps * accumulation, rank=process.rank, world=process.world_size)
    for step in range(steps):
        for tokens in itertools.islice(stream, accumulation):
            loss = engine(tokens, use_all=plain or step % 3 != 1, outside=not plain)
            engine.backward(loss)
            engine.step()
        mean = process.comm.gather_scalars(loss.detach().view(1), label="loss").mean()
        losses.append(float(mean))
        norms.append(engine.read_metrics().grad_norm)
    elements, calls = dict(process.comm.counters.elements), dict(process.comm.counters.calls)
    weights = {name: value.float().clone() for name, value in engine.zero.full_parameters()}
    bits = hashlib.sha256()
    for name in sorted(weights):
        bits.update(weights[name].numpy().tobytes())
    return Run(
        losses=losses,
        grad_norms=norms,
        weights=weights,
        digest=hashlib.sha256(torch.tensor(losses).numpy().tobytes()).hexdigest() + bits.hexdigest(),
        elements=elements,
        calls=calls,
        memory={tier.label: engine.memory.by_category(tier) for tier in Tier},
        skipped=engine.read_metrics().skipped_total,
        padded=sum(bucket.size for bucket in engine.zero.buckets),
    )
