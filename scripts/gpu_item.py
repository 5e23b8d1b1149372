"""One item of `scripts/check_gpu.py`; prints one line of JSON.

    python scripts/gpu_item.py nccl | identity bf16 | memory 2 cpu | speed ztk0

`--device cpu` runs identity on a machine without a GPU, to try the script itself.
"""

import argparse
import hashlib
import json
import tempfile
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from ztk import kernels
from ztk.data import Share, SyntheticStream
from ztk.engine import Engine
from ztk.engine.peers import PeerEngine, parallelize_peer
from ztk.nn import Decoder, DecoderConfig, initial_values, initialise
from ztk.offload import OffloadPolicy
from ztk.optim import OptimizerPolicy
from ztk.parallel import parallelize
from ztk.precision import LossScalePolicy, PrecisionPolicy
from ztk.runtime import Process, Tier
from ztk.runtime.comm.nccl import NcclTransport
from ztk.zero import ZeroPolicy

SMALL = DecoderConfig(
    vocab_size=256, dim=256, layers=4, heads=4, kv_heads=2, hidden_dim=768, max_seq_len=256, tie_embeddings=True
)
MEDIUM = DecoderConfig(vocab_size=32000, dim=640, layers=12, heads=10, kv_heads=5, hidden_dim=1792, max_seq_len=256)
LARGE = DecoderConfig(
    vocab_size=32000, dim=2048, layers=20, heads=16, kv_heads=8, hidden_dim=5632, max_seq_len=4096
)  # conf/model/1b.yaml
OPTIMIZER = OptimizerPolicy(lr=1e-3, weight_decay=0.1, clip_grad_norm=1.0)
SEED, STEPS = 0, 20
# Dense bf16 FLOP/s of the data sheets.
PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "B200": 2250e12, "L40S": 362e12, "4090": 165e12}
# The host's update has another order of operations: fp32 losses differ by rounding, 16-bit ones by steps of 16-bit numbers.
TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2, "fp16": 5e-3}


def build(
    config: DecoderConfig,
    *,
    process: Process,
    precision: str,
    stage: int = 0,
    tier: str = "none",
    folder: str | None = None,
) -> Engine:
    with torch.device("meta"):
        model = Decoder(config)
    scale = LossScalePolicy(initial=2.0**12) if precision == "fp16" else None
    return parallelize(
        model,
        process=process,
        optimizer=OPTIMIZER,
        precision=PrecisionPolicy.named(precision, loss_scale=scale),
        zero=ZeroPolicy(stage=stage),
        offload=OffloadPolicy(optimizer=tier, parameters=tier if stage == 3 else "none", nvme_path=folder),
        initial_values=partial(initial_values, model, seed=SEED),
    )


def batches(config: DecoderConfig, *, micro_batch: int, seq_len: int, device: torch.device):
    stream = SyntheticStream(
        vocab_size=config.vocab_size, seq_len=seq_len, share=Share(micro_batch=micro_batch), seed=SEED
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


def nccl(process: Process) -> dict:
    """A world of one: every collective hands back what it was given."""
    transport = NcclTransport(group=dist.group.WORLD)
    source = torch.randn(1 << 20, device=process.device)
    full, out = source.clone(), torch.empty_like(source)
    for work in (
        transport.all_gather(full, label=""),
        transport.broadcast(full, source=0, label=""),
        transport.all_to_all(full, out=out, label=""),
        transport.reduce_scatter(full, out=full, label=""),
    ):
        work.wait()
    torch.cuda.synchronize()
    if not (torch.equal(full, source) and torch.equal(out, source)):
        raise RuntimeError("NCCL in a world of one changed values")
    return {"bytes": source.nbytes}


def identity(process: Process, *, precision: str) -> dict:
    """Digest of the bits of losses and final weights, per stage and tier."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    digests, losses = {}, {}
    with tempfile.TemporaryDirectory(dir=".") as folder:
        for stage in range(4):
            for tier in ("none", "cpu", "nvme"):
                layout = f"{stage} {tier}"
                engine = build(SMALL, process=process, precision=precision, stage=stage, tier=tier, folder=folder)
                stream = batches(SMALL, micro_batch=8, seq_len=256, device=process.device)
                losses[layout] = torch.stack([train_step(engine, *next(stream)) for _ in range(STEPS)]).cpu()
                bits = hashlib.sha256(losses[layout].numpy().tobytes())
                for _, parameter in sorted(engine.zero.full_parameters()):
                    bits.update(parameter.cpu().contiguous().view(torch.uint8).numpy().tobytes())
                digests[layout] = bits.hexdigest()
    difference = ((losses["1 cpu"] - losses["1 none"]) / losses["1 none"]).abs().max()
    return {
        "digests": digests,
        "host_difference": float(difference),
        "tolerance": TOLERANCE[precision],
        "losses": losses["0 none"].tolist(),
    }


# memory


def memory(process: Process, *, stage: int, tier: str) -> dict:
    """Bytes on the device after two steps: by category, by the allocator, by formula. One GPU: nothing is divided."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    with tempfile.TemporaryDirectory(dir=".") as folder:
        engine = build(MEDIUM, process=process, precision="bf16", stage=stage, tier=tier, folder=folder)
        stream = batches(MEDIUM, micro_batch=4, seq_len=256, device=process.device)
        for _ in range(2):
            train_step(engine, *next(stream))
        torch.cuda.synchronize()
        allocated = torch.cuda.memory_allocated() - before
    held = engine.memory.by_category(Tier.device)
    state = {category: held.get(category, 0) for category in ("parameters", "gradients", "optimizer")}
    numel, offloaded = engine.num_parameters, tier != "none"
    # Offloaded: reduced gradients are stored beside their states at stages 2 and 3, parameters at 3.
    formula = numel * (2 * (not offloaded or stage < 3) + 2 * (not offloaded or stage < 2) + 12 * (not offloaded))
    ledger = engine.memory.current(Tier.device)
    slack = (2 << 20) + 0.002 * formula  # rotary tables, the step's scalars, the allocator's rounding; padding
    return {
        **state,
        "buffers": ledger - sum(state.values()),
        "ledger": ledger,
        "allocator": allocated,
        "formula": formula,
        "agrees": abs(allocated - ledger) < slack and abs(sum(state.values()) - formula) < slack,
    }


# speed


def speed(process: Process, *, contender: str) -> dict:
    """Steps of a training loop that only waits for the device at its end."""
    gigabytes = torch.cuda.get_device_properties(0).total_memory / 1e9
    config, seq_len, micro_batch = LARGE, 2048, 8 if gigabytes > 100 else 4 if gigabytes > 70 else 1
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True
    step = contender_step(contender, config=config, process=process)
    stream = batches(config, micro_batch=micro_batch, seq_len=seq_len, device=process.device)
    ready = [next(stream) for _ in range(4)]
    for number in range(4):
        step(*ready[number % 4])
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    start, steps = time.perf_counter(), 10
    for number in range(steps):
        loss = step(*ready[number % 4])
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - start) / steps
    tokens_per_second = micro_batch * seq_len / seconds
    flops = config.flops_per_token(seq_len) * tokens_per_second
    peak = next((peak for name, peak in PEAK_FLOPS.items() if name in torch.cuda.get_device_name()), None)
    return {
        "micro_batch": micro_batch,
        "seq_len": seq_len,
        "step_seconds": seconds,
        "tokens_per_second": tokens_per_second,
        "mfu": flops / peak if peak else None,
        "of_matmul": flops / matmul_flops(process.device),
        "peak_bytes": torch.cuda.max_memory_allocated(),
        # pyrefly: ignore[unbound-name]  # there is a step
        "loss": float(loss),
    }


def contender_step(contender: str, *, config: DecoderConfig, process: Process) -> Callable[[Tensor, Tensor], Tensor]:
    name, _, option = contender.partition("+")
    if name == "plain":
        kernels.set_backend("auto" if option == "kernels" else "reference")
        return plain(config, device=process.device)
    if name == "fsdp2":
        with torch.device("meta"):
            model = Decoder(config)
        engine = parallelize_peer(
            model,
            kind="fsdp2",
            process=process,
            optimizer=OPTIMIZER,
            precision=PrecisionPolicy.named("bf16", reduce_dtype="fp32"),
            initial_values=partial(initial_values, model, seed=SEED),
        )
    else:
        stage = int(name.removeprefix("ztk"))
        engine = build(config, process=process, precision="bf16", stage=stage, tier=option or "none")
    return partial(train_step, engine)


def plain(config: DecoderConfig, *, device: torch.device) -> Callable[[Tensor, Tensor], Tensor]:
    """fp32 parameters, autocast, clipping, fused AdamW."""
    model = initialise(Decoder(config), seed=SEED, device=device)
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
    """FLOP/s of a large bf16 product here and now: what a data sheet does not know."""
    a, b = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
    for _ in range(3):
        a @ b
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(10):
        a @ b
    torch.cuda.synchronize()
    return 10 * 2 * 8192**3 / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("item", choices=("nccl", "identity", "memory", "speed"))
    parser.add_argument("arguments", nargs="*")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    options = parser.parse_args()
    process = Process.start(device=options.device)
    match options.item, options.arguments:
        case "nccl", []:
            answer = nccl(process)
        case "identity", [precision]:
            answer = identity(process, precision=precision)
        case "memory", [stage, tier]:
            answer = memory(process, stage=int(stage), tier=tier)
        case "speed", [contender]:
            answer = speed(process, contender=contender)
        case _:
            parser.error(f"{options.item} does not take {options.arguments}")
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
