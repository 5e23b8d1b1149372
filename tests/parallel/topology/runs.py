"""A small decoder trained under any topology and memory strategy, and on one rank alone: the same batches, the same first weights."""

import hashlib
import os
import tempfile
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from ztk.core.policies.zero import ZeroPolicy
from ztk.core.precision import LossScalePolicy, PrecisionPolicy
from ztk.core.runtime import Comm, Process, Tier, Topology
from ztk.core.runtime.comm.transport import SingleRankTransport
from ztk.core.runtime.mesh import AXES
from ztk.core.runtime.process import all_replicas
from ztk.core.runtime.seed import generator
from ztk.nn import Decoder, DecoderConfig, initial_values
from ztk.optim import OptimizerPolicy
from ztk.parallel.apply import parallelize
from ztk.train.engine import Engine
from ztk.zero.buckets.bucket import Bucket
from ztk.zero.offload import OffloadPolicy

CONFIG = DecoderConfig(vocab_size=48, dim=32, layers=4, heads=4, kv_heads=2, hidden_dim=40, max_seq_len=32)
BATCH, LENGTH = 4, 16  # of all replicas together, tokens
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True, slots=True)
class Strategy:
    """Settings that must not change the numbers."""

    topology: Topology = field(default_factory=Topology)
    stage: int = 0
    offload: str = "none"
    dtype: str = "fp32"
    loss_scale: float = 2.0**17  # of fp16, at first: so large that some steps are skipped
    seed: int = 3  # of the first weights
    z_loss: float = 0.0  # the loss's; the one value here that changes numbers
    states: str = "fp32"  # of AdamW
    optimizer: OptimizerPolicy | None = None  # another one than AdamW
    zero: dict = field(default_factory=dict)  # of `ZeroPolicy`
    options: dict = field(default_factory=dict)  # of `parallelize`


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """losses: means over all ranks. digest: over losses and this rank's weights. elements: moved, by axis, then kind. owned: elements
    of parameters in this rank's shards, padding aside; padded: with it."""

    losses: list[float]
    grad_norms: list[float]
    digest: str
    elements: dict[str, dict[str, int]]
    state_bytes: int
    owned: int
    padded: int
    parameters: int


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets int64 [BATCH, LENGTH]."""
    first = torch.randint(CONFIG.vocab_size, (BATCH, 1), generator=generator("topology", step))
    tokens = (first + 5 * torch.arange(LENGTH + 1)) % CONFIG.vocab_size  # something that can be learnt
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def alone(process: Process) -> Process:
    """This rank as a world of its own."""
    comm = Comm(SingleRankTransport(), rank=0, size=1, device=process.device)
    return replace(process, rank=0, world_size=1, local_world_size=1, comm=comm, mesh=all_replicas(comm))


_ARRANGED: dict[tuple[int, Topology], Process] = {}


def arranged(process: Process, *, topology: Topology) -> Process:
    """`process.arrange(topology)`, connected once per process and topology."""
    key = id(process.comm), topology
    if key not in _ARRANGED:
        _ARRANGED[key] = process.arrange(topology)
    _ARRANGED[key].mesh.counters.reset()
    return _ARRANGED[key]


def make_engine(process: Process, *, strategy: Strategy, config: DecoderConfig = CONFIG):
    with torch.device("meta"):
        model = Decoder(config)
    model.loss.z_loss = strategy.z_loss
    parameters = strategy.offload if strategy.stage == 3 else "none"
    return parallelize(
        model,
        process=process,
        optimizer=strategy.optimizer
        or OptimizerPolicy(lr=3e-3, weight_decay=0.1, clip_grad_norm=0.8, states=strategy.states),
        precision=PrecisionPolicy(
            dtype=DTYPES[strategy.dtype],
            loss_scale=LossScalePolicy(initial=strategy.loss_scale, window=4, hysteresis=1)
            if strategy.dtype == "fp16"
            else None,
        ),
        zero=ZeroPolicy(stage=strategy.stage, bucket_size=3000, **strategy.zero),
        offload=OffloadPolicy(
            optimizer=strategy.offload,
            parameters=parameters,
            nvme_path=tempfile.mkdtemp(dir=os.environ.get("ZTK_TEST_NVME")),
            buffer_bytes=1 << 15,
            buffer_count=9,
            threads=2,
            block_bytes=1 << 14,
        ),
        initial_values=partial(initial_values, model, seed=strategy.seed),
        **strategy.options,
    )


def train_step(engine: Engine, *, step: int) -> float:
    """One optimizer step; the mean loss over all ranks."""
    mesh, parts = engine.process.mesh, engine.accumulation_steps
    own = [full.chunk(mesh.replicas)[mesh.replica].chunk(parts) for full in batch(step)]
    loss = engine.train_batch(list(zip(*own, strict=True)))
    return float(engine.comm.gather_scalars(loss.detach().view(1), label="loss").mean())


def train(process: Process, *, strategy: Strategy, steps: int = 20, config: DecoderConfig = CONFIG) -> Outcome:
    """`steps` optimizer steps on the mesh of `strategy`."""
    placed = arranged(process, topology=strategy.topology)
    mesh = placed.mesh
    engine = make_engine(placed, strategy=strategy, config=config)
    losses, norms = [], []
    for step in range(steps):
        losses.append(train_step(engine, step=step))
        norms.append(engine.read_metrics().grad_norm)
    elements = {axis: dict(mesh.comm(axis).counters.elements) for axis in AXES}
    bits = hashlib.sha256(torch.tensor(losses).numpy().tobytes())
    for _, value in engine.zero.full_parameters():
        bits.update(value.float().contiguous().numpy().tobytes())
    outcome = Outcome(
        losses=losses,
        grad_norms=norms,
        digest=bits.hexdigest(),
        elements=elements,
        state_bytes=sum(engine.memory.by_category(tier).get("optimizer", 0) for tier in Tier),
        owned=sum(_owned(bucket) for bucket in engine.zero.buckets),
        padded=sum(bucket.layout.shard_size for bucket in engine.zero.buckets),
        parameters=engine.num_parameters,
    )
    engine.close()
    return outcome


def _owned(bucket: Bucket) -> int:
    fragments = bucket.layout.fragments(bucket.layout.shard(bucket.comm.rank))
    return sum(fragment.stop - fragment.start for fragment in fragments)


def train_alone(process: Process, *, strategy: Strategy, steps: int = 20, config: DecoderConfig = CONFIG) -> Outcome:
    """The one-rank run of the same model on the same batches."""
    return train(alone(process), strategy=replace(strategy, topology=Topology()), steps=steps, config=config)
