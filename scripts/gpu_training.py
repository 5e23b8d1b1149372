"""Training on one or several GPUs: bit identity, bytes on the wire, memory, speed and overlap. Items of `scripts/gpu_item.py`."""

import hashlib
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from scripts.gpu_trace import overlap_of
from ztk import kernels
from ztk.core.policies.peaks import peak_rate
from ztk.core.policies.zero import ZeroPolicy
from ztk.core.precision import LossScalePolicy, PrecisionPolicy
from ztk.core.runtime import Process, Tier
from ztk.data import Share, SyntheticStream
from ztk.nn import Decoder, DecoderConfig, initial_values, initialise
from ztk.optim import OptimizerPolicy
from ztk.parallel.apply import parallelize
from ztk.train.engine import Engine
from ztk.train.engine.peers import PeerEngine, parallelize_peer
from ztk.zero.buckets.piece import Piece
from ztk.zero.offload import OffloadPolicy
from ztk.zero.update.piece_update import PieceUpdate

SMALL = DecoderConfig(
    vocab_size=256, dim=256, layers=4, heads=4, kv_heads=2, hidden_dim=768, max_seq_len=256, tie_embeddings=True
)
MEDIUM = DecoderConfig(vocab_size=32000, dim=640, layers=12, heads=10, kv_heads=5, hidden_dim=1792, max_seq_len=256)
LARGE = DecoderConfig(
    vocab_size=32000, dim=2048, layers=20, heads=16, kv_heads=8, hidden_dim=5632, max_seq_len=4096
)  # conf/model/1b.yaml
TINY = DecoderConfig(vocab_size=256, dim=64, layers=2, heads=2, kv_heads=1, hidden_dim=128, max_seq_len=64)
OPTIMIZER = OptimizerPolicy(lr=1e-3, weight_decay=0.1, clip_grad_norm=1.0)
SEED, STEPS = 0, 20
TRACED = 3  # steps
LAYOUTS = tuple(f"{stage} {tier}" for stage in range(4) for tier in ("none", "cpu", "nvme"))
OF_SEVERAL = ("0 none", "1 none", "2 none", "3 none", "1 cpu", "3 cpu")  # layouts on several ranks
VOLUME = {"0": 2, "1": 2, "2": 2, "3": 3}  # stage -> times the parameters that a step moves
PADDING = 0.02  # share of padding in the smallest model's buffers
OVERLAP_GOAL = 1.10  # step of `stage3 offload=cpu` / its longest part, see `Overlap.of_longest`
# The host's update orders operations differently: fp32 losses differ by fp32 rounding, 16-bit losses by 16-bit rounding.
TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2, "fp16": 5e-3}


def build(
    config: DecoderConfig,
    *,
    process: Process,
    precision: str,
    stage: int = 0,
    tier: str = "none",
    fraction: float = 1.0,
    folder: str | None = None,
) -> Engine:
    """fraction: share of the optimizer states that `tier` has."""
    with torch.device("meta"):
        model = Decoder(config)
    scale = LossScalePolicy(initial=2.0**12) if precision == "fp16" else None
    return parallelize(
        model,
        process=process,
        optimizer=OPTIMIZER,
        precision=PrecisionPolicy.named(precision, loss_scale=scale),
        zero=ZeroPolicy(stage=stage),
        offload=OffloadPolicy(
            optimizer=tier,
            optimizer_fraction=fraction,
            parameters=tier if stage == 3 else "none",
            nvme_path=folder,
        ),
        initial_values=partial(initial_values, model, seed=SEED),
    )


def batches(config: DecoderConfig, *, micro_batch: int, seq_len: int, device: torch.device, rank: int = 0):
    stream = SyntheticStream(
        vocab_size=config.vocab_size, seq_len=seq_len, share=Share(micro_batch=micro_batch), seed=SEED + rank
    )
    while True:
        batch = stream.next_batch()
        yield batch.tokens.to(device), batch.targets.to(device)


def train_step(engine: Engine | PeerEngine, tokens: Tensor, targets: Tensor) -> Tensor:
    loss = engine(tokens, targets)
    engine.backward(loss)
    engine.step()
    return loss.detach()


# identity


def identity(process: Process, *, precision: str) -> dict:
    """Digest of the bits of losses and final weights, per stage and tier."""
    config, micro_batch, seq_len, steps = (SMALL, 8, 256, STEPS) if process.device.type == "cuda" else (TINY, 2, 64, 3)
    digests, losses = {}, {}
    with tempfile.TemporaryDirectory(dir=".") as folder:
        for layout in LAYOUTS if process.world_size == 1 else OF_SEVERAL:
            stage, tier = layout.split()
            engine = build(config, process=process, precision=precision, stage=int(stage), tier=tier, folder=folder)
            stream = batches(config, micro_batch=micro_batch, seq_len=seq_len, device=process.device, rank=process.rank)
            losses[layout] = torch.stack([train_step(engine, *next(stream)) for _ in range(steps)]).cpu()
            bits = hashlib.sha256(losses[layout].numpy().tobytes())
            for _, parameter in sorted((name, value.clone()) for name, value in engine.zero.full_parameters()):
                bits.update(parameter.cpu().contiguous().view(torch.uint8).numpy().tobytes())
            digests[layout] = bits.hexdigest()
            engine.close()
    difference = ((losses["1 cpu"] - losses["1 none"]) / losses["1 none"]).abs().max()
    return {
        "digests": digests,
        "host_difference": float(difference),
        "tolerance": TOLERANCE[precision],
        "losses": losses["0 none"].tolist(),
    }


def identity_faults(answer: dict) -> list[str]:
    """States on the device must have one digest, and so must states that the host updates."""
    found = []
    for where in ("device", "host"):
        digests = {
            digest for layout, digest in answer["digests"].items() if layout.endswith("none") == (where == "device")
        }
        if len(digests) != 1:
            found.append(f"{len(digests)} different digests with the optimizer on the {where}")
    if answer["host_difference"] > answer["tolerance"]:
        found.append(f"losses with a host optimizer differ by {answer['host_difference']:.1e} relative")
    return found


# volume


def volume(process: Process) -> dict:
    """Counted bytes of a rank's collectives in one step per byte of bf16 parameters."""
    config, seq_len = (SMALL, 256) if process.device.type == "cuda" else (TINY, 64)
    counted = {}
    for stage in VOLUME:
        engine = build(config, process=process, precision="bf16", stage=int(stage))
        stream = batches(config, micro_batch=2, seq_len=seq_len, device=process.device, rank=process.rank)
        for _ in range(2):  # the first step records the order of uses
            process.comm.counters.reset()
            train_step(engine, *next(stream))
        moved = process.comm.counters.bytes
        total = sum(moved.get(kind, 0) for kind in ("all_gather", "reduce_scatter", "all_reduce"))
        counted[stage] = total / (2 * engine.num_parameters)
        engine.close()
    return {"counted": counted}


def volume_faults(answer: dict) -> list[str]:
    return [
        f"stage {stage} moves {value:.3f} times the parameters, not {VOLUME[stage]}"
        for stage, value in answer["counted"].items()
        if not VOLUME[stage] <= value <= VOLUME[stage] * (1 + PADDING)
    ]


# memory


def memory(process: Process, *, stage: str, tier: str) -> dict:
    """Device bytes after two steps: from the ledger by category, from the allocator, and from the formula for one GPU."""
    zero, on_gpu = int(stage), process.device.type == "cuda"
    config, seq_len = (MEDIUM, 256) if on_gpu else (TINY, 64)
    synchronize(process.device)
    before = allocated_bytes() if on_gpu else 0
    with tempfile.TemporaryDirectory(dir=".") as folder:
        engine = build(config, process=process, precision="bf16", stage=zero, tier=tier, folder=folder)
        stream = batches(config, micro_batch=4, seq_len=seq_len, device=process.device)
        for _ in range(2):
            train_step(engine, *next(stream))
        synchronize(process.device)
        allocated = allocated_bytes() - before if on_gpu else None
    held = engine.memory.by_category(Tier.device)
    state = {category: held.get(category, 0) for category in ("parameters", "gradients", "optimizer")}
    numel, offloaded = engine.num_parameters, tier != "none"
    # Offload moves reduced gradients with their states at stages 2 and 3, and parameters at stage 3.
    formula = numel * (2 * (not offloaded or zero < 3) + 2 * (not offloaded or zero < 2) + 12 * (not offloaded))
    ledger = engine.memory.current(Tier.device)
    slack = (2 << 20) + 0.002 * formula  # rotary tables, the step's scalars, the allocator's rounding; padding
    return {
        **state,
        "buffers": ledger - sum(state.values()),
        "ledger": ledger,
        "allocator": allocated,
        "formula": formula,
        "agrees": (allocated is None or abs(allocated - ledger) < slack) and abs(sum(state.values()) - formula) < slack,
    }


def allocated_bytes() -> int:
    """Bytes of tensors in the GPU's memory, without cuBLAS's workspaces. cuBLAS keeps up to 32 MiB from the same allocator for each thread that
    multiplies, autograd's thread included: more than the slack."""
    torch._C._cuda_clearCublasWorkspaces()
    return torch.cuda.memory_allocated()


# speed


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """A model and the batch of a rank."""

    config: DecoderConfig
    micro_batch: int
    seq_len: int

    @staticmethod
    def for_device(device: torch.device) -> "Shape":
        """A 1B model with the batch that fits into GPU memory; on a CPU a tiny model."""
        if device.type != "cuda":
            return Shape(config=TINY, micro_batch=2, seq_len=64)
        gigabytes = torch.cuda.get_device_properties(0).total_memory / 1e9
        return Shape(config=LARGE, micro_batch=8 if gigabytes > 100 else 4 if gigabytes > 70 else 1, seq_len=2048)

    def batches(self, device: torch.device) -> list[tuple[Tensor, Tensor]]:
        """Four batches for use in turn."""
        stream = batches(self.config, micro_batch=self.micro_batch, seq_len=self.seq_len, device=device)
        return [next(stream) for _ in range(4)]


def synchronize(device: torch.device) -> None:
    """Waits for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def speed(process: Process, *, contender: str) -> dict:
    """Times steps of a training loop that synchronises with the device only at its end."""
    device, on_gpu = process.device, process.device.type == "cuda"
    shape = Shape.for_device(device)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True
    step, ready = contender_step(contender, config=shape.config, process=process), shape.batches(device)
    for number in range(4):
        step(*ready[number % 4])
    synchronize(device)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    start, steps = time.perf_counter(), 10 if on_gpu else 2
    loss = torch.zeros(())
    for number in range(steps):
        loss = step(*ready[number % 4])
    synchronize(device)
    seconds = (time.perf_counter() - start) / steps
    tokens_per_second = shape.micro_batch * shape.seq_len / seconds
    flops = shape.config.flops_per_token(shape.seq_len) * tokens_per_second
    name = torch.cuda.get_device_name() if on_gpu else "cpu"
    peak = peak_rate(name, dtype="bfloat16")
    return {
        "micro_batch": shape.micro_batch,
        "seq_len": shape.seq_len,
        "step_seconds": seconds,
        "tokens_per_second": tokens_per_second,
        "mfu": flops / peak if peak else None,
        "of_matmul": flops / matmul_flops(device),
        "peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
        "loss": float(loss),
    }


# overlap


def overlap(process: Process, *, contender: str) -> dict:
    """The share of copies and collectives that overlaps with computing, from a trace of `TRACED` steps."""
    device = process.device
    shape = Shape.for_device(device)
    step, ready = contender_step(contender, config=shape.config, process=process), shape.batches(device)
    for number in range(4):
        step(*ready[number % 4])
    synchronize(device)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with updates_on_host() as spent, profile(activities=activities) as profiler:
        start = time.perf_counter()
        for number in range(TRACED):
            step(*ready[number % 4])
        synchronize(device)
        seconds = time.perf_counter() - start
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    found = overlap_of(events, seconds=seconds, steps=TRACED, host_seconds=sum(spent))
    if device.type == "cuda" and found.of_longest is None:
        raise RuntimeError("the trace has no work of the GPU: check that the GPU's profiler (CUPTI) may be used here")
    return {"contender": contender, "ranks": process.world_size} | asdict(found)


@contextmanager
def updates_on_host() -> Iterator[list[float]]:
    """Collects the seconds of each piece's update in main memory. Its thread is not in the trace."""
    spent, run = list[float](), PieceUpdate.run

    def timed(update: PieceUpdate, piece: Piece, *, master: Tensor, **options: Any) -> None:
        start = time.perf_counter()
        run(update, piece, master=master, **options)
        if master.device.type == "cpu":
            spent.append(time.perf_counter() - start)

    with mock.patch.object(PieceUpdate, "run", timed):
        yield spent


def contender_step(contender: str, *, config: DecoderConfig, process: Process) -> Callable[[Tensor, Tensor], Tensor]:
    """A training step of tokens and targets. contender: plain, plain+kernels, fsdp2, ddp, or ztk with a stage, `+tier` and
    `:fraction`; `+compile` compiles any of them with torch.compile, and the peers' attention is torch's then."""
    name, _, option = contender.partition("+")
    compiles = option == "compile"
    if name == "plain":
        kernels.set_backend("auto" if option == "kernels" else "reference")
        return plain(config, device=process.device, compiles=compiles)
    if name in ("fsdp2", "ddp"):
        with torch.device("meta"):
            model = Decoder(config)
        if compiles:
            kernels.set_backend("reference")
            for block in model.blocks:  # each alone, as torchtitan does, so that FSDP2 gathers between them
                block.compile()
        engine = parallelize_peer(
            model,
            kind=name,
            process=process,
            optimizer=OPTIMIZER,
            # Like ztk, DDP reduces gradients in bf16, with a hook that needs NCCL.
            precision=PrecisionPolicy.named("bf16", reduce_dtype="bf16" if process.device.type == "cuda" else None),
            initial_values=partial(initial_values, model, seed=SEED),
        )
    else:
        stage = int(name.removeprefix("ztk"))
        tier, _, fraction = ("none" if compiles else option or "none").partition(":")
        engine = build(
            config, process=process, precision="bf16", stage=stage, tier=tier, fraction=float(fraction or 1.0)
        )
        if compiles:
            engine.zero.compile(engine.module)
    return partial(train_step, engine)


def plain(config: DecoderConfig, *, device: torch.device, compiles: bool) -> Callable[[Tensor, Tensor], Tensor]:
    """fp32 parameters, autocast, clipping, fused AdamW."""
    model = initialise(Decoder(config), seed=SEED, device=device)
    if compiles:
        model.compile()
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": OPTIMIZER.weight_decay},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=OPTIMIZER.lr, betas=OPTIMIZER.betas, eps=OPTIMIZER.eps, fused=True)

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = model(tokens, targets)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.clip_grad_norm)
        optimizer.step()
        return loss.detach()

    return step


def matmul_flops(device: torch.device) -> float:
    """Measured FLOP/s of a large bf16 product, which is lower than the data sheet's rate."""
    n = 8192 if device.type == "cuda" else 256
    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    for _ in range(3):
        a @ b
    synchronize(device)
    start = time.perf_counter()
    for _ in range(10):
        a @ b
    synchronize(device)
    return 10 * 2 * n**3 / (time.perf_counter() - start)


def overlap_faults(answer: dict) -> list[str]:
    """A dry run has no ratio, because it has no trace of a GPU. Several ranks have no goal: on a shared GPU their collectives block."""
    if answer["contender"] != "ztk3+cpu" or answer["ranks"] > 1:
        return []
    if answer["of_longest"] is None or answer["of_longest"] <= OVERLAP_GOAL:
        return []
    times = ", ".join(
        f"{key} {1e3 * answer[key]:.1f}" for key in ("step", "compute", "to_device", "from_device", "wire", "host")
    )
    return [f"a step takes {answer['of_longest']:.2f} of its longest part, goal {OVERLAP_GOAL} (ms: {times})"]
