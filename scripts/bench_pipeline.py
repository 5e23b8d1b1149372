"""Compares the measured bubble of every pipeline schedule with its formula, and draws timelines.

    python scripts/bench_pipeline.py                      4 stages, 8 micro-batches
    python scripts/bench_pipeline.py --micro-batches 16 --unit-ms 30 --activation-mb 4

Ranks, schedules, messages and gradients come from the engine. The layers are made for the measurement: they only call `time.sleep`, all for
the same time, so that more ranks than cores do not slow each other down. A forward takes one unit, and so do the gradient of a stage's input
and the gradient of its weights. A rank is idle while it does not compute between the first start and the last stop of the batch on any rank.
"""

import argparse
import itertools
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import matplotlib

from ztk.train.engine.pipeline import PipelineEngine

matplotlib.use("Agg")
import torch
from matplotlib import pyplot
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.ranks import RankPool
from ztk.core.runtime import Process, Topology
from ztk.nn.deferred import DeferredGradients
from ztk.optim import OptimizerPolicy
from ztk.parallel.apply import parallelize
from ztk.parallel.pipeline import (
    Costs,
    Kind,
    LayerSpec,
    PipelineModule,
    PipelinePolicy,
    Timeline,
    bubble_share,
    make_schedule,
    zero_bubble_share,
)

SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zero_bubble": 1}  # schedule -> stages per rank
COLOURS = {
    Kind.forward: "#4c78a8",
    Kind.backward: "#54a24b",
    Kind.backward_input: "#72b7b2",
    Kind.backward_weight: "#eeca3b",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Results of one schedule: idle shares of the time of all ranks, and seconds per batch."""

    schedule: str
    idle: float
    formula: float
    simulated: float
    seconds: float
    ideal_seconds: float  # without a bubble
    sent_mb: float  # per batch, largest over ranks


class WaitingLayer(nn.Module):
    """x -> x after `seconds`. Its backward sleeps as long for the input's gradient, and again for the weight's."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.seconds, self.deferred = seconds, DeferredGradients()

    def defer_weight_gradients(self, deferred: DeferredGradients) -> None:
        self.deferred = deferred

    def forward(self, x: Tensor) -> Tensor:
        return _Wait.apply(x, self.weight, self)


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, layer: WaitingLayer) -> Tensor:
        ctx.layer, ctx.parameter = layer, weight
        time.sleep(layer.seconds)
        return x.clone()

    @staticmethod
    def backward(ctx, d_out: Tensor) -> tuple[Tensor, Tensor | None, None]:
        seconds, deferred, parameter = ctx.layer.seconds, ctx.layer.deferred, ctx.parameter
        time.sleep(seconds)

        def weight_gradient() -> Tensor:
            time.sleep(seconds)
            return torch.zeros_like(parameter)

        if deferred.is_active:
            deferred.defer(parameter, product=weight_gradient)
            return d_out, None, None
        return d_out, weight_gradient(), None


def run(process: Process, *, schedule: str, options: argparse.Namespace) -> list[tuple[Timeline, float]]:
    """Per measured batch: this rank's timeline, and the MB that it sent."""
    virtual = SCHEDULES[schedule]
    layers = options.ranks * virtual
    model = PipelineModule(
        [LayerSpec(WaitingLayer, options.unit_ms / 1e3 / virtual) for _ in range(layers)],
        loss_fn=lambda outputs, labels: (outputs * labels).mean(),
    )
    engine = parallelize(
        model,
        process=process.arrange(Topology(pipeline=options.ranks)),
        optimizer=OptimizerPolicy(lr=1e-3),
        pipeline=PipelinePolicy(schedule=schedule, virtual_stages=virtual, partition="uniform"),
        accumulation_steps=options.micro_batches,
    )
    numbers = torch.ones(int(options.activation_mb * 1e6) // 4)
    batches = [(numbers.clone().requires_grad_(), numbers) for _ in range(options.micro_batches)]
    assert isinstance(engine, PipelineEngine)
    engine.record_timeline = True
    measured = []
    for batch in range(options.warmup + options.batches):
        engine.process.mesh.counters.reset()
        engine.train_batch(batches)
        if batch >= options.warmup:
            measured.append((engine.timeline, engine.process.mesh.counters.bytes.get("send", 0) / 1e6))
    engine.close()
    return measured


def measure(pool: RankPool, *, schedule: str, options: argparse.Namespace) -> tuple[Measured, Timeline]:
    ranks = pool.run(run, schedule=schedule, options=options)
    together = [
        Timeline(intervals=tuple(itertools.chain.from_iterable(timeline.intervals for timeline, _ in batch)))
        for batch in zip(*ranks, strict=True)
    ]
    together.sort(key=lambda timeline: timeline.idle_share)
    median = together[len(together) // 2]
    sizes = {"num_ranks": options.ranks, "num_micro_batches": options.micro_batches}
    if schedule == "zero_bubble":
        formula = zero_bubble_share(**sizes, costs=Costs())
    else:
        formula = bubble_share(**sizes, virtual_stages=SCHEDULES[schedule])
    measured = Measured(
        schedule=schedule,
        idle=median.idle_share,
        formula=formula,
        simulated=simulate(schedule, options=options).idle_share,
        seconds=statistics.median(timeline.length for timeline in together),
        ideal_seconds=3 * options.micro_batches * options.unit_ms / 1e3,
        sent_mb=max(sent for rank in ranks for _, sent in rank),
    )
    return measured, median


def simulate(schedule: str, *, options: argparse.Namespace) -> Timeline:
    made = make_schedule(
        schedule,
        num_ranks=options.ranks,
        num_micro_batches=options.micro_batches,
        virtual_stages=SCHEDULES[schedule],
    )
    return made.timeline()


def draw(timelines: dict[str, Timeline], *, results: list[Measured], path: Path) -> None:
    """One panel per schedule with a row of bars per rank, on a common time axis."""
    figure, panels = pyplot.subplots(len(timelines), 1, figsize=(14, 2.1 * len(timelines)), sharex=True, squeeze=False)
    for panel, result in zip(panels[:, 0], results, strict=True):
        timeline = timelines[result.schedule]
        begin = min(interval.start for interval in timeline.intervals)
        for interval in timeline.intervals:
            width = interval.stop - interval.start
            left = interval.start - begin
            panel.barh(
                interval.rank,
                width,
                left=left,
                height=0.86,
                color=COLOURS[interval.action.kind],
                edgecolor="white",
                lw=0.5,
            )
            number = str(interval.action.micro_batch)
            panel.text(left + width / 2, interval.rank, number, ha="center", va="center", fontsize=6, color="black")
        panel.set_yticks(range(timeline.num_ranks), [f"rank {rank}" for rank in range(timeline.num_ranks)])
        panel.invert_yaxis()
        panel.set_title(
            f"{result.schedule}: idle {result.idle:.1%} measured, {result.formula:.1%} by formula",
            loc="left",
            fontsize=10,
        )
        panel.spines[["top", "right"]].set_visible(False)
    panels[-1, 0].set_xlabel("seconds; numbers are micro-batches")
    names = {
        Kind.forward: "forward",
        Kind.backward: "backward",
        Kind.backward_input: "input gradient",
        Kind.backward_weight: "weight gradient",
    }
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=COLOURS[kind]) for kind in names]
    figure.legend(handles, names.values(), loc="upper right", ncols=4, frameon=False, fontsize=9)
    figure.tight_layout(rect=(0, 0, 1, 0.97))
    figure.savefig(path, dpi=130)


def table(results: list[Measured], *, options: argparse.Namespace) -> Table:
    made = Table(
        title=f"{options.ranks} stages, {options.micro_batches} micro-batches, {options.activation_mb:g} MB each"
    )
    for column in (
        "schedule",
        "idle, measured",
        "formula",
        "simulated",
        "batch, s",
        "without bubble, s",
        "sent, MB a rank",
    ):
        made.add_column(column, justify="left" if column == "schedule" else "right")
    for r in results:
        shares = (f"{share:.1%}" for share in (r.idle, r.formula, r.simulated))
        made.add_row(r.schedule, *shares, f"{r.seconds:.3f}", f"{r.ideal_seconds:.3f}", f"{r.sent_mb:.1f}")
    return made


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument(
        "--unit-ms", type=float, default=40.0, help="duration of a stage's forward; a backward takes two units"
    )
    parser.add_argument(
        "--activation-mb", type=float, default=1.0, help="size of the activations between stages per micro-batch"
    )
    parser.add_argument("--batches", type=int, default=3, help="measured batches; the result is the median")
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument(
        "--out", type=Path, default=Path("outputs/pipeline"), help="folder for timeline.png and result.json"
    )
    return parser.parse_args()


def main() -> None:
    options = parse()
    options.out.mkdir(parents=True, exist_ok=True)
    pool, results, timelines = RankPool(options.ranks), [], {}
    try:
        for schedule in SCHEDULES:
            result, timelines[schedule] = measure(pool, schedule=schedule, options=options)
            results.append(result)
    finally:
        pool.close()
    Console().print(table(results, options=options))
    draw(timelines, results=results, path=options.out / "timeline.png")
    rows = [asdict(result) for result in results]
    (options.out / "result.json").write_text(json.dumps(rows, indent=1))
    print(f"picture: {options.out / 'timeline.png'}")


if __name__ == "__main__":
    main()
