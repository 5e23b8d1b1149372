"""Seconds by amount of work, of a CPU: its kernels are slow where little is to be done, and its caches fast. All ranks measure together."""

import functools
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ztk import kernels
from ztk.calibrate.timing import LEAST, seconds_of_call
from ztk.core.runtime import Process
from ztk.kernels import rms_norm, rope, swiglu
from ztk.nn.attention import causal_attention
from ztk.nn.linear import linear
from ztk.planner.tracker import StepTracker

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
START = 8  # elements of a side: what takes no time but to begin
SIDES = (64, 128, 256, 512, 1024)  # of square products
LENGTHS = (32, 64, 128, 256, 512)  # of sequences
TORCH_LENGTHS = (32, 128)  # in float16 torch's attention takes very long
ROWS = (16, 64, 256, 1024, 4096)
WIDTH, HEADS, SEQUENCES, LAYERS, GROUPS = 256, 4, 4, 8, 4
UPDATES = ("adamw", "adamw_bf16", "adamw_stochastic", "adamw_8bit")
UPDATED = (1 << 12, 1 << 16, 1 << 20)  # elements
ELEMENTS = (1 << 8, 1 << 12, 1 << 16, 1 << 20, 1 << 23)  # of the buffer of all ranks
CALL_SECONDS = 0.05  # of a round

Curve = list[list[float]]


def measure_curves(process: Process, *, latency: float) -> dict[str, Curve]:
    """`Hardware.curves` of this rank, without the work of the host that steps show. A collective call. latency:
    seconds, see `eager_latency`; the points are what an operation takes beyond it."""
    found, curve = {}, functools.partial(_curve, process, latency=latency)
    for dtype in DTYPES.values():
        name = str(dtype).removeprefix("torch.")
        found[f"product.{name}"] = curve(made=_products(dtype))
        found[f"grouped_product.{name}"] = curve(made=_grouped_products(dtype))
        found[f"attention.{name}"] = curve(made=_attentions(dtype, call=_of_ztk, lengths=LENGTHS))
        found[f"torch_attention.{name}"] = curve(made=_attentions(dtype, call=_of_torch, lengths=TORCH_LENGTHS))
        found[f"fused.{name}"] = curve(made=_fused(dtype))
        found[f"elementwise.{name}"] = curve(made=_elementwise(dtype))
        found[f"indexed.{name}"] = curve(made=_indexed(dtype))
    for name in UPDATES:
        found[name] = curve(made=_updates(name))
    if process.comm.size > 1:
        found |= _collectives(process)
    return found


def eager_latency(process: Process) -> float:
    """Seconds of torch, autograd and Python for an operation of a model that is computed by torch's operations, on next to nothing. A
    collective call."""
    _, operations, call = next(_elementwise(torch.float32))
    return seconds_of_call(process, run=call, round_seconds=CALL_SECONDS) / operations


def _curve(process: Process, *, latency: float, made: Iterator[tuple[float, int, Callable[[], object]]]) -> Curve:
    """made: amount of work of an operation, operations of a call, the call."""
    points = []
    for amount, operations, call in made:
        seconds = seconds_of_call(process, run=call, round_seconds=CALL_SECONDS) / operations
        points.append([float(amount), max(LEAST, seconds - latency)])
    return points


def _trained(call: Callable[..., Tensor], *inputs: Tensor) -> Callable[[], object]:
    """Forward and backward."""
    for tensor in inputs:
        tensor.requires_grad_()
    gradient = torch.ones_like(call(*inputs))
    return lambda: torch.autograd.grad(call(*inputs), inputs, gradient)


def _products(dtype: torch.dtype) -> Iterator[tuple[float, int, Callable[[], object]]]:
    """A forward and two products of the backward."""
    for side in (START, *SIDES):
        x, weight = (torch.randn(side, side).to(dtype) for _ in range(2))
        yield 2 * side**3, 3, _trained(lambda x, weight: linear(x, weight=weight), x, weight)


def _grouped_products(dtype: torch.dtype) -> Iterator[tuple[float, int, Callable[[], object]]]:
    """A forward and two products of the backward, as experts of transformers compute them: torch takes one group after the other, and
    another product than `linear`."""
    for rows in (GROUPS, *ROWS[:-1]):  # beyond, it takes in proportion
        width = START if rows == GROUPS else WIDTH
        x, weight = torch.randn(rows, width).to(dtype), torch.randn(GROUPS, width, width).to(dtype)
        ends = torch.arange(1, GROUPS + 1, dtype=torch.int32) * (rows // GROUPS)

        def call(x: Tensor, weight: Tensor, ends: Tensor = ends) -> Tensor:
            return F.grouped_mm(x, weight.transpose(-2, -1), offs=ends)

        yield 2 * rows * width * width, 3, _trained(call, x, weight)


def _attentions(
    dtype: torch.dtype, *, call: Callable[..., Tensor], lengths: Sequence[int]
) -> Iterator[tuple[float, int, Callable[[], object]]]:
    """Four units of T * T * D operations in the forward and ten in the backward, as a plan counts them."""
    head = WIDTH // HEADS
    for length in lengths:
        heads = [torch.randn(SEQUENCES, length, HEADS, head).to(dtype) for _ in range(3)]
        yield 14 * SEQUENCES * HEADS * length * length * head // 2, 2, _trained(call, *heads)


def _of_ztk(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """[B, T, H, D]. In 16 bits it is made of several operations on a CPU."""
    return causal_attention(query, key=key, value=value)


def _of_torch(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """[B, T, H, D], as models of transformers call it."""
    heads = (x.transpose(1, 2) for x in (query, key, value))
    return F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2)


def _fused(dtype: torch.dtype) -> Iterator[tuple[float, int, Callable[[], object]]]:
    """A norm, rotary positions and a gated activation by ztk's operations: 17 arrays are read and written by six of them."""
    for rows in (1, *ROWS):
        width = START if rows == 1 else WIDTH
        x, other = (torch.randn(rows, width).to(dtype) for _ in range(2))
        weight = torch.ones(width, dtype=dtype)
        cos, sin = (torch.randn(rows, width // HEADS // 2) for _ in range(2))

        def layer(x: Tensor, other: Tensor, weight: Tensor, cos: Tensor = cos, sin: Tensor = sin) -> Tensor:
            normed = rms_norm(x, weight)
            assert isinstance(normed, Tensor), "without a residual it returns one tensor"
            heads = normed.view(1, len(x), HEADS, -1)
            return swiglu(rope(heads, cos=cos, sin=sin).view_as(x), other)

        layers = _layers(rows)
        yield 17 * x.nbytes / 6, 6 * layers, _trained(_stacked(layer, layers=layers), x, other, weight)


def _elementwise(dtype: torch.dtype) -> Iterator[tuple[float, int, Callable[[], object]]]:
    """A norm, rotary positions and a residual by torch's operations, with their views, as models of transformers compute them."""
    for rows in (1, *ROWS):
        width = START if rows == 1 else WIDTH
        x, weight = torch.randn(rows, width).to(dtype), torch.ones(width, dtype=dtype)
        cos, sin = (torch.randn(rows, width // HEADS).to(dtype) for _ in range(2))

        def layer(x: Tensor, weight: Tensor, cos: Tensor = cos, sin: Tensor = sin) -> Tensor:
            wide = x.float()
            normed = weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
            heads = normed.view(len(x), HEADS, -1).transpose(0, 1)
            first, second = heads.chunk(2, dim=-1)
            rotated = heads * cos + torch.cat((-second, first), dim=-1) * sin
            return x + rotated.transpose(0, 1).reshape(x.shape)

        trained = _trained(_stacked(layer, layers=_layers(rows)), x, weight)
        operations, moved = _counted(trained)
        yield moved / operations, operations, trained


def _indexed(dtype: torch.dtype) -> Iterator[tuple[float, int, Callable[[], object]]]:
    """Rows in another order and some of them zero, as experts of transformers take and return their tokens."""
    for rows in (1, *ROWS):
        x = torch.randn(rows, START if rows == 1 else WIDTH).to(dtype)
        order, hidden = torch.randperm(rows), torch.rand(rows, 1) < 0.5

        def call(x: Tensor, order: Tensor = order, hidden: Tensor = hidden) -> Tensor:
            return x[order].masked_fill(hidden, 0.0)

        trained = _trained(call, x)
        operations, moved = _counted(trained)
        yield moved / operations, operations, trained


def _layers(rows: int) -> int:
    """What one layer keeps for its backward is out of the caches when that comes, as in a model; many rows are so alone."""
    return LAYERS if rows < ROWS[-1] else 1


def _stacked(layer: Callable[..., Tensor], *, layers: int) -> Callable[..., Tensor]:
    def call(x: Tensor, *others: Tensor) -> Tensor:
        for _ in range(layers):
            x = layer(x, *others)
        return x

    return call


def _updates(name: str) -> Iterator[tuple[float, int, Callable[[], object]]]:
    """Of the optimizer op `name`: on a CPU some formats of states are decoded by dozens of operations."""
    spec = next(spec for spec in kernels.ALL_OPS if spec.name == name)
    for elements in UPDATED:
        inputs = spec.make_inputs((elements,), dtype=torch.bfloat16, device="cpu")
        call = functools.partial(getattr(kernels, name), **inputs)
        yield _counted(call)[1], 1, call


def _counted(call: Callable[[], object]) -> tuple[int, int]:
    """The operations of a call, and the bytes that they read and write, as a plan counts them."""
    operations = moved = 0

    def count(*, device_bytes: int, **_: object) -> None:
        nonlocal operations, moved
        operations, moved = operations + 1, moved + device_bytes

    with StepTracker(device="cpu", computed=count):
        call()
    return operations, moved


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
