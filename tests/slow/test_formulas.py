"""Bytes of model state per rank and tier, and elements on the wire per step, follow the ZeRO paper's formulas.

P counts the elements of all buckets with their padding; Rajbhandari et al. 2020 (https://arxiv.org/abs/1910.02054), sections 5 and 7. In 16
bit: 2P of parameters, 2P of gradients, 12P of optimizer states, each divided by the ranks from stages 3, 2 and 1 on; 2P elements moved per
step, 3P at stage 3. On disk a slot ends on a page.
"""

import functools
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from ztk.core.policies.zero import ZeroPolicy
from ztk.core.precision import PrecisionPolicy
from ztk.core.runtime import Process, Tier
from ztk.nn import Decoder, DecoderConfig, initial_values
from ztk.optim import OptimizerPolicy
from ztk.parallel.apply import parallelize
from ztk.zero.offload import OffloadPolicy

CONFIG = DecoderConfig(vocab_size=256, dim=128, layers=4, heads=4, kv_heads=2, hidden_dim=384, max_seq_len=64)
STEPS, PAGE = 3, 4096
HOME = {"none": Tier.device, "cpu": Tier.host, "nvme": Tier.nvme}


@dataclass(frozen=True, kw_only=True, slots=True)
class Counted:
    """One rank. padded: P. slots: pieces on disk. state: tier -> category -> bytes. elements: moved per step."""

    padded: int
    slots: int
    state: dict[str, dict[str, int]]
    elements: int


def run(process: Process, *, stage: int, offload: str, folder: str) -> Counted:
    with torch.device("meta"):
        model = Decoder(CONFIG)
    engine = parallelize(
        model,
        process=process,
        optimizer=OptimizerPolicy(clip_grad_norm=1.0),
        precision=PrecisionPolicy.named("bf16"),
        zero=ZeroPolicy(stage=stage),
        offload=OffloadPolicy(
            optimizer=offload, parameters=offload if stage == 3 else "none", nvme_path=folder, buffer_bytes=1 << 22
        ),
        initial_values=functools.partial(initial_values, model, seed=0),
    )
    tokens = torch.randint(256, (2, 64))
    for _ in range(STEPS):
        engine.backward(engine(tokens, tokens))
        engine.step()
    moved = sum(count for kind, count in process.comm.counters.elements.items() if kind != "scalars")
    counted = Counted(
        padded=sum(bucket.size for bucket in engine.zero.buckets),
        slots=sum(len(bucket.pieces) for bucket in engine.zero.buckets),
        state={tier: engine.memory.by_category(tier) for tier in Tier},
        elements=moved // STEPS,
    )
    engine.close()
    return counted


@pytest.mark.parametrize("offload", HOME)
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("world", [1, 2, 4])
def test_bytes_and_elements_follow_the_formulas(ranks, tmp_path: Path, world: int, stage: int, offload: str):
    found = ranks(world).run(run, stage=stage, offload=offload, folder=str(tmp_path))[0]
    home = HOME[offload]
    expected = {
        "parameters": (home if stage == 3 else Tier.device, 2 * found.padded // (world if stage == 3 else 1)),
        "gradients": (home if stage >= 2 else Tier.device, 2 * found.padded // (world if stage >= 2 else 1)),
        "optimizer": (home, 12 * found.padded // (world if stage >= 1 else 1)),
    }
    for category, (tier, nbytes) in expected.items():
        pages = PAGE * found.slots if tier is Tier.nvme else 0
        assert nbytes <= found.state[tier].get(category, 0) <= nbytes + pages, category
    if world > 1:  # one rank sends nothing: it counts its own copies
        assert found.elements == (3 if stage == 3 else 2) * found.padded
