"""`ztk.Loop`: values of hooks in the step's row."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ztk
from tests.parallel.topology.runs import Strategy, arranged, make_engine, train_step
from tests.report.test_report import make_reporter


class Squares(nn.Module):
    """Returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).square().mean()


def engine_of(model: nn.Module | None = None, **options: Any) -> ztk.Engine:
    torch.manual_seed(0)
    options = {
        "optimizer": ztk.OptimizerPolicy(lr=0.1),
        "precision": ztk.PrecisionPolicy(dtype=torch.float32),
    } | options
    return ztk.parallelize(model or Squares(), process=ztk.Process.start(device="cpu"), **options)


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


class Logs(Squares):
    """Logs in its forward, of which a part is repeated in the backward for inputs of 1. repeats: in torch's reentrant or its other way."""

    def __init__(self, *, repeats: bool | None = None) -> None:
        super().__init__()
        self.repeats = repeats

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ztk.log("mine.mean", x.mean())
        plain = self.repeats is None or x.detach().mean() > 1
        hidden = self.inner(x) if plain else checkpoint(self.inner, x, use_reentrant=self.repeats)
        return hidden.square().mean()

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        ztk.log("mine.parts", x.detach().mean())
        out = self.layer(x)
        if out.requires_grad:
            out.register_hook(lambda gradient: ztk.log("mine.hook", gradient.sum() * 0 + 2))
        return out


@pytest.mark.parametrize("repeats", [None, False, True])
def test_values_of_a_model_are_means_over_calls(tmp_path, repeats):
    """Over two micro-batches. A repeated forward does not count again, hooks of gradients do."""
    torch.manual_seed(0)
    engine = engine_of(Logs(repeats=repeats), accumulation_steps=2)

    class Hook:
        def after_step(self, loop, *, loss):
            ztk.log("mine.step", loop.step)

    xs = [torch.full((2, 4), value, requires_grad=True) for value in (1.0, 4.0)]
    rows = loop_of(engine, tmp_path, Hook(), train_step=lambda step: engine.train_batch([(x,) for x in xs]))
    assert [row["mine.step"] for row in rows] == [1, 2]
    assert [row["mine.mean"] for row in rows] == [2.5, 2.5]
    assert [row["mine.parts"] for row in rows] == [2.5, 2.5] and rows[0]["mine.hook"] == 2.0


def test_values_of_an_evaluation_have_a_name_of_their_own(tmp_path):
    engine = engine_of(Logs())
    x = torch.ones(2, 4)

    def evaluate() -> float:
        return engine.eval_batch([(3 * x,)]).item()

    rows = loop_of(engine, tmp_path, evaluate=evaluate, eval_every=1, steps=2)
    assert rows[0]["validation_mine.mean"] == 3.0 and rows[0]["mine.mean"] == 3.5


def test_log_outside_of_a_loop_does_nothing_and_refuses_inside(tmp_path):
    assert ztk.log("lr", "no number") is None
    for name, value, said in (
        ("lr", 1.0, "ztk.log: 'lr' is a column of ztk's"),
        ("mine", "one", r"ztk.log\('mine', ...\) got a str: give a number"),
        ("mine", torch.ones(2), r"got a Tensor of shape \(2,\)"),
        (None, 1.0, "None is no name"),
    ):

        class Hook:
            def before_step(self, loop, name=name, value=value):
                ztk.log(name, value)

        with pytest.raises(ValueError, match=said):
            loop_of(engine_of(), tmp_path, Hook())

    class Twice:
        def after_step(self, loop, *, loss):
            ztk.log("mine", 1.0)
            loop.measured["mine"] = 2.0

    with pytest.raises(ValueError, match="'mine': two values have this name"):
        loop_of(engine_of(), tmp_path, Twice())


def logs_of_rank(process: ztk.Process, *, pipeline: bool, folder: str) -> list[dict]:
    """Every rank logs its number, and the last layer, which one stage of a pipeline has, another value."""
    placed = arranged(process, topology=ztk.Topology(pipeline=2) if pipeline else ztk.Topology())
    engine = make_engine(placed, strategy=Strategy(stage=0 if pipeline else 3))
    for name, module in engine.module.named_modules():
        if name == "norm":
            module.register_forward_hook(lambda *given: ztk.log("mine.norm", 7.0))

    class Hook:
        def after_step(self, loop, *, loss):
            ztk.log("mine.rank", process.rank)

    with make_reporter(Path(folder), total_steps=2, comm=process.comm) as reporter:
        step = lambda number: torch.tensor(train_step(engine, step=number))  # noqa: E731
        ztk.Loop(engine, train_step=step, steps=2, reporter=reporter, callbacks=[Hook()]).run()
        reporter.finish()
    engine.close()
    return [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("pipeline", [False, True])
def test_values_are_means_over_ranks(ranks, tmp_path, pipeline):
    rows, _ = ranks(2).run(logs_of_rank, pipeline=pipeline, folder=str(tmp_path))
    assert [(row["mine.rank"], row["mine.norm"]) for row in rows] == [(0.5, 7.0)] * 2


def test_a_summary_keeps_its_keys(tmp_path):
    with make_reporter(tmp_path) as reporter, pytest.raises(ValueError, match="'steps': two values have this name"):
        reporter.finish(steps=7)


@pytest.mark.parametrize(
    "loss_of, fault",
    [
        (lambda loss: loss.detach(), "the loss has no gradient: no trained parameter takes part in it"),
        (lambda loss: torch.tensor(loss.item()), "the loss has no gradient"),
        (lambda loss: loss.item(), "the loss is no tensor but a float: return the tensor itself, without .item()"),
        (lambda loss: loss * torch.ones(2, 3), r"the loss has the shape \[2, 3\]: return a scalar"),
    ],
)
def test_a_loss_without_a_gradient_names_the_fix(loss_of, fault):
    engine = engine_of()
    with pytest.raises(ValueError, match=fault):
        engine.backward(loss_of(engine(torch.ones(2, 4))))
    engine.close()


class _EndsOn:
    def __init__(self, process: ztk.Process, *, step: int, ranks: tuple[int, ...], hook: str) -> None:
        def end(loop: ztk.Loop, **given: Any) -> None:
            if loop.step == step and process.rank in ranks:
                loop.ended_by = "enough"

        setattr(self, hook, end)


def _ended(process: ztk.Process, *, ranks: tuple[int, ...], hook: str) -> tuple[str | None, int]:
    engine = ztk.parallelize(Squares(), process=process, optimizer=ztk.OptimizerPolicy(lr=0.1))
    loop = ztk.Loop(
        engine,
        train_step=lambda step: engine.train_batch([(torch.ones(2, 4),)]),
        steps=6,
        evaluate=lambda: 1.0,
        eval_every=2,
        callbacks=[_EndsOn(process, step=4, ranks=ranks, hook=hook)],
    )
    try:
        return loop.run(), loop.step
    except ValueError as error:
        return str(error), loop.step
    finally:
        engine.close()


@pytest.mark.parametrize("hook", ["before_step", "after_step", "after_evaluation"])
def test_an_end_on_one_rank_is_refused_on_all(ranks, hook):
    (first, second), (reason, step) = (
        ranks(2).run(_ended, ranks=(1,), hook=hook),
        ranks(2).run(_ended, ranks=(0, 1), hook=hook)[0],
    )
    assert "step 4: a hook has set loop.ended_by on another rank, and not on every rank" in first[0]
    assert "step 4: a hook has set loop.ended_by to 'enough', and not on every rank" in second[0]
    assert (reason, step) == ("enough", 4)
