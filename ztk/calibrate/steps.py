"""Measures the host overhead of a step (Python, the engine and its threads) that a plan made of single operations lacks."""

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ztk.calibrate.curves import DTYPES, Curve
from ztk.calibrate.timing import LEAST, seconds_of_call
from ztk.core.policies.curves import scaled
from ztk.core.policies.hardware import Hardware
from ztk.core.policies.zero import ZeroPolicy
from ztk.core.precision import PrecisionPolicy
from ztk.core.runtime import Process
from ztk.nn import Decoder, DecoderConfig, initial_values
from ztk.optim import OptimizerPolicy
from ztk.parallel.apply import parallelize
from ztk.parallel.recompute import RecomputePolicy
from ztk.planner import plan
from ztk.planner.kinds import GRADIENT, INTERCEPTED, REQUEST
from ztk.zero.offload import OffloadPolicy


@dataclass(frozen=True, kw_only=True, slots=True)
class _Model:
    """A decoder with the batch of one micro-batch."""

    sizes: Mapping[str, int]
    sequences: int


_LAYERS = {"layers": 4, "kv_heads": 1, "heads": 1}
TINY = _Model(sizes=_LAYERS | {"vocab_size": 16, "dim": 8, "hidden_dim": 16, "max_seq_len": 8}, sequences=1)
USUAL = _Model(
    sizes={"vocab_size": 256, "dim": 192, "layers": 4, "heads": 6, "kv_heads": 3, "hidden_dim": 512, "max_seq_len": 96},
    sequences=4,
)
_EACH: Curve = [[1.0, 1.0], [1e15, 1.0]]  # one second each, whatever the amount
_PER_UNIT: Curve = [[1.0, 1.0]]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Step:
    """A measured step. seconds: measured. planned: returns the planned seconds of the same step on given hardware."""

    seconds: float
    planned: Callable[[Hardware], float]

    def rest(self, hardware: Hardware, *, kind: str) -> tuple[float, float]:
        """Returns the unplanned seconds of the step per host operation of `kind`, and the mean amount of these operations.

        hardware: must not contain a curve for `kind`.
        """
        without, each, amount = (
            self.planned(_with(hardware, added=added)) for added in ({}, {kind: _EACH}, {kind: _PER_UNIT})
        )
        count = each - without
        return max(LEAST, self.seconds - without) / count, (amount - without) / count

    def scale(self, hardware: Hardware) -> float:
        """Returns the ratio of measured to planned work, without fixed latencies. hardware: must have a latency and `GRADIENT`."""
        others = {kind: points for kind, points in (hardware.curves or {}).items() if kind != GRADIENT}
        work = self.planned(replace(hardware, operation_latency=0.0, curves=others))
        starts = self.planned(hardware) - work
        return max(work / 2, self.seconds - starts) / work


def operation_latency(process: Process, *, hardware: Hardware) -> float:
    """Returns the seconds of Python, autograd and engine overhead per operation of a plan for a GPU. A collective call.

    Measured as the time of tiny steps that the plan does not explain, averaged over precisions and stages.

    hardware: its own latency is ignored.
    """
    found = []
    for step in _usual_steps(process, model=TINY):
        without, counted = (step.planned(replace(hardware, operation_latency=latency)) for latency in (0.0, 1.0))
        found.append(max(LEAST, step.seconds - without) / (counted - without))
    return _mean(found)


def curves_of_steps(process: Process, *, hardware: Hardware, folder: str) -> dict[str, Curve]:
    """Returns the curves of `hardware`, scaled to real steps, and the curves of host work (`ztk.planner.trace`). A collective call.

    1. The unexplained time of steps of a tiny model is attributed to its gradients.
    2. The remaining unexplained time of a usual model gives one scale for all curves. Repeated measurements of a single call find their
      data in the caches, so real steps are slower.
    3. The extra time under selective recomputation is attributed to the operations that it intercepts, and the extra time with states and
      parameters on the disk to the requests.

    hardware: has curves and latency. folder: a folder on the disk to measure.
    """
    curves = dict(hardware.curves or {})
    gradient = _mean([step.rest(hardware, kind=GRADIENT)[0] for step in _usual_steps(process, model=TINY)])
    host: dict[str, Curve] = {GRADIENT: [[1.0, gradient]]}
    known = _with(hardware, added=host)
    scale = _mean([step.scale(known) for step in _usual_steps(process, model=USUAL)])
    curves = scaled(curves, by=scale)
    known = replace(hardware, curves=curves | host)
    for dtype in ("fp32", "bf16"):
        policies = _policies(dtype, stage=3) | {"recompute": RecomputePolicy(mode="selective")}
        step = _made(process, model=USUAL, policies=policies)
        seconds, _ = step.rest(known, kind=INTERCEPTED)
        host[f"{INTERCEPTED}.{str(DTYPES[dtype]).removeprefix('torch.')}"] = [[1.0, seconds]]
    offload = OffloadPolicy(optimizer="nvme", parameters="nvme", nvme_path=folder, buffer_bytes=1 << 22)
    requests = []
    for model in (TINY, USUAL):
        step = _made(process, model=model, policies=_policies("bf16", stage=3) | {"offload": offload})
        seconds, nbytes = step.rest(known, kind=REQUEST)
        requests.append([nbytes, seconds])
    return curves | host | {REQUEST: requests}


def _with(hardware: Hardware, *, added: Mapping[str, Curve]) -> Hardware:
    return replace(hardware, curves={**(hardware.curves or {}), **added})


def _policies(dtype: str, *, stage: int) -> dict[str, Any]:
    return {
        "optimizer": OptimizerPolicy(),
        "precision": PrecisionPolicy.named(dtype),
        "zero": ZeroPolicy(stage=stage),
    }


def _usual_steps(process: Process, *, model: _Model) -> Iterator[_Step]:
    """Measures steps in two precisions at two stages. A collective call."""
    for dtype, stage in itertools.product(("fp32", "bf16"), (0, 3)):
        yield _made(process, model=model, policies=_policies(dtype, stage=stage))


def _made(process: Process, *, model: _Model, policies: dict[str, Any]) -> _Step:
    tokens = torch.zeros(model.sequences, model.sizes["max_seq_len"], dtype=torch.int64, device=process.device)
    with _engine(process, model=model, tokens=tokens, policies=policies) as step:
        seconds = seconds_of_call(process, run=step)
    ranks = process.comm.size
    planned = functools.partial(_planned_seconds, model=model, tokens=tokens, ranks=ranks, policies=policies)
    return _Step(seconds=seconds, planned=planned)


def _planned_seconds(
    hardware: Hardware, *, model: _Model, tokens: Tensor, ranks: int, policies: dict[str, Any]
) -> float:
    batch = (tokens.to("meta"),) * 2
    made = plan(
        lambda: Decoder(DecoderConfig(**model.sizes)), batch=batch, world_size=ranks, hardware=hardware, **policies
    )
    assert made.time is not None, "there is hardware"
    return made.time.seconds


@contextmanager
def _engine(
    process: Process, *, model: _Model, tokens: Tensor, policies: dict[str, Any]
) -> Iterator[Callable[[], None]]:
    """Builds an engine and yields a function that runs one step."""
    with torch.device("meta"):
        decoder = Decoder(DecoderConfig(**model.sizes))
    values = functools.partial(initial_values, decoder, seed=0)
    engine = parallelize(decoder, process=process, initial_values=values, **policies)

    def step() -> None:
        engine.backward(engine(tokens, tokens))
        engine.step()

    yield step
    engine.close()


def _mean(found: list[float]) -> float:
    return sum(found) / len(found)
