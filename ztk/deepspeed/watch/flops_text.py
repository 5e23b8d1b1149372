"""Formats a FLOPs profile: a summary, and a table of modules as in torch.utils.flop_counter."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import nlargest

from torch import nn

_SCALES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "K"), (1, ""), (1e-3, "m"), (1e-6, "u"))


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileHead:
    """The content of the summary, apart from the model's own cost.

    milliseconds: of fwd and bwd of a micro-batch and of the step, if measured. accumulation: micro-batches per step.
    """

    step: int
    world_size: int | None = None
    data_parallel: int = 1
    model_parallel: int = 1
    micro_batch: int = 1
    accumulation: int = 1
    milliseconds: Mapping[str, float] = field(default_factory=dict)
    backward_factor: float = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class StageProfile:
    """A pipeline stage: its layers, its costs for one micro-batch, and the lines about its modules."""

    layers: range
    params: int
    flops: int
    macs: int
    seconds: float
    lines: tuple[str, ...]


def profile_text(
    model: nn.Module, *, of: Callable, parameters: Callable, head: ProfileHead, rows: Sequence[str]
) -> str:
    """of: module -> its costs, including submodules. parameters: module -> number of parameters. rows: of `module_table`."""
    summary = _rows(_summary(of(model), params=parameters(model), head=head))
    return "\n".join([*_title(head), *summary, "", *rows, "-" * 78])


def module_table(
    model: nn.Module, *, of: Callable, parameters: Callable, module_depth: int, top_modules: int, detailed: bool
) -> list[str]:
    """Returns one row per module, indented by depth: all modules if detailed, else the `top_modules` with the most MACs at every depth
    down to `module_depth` (-1: the innermost).

    Operations outside of submodules appear only in the module's own row.
    """
    found: list[tuple[int, str, nn.Module]] = []

    def walk(module: nn.Module, name: str, depth: int) -> None:
        found.append((depth, name, module))
        for key, child in module.named_children():
            walk(child, key, depth + 1)

    walk(model, "", 0)
    if not detailed:
        depths = range(max(depth for depth, _, _ in found) + 1)
        shown = {
            id(row)
            for depth in (depths if module_depth == -1 else depths[: module_depth + 1])
            for row in nlargest(top_modules, (row for row in found if row[0] == depth), key=lambda row: of(row[2]).macs)
        }
        found = [row for row in found if id(row) in shown]
    total, params = of(model), parameters(model)
    lines = [f"{'module':<44}{'params':>10}{'%':>8}{'MACs':>14}{'%':>8}{'fwd latency':>13}{'%':>8}{'FLOPS':>14}"]
    for depth, name, module in found:
        cost, own = of(module), parameters(module)
        lines.append(
            f"{'  ' * depth + (f'{name}: ' if name else '') + type(module).__name__:<44}"
            f"{params_to_string(own):>10}{_percent(own, params):>8}"
            f"{macs_to_string(cost.macs):>14}{_percent(cost.macs, total.macs):>8}"
            f"{duration_to_string(cost.seconds):>13}{_percent(cost.seconds, total.seconds):>8}"
            f"{_rate(cost.flops, seconds=cost.seconds):>14}"
        )
    return lines


def pipeline_text(stages: Sequence[StageProfile], *, head: ProfileHead) -> str:
    """Formats the sums over `stages`, and each stage. A tied layer's parameters count on every stage that has them."""
    flops = sum(stage.flops for stage in stages)
    rows = [
        *_sizes(head),
        ("pipeline stages: ", len(stages)),
        ("params of model = sum of the stages': ", params_to_string(sum(stage.params for stage in stages))),
        ("fwd MACs of model, per micro-batch: ", macs_to_string(sum(stage.macs for stage in stages))),
        ("fwd flops of model, per micro-batch: ", number_to_string(flops)),
        ("micro-batches: ", head.accumulation),
    ]
    if "step" in head.milliseconds:
        total_seconds, factor = head.milliseconds["step"] / 1000, head.backward_factor + 1
        rows += [
            ("iter latency: ", duration_to_string(total_seconds)),
            (
                f"FLOPS per GPU = {factor:g} * fwd flops of model * micro-batches / stages / iter latency: ",
                _rate(factor * flops * head.accumulation / len(stages), seconds=total_seconds),
            ),
            ("samples/second: ", round(head.micro_batch * head.accumulation * head.data_parallel / total_seconds, 2)),
        ]
    lines = [*_title(head), *_rows(rows)]
    for number, stage in enumerate(stages):
        lines += [
            "",
            f"----------------------------- Stage {number}: layers {stage.layers.start} to {stage.layers.stop - 1} -----",
        ]
        own = [
            ("params of stage: ", params_to_string(stage.params)),
            ("fwd MACs of stage: ", f"{macs_to_string(stage.macs)} = {_percent(stage.flops, flops)} of all flops"),
            ("fwd latency of stage: ", duration_to_string(stage.seconds)),
            ("fwd FLOPS per GPU = fwd flops per GPU / fwd latency: ", _rate(stage.flops, seconds=stage.seconds)),
        ]
        lines += [*_rows(own), *stage.lines]
    return "\n".join([*lines, "-" * 78])


def _title(head: ProfileHead) -> list[str]:
    lines = ["", "-------------------------- DeepSpeed Flops Profiler --------------------------"]
    return [*lines, f"Profile Summary at step {head.step}:"]


def _rows(pairs: Sequence[tuple[str, object]]) -> list[str]:
    return [f"{key:<70}  {value:<8}" for key, value in pairs]


def _sizes(head: ProfileHead) -> list[tuple[str, object]]:
    if head.world_size is None:
        return []
    return [
        ("world size: ", head.world_size),
        ("data parallel size: ", head.data_parallel),
        ("model parallel size: ", head.model_parallel),
        ("batch size per GPU: ", head.micro_batch),
    ]


def _summary(total, *, params: int, head: ProfileHead) -> list[tuple[str, object]]:
    rows = _sizes(head)
    rows += [
        ("params per GPU: ", params_to_string(params)),
        ("params of model = params per GPU * mp_size: ", params_to_string(params * head.model_parallel)),
        ("fwd MACs per GPU: ", macs_to_string(total.macs)),
        ("fwd flops per GPU: ", number_to_string(total.flops)),
        ("fwd flops of model = fwd flops per GPU * mp_size: ", number_to_string(total.flops * head.model_parallel)),
    ]
    forward = head.milliseconds.get("fwd", 1000 * total.seconds) / 1000
    rows += [
        ("fwd latency: ", duration_to_string(forward)),
        ("fwd FLOPS per GPU = fwd flops per GPU / fwd latency: ", _rate(total.flops, seconds=forward)),
    ]
    if "bwd" in head.milliseconds and "step" in head.milliseconds:
        rows += _phases(total.flops, forward=forward, head=head)
    return rows


def _phases(flops: int, *, forward: float, head: ProfileHead) -> list[tuple[str, object]]:
    back, step = head.milliseconds["bwd"] / 1000, head.milliseconds["step"] / 1000
    many, factor = head.accumulation, head.backward_factor
    total_seconds = many * (forward + back) + step
    times = f" * {many} micro-batches" if many > 1 else ""
    samples = round(head.micro_batch * many * (head.world_size or 1) / total_seconds, 2)
    return [
        ("bwd latency: ", duration_to_string(back)),
        (
            f"bwd FLOPS per GPU = {factor:g} * fwd flops per GPU / bwd latency: ",
            _rate(factor * flops, seconds=back),
        ),
        (
            f"fwd+bwd FLOPS per GPU = {factor + 1:g} * fwd flops per GPU / (fwd+bwd latency): ",
            _rate((factor + 1) * flops, seconds=forward + back),
        ),
        ("step latency: ", duration_to_string(step)),
        ("iter latency: ", duration_to_string(total_seconds)),
        (
            f"FLOPS per GPU = {factor + 1:g} * fwd flops per GPU{times} / iter latency: ",
            _rate(many * (factor + 1) * flops, seconds=total_seconds),
        ),
        ("samples/second: ", samples),
    ]


def _percent(part: float, total: float) -> str:
    return f"{round(100 * part / total, 2) if total else 0:g}%"


def _rate(flops: float, *, seconds: float) -> str:
    return flops_to_string(flops / seconds if seconds else 0)


def number_to_string(num: float, units: str | None = None, precision: int = 2) -> str:
    """Formats as `1.5 K`. units: a prefix; by default one that fits."""
    if units is None:
        scale, units = next((pair for pair in _SCALES if num >= pair[0]), (1, "") if num == 0 else _SCALES[-1])
    else:
        scale = {letter: factor for factor, letter in _SCALES}.get(units, 1)
    return f"{round(num / scale, precision):g} {units}"


def macs_to_string(macs: float, units: str | None = None, precision: int = 2) -> str:
    """Formats like "1.5 GMACs"."""
    return f"{number_to_string(macs, units=units, precision=precision)}MACs"


def flops_to_string(flops: float, units: str | None = None, precision: int = 2) -> str:
    """Formats like "1.5 TFLOPS"."""
    return f"{number_to_string(flops, units=units, precision=precision)}FLOPS"


def duration_to_string(duration: float, units: str | None = None, precision: int = 2) -> str:
    """Formats like "1.5 ms". duration: seconds."""
    return f"{number_to_string(duration, units=units, precision=precision)}s"


def bytes_to_string(b: float, units: str | None = None, precision: int = 2) -> str:
    """Formats like "1.5 GB", in steps of 1000."""
    return f"{number_to_string(b, units=units, precision=precision)}B"


def params_to_string(params_num: float, units: str | None = None, precision: int = 2) -> str:
    """Formats a number of parameters. Billions are B."""
    units = units.replace("B", "G") if units else units
    return number_to_string(params_num, units=units, precision=precision).replace("G", "B").strip()
