"""`ztk.Loop`: values of hooks in the step's row."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ztk
from tests.report.test_report import make_reporter


class Squares(nn.Module):
    """Returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).square().mean()


def engine_of(**options: Any) -> ztk.Engine:
    torch.manual_seed(0)
    options = {
        "optimizer": ztk.OptimizerPolicy(lr=0.1),
        "precision": ztk.PrecisionPolicy(dtype=torch.float32),
    } | options
    return ztk.parallelize(Squares(), process=ztk.Process.start(device="cpu"), **options)


def loop_of(engine: ztk.Engine, folder: Path, *callbacks: Any, steps: int = 2, **options: Any) -> list[dict]:
    """Runs a loop and returns its rows."""
    x = torch.arange(8.0).view(2, 4)
    options = {"train_step": lambda step: engine.train_batch([(x,)] * engine.accumulation_steps)} | options
    with make_reporter(folder, total_steps=steps) as reporter:
        loop = ztk.Loop(engine, steps=steps, reporter=reporter, callbacks=callbacks, **options)
        loop.run()
        reporter.finish()
    engine.close()
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


class Writes:
    """Writes one value in one hook."""

    def __init__(self, name: str, *, hook: str = "after_step", value: Any = 1.0) -> None:
        def write(loop: ztk.Loop, **given: Any) -> None:
            loop.measured[name] = value

        setattr(self, hook, write)


def test_hooks_add_columns_and_change_their_own(tmp_path):
    class Twice:
        def before_step(self, loop):
            loop.measured["mine.count"] = torch.tensor(1)

        def after_step(self, loop, *, loss):
            loop.measured["mine.count"] += 1
            loop.measured |= {"row": 3, "metrics": 4.5}  # names of arguments of the reporter

    rows = loop_of(engine_of(), tmp_path, Twice())
    assert [(row["mine.count"], row["row"], row["metrics"]) for row in rows] == [(2, 3, 4.5)] * 2


@pytest.mark.parametrize(
    "name",
    [
        *("step", "loss", "lr", "grad_norm", "loss_scale", "skipped", "tokens", "tokens_per_second", "step_seconds"),
        *("memory.host_bytes", "comm.all_gather_bytes", "io.read_bytes", "seconds.forward", "kernel.x.ms", "mfu"),
        *("status", "error", "steps", "loss_digest", "peak_memory.host_bytes"),
    ],
)
def test_a_column_of_ztks_is_refused(tmp_path, name):
    with pytest.raises(
        ValueError, match=f"loop.measured: '{name}' is a column of ztk's: use another name, such as 'my_"
    ):
        loop_of(engine_of(), tmp_path, Writes(name))


def test_a_column_of_another_writer_is_refused(tmp_path):
    """Of another callback, of the step, and of an evaluation, which comes before or after the hook."""
    with pytest.raises(ValueError, match="Writes has written this column in this step, and Writes would replace it"):
        loop_of(engine_of(), tmp_path, Writes("mine"), Writes("mine"))
    evaluates: dict[str, Any] = {"evaluate": lambda: {"validation_loss": 2.0, "accuracy": 0.5}, "eval_every": 1}
    for hook in ("after_step", "after_evaluation"):
        with pytest.raises(ValueError, match=r"loop.measured\['accuracy'\]: .* use another name"):
            loop_of(engine_of(), tmp_path, Writes("accuracy", hook=hook), **evaluates)

    class Replaces:
        def after_step(self, loop, *, loss):
            loop.measured = {"mine": 1.0}

    with pytest.raises(AttributeError, match="cannot be replaced: add values by"):
        loop_of(engine_of(), tmp_path, Replaces())


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("text", "one", "'one' is a str; give a number"),
        ("rows", torch.ones(2), r"is a Tensor of shape \(2,\)"),
        ("none", None, "None is a NoneType"),
        (3, 1.0, "3 is no name"),
    ],
)
def test_other_values_than_numbers_are_refused(tmp_path, name, value, said):
    with pytest.raises(ValueError, match=said):
        loop_of(engine_of(), tmp_path, Writes(name, value=value))


@pytest.mark.parametrize("hook", ["before_save", "after_save"])
def test_a_value_after_the_row_is_refused(tmp_path, hook):
    class Saver:
        def save(self, **given):
            pass

    saves: dict[str, Any] = {"saver": Saver(), "saves": lambda step, ends: True}
    with pytest.raises(ValueError, match=r"loop.measured\['mine'\]: the step's row is written: add it in after_step"):
        loop_of(engine_of(), tmp_path, Writes("mine", hook=hook), **saves)


def test_a_summary_keeps_its_keys(tmp_path):
    with make_reporter(tmp_path) as reporter, pytest.raises(ValueError, match="'steps': two values have this name"):
        reporter.finish(steps=7)
