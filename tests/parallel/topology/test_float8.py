"""precision=fp8 under the memory strategies: one loss, and half of the bytes of bf16 at stage 3."""

import tempfile
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch

from ztk.core.policies.zero import ZeroPolicy
from ztk.core.precision import PrecisionPolicy
from ztk.core.runtime import Process, Topology
from ztk.core.runtime.seed import generator
from ztk.nn import Decoder, DecoderConfig, initial_values
from ztk.optim import OptimizerPolicy
from ztk.parallel.apply import parallelize
from ztk.parallel.pipeline import PipelinePolicy, ScheduleName
from ztk.parallel.recompute import RecomputePolicy
from ztk.parallel.tensor import TensorPolicy
from ztk.zero.offload import OffloadPolicy

CONFIG = DecoderConfig(vocab_size=64, dim=32, layers=2, heads=2, kv_heads=2, hidden_dim=64, max_seq_len=16)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Way:
    """Settings that must not change the losses, except `float8` and `topology`."""

    stage: int = 0
    offload: str = "none"
    float8: str | None = "rowwise"
    topology: Topology = field(default_factory=Topology)
    options: dict = field(default_factory=dict)


def _train(process: Process, *, way: _Way, steps: int = 4) -> tuple[list[float], dict[str, list[int]]]:
    """Losses over all replicas, and the bytes of each gather in the last step by its label."""
    arranged = process.arrange(way.topology)
    with torch.device("meta"):
        model = Decoder(CONFIG)
    engine = parallelize(
        model,
        process=arranged,
        optimizer=OptimizerPolicy(lr=3e-3, clip_grad_norm=1.0),
        precision=PrecisionPolicy.named("bf16", float8=way.float8, reduce_dtype="fp32"),
        zero=ZeroPolicy(stage=way.stage, bucket_size=1 << 20),
        offload=OffloadPolicy(
            optimizer=way.offload,
            parameters=way.offload if way.stage == 3 else "none",
            nvme_path=tempfile.mkdtemp(),
            buffer_bytes=1 << 15,
            buffer_count=9,
            threads=2,
            block_bytes=1 << 14,
        ),
        initial_values=partial(initial_values, model, seed=1),
        **way.options,
    )
    losses, gathers = [], {}
    comm, parts = arranged.mesh.comm("data"), engine.accumulation_steps

    def before(name: str) -> None:
        kind, _, label = name.partition(" ")
        label, _, dtype = label.rpartition(" x ")
        label, _, count = label.rpartition(" ")
        if kind == "all_gather":
            gathers.setdefault(label, []).append(int(count) * getattr(torch, dtype).itemsize)

    for step in range(steps):
        tokens = torch.randint(CONFIG.vocab_size, (4, 17), generator=generator("float8", step)).sort(1).values
        own = [
            part.chunk(comm.size)[comm.rank].chunk(parts)
            for part in (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        ]
        comm.before = before if step == steps - 1 else None
        loss = engine.train_batch(list(zip(*own, strict=True)))
        comm.before = None
        losses.append(float(engine.comm.gather_scalars(loss.detach().view(1), label="loss").mean()))
    engine.close()
    return losses, gathers


def test_losses_do_not_depend_on_the_stage_or_tier(ranks):
    first = ranks(2).run(_train, way=_Way())[0][0]
    ways = [
        _Way(stage=1),
        _Way(stage=2, offload="cpu"),
        _Way(stage=3, options={"recompute": RecomputePolicy(mode="full")}),
        _Way(stage=3, offload="cpu"),
        _Way(stage=3, offload="nvme"),
    ]
    for way in ways:
        assert ranks(2).run(_train, way=way)[0][0] == first, way
    wide = ranks(2).run(_train, way=_Way(float8=None))[0][0]
    assert first != wide and first == pytest.approx(wide, rel=0.02)


def test_stage_3_gathers_weights_in_float8(ranks):
    _, sent = ranks(2).run(_train, way=_Way(stage=3))[0]
    _, plain = ranks(2).run(_train, way=_Way(stage=3, float8=None))[0]
    # A block has four matrices of 32 x 32 and three of 32 x 64: 10,240 elements, and two norms of 32. Each shard begins with a row.
    rows = 4 * 32 + 2 * 64 + 32
    of_block = {label: sizes for label, sizes in sent.items() if label.endswith("as float8")}
    assert len(of_block) == CONFIG.layers
    for sizes in of_block.values():
        assert len(sizes) == 2  # forward, backward
        assert all(10_240 < nbytes <= 10_240 + 2 * (rows + 16) for nbytes in sizes)
    assert sum(map(sum, of_block.values())) / (CONFIG.layers * 2 * 2 * 10_240) == pytest.approx(0.5, abs=0.02)
    assert sum(map(sum, sent.values())) < sum(map(sum, plain.values()))


def test_other_topologies_train_alike(ranks):
    first = ranks(2).run(_train, way=_Way())[0][0]
    stages = _Way(
        topology=Topology(pipeline=2),
        options={"accumulation_steps": 2, "pipeline": PipelinePolicy(schedule=ScheduleName.zero_bubble)},
    )
    tensors = _Way(topology=Topology(tensor=2), options={"tensor": TensorPolicy(sequence_parallel=True)})
    recipes = (_Way(stage=3, float8=name) for name in ("rowwise_with_gw_hp", "rowwise_e5m2"))
    for way in (stages, tensors, *recipes):
        assert ranks(2).run(_train, way=way)[0][0] == pytest.approx(first, rel=0.02), way
