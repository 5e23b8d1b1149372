"""Compares plans with the counters of real runs on 1, 2 and 4 ranks.

    python scripts/check_plan.py            56 configurations; exit code 1 if bytes of state, wire or disk differ, or a peak by more than 10 %
    python scripts/check_plan.py --times    measures this machine, then compares planned with measured seconds of a step
    python scripts/check_plan.py --large    seconds and resident memory of the plan of 70 billion parameters on 1,024 ranks

The peak counts the results of operations, in the same way on both sides; see `tests/planner/measure.py`.
"""

import argparse
import itertools
import resource
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import yaml
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.planner.measure import STATE, Case, made, planned, step_seconds
from tests.ranks import RankPool
from ztk.calibrate import combine, measure
from ztk.core.policies.hardware import Hardware
from ztk.core.policies.zero import ZeroPolicy
from ztk.core.precision import PrecisionPolicy
from ztk.nn import Decoder, DecoderConfig
from ztk.parallel.recompute import RecomputePolicy
from ztk.planner import plan
from ztk.planner.result import size
from ztk.report.statistics import Interval, median_interval, ratio_interval

NVME = {"offload": "nvme", "parameters": "nvme"}
CASES = (
    *(Case(ranks=ranks, stage=stage) for ranks in (1, 2, 4) for stage in range(4)),
    *(Case(ranks=2, stage=stage, offload="cpu", dtype="bf16") for stage in (0, 1, 2)),
    Case(ranks=4, stage=3, offload="cpu", parameters="cpu"),
    Case(ranks=2, stage=3, offload="cpu", dtype="bf16"),
    Case(ranks=1, stage=0, offload="nvme", dtype="bf16"),
    Case(ranks=2, stage=2, offload="nvme", optimizer="sgd"),
    Case(ranks=2, stage=3, dtype="bf16", **NVME),
    Case(ranks=4, stage=3, accumulation=2, **NVME),
    Case(ranks=2, stage=1, dtype="bf16", recompute="full", optimizer="lion"),
    Case(ranks=2, stage=3, dtype="bf16", recompute="selective"),
    Case(ranks=2, stage=2, dtype="fp16", accumulation=3),
    Case(ranks=4, stage=2, tensor=2, dtype="bf16"),
    Case(ranks=4, stage=3, tensor=2, sequence_parallel=True),
    Case(ranks=4, stage=3, sequence=2, recompute="full"),
    Case(ranks=4, stage=1, tensor=2, sequence=2),
    Case(ranks=2, stage=3, zero={"bucket_size": 50_000, "prefetch_bucket_size": 100_000}),
    Case(ranks=2, stage=3, zero={"param_persistence_threshold": 200}),
    Case(ranks=4, stage=3, zero={"hpz_partition_size": 2, "quantized_weights": True, "quantized_gradients": True}),
    Case(ranks=2, stage=0, dtype="bf16", states="8bit"),
    Case(ranks=2, stage=3, dtype="bf16", states="8bit", offload="cpu", parameters="cpu"),
    Case(ranks=2, stage=3, dtype="bf16", states="8bit", **NVME),
    Case(ranks=1, stage=2, dtype="bf16", states="8bit", offload="nvme"),
    Case(ranks=2, stage=1, states="bf16"),
    Case(ranks=2, stage=3, dtype="bf16", states="bf16", **NVME),
    Case(ranks=2, stage=3, dtype="bf16", states="bf16", master="stochastic", **NVME),
    Case(ranks=4, stage=2, dtype="bf16", states="bf16", master="stochastic", pipeline=2, accumulation=2, offload="cpu"),
    *(Case(ranks=4, stage=stage, pipeline=2, accumulation=4) for stage in range(4)),
    Case(ranks=4, stage=0, pipeline=4, accumulation=4, schedule="gpipe", dtype="bf16"),
    Case(ranks=4, stage=1, pipeline=2, accumulation=4, schedule="zero_bubble", recompute="full"),
    Case(ranks=2, stage=2, pipeline=2, accumulation=4, schedule="interleaved", virtual_stages=2),
    Case(ranks=4, stage=1, pipeline=2, tensor=2, accumulation=2, tied=True, dtype="bf16"),
    Case(ranks=2, stage=2, pipeline=2, accumulation=2, offload="nvme", dtype="bf16"),
    Case(ranks=4, stage=1, experts=4),
    Case(ranks=4, stage=3, experts=4, expert=2, dtype="bf16"),
    Case(ranks=4, stage=2, experts=4, expert=4, offload="cpu"),
    Case(ranks=4, stage=1, pipeline=2, experts=4, expert=2, accumulation=2),
    Case(ranks=2, stage=3, dtype="bf16", family="llama", **NVME),
    Case(ranks=2, stage=2, tensor=2, family="gpt2"),
    Case(ranks=2, stage=1, pipeline=2, accumulation=2, family="llama"),
    Case(ranks=2, stage=3, dtype="bf16", recompute="full", family="qwen2_moe"),
)
LARGEST_DIFFERENCE = 0.1  # relative, of the peak
TIMED_STEPS, NEAR, LEAST_NEAR = 25, 0.2, 0.9
CONTENDERS, ROUNDS, ROUND_STEPS = 6, 9, 9  # the fastest configurations are measured again in turns, for their order


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--large", action="store_true", help="only the plan of 70 billion parameters")
    parser.add_argument("--times", action="store_true", help="only seconds of a step; needs an idle machine")
    given = parser.parse_args()
    return large() if given.large else times() if given.times else compare()


def compare() -> int:
    """Compares bytes of plans and runs. Returns the exit code."""
    table, failed = Table(title=f"{len(CASES)} plans and the counters of one rank of each kind"), 0
    for column in ("configuration", "state", "wire", "disk", "peak", "plan / run"):
        table.add_column(column, justify="left" if column == "configuration" else "right")
    pools: dict[int, RankPool] = {}
    with tempfile.TemporaryDirectory(dir=".") as folder:
        for case in CASES:
            classes = planned(case, folder=folder).classes
            pool = pools.setdefault(case.ranks, RankPool(case.ranks))
            run = pool.run(made, case=case, folder=folder)
            for trace in classes:
                measured = run[trace.rank]
                state = {tier: {k: v for k, v in held.items() if k in STATE} for tier, held in trace.state.items()}
                ratio = trace.peak.nbytes / measured.peak
                equal = (
                    state == measured.state,
                    trace.wire == measured.wire,
                    (trace.disk_read, trace.disk_write) == measured.disk,
                )
                failed += not all(equal) or abs(ratio - 1) > LARGEST_DIFFERENCE
                table.add_row(
                    f"{case}" if trace.rank == 0 else f"  its rank {trace.rank}",
                    *("equal" if same else "DIFFERS" for same in equal),
                    size(measured.peak),
                    f"{ratio:.3f}",
                )
    for pool in pools.values():
        pool.close()
    Console(width=140).print(table)
    return int(failed > 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Timed:
    """Seconds of a step: planned, and the interval of the median of measured ones. fastest: the fastest measured step, which is close to the
    median of an idle machine if other processes run."""

    case: Case
    planned: float
    limit: str
    measured: Interval
    fastest: float

    @property
    def ratio(self) -> float:
        return self.planned / self.measured.median

    @property
    def ratio_to_fastest(self) -> float:
        return self.planned / self.fastest


def times() -> int:
    """Measures the machine with 1 and 2 ranks and compares planned seconds with the median step. Returns the exit code: 1 if fewer than 90 %
    are within 20 %, or if the three fastest plans for a number of ranks are in another order than measured."""
    table = Table(title=f"seconds of a step: plans for hardware=here, and the median of {TIMED_STEPS} steps")
    for column in ("configuration", "plan", "limit", "median", "interval", "plan / median", "plan / fastest"):
        table.add_column(column, justify="left" if column == "configuration" else "right")
    found: dict[int, list[Timed]] = {}
    fastest: dict[int, list[Rounds]] = {}
    with tempfile.TemporaryDirectory(dir=".") as folder:
        for ranks in (1, 2):
            pool = RankPool(ranks)
            hardware = combine(pool.run(measure, folder=folder), source="measured now")
            found[ranks] = [
                time_case(case, pool=pool, folder=folder, hardware=hardware) for case in CASES if case.ranks == ranks
            ]
            fastest[ranks] = take_rounds(found[ranks], pool=pool, folder=folder)
            pool.close()
    every = [one for timed in found.values() for one in timed]
    for one in every:
        interval = f"{one.measured.low:.4f} to {one.measured.high:.4f}"
        cells = (f"{one.planned:.4f}", one.limit, f"{one.measured.median:.4f}", interval)
        table.add_row(str(one.case), *cells, f"{one.ratio:.2f}", f"{one.ratio_to_fastest:.2f}")
    near, near_fastest = (
        sum(abs(ratio - 1) <= NEAR for ratio in ratios) / len(every)
        for ratios in ([one.ratio for one in every], [one.ratio_to_fastest for one in every])
    )
    ordered = all(is_ordered(rounds[:3]) for rounds in fastest.values())
    Console(width=160).print(table)
    for rounds in fastest.values():
        print_rounds(rounds)
    print(
        f"{near:.0%} of {len(every)} plans are within {NEAR:.0%} of the median, {near_fastest:.0%} as close to the fastest step; "
        f"the three fastest are {'' if ordered else 'NOT '}in order"
    )
    return int(near < LEAST_NEAR or not ordered)


def time_case(case: Case, *, pool: RankPool, folder: str, hardware: Hardware) -> Timed:
    plan_time = planned(case, folder=folder, hardware=hardware).time
    assert plan_time is not None, "a plan without hardware has no time"
    run = pool.run(step_seconds, case=case, folder=folder, steps=TIMED_STEPS)
    seconds = [max(ranks) for ranks in zip(*run, strict=True)]
    return Timed(
        case=case,
        planned=plan_time.seconds,
        limit=plan_time.limit,
        measured=median_interval(seconds),
        fastest=min(seconds),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Rounds:
    """One of the fastest configurations. seconds: the median step of every round."""

    timed: Timed
    seconds: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def take_rounds(timed: list[Timed], *, pool: RankPool, folder: str) -> list[Rounds]:
    """Measures the fastest configurations for one number of ranks again in rounds, one after the other, the fastest first. A disturbance of
    the machine that lasts a minute or two then affects all of them, as with `sweep.repeats`."""
    contenders = sorted(timed, key=lambda one: one.measured.median)[:CONTENDERS]
    found: list[list[float]] = [[] for _ in contenders]
    for _ in range(ROUNDS):
        for one, seconds in zip(contenders, found, strict=True):
            run = pool.run(step_seconds, case=one.case, folder=folder, steps=ROUND_STEPS)
            seconds.append(statistics.median(max(ranks) for ranks in zip(*run, strict=True)))
    rounds = [Rounds(timed=one, seconds=seconds) for one, seconds in zip(contenders, found, strict=True)]
    return sorted(rounds, key=lambda one: one.median)


def is_ordered(fastest: list[Rounds]) -> bool:
    """Whether no pair is planned in the opposite of its measured order. A pair has no order if the interval of its ratios, round by round,
    contains 1."""
    pairs = itertools.combinations(fastest, 2)
    return all(
        slow.timed.planned >= fast.timed.planned
        for fast, slow in pairs
        if ratio_interval(slow.seconds, baseline=fast.seconds).excludes_one
    )


def print_rounds(rounds: list[Rounds]) -> None:
    table = Table(
        title=f"the fastest in {ROUNDS} rounds of {ROUND_STEPS} steps each, and their ratio to the first, round by round"
    )
    for column in ("configuration", "plan", "median", "plan / median", "ratio", "interval"):
        table.add_column(column, justify="left" if column == "configuration" else "right")
    for one in rounds:
        ratio = ratio_interval(one.seconds, baseline=rounds[0].seconds)
        cells = (
            f"{one.timed.planned:.4f}",
            f"{one.median:.4f}",
            f"{one.timed.planned / one.median:.2f}",
            f"{ratio.median:.3f}",
        )
        table.add_row(str(one.timed.case), *cells, f"{ratio.low:.3f} to {ratio.high:.3f}")
    Console(width=160).print(table)


def large() -> int:
    """Plans 70 billion parameters. Returns the exit code: 1 above 60 seconds or 2 GB."""
    values = yaml.safe_load(Path(__file__).resolve().parents[1].joinpath("conf/model/70b.yaml").read_text())
    shape = {name: float(value) if name == "norm_eps" else value for name, value in values.items() if name != "name"}
    tokens = torch.empty(1, 4096, dtype=torch.int64)
    started = time.perf_counter()
    made_plan = plan(
        lambda: Decoder(DecoderConfig(**shape)),
        batch=(tokens, tokens),
        world_size=1024,
        precision=PrecisionPolicy.named("bf16"),
        zero=ZeroPolicy(stage=3),
        recompute=RecomputePolicy(mode="full"),
    )
    seconds = time.perf_counter() - started
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(made_plan)
    print(f"planned in {seconds:.1f} s, largest resident memory {size(resident)}")
    return int(seconds > 60 or resident > 2e9)


if __name__ == "__main__":
    sys.exit(main())
