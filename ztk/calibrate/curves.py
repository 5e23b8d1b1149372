"""Seconds by amount of work, of a CPU: its kernels are slow where little is to be done, and its caches fast. All ranks measure together."""

import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ztk import kernels
from ztk.calibrate.timing import seconds_of_call
from ztk.kernels import rms_norm, swiglu
from ztk.nn import Decoder, DecoderConfig, initial_values
from ztk.nn.attention import causal_attention
from ztk.nn.linear import linear
from ztk.optim import OptimizerPolicy
from ztk.parallel import parallelize
from ztk.planner import plan
from ztk.planner.tracker import StepTracker
from ztk.policies.hardware import Hardware
from ztk.precision import PrecisionPolicy
from ztk.runtime import Process
from ztk.zero import ZeroPolicy

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
START = 8  # elements of a side: what takes no time but to begin
SIDES = (64, 128, 256, 512, 1024)  # of square products
LENGTHS = (32, 64, 128, 256, 512)  # of sequences
ROWS = (16, 64, 256, 1024, 4096)
WIDTH, HEADS, SEQUENCES = 256, 4, 4
UPDATES = ("adamw", "adamw_bf16", "adamw_stochastic", "adamw_8bit")
UPDATED = (1 << 12, 1 << 16, 1 << 20)  # elements
ELEMENTS = (1 << 8, 1 << 12, 1 << 16, 1 << 20, 1 << 23)  # of the buffer of all ranks
TINY = {"vocab_size": 16, "dim": 8, "layers": 4, "heads": 1, "kv_heads": 1, "hidden_dim": 16, "max_seq_len": 8}
USUAL = TINY | {"vocab_size": 256, "dim": 192, "heads": 6, "kv_heads": 3, "hidden_dim": 512, "max_seq_len": 96}
CALL_SECONDS = 0.05  # of a round
LEAST = 1e-9  # seconds: less is no measurement

Curve = list[list[float]]


def measure_curves(process: Process) -> dict[str, Curve]:
    """`Hardware.curves` of this rank. A collective call."""
    found = {}
    for dtype in DTYPES.values():
        name = str(dtype).removeprefix("torch.")
        found[f"product.{name}"] = _curve(process, made=_products(dtype))
        found[f"attention.{name}"] = _curve(process, made=_attentions(dtype), nets=False)
        found[f"elementwise.{name}"] = _curve(process, made=_elementwise(dtype))
    for name in UPDATES:
        found[name] = _curve(process, made=_updates(name), nets=False)
    if process.comm.size > 1:
        found |= _collectives(process)
    return found


def _curve(process: Process, *, made: Iterator[tuple[int, int, Callable[[], object]]], nets: bool = True) -> Curve:
    """made: amount of work of an operation, operations of a call, the call. nets: what the first call takes is the start of an operation,
    which `operation_latency` has, and is subtracted from the others."""
    points, start = [], 0.0 if not nets else None
    for amount, operations, call in made:
        seconds = seconds_of_call(process, run=call, round_seconds=CALL_SECONDS) / operations
        if start is None:
            start = seconds
            continue
        points.append([float(amount), max(LEAST, seconds - start)])
    return points


def _trained(call: Callable[..., Tensor], *inputs: Tensor) -> Callable[[], object]:
    """Forward and backward."""
    for tensor in inputs:
        tensor.requires_grad_()
    gradient = torch.ones_like(call(*inputs))
    return lambda: torch.autograd.grad(call(*inputs), inputs, gradient)


def _products(dtype: torch.dtype) -> Iterator[tuple[int, int, Callable[[], object]]]:
    """A forward and two products of the backward."""
    for side in (START, *SIDES):
        x, weight = (torch.randn(side, side).to(dtype) for _ in range(2))
        yield 2 * side**3, 3, _trained(lambda x, weight: linear(x, weight=weight), x, weight)


def _attentions(dtype: torch.dtype) -> Iterator[tuple[int, int, Callable[[], object]]]:
    """Four units of T * T * D operations in the forward and ten in the backward, as a plan counts them. In 16 bits it is made of several
    operations on a CPU, whose start is a part of its time."""
    head = WIDTH // HEADS
    for length in LENGTHS:
        heads = [torch.randn(SEQUENCES, length, HEADS, head).to(dtype) for _ in range(3)]
        call = _trained(lambda query, key, value: causal_attention(query, key=key, value=value), *heads)
        yield 14 * SEQUENCES * HEADS * length * length * head // 2, 2, call


def _elementwise(dtype: torch.dtype) -> Iterator[tuple[int, int, Callable[[], object]]]:
    """A norm and a gated activation: 13 arrays are read and written by four operations."""
    for rows in (1, *ROWS):
        width = START if rows == 1 else WIDTH
        x, other = (torch.randn(rows, width).to(dtype) for _ in range(2))
        weight = torch.ones(width, dtype=dtype)
        call = _trained(lambda x, other, weight: swiglu(rms_norm(x, weight), other), x, other, weight)
        yield 13 * x.nbytes // 4, 4, call


def _updates(name: str) -> Iterator[tuple[int, int, Callable[[], object]]]:
    """Of the optimizer op `name`: on a CPU some formats of states are decoded by dozens of operations."""
    spec = next(spec for spec in kernels.ALL_OPS if spec.name == name)
    for elements in UPDATED:
        inputs = spec.make_inputs((elements,), dtype=torch.bfloat16, device="cpu")
        call = functools.partial(getattr(kernels, name), **inputs)
        yield _bytes_of(call), 1, call


def _bytes_of(call: Callable[[], object]) -> int:
    """Bytes that the operations of a call read and write, as a plan counts them."""
    counted = 0

    def count(*, device_bytes: int, **_: object) -> None:
        nonlocal counted
        counted += device_bytes

    with StepTracker(device="cpu", computed=count):
        call()
    return counted


def _collectives(process: Process) -> dict[str, Curve]:
    """In memory that the ranks share, as the engine's buckets are."""
    comm, found = process.comm, {"all_gather": [], "reduce_scatter": []}
    for elements in ELEMENTS:
        numel = elements // comm.size * comm.size
        full = comm.empty(numel, dtype=torch.float32, label=f"calibration {elements}").fill_(1.0)
        own = full.chunk(comm.size)[comm.rank]
        gather = lambda full=full: comm.all_gather(full, label="calibration").wait()  # noqa: E731
        scatter = lambda full=full, own=own: comm.reduce_scatter(full, out=own, label="calibration").wait()  # noqa: E731
        for kind, call in (("all_gather", gather), ("reduce_scatter", scatter)):
            seconds = seconds_of_call(process, run=call, round_seconds=CALL_SECONDS)
            found[kind].append([float(full.nbytes), max(LEAST, seconds)])
    return found


def operation_latency(process: Process, *, hardware: Hardware) -> float:
    """Seconds of Python, autograd and the engine per operation of a plan: what steps of a model of a few numbers take beyond the plan's
    seconds, the mean over precisions and stages. A collective call. hardware: with curves; its own latency does not count."""
    found = []
    for step in _steps(process, model=TINY, sequences=1):
        without, counted = (step.planned(replace(hardware, operation_latency=latency)) for latency in (0.0, 1.0))
        found.append(max(LEAST, step.seconds - without) / (counted - without))
    return sum(found) / len(found)


def step_scale(process: Process, *, hardware: Hardware) -> float:
    """By how much the work of a step takes longer than the curves say: a call that is measured again and again finds its numbers in the
    caches, one in a step does not. Of steps of a usual model without the start of their operations, the mean over precisions and stages.
    A collective call. hardware: with curves and latency."""
    found = []
    for step in _steps(process, model=USUAL, sequences=SEQUENCES):
        work = step.planned(replace(hardware, operation_latency=0.0))
        starts = step.planned(hardware) - work
        found.append(max(work / 2, step.seconds - starts) / work)
    return sum(found) / len(found)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Step:
    """seconds: measured. planned: of the same step with given hardware."""

    seconds: float
    planned: Callable[[Hardware], float]


def _steps(process: Process, *, model: dict[str, int], sequences: int) -> Iterator[_Step]:
    """Of a decoder with these sizes in two precisions at two stages. A collective call."""
    for dtype, stage in itertools.product(("fp32", "bf16"), (0, 3)):
        policies = {
            "optimizer": OptimizerPolicy(),
            "precision": PrecisionPolicy.named(dtype),
            "zero": ZeroPolicy(stage=stage),
        }
        tokens = torch.zeros(sequences, model["max_seq_len"], dtype=torch.int64, device=process.device)
        with _engine(process, model=model, tokens=tokens, policies=policies) as step:
            seconds = seconds_of_call(process, run=step)
        ranks = process.comm.size
        planned = functools.partial(_planned_seconds, model=model, tokens=tokens, ranks=ranks, policies=policies)
        yield _Step(seconds=seconds, planned=planned)


def _planned_seconds(
    hardware: Hardware, *, model: dict[str, int], tokens: Tensor, ranks: int, policies: dict[str, Any]
) -> float:
    batch = (tokens.to("meta"),) * 2
    made = plan(lambda: Decoder(DecoderConfig(**model)), batch=batch, world_size=ranks, hardware=hardware, **policies)
    assert made.time is not None, "there is hardware"
    return made.time.seconds


@contextmanager
def _engine(
    process: Process, *, model: dict[str, int], tokens: Tensor, policies: dict[str, Any]
) -> Iterator[Callable[[], None]]:
    """A step of it."""
    with torch.device("meta"):
        decoder = Decoder(DecoderConfig(**model))
    values = functools.partial(initial_values, decoder, seed=0)
    engine = parallelize(decoder, process=process, initial_values=values, **policies)

    def step() -> None:
        engine.backward(engine(tokens, tokens))
        engine.step()

    yield step
    engine.close()
