"""Writes docs/document_sizes.md: the documents' statements about sizes and speed, each next to a plan.

python scripts/document_sizes.py                   plans every row (about three minutes) and writes the page
python scripts/document_sizes.py memory offload    plans only these sections: memory, offload, sizes, speeds or stages

All planned numbers come from `ztk.plan_run`, so a change of the planner or of ZeRO changes the page.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import ztk
from ztk.planner import Plan
from ztk.planner.result import size

PAGE = Path(__file__).resolve().parents[1] / "docs" / "document_sizes.md"
SEQUENCE, BATCH = 2048, 4  # tokens; sequences per rank for the throughput of 7B
RUN = (
    "precision=fp16",
    "recompute=full",
    "hardware=a100_80",
    "data=synthetic",
    f"data.seq_len={SEQUENCE}",
    "train.micro_batch_size=1",
    "logger=disabled",
)
# name in the documents -> planned shape
MODELS = {
    "7B": ("model=7b",),
    "10B": ("model=70b", "model.layers=11"),
    "14B": ("model=70b", "model.layers=16"),
    "35B": ("model=175b", "model.layers=20"),
    "50B": ("model=70b", "model.layers=58"),
    "70B": ("model=70b",),
    "175B": ("model=175b", "model.layers=103"),
    "350B": ("model=175b", "model.dim=25600", "model.heads=160", "model.hidden_dim=76800", "model.layers=48"),
    "1T": ("model=175b", "model.dim=25600", "model.heads=160", "model.hidden_dim=76800", "model.layers=137"),
}
STATE = ("parameters", "gradients", "optimizer")
NODE_MEMORY, NODE_DISK = 2e12, 8 * 3.84e12  # bytes of a DGX A100 640 GB: main memory, and its eight drives
PEAK_RATE = 312e12  # FLOP/s of fp16 products on an A100
NEAR = 0.05  # relative; the document's numbers have two digits


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """place: a section, of document 002 unless another is named. says: the statement. plan: the planned numbers. result: the conclusion."""

    place: str
    says: str
    plan: str
    result: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Benchmark:
    """A row of the table in 12.2: name, planned options, largest model and tokens per second."""

    name: str
    words: tuple[str, ...]
    largest: str
    speed: int


LARGE_PIECES = "offload.buffer_bytes=1073741824"  # few pieces make a fast plan; bytes on disk do not change
BENCHMARKS = (
    Benchmark(name="Baseline DDP", words=("zero=stage0",), largest="7B", speed=12_000),
    Benchmark(name="ZeRO-1", words=("zero=stage1",), largest="14B", speed=11_500),
    Benchmark(name="ZeRO-2", words=("zero=stage2",), largest="35B", speed=10_800),
    Benchmark(name="ZeRO-3", words=("zero=stage3",), largest="175B", speed=9_200),
    Benchmark(name="ZeRO-3 + CPU Offload", words=("zero=stage3", "offload=cpu"), largest="350B", speed=4_100),
    Benchmark(name="ZeRO-Infinity", words=("zero=stage3", "offload=nvme", LARGE_PIECES), largest="1T", speed=1_800),
)


class Plans:
    """Plans by command line, each computed once."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, ...], Plan] = {}

    def __call__(self, *words: str, ranks: int) -> Plan:
        given = {word.split("=")[0] for word in words}
        usual = (word for word in RUN if word.split("=")[0] not in given)
        key = (*usual, *words, f"launch.ranks={ranks}")
        if key not in self._made:
            started = time.perf_counter()
            self._made[key] = ztk.plan_run(*key)
            print(f"{' '.join(words)} launch.ranks={ranks}: {time.perf_counter() - started:.1f} s", file=sys.stderr)
        return self._made[key]


def held(plan: Plan, *, tier: str = "device") -> dict[str, int]:
    """Bytes of parameters, gradients and optimizer states that a rank keeps in `tier` between steps."""
    booked = plan.fullest.state.get(tier, {})
    return {name: booked[name] for name in STATE if name in booked}


def written(booked: dict[str, int]) -> str:
    return ", ".join(f"{name} {nbytes:,}" for name, nbytes in booked.items())


def per_parameter(plan: Plan, *, tier: str = "device") -> float:
    """Bytes of state per parameter of the full model, on one rank."""
    return sum(held(plan, tier=tier).values()) / plan.parameters


def judged(found: float, *, said: float) -> str:
    """The conclusion for a number of the document, which has about two digits."""
    return "confirmed" if abs(found / said - 1) <= NEAR else f"contradicted: {found / said:.2g} times the document's"


def memory_rows(plans: Plans) -> Iterator[Row]:
    """Sections 1 and 2: bytes of state by ZeRO stage."""
    gpt = {name: 8 * nbytes for name, nbytes in held(plans(*MODELS["175B"], "zero=stage3", ranks=8)).items()}
    total = sum(gpt.values())
    yield Row(
        place="1.1",
        says="175B in fp16: ~350 GB",
        plan=f"parameters {gpt['parameters']:,} bytes on 8 ranks together",
        result=judged(gpt["parameters"], said=350e9),
    )
    yield Row(
        place="1.1",
        says="175B with Adam's states: 1.4 TB",
        plan=f"parameters, gradients and states {total:,} bytes; the states are {gpt['optimizer']:,}",
        result=f"{judged(total, said=1.4e12)}; 1.4 TB are Adam's two moments, without parameters, gradients and fp32 weights",
    )
    seven = plans(*MODELS["7B"], "zero=stage0", ranks=8)
    parts = held(seven)
    for name, said in (("parameters", 2), ("gradients", 2), ("optimizer", 12)):
        words = {"optimizer": "fp32 weights and Adam's moments: 4 + 4 + 4 bytes"}.get(name, f"{name} in fp16: {said}")
        yield Row(
            place="2",
            says=f"{words} per parameter",
            plan=f"{parts[name]:,} bytes of {seven.parameters:,} parameters: {parts[name] / seven.parameters:.4f}",
            result=judged(parts[name] / seven.parameters, said=said),
        )
    for name, said in (("7B", 112e9), ("70B", 1.1e12)):
        one = plans(*MODELS[name], "zero=stage0", ranks=8)
        nbytes = sum(held(one).values())
        yield Row(
            place="2",
            says=f"a {name} model requires ~{said / 1e9:,.0f} GB",
            plan=f"{nbytes:,} bytes for {one.parameters:,} parameters, peak {size(one.peak_bytes['device'])}",
            result=judged(nbytes, said=said),
        )
    for stage, said, times in ((1, 4.2, 4), (2, 2.2, 8), (3, 0.25, 64)):
        one = plans(*MODELS["7B"], f"zero=stage{stage}", ranks=64)
        found = per_parameter(one)
        yield Row(
            place=f"2.{stage}",
            says=f"ZeRO-{stage}, N = 64: ~{said} bytes per parameter, ~{times}x less",
            plan=f"{sum(held(one).values()):,} bytes: {found:.4f} per parameter, {16 / found:.2f}x; peak {size(one.peak_bytes['device'])}",
            result=f"bytes {judged(found, said=said)}; factor {judged(16 / found, said=times)}",
        )


def offload_rows(plans: Plans) -> Iterator[Row]:
    """Section 3: which states offload moves, and the rates of the links."""
    offloaded = plans(*MODELS["7B"], "zero=stage2", "offload=cpu", ranks=8)
    device, host = held(offloaded), held(offloaded, tier="host")
    yield Row(
        place="3.1",
        says="ZeRO-Offload: optimizer states and gradients in main memory; fp16 parameters on the GPU",
        plan=f"7B at stage 2 on 8 ranks, bytes per rank: {written(device)} on the device, {written(host)} in main memory",
        result="confirmed"
        if set(device) == {"parameters"} and set(host) == {"gradients", "optimizer"}
        else "contradicted",
    )
    layers, single = largest(plans, words=("model=70b", "zero=stage2", "offload=cpu"), ranks=1)
    yield Row(
        place="3.1",
        says="multi-billion parameter models on a single GPU",
        plan=f"{single.parameters:,} parameters ({layers} layers of the width of 70B) fit on one A100 80 GB,"
        f" with {sum(held(single, tier='host').values()):,} bytes in main memory",
        result="confirmed" if single.parameters > 2e9 else "contradicted",
    )
    sharded = {
        tier: plans(*MODELS["7B"], "zero=stage3", f"offload={tier}", ranks=8) for tier in ("none", "cpu", "nvme")
    }
    yield Row(
        place="3.1",
        says="parameter offload (ZeRO-3)",
        plan=f"7B on 8 ranks keeps {sum(held(sharded['cpu']).values()):,} bytes of state on the device"
        f" and {sum(held(sharded['cpu'], tier='host').values()):,} in main memory;"
        f" peak {size(sharded['cpu'].peak_bytes['device'])} instead of {size(sharded['none'].peak_bytes['device'])}",
        result="confirmed" if not held(sharded["cpu"]) else "contradicted",
    )
    hardware = sharded["cpu"].hardware
    assert hardware is not None, "of RUN"
    pcie = 16e9 * 16 * 128 / 130 / 8
    yield Row(
        place="3.2",
        says="PCIe 4.0 x16: ~32 GB/s",
        plan=f"16 GT/s by 16 lanes in 128 of 130 bits: {pcie / 1e9:.1f} GB/s;"
        f" `conf/hardware/a100_80.yaml` has {hardware.pcie_bandwidth / 1e9:.0f}",
        result=judged(pcie, said=32e9),
    )
    yield Row(
        place="3.2",
        says="NVMe: ~7 GB/s",
        plan=f"one drive of the hardware file reads {hardware.disk_read_bandwidth / 1e9:.1f}"
        f" and writes {hardware.disk_write_bandwidth / 1e9:.1f} GB/s",
        result=f"reading {judged(hardware.disk_read_bandwidth, said=7e9)}; writing {judged(hardware.disk_write_bandwidth, said=7e9)}",
    )
    seconds = {tier: step_seconds(one) for tier, one in sharded.items()}
    yield Row(
        place="3.2",
        says="NVMe is slower than main memory and adds overhead",
        plan="a step of 7B on 8 ranks, 16,384 tokens: "
        + ", ".join(f"{tier} {value:.2f} s" for tier, value in seconds.items())
        + " or more",
        result="confirmed" if seconds["none"] <= seconds["cpu"] < seconds["nvme"] else "contradicted",
    )


def largest(plans: Plans, *, words: tuple[str, ...], ranks: int) -> tuple[int, Plan]:
    """The largest number of layers whose plan fits, and that plan. The first guess extrapolates the bytes of two small plans."""

    def made(layers: int) -> Plan:
        return plans(*words, f"model.layers={layers}", ranks=ranks)

    few, more = made(4), made(8)
    per_layer = (more.peak_bytes["device"] - few.peak_bytes["device"]) / 4
    assert few.margin_bytes is not None, "RUN has hardware"
    layers = max(1, 4 + int(few.margin_bytes / per_layer))
    while not made(layers).fits:
        layers -= 1
    while made(layers + 1).fits:
        layers += 1
    return layers, made(layers)


def step_seconds(plan: Plan) -> float:
    assert plan.time is not None, "RUN has hardware"
    return plan.time.seconds


def size_rows(plans: Plans) -> Iterator[Row]:
    """The first half of the table of 12.2: the largest model on 8 devices of 80 GB."""
    for one in BENCHMARKS:
        plan = plans(*MODELS[one.largest], *one.words, ranks=8)
        peak = plan.peak_bytes["device"]
        text = f"{plan.parameters:,} parameters: peak {peak:,} bytes, state {sum(held(plan).values()):,}"
        if len(one.words) > 1:
            tier, room = ("host", NODE_MEMORY) if one.words[1] == "offload=cpu" else ("nvme", NODE_DISK)
            node = 8 * sum(held(plan, tier=tier).values())
            where = {"host": "main memory", "nvme": "disk"}[tier]
            most = room / (node / plan.parameters)
            text += f"; {node:,} bytes of {where} for the node"
            has_room = plan.margin_bytes is not None and plan.margin_bytes >= 0
            result = "the devices have room" if has_room else f"does not fit on the devices ({plan.answer})"
            result += (
                f"; a DGX A100 has {size(room)} of {where}: "
                f"{'confirmed' if node <= room else 'contradicted'}, at most {most / 1e9:,.0f}B"
            )
        else:
            shape = {"7B": "model=7b", "14B": "model=70b"}.get(one.largest, "model=175b")
            _, fitting = largest(plans, words=(shape, *one.words), ranks=8)
            result = f"{'confirmed' if plan.fits else 'contradicted'}: at most {fitting.parameters / 1e9:.1f}B fit"
        yield Row(place="12.2", says=f"{one.name}: ~{one.largest}", plan=text, result=result)


def speed_rows(plans: Plans) -> Iterator[Row]:
    """The second half: tokens per second of 8 devices. The document names neither model nor batch, so both readings are judged."""
    for one in BENCHMARKS:
        big, seven = (fastest(plans, words=(*MODELS[name], *one.words)) for name in (one.largest, "7B"))
        roof = 8 * PEAK_RATE / operations_per_token(big)
        numbers = (
            f"{name} {speed(plan):,.0f}{'' if plan.fits else ' (does not fit)'}"
            for name, plan in ((one.largest, big), ("7B", seven))
        )
        yield Row(
            place="12.2",
            says=f"{one.name}: {one.speed:,} tokens/s",
            plan=f"tokens/s: {', '.join(numbers)}; {one.largest} at the data sheet's rate of products: {roof:,.0f}",
            result=f"of {one.largest}: {reached(one.speed, plan=big)}; of 7B: {reached(one.speed, plan=seven)}",
        )


def fastest(plans: Plans, *, words: tuple[str, ...]) -> Plan:
    """The fastest plan on 8 devices over the tried micro-batches. Plans that fit come first."""
    made = (plans(*words, *batch, ranks=8) for batch in ((), (f"train.micro_batch_size={BATCH}",)))
    return max(made, key=lambda plan: (bool(plan.fits), speed(plan)))


def speed(plan: Plan) -> float:
    """Tokens per second of all devices."""
    assert plan.tokens_per_second_per_gpu is not None, "RUN has hardware"
    return plan.world_size * plan.tokens_per_second_per_gpu


def reached(said: float, *, plan: Plan) -> str:
    """Whether a plan reaches the document's tokens per second, and their ratio."""
    if speed(plan) < said:
        return f"not possible, the plan reaches {speed(plan) / said:.0%}"
    return f"possible, the plan reaches {speed(plan) / said:.1f} times as many" + (
        "" if plan.fits else ", but does not fit"
    )


def operations_per_token(plan: Plan) -> float:
    """FLOPs of forward and backward per token, without recomputation, which makes four units of three."""
    assert plan.time is not None, "RUN has hardware"
    tokens = speed(plan) / plan.world_size * plan.time.seconds
    return plan.as_dict()["flops"] / tokens * 3 / 4


def table_rows(plans: Plans) -> Iterator[Row]:
    """The table of document 003: a stage for each model size."""
    cases = ((1, "10B", (8,)), (2, "50B", (8, 1024)), (3, "50B", (8, 16)))
    texts = {
        1: "stage 1: models within 10B",
        2: "stage 2: 10B to 50B",
        3: "stage 3: 50B and more",
    }
    for stage, name, worlds in cases:
        made = {ranks: plans(*MODELS[name], f"zero=stage{stage}", ranks=ranks) for ranks in worlds}
        fitting = [ranks for ranks, plan in made.items() if plan.fits]
        yield Row(
            place="003",
            says=texts[stage],
            plan="; ".join(
                f"{name} on {ranks}: peak {plan.peak_bytes['device']:,} bytes" for ranks, plan in made.items()
            ),
            result=f"confirmed on devices of 80 GB, {name} from {fitting[0]} ranks on"
            if fitting
            else f"contradicted on devices of 80 GB: {name} fits on none of these numbers of ranks,"
            f" its fp16 parameters alone take {size(held(made[worlds[0]])['parameters'])}",
        )


INTRO = f"""# The documents' sizes and speeds

Statements of [four documents](examples.md) about memory and speed, row by row, next to [plans](planning.md).
`python scripts/document_sizes.py` writes this page. Every number on the right is from `ztk.plan_run`, in bytes, per rank unless another
count is named.

The plans are for decoders in fp16 with AdamW, one sequence of {SEQUENCE:,} tokens per rank and step, full recomputation, on the A100 80 GB of
`conf/hardware/a100_80.yaml`. A number is *confirmed* within {NEAR:.0%}, for the documents give about two digits. Seconds follow
from rates that training reaches ([published runs](published_runs.md) compares them). No run on eight A100s was made.

7B is the shipped model of that name. The others:

{{models}}
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """A table of the page. note: text above the table."""

    title: str
    rows: Callable[[Plans], Iterator[Row]]
    note: str = ""

    def text(self, plans: Plans) -> str:
        """Returns the tables as Markdown."""
        head = "| section | the document | the plan | result |\n| --- | --- | --- | --- |"
        lines = [f"| {row.place} | {row.says} | {row.plan} | {row.result} |" for row in self.rows(plans)]
        return "\n".join([f"## {self.title}\n", *([self.note, ""] if self.note else []), head, *lines, ""])


SECTIONS = {
    "memory": Section(title="Memory by stage (002, sections 1 and 2)", rows=memory_rows),
    "offload": Section(title="Offload (002, section 3)", rows=offload_rows),
    "sizes": Section(title="Largest models (002, section 12.2)", rows=size_rows, note="On 8 x A100 80 GB."),
    "speeds": Section(
        title="Throughput (002, section 12.2)",
        rows=speed_rows,
        note=f"""The table names neither the model nor the batch, so both the largest model and one 7B model are planned, with
micro-batches of 1 and {BATCH} sequences of {SEQUENCE:,} tokens on 8 x A100 80 GB; the faster one that fits is shown.""",
    ),
    "stages": Section(
        title="Which stage for which size (003)", rows=table_rows, note="On devices of 80 GB, without offload."
    ),
}


def introduction() -> str:
    """The text above the tables."""
    models = "\n".join(f"- {name}: `{' '.join(words)}`" for name, words in MODELS.items() if len(words) > 1)
    return INTRO.format(models=models)


def written_before() -> dict[str, str]:
    """The sections of the current page."""
    old = PAGE.read_text(encoding="utf-8").split("\n## ")[1:] if PAGE.exists() else []
    return {
        name: f"## {part.rstrip()}\n"
        for name, section in SECTIONS.items()
        for part in old
        if part.startswith(f"{section.title}\n")
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"of {', '.join(SECTIONS)}; default: all")
    chosen = parser.parse_args(arguments).sections or list(SECTIONS)
    if unknown := set(chosen) - set(SECTIONS):
        parser.error(f"{', '.join(sorted(unknown))}: no such section; there are {', '.join(SECTIONS)}")
    plans, texts = Plans(), written_before()
    for name in chosen:
        texts[name] = SECTIONS[name].text(plans)
        page = [introduction(), *(texts[other] for other in SECTIONS if other in texts)]
        PAGE.write_text("\n".join(page), encoding="utf-8")
    print(PAGE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
