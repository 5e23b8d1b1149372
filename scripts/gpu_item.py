"""One item of `scripts/check_gpu.py` and `scripts/first_hour.py`; prints one line of JSON.

    python scripts/gpu_item.py machine | answers | decode | nccl | identity bf16 | memory 2 cpu | speed ztk0 | overlap ztk3+cpu

`--device cpu` tests the script itself on a machine without a GPU: the same code with small models. Values that only a GPU counts are null.
"""

import argparse
import hashlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import triton
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.gpu_trace import overlap_of
from ztk import kernels
from ztk.core.policies.peaks import peak_rate
from ztk.core.policies.zero import ZeroPolicy
from ztk.core.precision import LossScalePolicy, PrecisionPolicy
from ztk.core.runtime import Process, Tier
from ztk.core.runtime.comm.nccl import NcclTransport
from ztk.data import Share, SyntheticStream
from ztk.inference import Generator, InferencePolicy, SamplingParams
from ztk.nn import Decoder, DecoderConfig, initial_values, initialise
from ztk.optim import OptimizerPolicy
from ztk.parallel.apply import parallelize
from ztk.train.engine import Engine
from ztk.train.engine.peers import PeerEngine, parallelize_peer
from ztk.zero.offload import OffloadPolicy

SMALL = DecoderConfig(
    vocab_size=256, dim=256, layers=4, heads=4, kv_heads=2, hidden_dim=768, max_seq_len=256, tie_embeddings=True
)
MEDIUM = DecoderConfig(vocab_size=32000, dim=640, layers=12, heads=10, kv_heads=5, hidden_dim=1792, max_seq_len=256)
LARGE = DecoderConfig(
    vocab_size=32000, dim=2048, layers=20, heads=16, kv_heads=8, hidden_dim=5632, max_seq_len=4096
)  # conf/model/1b.yaml
LLAMA = DecoderConfig(
    vocab_size=128_256, dim=4096, layers=32, heads=32, kv_heads=8, hidden_dim=14_336, max_seq_len=8192
)  # 8B
TINY = DecoderConfig(vocab_size=256, dim=64, layers=2, heads=2, kv_heads=1, hidden_dim=128, max_seq_len=64)
DECODED = {1: 2048, 64: 2048}  # sequences of a decoding step -> tokens that each has at the end
PREFILLED = 8192  # tokens of a step that computes prompts
OPTIMIZER = OptimizerPolicy(lr=1e-3, weight_decay=0.1, clip_grad_norm=1.0)
SEED, STEPS = 0, 20
TRACED = 3  # steps
# The host's update orders operations differently: fp32 losses differ by fp32 rounding, 16-bit losses by 16-bit rounding.
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


# machine, answers and decode


def machine(process: Process) -> dict:
    """Versions, and copy rates in bytes per second: between the device and page-locked memory, and within main memory."""
    on_gpu, device = process.device.type == "cuda", process.device
    numel = 1 << (28 if on_gpu else 20)
    pinned, host = torch.ones(numel, pin_memory=on_gpu), torch.ones(numel)
    there = torch.ones(numel, device=device)

    def rate(target: Tensor, source: Tensor) -> float:
        target.copy_(source, non_blocking=True)
        synchronize(device)
        start = time.perf_counter()
        for _ in range(3):
            target.copy_(source, non_blocking=True)
        synchronize(device)
        return 3 * source.nbytes / (time.perf_counter() - start)

    return {
        "gpu": torch.cuda.get_device_name() if on_gpu else "cpu",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": sys.version.split()[0],
        "to_device": rate(there, pinned),
        "from_device": rate(pinned, there),
        "main_memory": rate(host, pinned),
    }


def answers(process: Process) -> dict:
    """A random model answers over a block cache: with eager kernels, with CUDA graphs, and without other sequences.

    Raises:
        RuntimeError: their tokens differ.
    """
    config = MEDIUM if process.device.type == "cuda" else TINY
    model = initialise(Decoder(config), seed=SEED, device=process.device)
    policy = InferencePolicy(cache="blocks", max_model_len=config.max_seq_len)
    prompts = [[(7 * i + j) % config.vocab_size for j in range(3 + 5 * i)] for i in range(6)]
    sampling = SamplingParams(max_tokens=16, temperature=0)
    generator = Generator(model, policy=policy)
    has_graphs, start = generator._stepper.graphs is not None, time.perf_counter()
    batch = [own[0].tokens for own in generator.generate(prompts, sampling=sampling)]
    seconds = time.perf_counter() - start
    alone = [generator.generate([prompt], sampling=sampling)[0][0].tokens for prompt in prompts]
    generator._stepper.graphs = None
    eager = [own[0].tokens for own in generator.generate(prompts, sampling=sampling)]
    if not batch == alone == eager:
        raise RuntimeError(f"tokens differ: together {batch}, alone {alone}, without graphs {eager}")
    return {"graphs": has_graphs, "tokens": sum(map(len, batch)), "seconds": seconds}


def decode(process: Process) -> dict:
    """Median seconds of a decoding step of an 8B model with random weights per number of sequences, and tokens of prompts per second."""
    on_gpu = process.device.type == "cuda"
    config, longest = (LLAMA, max(DECODED.values())) if on_gpu else (TINY, TINY.max_seq_len)
    answer, found = longest // 32 if on_gpu else longest // 4, {}
    policy = InferencePolicy(
        cache="blocks",
        max_sequences=max(DECODED),
        max_step_tokens=PREFILLED,
        max_model_len=longest,
        cache_tokens=(max(DECODED) + 1) * longest,
    )
    generator = Generator(random_decoder(config, device=process.device), policy=policy)
    for rows in DECODED:
        for row in range(rows):  # without a common prefix, also with the prompts of the turn before
            prompt = [(rows + row + 3 * place) % config.vocab_size for place in range(longest - answer)]
            generator.submit(prompt, sampling=SamplingParams(max_tokens=answer))
        seconds, began = [], time.perf_counter()
        while generator.has_work:
            start = time.perf_counter()
            if len(generator.step()) == rows:  # the host has read the tokens
                seconds.append(time.perf_counter() - start)
                found.setdefault(f"prompts_{rows}", rows * (longest - answer) / (time.perf_counter() - began))
        found[f"batch_{rows}"] = statistics.median(seconds)
    return found


def random_decoder(config: DecoderConfig, *, device: torch.device) -> Decoder:
    """In bf16, drawn on the device: a host takes minutes to draw 8B numbers."""
    with torch.device("meta"):
        model = Decoder(config).to(torch.bfloat16)
    model.to_empty(device=device)
    model.materialise_buffers(device)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02) if parameter.dim() > 1 else torch.nn.init.ones_(parameter)
    return model


# identity


def nccl(process: Process) -> dict:
    """In a world of one, every collective must return its input."""
    if process.device.type == "cpu":
        return {"bytes": 0}
    source = torch.randn(1 << 20, device=process.device)
    transport = NcclTransport(group=dist.group.WORLD)
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
    """Digest of the bits of losses and final weights, per stage and tier; like a run, without torch's deterministic mode."""
    config, micro_batch, seq_len, steps = (SMALL, 8, 256, STEPS) if process.device.type == "cuda" else (TINY, 2, 64, 3)
    digests, losses = {}, {}
    with tempfile.TemporaryDirectory(dir=".") as folder:
        for stage in range(4):
            for tier in ("none", "cpu", "nvme"):
                layout = f"{stage} {tier}"
                engine = build(config, process=process, precision=precision, stage=stage, tier=tier, folder=folder)
                stream = batches(config, micro_batch=micro_batch, seq_len=seq_len, device=process.device)
                losses[layout] = torch.stack([train_step(engine, *next(stream)) for _ in range(steps)]).cpu()
                bits = hashlib.sha256(losses[layout].numpy().tobytes())
                for _, parameter in sorted(engine.zero.full_parameters()):
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


# memory


def memory(process: Process, *, stage: int, tier: str) -> dict:
    """Device bytes after two steps: from the ledger by category, from the allocator, and from the formula for one GPU."""
    on_gpu = process.device.type == "cuda"
    config, seq_len = (MEDIUM, 256) if on_gpu else (TINY, 64)
    synchronize(process.device)
    before = allocated_bytes() if on_gpu else 0
    with tempfile.TemporaryDirectory(dir=".") as folder:
        engine = build(config, process=process, precision="bf16", stage=stage, tier=tier, folder=folder)
        stream = batches(config, micro_batch=4, seq_len=seq_len, device=process.device)
        for _ in range(2):
            train_step(engine, *next(stream))
        synchronize(process.device)
        allocated = allocated_bytes() - before if on_gpu else None
    held = engine.memory.by_category(Tier.device)
    state = {category: held.get(category, 0) for category in ("parameters", "gradients", "optimizer")}
    numel, offloaded = engine.num_parameters, tier != "none"
    # Offload moves reduced gradients with their states at stages 2 and 3, and parameters at stage 3.
    formula = numel * (2 * (not offloaded or stage < 3) + 2 * (not offloaded or stage < 2) + 12 * (not offloaded))
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
    with profile(activities=activities) as profiler:
        start = time.perf_counter()
        for number in range(TRACED):
            step(*ready[number % 4])
        synchronize(device)
        seconds = time.perf_counter() - start
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    found = overlap_of(events, seconds=seconds, steps=TRACED)
    if device.type == "cuda" and found.of_longest is None:
        raise RuntimeError("the trace has no work of the GPU: check that the GPU's profiler (CUPTI) may be used here")
    return asdict(found)


def contender_step(contender: str, *, config: DecoderConfig, process: Process) -> Callable[[Tensor, Tensor], Tensor]:
    name, _, option = contender.partition("+")
    if name == "plain":
        kernels.set_backend("auto" if option == "kernels" else "reference")
        return plain(config, device=process.device)
    if name in ("fsdp2", "ddp"):
        with torch.device("meta"):
            model = Decoder(config)
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


ITEMS = ("machine", "answers", "decode", "nccl", "identity", "memory", "speed", "overlap")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("item", choices=ITEMS)
    parser.add_argument("arguments", nargs="*")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    options = parser.parse_args()
    process = Process.start(device=options.device)
    match options.item, options.arguments:
        case "machine", []:
            answer = machine(process)
        case "answers", []:
            answer = answers(process)
        case "decode", []:
            answer = decode(process)
        case "nccl", []:
            answer = nccl(process)
        case "identity", [precision]:
            answer = identity(process, precision=precision)
        case "memory", [stage, tier]:
            answer = memory(process, stage=int(stage), tier=tier)
        case "speed", [contender]:
            answer = speed(process, contender=contender)
        case "overlap", [contender]:
            answer = overlap(process, contender=contender)
        case _:
            parser.error(f"{options.item} does not take {options.arguments}")
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
