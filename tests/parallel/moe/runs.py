"""Training runs on models with experts, for any mesh, stage and tier."""

import hashlib
import os
import tempfile
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ztk import checkpoint
from ztk.core.policies.zero import ZeroPolicy
from ztk.core.precision import LossScalePolicy, PrecisionPolicy
from ztk.core.runtime import Process, Tier, Topology
from ztk.core.runtime.seed import generator
from ztk.nn import Decoder, DecoderConfig, initial_values
from ztk.optim import OptimizerPolicy
from ztk.parallel.apply import parallelize
from ztk.parallel.moe import MoE
from ztk.zero.offload import OffloadPolicy

BATCH, LENGTH, VOCABULARY = 8, 8, 32
CONFIG = DecoderConfig(
    vocab_size=VOCABULARY,
    dim=32,
    layers=2,
    heads=2,
    kv_heads=1,
    hidden_dim=48,
    max_seq_len=LENGTH,
    experts=4,
    experts_per_token=2,
    experts_every=2,
    expert_hidden_dim=24,
    shared_hidden_dim=16,
    balance_loss_weight=0.1,
)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Expert(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class LayersOfExperts(nn.Module):
    """Two of DeepSpeed's layers, one of them with a residual expert; no token is dropped, or results depend on the ranks."""

    def __init__(self, *, ep_size: int, k: int = 2) -> None:
        super().__init__()
        width = 16
        self.embedding = nn.Embedding(VOCABULARY, width)
        options = {"num_experts": 4, "ep_size": ep_size, "k": k, "capacity_factor": 4.0, "eval_capacity_factor": 4.0}
        options |= {"top2_2nd_expert_sampling": False, "use_rts": False}
        self.layers = nn.ModuleList(
            MoE(width, Expert(width), use_residual=number == 1, **options) for number in range(2)
        )
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            out, _, _ = layer(x)
            x = x + out
        return F.cross_entropy(self.head(x).float().flatten(0, 1), targets.flatten())


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]  # of this rank
    digest: str
    bytes: dict[str, int]
    calls: dict[str, int]
    module_metrics: dict
    skipped: int
    memory: dict[str, dict[str, int]]


def batch(step: int, *, rank: int, world: int) -> Tensor:
    """Rank's part of the step's batch: int64 [BATCH / world, LENGTH + 1]."""
    tokens = torch.randint(VOCABULARY, (BATCH, 1), generator=generator("moe batch", step))
    return ((tokens + torch.arange(LENGTH + 1) * (1 + tokens % 3)) % VOCABULARY).chunk(world)[rank]


def build(kind: str, *, topology: Topology, config: DecoderConfig = CONFIG) -> tuple[nn.Module, dict]:
    """(model, arguments of `parallelize`): the decoder on the meta device, the others with values."""
    if kind == "decoder":
        with torch.device("meta"):
            model = Decoder(config)
        return model, {"initial_values": partial(initial_values, model, seed=3)}
    torch.manual_seed(5)
    return LayersOfExperts(ep_size=topology.expert), {}


def train(
    process: Process,
    *,
    topology: Topology,
    kind: str = "decoder",
    stage: int = 0,
    offload: str = "none",
    dtype: str = "fp32",
    steps: int = 20,
    bucket_size: int = 3000,
    config: DecoderConfig = CONFIG,
    accumulation_steps: int = 1,
    loss_scale: float = 2.0**17,
    save_after: tuple[int, str] | None = None,
    resume: str | None = None,
    **more,
) -> Run:
    """save_after: (step, folder). resume: the folder of a checkpoint; the run goes on from there. more: of `parallelize`."""
    process = process.arrange(topology)
    mesh = process.mesh
    model, options = build(kind, topology=topology, config=config)
    engine = parallelize(
        model,
        process=process,
        optimizer=OptimizerPolicy(lr=1e-2, weight_decay=0.1, clip_grad_norm=0.5),
        precision=PrecisionPolicy(
            dtype=DTYPES[dtype],
            loss_scale=LossScalePolicy(initial=loss_scale, window=4, hysteresis=1) if dtype == "fp16" else None,
        ),
        zero=ZeroPolicy(stage=stage, bucket_size=bucket_size),
        offload=OffloadPolicy(
            optimizer=offload,
            parameters=offload if stage == 3 else "none",
            nvme_path=tempfile.mkdtemp(dir=os.environ.get("ZTK_TEST_NVME")),
            buffer_bytes=1 << 15,
            buffer_count=9,
            threads=2,
            block_bytes=1 << 14,
        ),
        accumulation_steps=accumulation_steps,
        **options,
        **more,
    )
    if resume is not None:
        checkpoint.load(engine, path=resume)
    losses, norms = [], []
    begun = engine.global_steps * accumulation_steps
    tokens = (batch(step, rank=mesh.replica, world=mesh.replicas) for step in range(begun, steps * accumulation_steps))
    on_device = (part.to(process.device) for part in tokens)
    micro_batches = ((part[:, :-1], part[:, 1:]) for part in on_device)
    for step in range(engine.global_steps, steps):
        if save_after is not None and step == save_after[0]:
            checkpoint.save(engine, folder=save_after[1])
        loss = engine.train_batch(micro_batches)
        losses.append(float(mesh.world.gather_scalars(loss.view(1), label="loss").mean()))
        norms.append(engine.read_metrics().grad_norm)
    counted, calls = mesh.counters.bytes, mesh.counters.calls
    module_metrics = engine.read_module_metrics()
    weights = {name: value.float().cpu().clone() for name, value in engine.zero.full_parameters()}
    bits = hashlib.sha256(torch.tensor(losses).numpy().tobytes())
    for name in sorted(weights):
        bits.update(weights[name].numpy().tobytes())
    run = Run(
        losses=losses,
        norms=norms,
        weights=weights,
        digest=bits.hexdigest(),
        bytes=counted,
        calls=calls,
        module_metrics=module_metrics,
        skipped=engine.read_metrics().skipped_total,
        memory={tier.label: engine.memory.by_category(tier) for tier in (Tier.device, Tier.host)},
    )
    engine.close()
    process.comm.barrier()
    if topology != Topology():
        mesh.close()
    return run
