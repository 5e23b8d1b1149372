"""One rank of `scripts/bench_engine.py`: builds a candidate, warms it up and measures its steps.

`python bench_rank.py` is a process that forks ranks. It imports torch once, reads one `Task` as JSON per line, forks the task's ranks and
writes one line of JSON. Every measurement thus has fresh processes, and torch is imported only once. It runs in the interpreter that has the
peer: DeepSpeed may be installed in another environment.
"""

import gc
import json
import os
import resource
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # these two take seconds that every fork would pay
import torch.distributed.fsdp
from plain_decoder import plain_decoder
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from ztk.core.policies.zero import ZeroPolicy
from ztk.core.precision import PrecisionPolicy
from ztk.core.precision.policy import DTYPES
from ztk.core.runtime import Process
from ztk.data import Share, SyntheticStream
from ztk.nn import Decoder, DecoderConfig, initial_values, initialise
from ztk.optim import OptimizerPolicy
from ztk.parallel.apply import parallelize
from ztk.train.engine.peers import parallelize_peer
from ztk.zero.offload import OffloadPolicy

MODELS = {
    "tiny": {"dim": 192, "layers": 4, "heads": 6, "kv_heads": 3, "hidden_dim": 512},
    "30m": {"dim": 512, "layers": 8, "heads": 8, "kv_heads": 8, "hidden_dim": 1536},
}
OPTIMIZER = OptimizerPolicy(lr=1e-3, weight_decay=0.1)
SEED = 0

# Forward and backward of tokens and targets, which returns the loss, and the update.
Loop = tuple[Callable[[Tensor, Tensor], Tensor], Callable[[], object]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One measurement.

    candidate: `compute`; `ddp`; `zro` (ZeroRedundancyOptimizer over DDP); `fsdp2`; `fsdp2-keep` (FSDP2 whose parameters stay gathered from
        forward to backward, like stage 2); or `ztk` or `deepspeed` with stage and tier: `ztk3+nvme`.
    modules: layers of the model: `torch` or `ztk` for all candidates, or `own`, which is ztk's for ztk and torch's for the others.
    """

    candidate: str
    model: str
    modules: str
    dtype: str
    ranks: int
    warmup: int
    steps: int
    micro_batch: int
    seq_len: int
    nvme_path: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """One candidate in one round. Seconds per step: wall time of the slowest rank; CPU time of all threads, mean over ranks.

    proportional_bytes: the proportional set (Pss) of rank 0 before an update, while gradients exist. Each of its pages counts as a part, by the
    number of processes that share it, so the sum over ranks is the machine's memory.
    """

    candidate: str
    wall_seconds: float
    cpu_seconds: float
    peak_resident_bytes: int
    proportional_bytes: int
    loss: float


def measure(loop: Loop, *, task: Task, process: Process) -> Measurement:
    """Runs the warm-up and the measured steps of one rank, and a step whose memory counts."""
    backward, update = loop
    share = Share(micro_batch=task.micro_batch, rank=process.rank, world_size=process.world_size)
    stream = SyntheticStream(vocab_size=256, seq_len=task.seq_len, share=share, seed=SEED)

    def step() -> Tensor:
        batch = stream.next_batch()
        loss = backward(batch.tokens, batch.targets)
        update()
        return loss

    for _ in range(task.warmup):
        loss = step()
    process.comm.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(task.steps):
        loss = step()
    process.comm.barrier()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    batch = stream.next_batch()
    backward(batch.tokens, batch.targets)
    gc.collect()
    process.comm.barrier()
    proportional = proportional_bytes()
    process.comm.barrier()
    update()
    return Measurement(
        candidate=task.candidate,
        wall_seconds=wall / task.steps,
        cpu_seconds=cpu / task.steps,
        peak_resident_bytes=peak,
        proportional_bytes=proportional,
        # pyrefly: ignore[unbound-name]  # there is a step
        loss=float(process.comm.gather_scalars(loss.detach().float().view(1), label="loss").mean()),
    )


def proportional_bytes() -> int:
    """The proportional set of this process."""
    rows = (line.split() for line in Path("/proc/self/smaps_rollup").read_text().splitlines())
    return next(1024 * int(row[1]) for row in rows if row[0] == "Pss:")


# Candidates


def build(task: Task, *, process: Process) -> Loop:
    """Builds the candidate and returns its loop."""
    name, _, tier = task.candidate.partition("+")
    if name == "compute":
        return compute(task)
    if name.startswith("deepspeed"):
        return deepspeed(task, stage=int(name[-1]), tier=tier or "none")
    if name == "zro":
        return zero_redundancy(task)
    common: dict[str, Any] = {
        "process": process,
        "optimizer": OPTIMIZER,
        "precision": PrecisionPolicy(dtype=DTYPES[task.dtype]),
    }
    if is_plain(task):
        model = full_model(task)
    else:
        with torch.device("meta"):
            model = Decoder(config(task))
        common["initial_values"] = partial(initial_values, model, seed=SEED)
    if name in ("ddp", "fsdp2", "fsdp2-keep"):
        engine = parallelize_peer(model, kind=name.removesuffix("-keep"), **common)
        if name == "fsdp2-keep":
            # pyrefly: ignore[not-callable]  # nn.Module says Tensor | Module for every name that a model has
            engine.module.set_reshard_after_forward(False)
    else:
        stage = int(name.removeprefix("ztk"))
        engine = parallelize(
            model,
            zero=ZeroPolicy(stage=stage),
            offload=offload(task, stage=stage, tier=tier),
            fast_linear=is_plain(task),
            **common,
        )
    return of_engine(engine)


def of_engine(engine: Any) -> Loop:
    def backward(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = engine(tokens, targets)
        engine.backward(loss)
        return loss

    return backward, engine.step


def config(task: Task) -> DecoderConfig:
    return DecoderConfig(vocab_size=256, max_seq_len=task.seq_len, tie_embeddings=True, **MODELS[task.model])


def is_plain(task: Task) -> bool:
    """Whether the candidate's model has torch's layers."""
    return task.modules == "torch" or (task.modules == "own" and not task.candidate.startswith("ztk"))


def full_model(task: Task) -> nn.Module:
    """The model in float32 with its first values."""
    decoder = initialise(Decoder(config(task)), seed=SEED)
    return plain_decoder(decoder) if is_plain(task) else decoder


def offload(task: Task, *, stage: int, tier: str) -> OffloadPolicy:
    tier = tier or "none"
    return OffloadPolicy(
        optimizer=tier, parameters=tier if stage == 3 else "none", nvme_path=task.nvme_path if tier == "nvme" else None
    )


def compute(task: Task) -> Loop:
    """Forward, backward and torch's fused AdamW without communication. 16-bit runs have fp32 master weights, as all candidates."""
    model = full_model(task)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(DTYPES[task.dtype])
    parameters = list(model.parameters())
    half = task.dtype != "fp32"
    masters = [p.detach().float().requires_grad_() for p in parameters] if half else parameters
    groups = [
        {"params": [m for m in masters if m.dim() >= 2], "weight_decay": OPTIMIZER.weight_decay},
        {"params": [m for m in masters if m.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=OPTIMIZER.lr, betas=OPTIMIZER.betas, eps=OPTIMIZER.eps, fused=True)

    def backward(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = model(tokens, targets)
        loss.backward()
        return loss

    def update() -> None:
        if half:
            for master, parameter in zip(masters, parameters, strict=True):
                assert parameter.grad is not None
                master.grad, parameter.grad = parameter.grad.float(), None
        optimizer.step()
        if half:
            with torch.no_grad():
                torch._foreach_copy_(parameters, masters)
        optimizer.zero_grad()

    return backward, update


def zero_redundancy(task: Task) -> Loop:
    """torch's ZeroRedundancyOptimizer over DistributedDataParallel, autocast in 16 bit."""
    model = full_model(task)
    wrapped = DistributedDataParallel(model, broadcast_buffers=False, gradient_as_bucket_view=True)
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": OPTIMIZER.weight_decay},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = ZeroRedundancyOptimizer(
        groups, torch.optim.AdamW, lr=OPTIMIZER.lr, betas=OPTIMIZER.betas, eps=OPTIMIZER.eps, fused=True
    )

    def backward(tokens: Tensor, targets: Tensor) -> Tensor:
        half = task.dtype != "fp32"
        with torch.autocast("cpu", dtype=DTYPES[task.dtype] if half else None, enabled=half):
            loss = wrapped(tokens, targets)
        optimizer.zero_grad()
        loss.backward()
        return loss

    return backward, optimizer.step


def deepspeed(task: Task, *, stage: int, tier: str) -> Loop:
    """DeepSpeed as configured in its documentation, with its own CPU AdamW."""
    import deepspeed

    deepspeed.init_distributed("gloo")
    zero: dict[str, Any] = {"stage": stage}
    if tier != "none":
        target = {"device": tier, "nvme_path": task.nvme_path} if tier == "nvme" else {"device": tier}
        zero["offload_optimizer"] = target
        if stage == 3:
            zero["offload_param"] = target
    settings = {
        "train_micro_batch_size_per_gpu": task.micro_batch,
        "gradient_clipping": OPTIMIZER.clip_grad_norm,  # DeepSpeed's default is 1.0
        "zero_optimization": zero,
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": OPTIMIZER.lr,
                "betas": OPTIMIZER.betas,
                "eps": OPTIMIZER.eps,
                "weight_decay": OPTIMIZER.weight_decay,
            },
        },
        "steps_per_print": 10**9,
    }
    if task.dtype != "fp32":
        settings[task.dtype] = {"enabled": True}
    model = full_model(task)
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2]},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=settings)
    return of_engine(engine)


# Processes


def run(task: Task) -> Measurement | str:
    """Forks the ranks of one measurement. Returns the text of the error if it fails."""
    with tempfile.TemporaryDirectory(prefix="ztk-bench-") as folder:
        children = [fork(task, rank=rank, store=os.path.join(folder, "store")) for rank in range(task.ranks)]
        answers = [pipe.read() for _, pipe in children]
        for pid, _ in children:
            os.waitpid(pid, 0)
    for left in Path("/dev/shm").glob(f"deepspeed_*_{deepspeed_port(os.getpid())}_*"):
        left.unlink()  # DeepSpeed does not remove it, and 69 MB per rank would stay until the machine restarts
    errors = [answer for answer in answers if not answer.startswith("{")]
    if errors:
        return errors[0] or "a rank died"
    ranks = [Measurement(**json.loads(answer)) for answer in answers]
    return Measurement(
        candidate=task.candidate,
        wall_seconds=max(rank.wall_seconds for rank in ranks),
        cpu_seconds=statistics.mean(rank.cpu_seconds for rank in ranks),
        peak_resident_bytes=max(rank.peak_resident_bytes for rank in ranks),
        proportional_bytes=ranks[0].proportional_bytes,
        loss=ranks[0].loss,
    )


def fork(task: Task, *, rank: int, store: str):
    """(process id, pipe with the rank's result)."""
    read, write = os.pipe()
    pid = os.fork()
    if pid:
        os.close(write)
        return pid, os.fdopen(read)
    os.close(read)
    try:
        answer = json.dumps(asdict(serve(task, rank=rank, store=store)))
    except BaseException:
        answer = traceback.format_exc()
    os.write(write, answer.encode())
    os._exit(0)


def serve(task: Task, *, rank: int, store: str) -> Measurement:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), ZTK_STORE=store)
    os.environ.update(WORLD_SIZE=str(task.ranks), LOCAL_WORLD_SIZE=str(task.ranks))
    # The variables that DeepSpeed's launcher sets.
    os.environ.update(LOCAL_SIZE=str(task.ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=deepspeed_port(os.getppid()))
    os.environ.update(DS_ACCELERATOR="cpu")
    torch.set_num_threads(1)
    process = Process.start(device="cpu", timeout_seconds=180)
    return measure(build(task, process=process), task=task, process=process)


def deepspeed_port(init_context: int) -> str:
    """A port that only names DeepSpeed's shared memory; no process listens on it."""
    return str(10000 + init_context % 50000)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keeps the candidates' output out of the results
    for line in sys.stdin:
        result = run(Task(**json.loads(line)))
        print(json.dumps(result if isinstance(result, str) else asdict(result)), file=answers, flush=True)


if __name__ == "__main__":
    main()
