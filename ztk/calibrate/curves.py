"""Measures the time of each kind of CPU operation as a function of its size.

A single rate is not enough on a CPU: small operations are dominated by overhead, and the caches speed up medium ones. All ranks
measure at the same time.
"""

import functools
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ztk import kernels
from ztk.calibrate.timing import LEAST, seconds_of_call
from ztk.core.runtime import Process
from ztk.kernels import rms_norm, rope, swiglu
from ztk.nn.linear import linear
from ztk.nn.self_attention import causal_attention
from ztk.planner.tracker import StepTracker

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
START = 8  # side length of inputs so small that only the overhead counts
SIDES = (64, 128, 256, 512, 1024)  # side lengths of square matrix products
LENGTHS = (32, 64, 128, 256, 512)  # sequence lengths
TORCH_LENGTHS = (32, 128)  # torch's attention in float16 is very slow beyond these lengths
ROWS = (16, 64, 256, 1024, 4096)
WIDTH, HEADS, SEQUENCES, LAYERS, GROUPS = 256, 4, 4, 8, 4
UPDATES = ("adamw", "adamw_bf16", "adamw_stochastic", "adamw_8bit")
UPDATED = (1 << 12, 1 << 16, 1 << 20)  # elements
ELEMENTS = (1 << 8, 1 << 12, 1 << 16, 1 << 20, 1 << 23)  # elements of the buffer of all ranks together
CALL_SECONDS = 0.05  # per measuring round

Curve = list[list[float]]


def measure_curves(process: Process, *, latency: float) -> dict[str, Curve]:
    """Measures this rank's curves for `Hardware.curves`, except the host work that `curves_of_steps` adds. A collective call.

    latency: seconds per operation from `eager_latency`. Points hold the time on top of it.
    """
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
    """Returns the seconds that torch, autograd and Python need for one tiny operation of a model in eager mode. A collective call."""
    _, operations, call = next(_elementwise(torch.float32))
    return seconds_of_call(process, run=call, round_seconds=CALL_SECONDS) / operations


def _curve(process: Process, *, latency: float, made: Iterator[tuple[float, int, Callable[[], object]]]) -> Curve:
    """Measures one curve. made: (amount of work per operation, operations per call, the call)."""
    points = []
    for amount, operations, call in made:
        seconds = seconds_of_call(process, run=call, round_seconds=CALL_SECONDS) / operations
        points.append([float(amount), max(LEAST, seconds - latency)])
    return points


def _trained(call: Callable[..., Tensor], *inputs: Tensor) -> Callable[[], object]:
    """Returns a function that runs the forward and the backward of `call`."""
    for tensor in inputs:
        tensor.requires_grad_()
    gradient = torch.ones_like(call(*inputs))
    return lambda: torch.autograd.grad(call(*inputs), inputs, gradient)


def _products(dtype: torch.dtype) -> Iterator[tuple[float, int, Callable[[], object]]]:
    """Products of one forward and the two of its backward."""
    for side in (START, *SIDES):
        x, weight = (torch.randn(side, side).to(dtype) for _ in range(2))
        yield 2 * side**3, 3, _trained(lambda x, weight: linear(x, weight=weight), x, weight)


def _grouped_products(dtype: torch.dtype) -> Iterator[tuple[float, int, Callable[[], object]]]:
    """Products of experts in transformers models, forward and backward: torch runs one product per group, with another kernel than
    `linear`.
    """
    for rows in (GROUPS, *ROWS[:-1]):  # larger sizes scale linearly
        width = START if rows == GROUPS else WIDTH
        x, weight = torch.randn(rows, width).to(dtype), torch.randn(GROUPS, width, width).to(dtype)
        ends = torch.arange(1, GROUPS + 1, dtype=torch.int32) * (rows // GROUPS)

        def call(x: Tensor, weight: Tensor, ends: Tensor = ends) -> Tensor:
            return F.grouped_mm(x, weight.transpose(-2, -1), offs=ends)

        yield 2 * rows * width * width, 3, _trained(call, x, weight)


def _attentions(
    dtype: torch.dtype, *, call: Callable[..., Tensor], lengths: Sequence[int]
) -> Iterator[tuple[float, int, Callable[[], object]]]:
    """Attention in units of T * T * D operations, as the planner counts them: four in the forward and ten in the backward."""
    head = WIDTH // HEADS
    for length in lengths:
        heads = [torch.randn(SEQUENCES, length, HEADS, head).to(dtype) for _ in range(3)]
        yield 14 * SEQUENCES * HEADS * length * length * head // 2, 2, _trained(call, *heads)


def _of_ztk(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """ztk's attention over [B, T, H, D]. On a CPU it consists of several operations in 16-bit dtypes."""
    return causal_attention(query, key=key, value=value)


def _of_torch(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """torch's attention over [B, T, H, D], called as transformers models call it."""
    heads = (x.transpose(1, 2) for x in (query, key, value))
    return F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2)


def _fused(dtype: torch.dtype) -> Iterator[tuple[float, int, Callable[[], object]]]:
    """A norm, rotary positions and a gated activation with ztk's operations: six operations that read or write 17 arrays."""
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
    """A norm, rotary positions and a residual with torch's operations and their views, as in transformers models."""
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
    """Permutes and masks rows, as the experts of transformers models do with their tokens."""
    for rows in (1, *ROWS):
        x = torch.randn(rows, START if rows == 1 else WIDTH).to(dtype)
        order, hidden = torch.randperm(rows), torch.rand(rows, 1) < 0.5

        def call(x: Tensor, order: Tensor = order, hidden: Tensor = hidden) -> Tensor:
            return x[order].masked_fill(hidden, 0.0)

        trained = _trained(call, x)
        operations, moved = _counted(trained)
        yield moved / operations, operations, trained


def _layers(rows: int) -> int:
    """Returns how many layers to stack.

    Activations must have left the caches when the backward reads them, as in a real model. The largest inputs exceed the caches with one
    layer.
    """
    return LAYERS if rows < ROWS[-1] else 1


def _stacked(layer: Callable[..., Tensor], *, layers: int) -> Callable[..., Tensor]:
    def call(x: Tensor, *others: Tensor) -> Tensor:
        for _ in range(layers):
            x = layer(x, *others)
        return x

    return call


def _updates(name: str) -> Iterator[tuple[float, int, Callable[[], object]]]:
    """Updates by the optimizer op `name`. On a CPU, decoding some state formats takes dozens of operations."""
    spec = next(spec for spec in kernels.ALL_OPS if spec.name == name)
    for elements in UPDATED:
        inputs = spec.make_inputs((elements,), dtype=torch.bfloat16, device="cpu")
        call = functools.partial(getattr(kernels, name), **inputs)
        yield _counted(call)[1], 1, call


def _counted(call: Callable[[], object]) -> tuple[int, int]:
    """Counts the operations of a call and the bytes that they read and write, as the planner does."""
    operations = moved = 0

    def count(*, device_bytes: int, **_: object) -> None:
        nonlocal operations, moved
        operations, moved = operations + 1, moved + device_bytes

    with StepTracker(device="cpu", computed=count):
        call()
    return operations, moved


def _collectives(process: Process) -> dict[str, Curve]:
    """Collectives over shared memory, where the engine's buckets lie."""
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
