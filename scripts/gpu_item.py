"""One item of `scripts/first_hour.py`; prints one line of JSON. Exit code 1, with the reasons, if a check fails.

    python scripts/gpu_item.py machine | answers | decode | eager | launches | nccl | job
    python scripts/gpu_item.py identity bf16 | memory 2 cpu | speed ztk0 | overlap ztk3+cpu
    python scripts/gpu_item.py host_update | volume | identity bf16 | speed ztk0 | overlap ztk3 --ranks 2 [--shared]

identity: stages and tiers train to the same bits, without torch's deterministic mode; a host optimizer agrees within rounding.
memory: model state from the CUDA allocator's counters, compared with the ledger and the formula of the ZeRO paper.
eager: times of decoding without graphs. launches: steps of small batches; both compare the launches of ZTK_LAUNCH.
host_update: AdamW in main memory by ztk's workers and by torch's teams of threads, by numbers of threads; their bits must be equal.
job: the main job, `python run.py`; its held-out loss must be below the text's byte-bigram entropy.
overlap: from a trace, the hidden share of copies and collectives, and the step compared with its longest part, the host's update
    after the backward among them. On one rank `ztk3+cpu` may take 10 % more.
    A number after the tier is `offload.optimizer_fraction`: `ztk3+cpu:0.5`.
speed: tokens/s and model FLOP utilisation of a 1B model in bf16.
volume: bytes per step that a rank's collectives count: 2 per model parameter at stages 0 to 2, 3 at stage 3, in units of a parameter's size.

`--shared`: all ranks use the first GPU, and their collectives use gloo through main memory, because NCCL allows one rank per GPU.
`--device cpu` tests the script itself on a machine without a GPU: the same code with small models. Values that only a GPU counts are null.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import triton
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.bench import parser_of
from scripts.gpu_host import host_update
from scripts.gpu_launch import launches
from scripts.gpu_training import (
    MEDIUM,
    SEED,
    TINY,
    identity,
    identity_faults,
    memory,
    overlap,
    overlap_faults,
    speed,
    synchronize,
    volume,
    volume_faults,
)
from scripts.hosted_gloo import hosted
from ztk.core.launch import run_ranks
from ztk.core.runtime import Process
from ztk.core.runtime.comm.nccl import NcclTransport
from ztk.inference import Generator, InferencePolicy, SamplingParams
from ztk.nn import Decoder, DecoderConfig, initialise

REPOSITORY = Path(__file__).resolve().parents[1]
LLAMA = DecoderConfig(
    vocab_size=128_256, dim=4096, layers=32, heads=32, kv_heads=8, hidden_dim=14_336, max_seq_len=8192
)  # 8B
DECODED = {1: 2048, 64: 2048}  # sequences of a decoding step -> tokens that each has at the end
JUDGED_STEPS = 100  # shorter main jobs are not checked
PREFILLED = 8192  # tokens of a step that computes prompts

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
    """A random model answers on a GPU: with eager kernels, with CUDA graphs, and without other sequences.

    Raises:
        RuntimeError: their tokens differ.
    """
    config = MEDIUM if process.device.type == "cuda" else TINY
    model = initialise(Decoder(config), seed=SEED, device=process.device)
    policy = InferencePolicy(max_model_len=config.max_seq_len)
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


def decode(process: Process, *, graphs: bool = True) -> dict:
    """Median seconds of a decoding step of an 8B model with random weights per number of sequences, and tokens of prompts per second."""
    on_gpu = process.device.type == "cuda"
    config, longest = (LLAMA, max(DECODED.values())) if on_gpu else (TINY, TINY.max_seq_len)
    answer, found = longest // 32 if on_gpu else longest // 4, {}
    policy = InferencePolicy(
        max_sequences=max(DECODED),
        max_step_tokens=PREFILLED,
        max_model_len=longest,
        cache_tokens=(max(DECODED) + 1) * longest,
    )
    generator = Generator(random_decoder(config, device=process.device), policy=policy)
    if not graphs:
        generator._stepper.graphs = None
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


# nccl


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


# job


def job(*, device: str) -> dict:
    """The summary of the main job on one rank."""
    small = ("train.steps=2", "train.eval_batches=1") if device == "cpu" else ()
    with tempfile.TemporaryDirectory() as folder:
        words = ("launch.ranks=1", f"launch.device={device}", "logger=disabled", f"hydra.run.dir={folder}", *small)
        subprocess.run([sys.executable, "run.py", *words], cwd=REPOSITORY, check=True)
        summary = json.loads(Path(folder, "summary.json").read_text())
    return {key: value for key, value in summary.items() if key != "error"}


def job_faults(answer: dict) -> list[str]:
    if answer["steps"] < JUDGED_STEPS or answer["validation_loss"] < answer["bigram_entropy"]:
        return []
    return [f"held-out loss {answer['validation_loss']:.4f}, the byte-bigram entropy is {answer['bigram_entropy']:.4f}"]


# Item -> its function, and the names of its arguments.
ITEMS: dict[str, tuple[Callable[..., dict], tuple[str, ...]]] = {
    "machine": (machine, ()),
    "answers": (answers, ()),
    "decode": (decode, ()),
    "eager": (partial(decode, graphs=False), ()),
    "launches": (launches, ()),
    "nccl": (nccl, ()),
    "identity": (identity, ("precision",)),
    "volume": (volume, ()),
    "memory": (memory, ("stage", "tier")),
    "speed": (speed, ("contender",)),
    "overlap": (overlap, ("contender",)),
    "host_update": (host_update, ()),
    "job": (job, ()),
}
FAULTS: dict[str, Callable[[dict], list[str]]] = {
    "identity": identity_faults,
    "volume": volume_faults,
    "memory": lambda answer: (
        [] if answer["agrees"] else ["the allocator's, the ledger's and the formula's bytes differ"]
    ),
    "overlap": overlap_faults,
    "job": job_faults,
}


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("item", choices=ITEMS)
    parser.add_argument("arguments", nargs="*")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--shared", action="store_true", help="all ranks on the first GPU, collectives over gloo")
    options = parser.parse_args()
    function, names = ITEMS[options.item]
    if len(names) != len(options.arguments):
        parser.error(
            f"{options.item} {' '.join(options.arguments)}: the item takes {' and '.join(names) or 'no words'}"
        )
    given = dict(zip(names, options.arguments, strict=True))
    if options.ranks > 1 and "RANK" not in os.environ:
        start(options.ranks, shared=options.shared)
        return 0
    if options.item == "job":
        answer = job(device=options.device)
    else:
        with mock.patch("ztk.core.runtime.comm.connect._transport", hosted) if options.shared else nullcontext():
            process = Process.start(device=options.device)
            answer = function(process, **given)
            if process.world_size > 1:
                is_first = process.rank == 0
                process.stop()
                if not is_first:
                    return 0
    print(json.dumps(answer), flush=True)
    faults = FAULTS.get(options.item, lambda _: [])(answer)
    for fault in faults:
        print(fault, file=sys.stderr)
    return int(bool(faults))


def start(ranks: int, *, shared: bool) -> None:
    """Runs this command line on every rank."""
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(
            [sys.executable, *sys.argv],
            ranks=ranks,
            threads=max(1, (os.cpu_count() or 1) // ranks),
            output_dir=folder,
            places=[0] * ranks if shared else None,
        )


if __name__ == "__main__":
    sys.exit(main())
