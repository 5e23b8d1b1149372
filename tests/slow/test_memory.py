"""With `offload=nvme` the resident memory of a rank does not grow with the model.

The bound of a rank: its buffer pool, the largest unit's buffers that are gathered or reduced at one time, the activations, and the rank's
memory before it has a model. The larger model's states are about ten times the bound.
"""

import functools
import gc
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from scripts.bench import status_bytes
from tests.ranks import RankPool
from ztk.core.policies.zero import ZeroPolicy
from ztk.core.precision import PrecisionPolicy
from ztk.core.runtime import Process, Tier
from ztk.nn import Decoder, DecoderConfig, initial_values
from ztk.optim import OptimizerPolicy
from ztk.parallel.apply import parallelize
from ztk.train.engine import Engine
from ztk.zero.offload import OffloadPolicy

BUFFERS, BUFFER_BYTES, THREADS, BLOCK_BYTES = 9, 4 << 20, 2, 4 << 20
SEQ_LEN, DIM = 128, 768
ALLOCATOR_SLACK = 64 << 20  # freed temporaries that the C allocator keeps


@dataclass(frozen=True, kw_only=True, slots=True)
class Footprint:
    """Bytes of one rank. `before` and `peak` are resident sets, `state` lies on disk; the rest is counted by the ledger."""

    before: int
    peak: int
    pool: int
    gathered: int
    gradients: int
    parameters: int
    state: int


def run(process: Process, *, layers: int, dim: int, folder: str) -> Footprint:
    """Three steps at stage 3 with everything on NVMe; before that one step of a model of next to no size, which loads the libraries."""
    train(process, layers=1, dim=64, folder=folder, steps=1).close()
    gc.collect()
    before = status_bytes("VmRSS")
    engine = train(process, layers=layers, dim=dim, folder=folder, steps=3)
    device = engine.memory.by_category(Tier.device)
    return Footprint(
        before=before,
        peak=status_bytes("VmHWM"),
        pool=engine.memory.current(Tier.host),
        gathered=device.get("gathered", 0),
        gradients=device.get("gradients in flight", 0),
        parameters=engine.zero.num_parameters,
        state=engine.memory.current(Tier.nvme),
    )


def train(process: Process, *, layers: int, dim: int, folder: str, steps: int) -> Engine:
    """Built on meta, initialised piece by piece."""
    config = DecoderConfig(
        vocab_size=256,
        dim=dim,
        layers=layers,
        heads=dim // 64,
        kv_heads=dim // 64,
        hidden_dim=4 * dim,
        max_seq_len=SEQ_LEN,
    )
    with torch.device("meta"):
        model = Decoder(config)
    engine = parallelize(
        model,
        process=process,
        optimizer=OptimizerPolicy(clip_grad_norm=1.0),
        precision=PrecisionPolicy.named("bf16"),
        zero=ZeroPolicy(stage=3, prefetch_bucket_size=20 * dim * dim),
        offload=OffloadPolicy(
            optimizer="nvme",
            parameters="nvme",
            nvme_path=folder,
            buffer_count=BUFFERS,
            buffer_bytes=BUFFER_BYTES,
            threads=THREADS,
            block_bytes=BLOCK_BYTES,
        ),
        initial_values=functools.partial(initial_values, model, seed=0),
    )
    tokens = torch.randint(256, (1, SEQ_LEN))
    for _ in range(steps):
        engine.backward(engine(tokens, tokens))
        engine.step()
    return engine


@pytest.mark.parametrize("layers", [8, 24])
def test_resident_memory_stays_within_its_bound(show, tmp_path: Path, layers: int):
    pool = RankPool(2)  # new processes: memory of other tests would count
    found = pool.run(run, layers=layers, dim=DIM, folder=str(tmp_path))[0]
    pool.close()
    activations = layers * SEQ_LEN * DIM * 2 * 34  # a block keeps about 34 values of 2 bytes per element
    bound = found.before + found.pool + found.gathered + found.gradients + activations + ALLOCATOR_SLACK
    show(
        f"{found.parameters / 1e6:.0f} M parameters, MiB of a rank: state {found.state >> 20}, peak {found.peak >> 20}, "
        f"bound {bound >> 20}, before {found.before >> 20}"
    )
    assert found.peak <= bound
