"""Small models, and a training run on any layout that returns results to compare with one rank."""

from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ztk.core.policies.zero import ZeroPolicy
from ztk.core.precision import LossScalePolicy, PrecisionPolicy
from ztk.core.runtime import Process, Topology
from ztk.nn import Decoder, DecoderConfig, initial_values
from ztk.optim import OptimizerPolicy
from ztk.parallel.apply import parallelize
from ztk.parallel.pipeline import LayerSpec, PipelineModule, PipelinePolicy, TiedLayerSpec
from ztk.zero.offload import OffloadPolicy

GLOBAL_BATCH, BATCH, LENGTH, VOCABULARY = 8, 1, 12, 50  # micro-batches of all replicas, sequences in each, tokens
DECODER = DecoderConfig(
    vocab_size=VOCABULARY,
    dim=32,
    layers=6,
    heads=4,
    kv_heads=2,
    hidden_dim=48,
    max_seq_len=LENGTH,
    tie_embeddings=False,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """How a run is spread and stored."""

    topology: Topology = Topology()
    model: str = "decoder"
    schedule: str = "1f1b"
    virtual_stages: int = 1
    partition: str = "parameters"
    stage: int = 0
    offload: str = "none"
    tied: bool = False
    dtype: str = "fp32"
    zero: dict = field(default_factory=dict)
    pipeline: dict = field(default_factory=dict)

    @property
    def id(self) -> str:
        t = self.topology
        axes = "".join(f"{n}{v}" for n, v in (("pp", t.pipeline), ("tp", t.tensor), ("sp", t.sequence)) if v > 1)
        return f"{axes or 'one'}-{self.schedule}-stage{self.stage}-{self.offload}{'-tied' * self.tied}-{self.dtype}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """The results of one rank."""

    losses: list[float]
    grad_norms: list[float]
    weights: dict[str, Tensor]  # of this rank's stages
    bytes: dict[str, int]  # of training, by kind
    skipped: int
    validation: float


def offload_policy(name: str, *, folder: str) -> OffloadPolicy:
    if name == "none":
        return OffloadPolicy()
    return OffloadPolicy(optimizer=name, nvme_path=folder, buffer_bytes=1 << 15, buffer_count=9, threads=2)


def precision_policy(dtype: str) -> PrecisionPolicy:
    match dtype:
        case "bf16":
            return PrecisionPolicy(dtype=torch.bfloat16)
        case "fp16":
            return PrecisionPolicy(dtype=torch.float16, loss_scale=LossScalePolicy(dynamic=True, initial=256.0))
        case _:
            return PrecisionPolicy()


def build_engine(process: Process, *, layout: Layout, model: nn.Module, folder: str = "/tmp", **more):
    if layout.topology != Topology():
        process = process.arrange(layout.topology)
    policy = PipelinePolicy(
        schedule=layout.schedule,
        virtual_stages=layout.virtual_stages,
        partition=layout.partition,
        **layout.pipeline,
    )
    return parallelize(
        model,
        process=process,
        optimizer=OptimizerPolicy(lr=1e-2, clip_grad_norm=0.5),
        precision=precision_policy(layout.dtype),
        zero=ZeroPolicy(stage=layout.stage, **layout.zero),
        offload=offload_policy(layout.offload, folder=folder),
        pipeline=policy,
        accumulation_steps=GLOBAL_BATCH // process.mesh.replicas,
        **more,
    )


def decoder(config: DecoderConfig) -> tuple[Decoder, dict]:
    """The decoder on the meta device, and the arguments of `parallelize` that fill it."""
    with torch.device("meta"):
        model = Decoder(config)
    return model, {"initial_values": partial(initial_values, model, seed=7)}


def micro_batches(step: int, *, replica: int, replicas: int) -> list[tuple[Tensor, Tensor]]:
    """The replica's part of a global batch that does not depend on the layout."""
    generator = torch.Generator().manual_seed(step)
    rows = torch.randint(VOCABULARY, (GLOBAL_BATCH, BATCH, LENGTH + 1), generator=generator)
    own = rows.chunk(replicas)[replica]
    return [(row[:, :-1].contiguous(), row[:, 1:].contiguous()) for row in own]


def train(process: Process, *, layout: Layout, steps: int, folder: str = "/tmp") -> Run:
    """Trains on the global batches 0, 1, ... Returns the losses of this rank's replica."""
    if layout.model == "decoder":
        model, more = decoder(replace(DECODER, tie_embeddings=layout.tied))
    else:
        model, more = pipeline_module(), {}
    engine = build_engine(process, layout=layout, model=model, folder=folder, **more)
    mesh = engine.process.mesh
    losses, norms = [], []
    for step in range(steps):
        batches = micro_batches(step, replica=mesh.replica, replicas=mesh.replicas)
        losses.append(float(engine.train_batch(iter(batches))))
        metrics = engine.read_metrics()
        norms.append(metrics.grad_norm)
    run = Run(
        losses=losses,
        grad_norms=norms,
        bytes={kind: count for kind, count in mesh.counters.bytes.items() if count},
        skipped=metrics.skipped_total,
        validation=float(engine.eval_batch(micro_batches(99, replica=mesh.replica, replicas=mesh.replicas))),
        weights={name: value.detach().float().clone() for name, value in engine.zero.full_parameters()},
    )
    engine.close()
    if layout.topology != Topology():
        mesh.close()
    return run


class Embed(nn.Embedding):
    def __init__(self) -> None:
        super().__init__(VOCABULARY, 24)


class Mix(nn.Module):
    """Takes and returns a tuple, one of whose members has no gradient."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, inputs):
        x, mask = inputs
        return x + torch.tanh(self.inner(x)) * mask.unsqueeze(-1), mask


def with_mask(x: Tensor):
    return x, torch.ones(x.shape[:2], dtype=torch.int64)


def drop_mask(inputs) -> Tensor:
    return inputs[0]


def language_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def pipeline_module() -> PipelineModule:
    """A tied head, functions between layers, tuples of two dtypes."""
    return PipelineModule(
        [
            TiedLayerSpec("words", Embed),
            with_mask,
            *(LayerSpec(Mix) for _ in range(4)),
            drop_mask,
            LayerSpec(nn.LayerNorm, 24),
            TiedLayerSpec("words", Embed, forward_fn=lambda module, x: x @ module.weight.t()),
        ],
        loss_fn=language_loss,
    )
