"""Bytes of model state per rank and tier, and elements on the wire per step, beside the ZeRO paper's formulas.

    python scripts/check_formulas.py

P counts the elements of all buckets with their padding; Rajbhandari et al. 2020 (https://arxiv.org/abs/1910.02054), sections 5
and 7. In 16 bit: 2P of parameters, 2P of gradients, 12P of optimizer states, each divided by the ranks from stages 3, 2 and 1 on; 2P
elements moved per step, 3P at stage 3. Exit code 1 if a number differs (on disk: by more than the pages that slots end on).
"""

import functools
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.ranks import RankPool
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
class Metrics:
    """Of one rank."""

    padded: int
    slots: int
    state: dict[str, dict[str, int]]
    elements: int


def run(process: Process, *, stage: int, offload: str, folder: str) -> Metrics:
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
    state = {tier: engine.memory.by_category(tier) for tier in Tier}
    metrics = Metrics(
        padded=sum(bucket.size for bucket in engine.zero.buckets),
        slots=sum(len(bucket.pieces) for bucket in engine.zero.buckets),
        state=state,
        elements=moved // STEPS,
    )
    engine.close()
    return metrics


def expected(*, stage: int, offload: str, world: int, padded: int) -> dict[str, tuple[Tier, int]]:
    """Category -> tier and bytes."""
    home = HOME[offload]
    return {
        "parameters": (home if stage == 3 else Tier.device, 2 * padded // (world if stage == 3 else 1)),
        "gradients": (home if stage >= 2 else Tier.device, 2 * padded // (world if stage >= 2 else 1)),
        "optimizer": (home, 12 * padded // (world if stage >= 1 else 1)),
    }


def main() -> int:
    console, failed = Console(), False
    for world in (1, 2, 4):
        table = Table(title=f"{world} ranks, bf16, per parameter: bytes per rank, elements moved per step")
        for column in ("", "offload", "parameters", "gradients", "optimizer", "moved", "formula", "equal"):
            table.add_column(column, no_wrap=True)
        pool = RankPool(world)
        with tempfile.TemporaryDirectory(dir=".") as folder:
            for stage in range(4):
                for offload in HOME:
                    found = pool.run(run, stage=stage, offload=offload, folder=folder)[0]
                    wanted = expected(stage=stage, offload=offload, world=world, padded=found.padded)
                    equal, cells = True, []
                    for category, (tier, nbytes) in wanted.items():
                        have = found.state[tier].get(category, 0)
                        equal &= nbytes <= have <= nbytes + (PAGE * found.slots if tier is Tier.nvme else 0)
                        cells.append(f"{have / found.padded:.3f} {tier.label}")
                    moved = 0 if world == 1 else 3 if stage == 3 else 2
                    # a world of one moves nothing; what it counts are its own copies
                    equal &= world == 1 or found.elements == moved * found.padded
                    failed |= not equal
                    formula = "+".join(f"{nbytes / found.padded:g}" for _, nbytes in wanted.values())
                    share = "-" if world == 1 else f"{found.elements / found.padded:.3f}"
                    table.add_row(f"stage{stage}", offload, *cells, share, formula, str(equal))
        pool.close()
        console.print(table)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
