"""Every stage, offload tier and precision on 2 and 4 ranks gives the same bits; fp32 agrees with a plain PyTorch loop.

72 runs of 20 steps on real text, about 5 minutes on 2 cores.
"""

import functools
import hashlib
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from ztk.core.policies.zero import ZeroPolicy
from ztk.core.precision import PrecisionPolicy
from ztk.core.runtime import Process
from ztk.data import ByteCorpus, Share, TokenStream
from ztk.nn import Decoder, DecoderConfig, initial_values, initialise
from ztk.optim import OptimizerPolicy
from ztk.parallel.apply import parallelize
from ztk.zero.offload import OffloadPolicy

CONFIG = DecoderConfig(
    vocab_size=256, dim=192, layers=4, heads=6, kv_heads=3, hidden_dim=512, max_seq_len=128, tie_embeddings=True
)
STEPS, SEQUENCES, SEQ_LEN, SEED = 20, 8, 128, 0
OPTIMIZER = OptimizerPolicy(lr=1e-3, weight_decay=0.1, clip_grad_norm=1.0)
TIERS = ("none", "cpu", "nvme")
PLAIN = 1e-5  # relative difference of a loss from the plain loop in fp32


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The global loss of every step, a digest of the bits of losses and final weights, and the steps whose gradient was clipped."""

    losses: list[float]
    digest: str
    clipped: int


def open_stream(*, rank: int, world_size: int) -> TokenStream:
    share = Share(micro_batch=SEQUENCES // world_size, accumulation_steps=1, rank=rank, world_size=world_size)
    corpus = ByteCorpus.open(None)
    return TokenStream(corpus.train, digest=corpus.digest, seq_len=SEQ_LEN, share=share, seed=SEED)


def run(process: Process, *, stage: int, tier: str, precision: str, folder: str) -> Outcome:
    """One layout on all ranks of `process`."""
    with torch.device("meta"):
        model = Decoder(CONFIG)
    engine = parallelize(
        model,
        process=process,
        optimizer=OPTIMIZER,
        precision=PrecisionPolicy.named(precision),
        zero=ZeroPolicy(stage=stage),
        offload=OffloadPolicy(
            optimizer=tier,
            parameters=tier if stage == 3 else "none",
            nvme_path=folder,
            buffer_bytes=1 << 20,
            buffer_count=9,
        ),
        initial_values=functools.partial(initial_values, model, seed=SEED),
    )
    stream = open_stream(rank=process.rank, world_size=process.world_size)
    losses, norms = [], []
    for _ in range(STEPS):
        batch = stream.next_batch()
        loss = engine(batch.tokens, batch.targets)
        engine.backward(loss)
        engine.step()
        losses.append(process.comm.gather_scalars(loss.detach().view(1), label="loss").mean())
        norms.append(engine.read_metrics().grad_norm)
    bits = hashlib.sha256(torch.stack(losses).numpy().tobytes())
    for _, parameter in sorted((name, value.clone()) for name, value in engine.zero.full_parameters()):
        bits.update(parameter.view(torch.uint8).numpy().tobytes())
    return Outcome(
        losses=[float(loss) for loss in losses],
        digest=bits.hexdigest()[:12],
        clipped=sum(norm > OPTIMIZER.clip_grad_norm for norm in norms),
    )


@functools.cache
def plain_losses() -> torch.Tensor:
    """Losses [STEPS] of the same training in one process by PyTorch alone."""
    model = initialise(Decoder(CONFIG), seed=SEED)
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": OPTIMIZER.weight_decay}, {"params": others, "weight_decay": 0.0}],
        lr=OPTIMIZER.lr,
        betas=OPTIMIZER.betas,
        eps=OPTIMIZER.eps,
    )
    stream = open_stream(rank=0, world_size=1)
    losses = []
    for _ in range(STEPS):
        batch = stream.next_batch()
        loss = torch.nn.functional.cross_entropy(model(batch.tokens).flatten(0, 1), batch.targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.clip_grad_norm)
        optimizer.step()
        losses.append(loss.item())
    return torch.tensor(losses)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_stages_and_tiers_have_one_digest(ranks, show, tmp_path: Path, world_size: int, precision: str):
    pool, digests = ranks(world_size), set()
    for stage in range(4):
        for tier in TIERS:
            outcomes = pool.run(run, stage=stage, tier=tier, precision=precision, folder=str(tmp_path))
            digests |= {outcome.digest for outcome in outcomes}
    last = outcomes[0]
    words = f"{world_size} ranks, {precision}: {len(digests)} digest, {last.clipped} of {STEPS} steps clipped"
    if precision == "fp32":
        error = float(((torch.tensor(last.losses) - plain_losses()) / plain_losses()).abs().max())
        words += f", {error:.1e} from the plain loop"
        assert error <= PLAIN
    show(words)
    assert len(digests) == 1
    assert last.clipped
