"""Research from outside: `examples/research` through the command line, with sweeps, resumes, plans and text of own models."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.commands import run_command
from ztk.config import compose
from ztk.experiments.plan import find_fixes
from ztk.experiments.pretrain import build_model
from ztk.experiments.user_objects import own_callbacks
from ztk.parallel.pipeline.stages import layered
from ztk.report.status import read_summary

RESEARCH = Path(__file__).parents[2] / "examples" / "research"
OWN = ("--config-dir", str(RESEARCH / "conf"))
SMALL = ("logger=disabled", "train.steps=3", "train.micro_batch_size=2", "train.eval_batches=1", "data.seq_len=16")
BARS = (
    *SMALL[:-1],
    "scheduler=constant",
    "scheduler.warmup_steps=0",
    "model=vit",
    "data=bars",
    "precision=fp32",
    "launch.threads=1",
)


def run(folder: Path, *words: str, environment: dict[str, str] | None = None) -> dict:
    last = {word.partition("=")[0]: word for word in words}  # a key has one value
    done = run_command(*OWN, *last.values(), f"hydra.run.dir={folder}", cwd=folder.parent, environment=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return read_summary(folder) | {"printed": done.stdout}


def test_an_own_key_is_swept_and_reported(tmp_path):
    words = (
        *SMALL[:3],
        "train.quick=true",
        "data.seq_len=16",
        "experiment=conv",
        "user.width=8,12",
        "zero=stage0,stage3",
        "launch.ranks=2",
    )
    done = run_command("-m", *OWN, *words, f"hydra.sweep.dir={tmp_path / 'sweep'}", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    from ztk.report import load

    runs, _ = load(tmp_path / "sweep")
    assert set(runs["user.width"]) == {8, 12} and set(runs["model._target_"]) == {"conv_lm.ConvLM"}
    digests = runs.groupby("user.width")["loss_digest"].nunique()
    assert (digests == 1).all() and runs["loss_digest"].nunique() == 2  # stages agree, widths do not
    assert "user.width=12 zero=stage3" in done.stdout


def test_images_resume_at_another_layout_with_the_same_numbers(tmp_path):
    whole = run(tmp_path / "whole", *BARS, "launch.ranks=1", "train.accumulation_steps=2")
    run(
        tmp_path / "part", *BARS, "launch.ranks=2", "zero=stage3", "offload=nvme", "checkpoint.every=2", "train.steps=2"
    )
    rest = ("zero=stage1", "launch.ranks=1", "train.accumulation_steps=2", f"checkpoint.resume={tmp_path / 'part'}")
    resumed = run(tmp_path / "rest", *BARS, *rest)
    assert whole["validation_loss"] == pytest.approx(resumed["validation_loss"], rel=1e-5)
    assert whole["parameters"] > 10_000


def test_a_plan_of_an_own_model_counts_its_parameters(tmp_path):
    planned = run(tmp_path / "plan", "task=plan", "experiment=conv", "zero=stage3", "launch.ranks=4", "user.width=8")
    made = json.loads((tmp_path / "plan" / "plan.json").read_text())
    assert made["parameters"] == 256 * 8 + 2 * (5 * 8 * 8 + 8) + 8 * 256 + 256
    assert "per step" in planned["printed"]


def test_objects_that_cannot_act_are_refused(tmp_path):
    with pytest.raises(ValueError, match="callbacks.mine=fractions.Fraction: has none of the hooks before_step, "):
        own_callbacks(compose("callbacks.mine._target_=fractions.Fraction", output_dir=tmp_path))
    done = run_command(*OWN, *SMALL, "optimizer=normed", "optimizer.elementwise=true", cwd=tmp_path)
    assert done.returncode == 2 and "optimizer=Normed: it is not elementwise" in done.stderr


@pytest.mark.parametrize("optimizer", ["optimizer=normed", "optimizer._target_=torch.optim.LBFGS"])
def test_an_optimizer_of_full_parameters_has_equal_losses_at_every_stage(tmp_path, optimizer):
    """LBFGS also evaluates the loss again in its step."""
    words = (*SMALL, "experiment=conv", "user.width=8", "launch.ranks=2", "precision=fp32", optimizer)
    words += ("optimizer=own",) if "_target_" in optimizer else ()
    first = run(tmp_path / "first", *words, "zero=stage0")
    second = run(tmp_path / "second", *words, "zero=stage3", "offload=nvme")
    assert first["loss_digest"] == second["loss_digest"] and first["first_loss"] != first["final_loss"]


def test_an_own_schedule_and_callback_act_and_are_recorded(tmp_path):
    words = (
        "precision=fp32",
        "experiment=paced",
        "model=conv",
        "loss=smooth",
        "user.width=8",
        "train.steps=6",
        "train.eval_every=1",
    )
    ended = run(tmp_path / "run", *SMALL, *words, "optimizer.lr=0", "launch.ranks=2")
    assert ended["ended_by"] == "2 validations without a smaller loss" and ended["steps"] == 3
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["patience.worse"] for row in rows] == [0, 1, 2]
    run(tmp_path / "rates", *SMALL, *words, "optimizer=sign", "optimizer.lr=0.01", "callbacks.patience.evaluations=9")
    rows = [json.loads(line) for line in (tmp_path / "rates" / "metrics.jsonl").read_text().splitlines()]
    assert [row["lr"] for row in rows] == pytest.approx([0.01, 0.01, 0.005, 0.005, 0.0025, 0.0025])


@pytest.mark.parametrize("folder", [False, True])
@pytest.mark.parametrize("word", ["~callbacks", "callbacks=null", "~callbacks.patience"])
def test_a_callback_of_an_experiment_can_be_planned_and_taken_out(word, folder, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(RESEARCH)
    folders = [RESEARCH / "conf"]
    if folder:  # a folder of options makes `callbacks` a group for Hydra
        folders.append(tmp_path / "conf")
        (tmp_path / "conf" / "callbacks").mkdir(parents=True)
        (tmp_path / "conf" / "callbacks" / "some.yaml").write_text("some: {_target_: pace.Patience}\n")
    kept = compose("experiment=paced", "task=plan", output_dir=tmp_path, folders=folders)
    assert list(kept.own["callbacks"]) == ["patience"]
    without = compose("experiment=paced", word, output_dir=tmp_path, folders=folders)
    assert "callbacks" not in without.own and "scheduler" in without.own
    assert compose("experiment=null", output_dir=tmp_path, folders=folders).own == {}


def test_taking_out_names_its_faults(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(RESEARCH)

    def fault(*words: str) -> str:
        with pytest.raises(ValueError) as raised:
            compose("experiment=paced", *words, output_dir=tmp_path, folders=[RESEARCH / "conf"])
        return str(raised.value)

    assert "~callbacks and callbacks.more._target_=pace.Patience: exclude each other" in fault(
        "~callbacks", "callbacks.more._target_=pace.Patience"
    )
    assert "callbacks.patients" in fault("~callbacks.patients")
    assert "a run has one option of this group" in fault("~model")


def test_an_own_task_uses_the_loop_as_a_library(tmp_path):
    words = ("task._target_=copying.main", "task.longest=6", "zero=stage3", "offload=nvme", "launch.ranks=2")
    ended = run(tmp_path / "run", *SMALL, *words)
    assert ended["steps"] == 3 and ended["validation_loss"] > 0
    again = run(tmp_path / "again", *SMALL, *words[:2], "zero=stage0", "launch.ranks=2")
    assert again["loss_digest"] == ended["loss_digest"]


def test_a_plan_of_own_data_prints_and_counts_tokens_where_it_has_them(tmp_path):
    words = ("task=plan", "hardware=h100", "precision=bf16", "launch.ranks=2")
    bars = run(tmp_path / "bars", *words, "model=vit", "data=bars")
    made = json.loads((tmp_path / "bars" / "plan.json").read_text())
    assert "MFU" in bars["printed"] and "tokens per second" not in bars["printed"]
    assert made["mfu"] > 0 and "tokens_per_second_per_gpu" not in made
    words += ("experiment=conv", "user.width=8", "train.micro_batch_size=4", "plan.tokens=1000000")
    text = run(tmp_path / "text", *words, "data.seq_len=16")
    rows = run(tmp_path / "rows", *words, "data._target_=rows.Rows", "data.seq_len=16", environment=_rows(tmp_path))
    assert "tokens per second and GPU" in text["printed"] and text["printed"] == rows["printed"]


@pytest.mark.parametrize("word", ["plan.tokens=1000", "plan.budget_hours=5", "plan.search=true"])
def test_a_plan_of_items_refuses_prices_and_searches_by_tokens(word, tmp_path):
    words = ("model=vit", "data=bars", "task=plan", "hardware=h100", word)
    done = run_command(*OWN, *words, cwd=tmp_path)
    assert done.returncode == 2 and word.partition("=")[0] in done.stderr and "vit.Bars" in done.stderr


def test_fixes_of_a_plan_have_the_own_options(tmp_path, monkeypatch):
    words = ("task=plan", "experiment=conv", "user.width=64", "hardware=h100", "train.micro_batch_size=64")
    words += ("hardware.capacity_bytes=20000000", "hardware.reserve_bytes=0", "launch.ranks=2")
    monkeypatch.syspath_prepend(RESEARCH)
    monkeypatch.setenv("ZTK_CONFIG_DIRS", str(RESEARCH / "conf"))
    config = compose(*words, output_dir=tmp_path, folders=[RESEARCH / "conf"])
    (tmp_path / "overrides.json").write_text(json.dumps(dict(word.split("=") for word in words)))
    assert find_fixes(config)[0].plan.fits


def _rows(folder: Path) -> dict[str, str]:
    """Writes a module with a dataset of tokens and targets, and returns the environment in which it is found."""
    text = """
        import torch

        class Rows(torch.utils.data.Dataset):
            def __init__(self, seq_len):
                self.seq_len = seq_len
            def __len__(self):
                return 64
            def __getitem__(self, index):
                return torch.zeros(self.seq_len, dtype=torch.int64), torch.zeros(self.seq_len, dtype=torch.int64)
    """
    (folder / "rows.py").write_text(textwrap.dedent(text))
    return {"PYTHONPATH": str(folder)}


DRAWS = """
import random

import numpy
import torch
from torch.utils.data import Dataset


def drawn(size):
    return random.randrange(size), int(numpy.random.randint(size)), int(torch.randint(size, ()))


class Noisy(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        tokens = torch.tensor([index, *drawn(256)])
        return tokens[:-1], tokens[1:]


class Stream:
    def __init__(self, size=256):
        self.size = size

    def next_batch(self):
        tokens = torch.tensor([drawn(self.size)] * 2)
        return tokens[:, :-1], tokens[:, 1:]

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        drawn(self.size)
"""


@pytest.mark.parametrize("data", ["Noisy", "Stream"])
def test_data_that_draw_go_on_at_a_resume_as_without_one(tmp_path, data):
    (tmp_path / "mine.py").write_text(DRAWS)
    words = ("model=tiny", "model.layers=1", "precision=fp32", f"data._target_=mine.{data}", "launch.ranks=2")
    small = ("logger=disabled", "train.micro_batch_size=2", "train.quick=true", "train.eval_every=0", *words)

    def ran(name: str, *more: str) -> str:
        done = run_command(*small, *more, f"hydra.run.dir={tmp_path / name}", cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        return read_summary(tmp_path / name)["loss_digest"]

    whole = ran("whole", "train.steps=4", "checkpoint.every=2")
    assert ran("rest", f"checkpoint.resume={tmp_path / 'whole' / 'checkpoints' / 'step-000002'}") == whole


_CUT = """
    import torch
    import torch.nn.functional as F
    from torch import nn

    PLAN = {"embedding": "vocabulary", "layers.*.first": "column", "layers.*.second": "row", "output": "head"}

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 16)

        def forward(self, x):
            return x + self.second(torch.relu(self.first(x)).flip(0).flip(0))

    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.output = nn.Embedding(256, 16), nn.Linear(16, 256)
            self.layers = nn.ModuleList(Block() for _ in range(2))

        def forward(self, tokens):
            x = self.embedding(tokens)
            for layer in self.layers:
                x = layer(x)
            return self.output(x)

    class Planned(Plain):
        tensor_plan = PLAN

    class Misspelt(Plain):
        tensor_plan = PLAN | {"layers.*.third": "column"}

    def loss(outputs, targets):
        return F.cross_entropy(outputs.float().flatten(0, 1), targets.flatten())
"""


def test_tensor_plans_of_own_models_act_and_name_their_faults(tmp_path):
    """The plan is a class attribute or an option of the user's group topology; a head's outputs are whole for the user's loss."""
    (tmp_path / "cut.py").write_text(textwrap.dedent(_CUT))
    (tmp_path / "conf" / "topology").mkdir(parents=True)
    plan = "  embedding: vocabulary\n  layers.*.first: 'column:4'\n  layers.*.second: 'row:4'\n  output: head\n"
    (tmp_path / "conf" / "topology" / "cut.yaml").write_text(f"tensor: 2\nplan:\n{plan}")
    (tmp_path / "conf" / "topology" / "odd.yaml").write_text("tensor: 2\nplan: {layers.*.first: diagonal}\n")

    def train(name: str, *words: str) -> subprocess.CompletedProcess[str]:
        last = {word.partition("=")[0]: word for word in (*SMALL, "precision=fp32", "loss._target_=cut.loss", *words)}
        folder = ("--config-dir", str(tmp_path / "conf"), f"hydra.run.dir={tmp_path / name}")
        return run_command(*last.values(), *folder, "launch.threads=1", cwd=tmp_path)

    done = [
        train("one", "model._target_=cut.Plain", "launch.ranks=1"),
        train("two", "model._target_=cut.Planned", "topology=tp2"),
        train("yaml", "model._target_=cut.Plain", "topology=cut", "zero=stage3"),
    ]
    assert all(one.returncode == 0 for one in done), "".join(one.stdout + one.stderr for one in done)
    one, two, yaml = (read_summary(tmp_path / name) for name in ("one", "two", "yaml"))
    assert two["final_loss"] == pytest.approx(one["final_loss"], rel=1e-5)
    assert yaml["final_loss"] == pytest.approx(one["final_loss"], rel=1e-5)
    assert two["loss_digest"] != one["loss_digest"] or two["final_loss"] == one["final_loss"]
    refused = train("odd", "model._target_=cut.Plain", "topology=odd")
    assert refused.returncode == 2 and "tensor plan layers.*.first=diagonal: must be one of column," in refused.stderr
    failed = train("misspelt", "model._target_=cut.Misspelt", "topology=tp2")
    assert failed.returncode == 1 and "tensor plan layers.*.third: the model has no such module" in failed.stderr
    with pytest.raises(ValueError, match="topology.plan: model=tiny has a tensor plan"):
        compose("topology=cut", output_dir=tmp_path, folders=[tmp_path / "conf"])


_STAGED = """
    import torch
    import torch.nn.functional as F
    from torch import nn
    from ztk.parallel.pipeline import LayerSpec, PipelineModule

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 16)

        def forward(self, x):
            return x + self.second(torch.relu(self.first(x)))

    class Plain(nn.Module):
        def __init__(self, tied=False):
            super().__init__()
            self.output, self.embedding = nn.Linear(16, 256, bias=False), nn.Embedding(256, 16)
            self.layers = nn.ModuleList(Block() for _ in range(3))
            if tied:
                self.output.weight = self.embedding.weight

        def forward(self, tokens, unused=None):
            x = self.embedding(tokens)
            for layer in self.layers:
                x = layer(x)
            return self.output(x)

    class Staged(Plain):
        pipeline_plan = ["embedding", "layers", "output"]

    class Cut(Staged):
        tensor_plan = {"embedding": "vocabulary", "layers.*.first": "column", "layers.*.second": "row"}

    class CutMisspelt(Staged):
        tensor_plan = {"layers.*.third": "column"}

    class Scaled(Staged):
        def forward(self, tokens):
            x = self.embedding(tokens)
            for layer in self.layers:
                x = layer(x) * 0.5
            return self.output(x)

    class Short(Plain):
        pipeline_plan = ["embedding", "layers.0", "layers.1", "output"]

    class Deciding(Staged):
        def forward(self, tokens):
            return super().forward(tokens) if tokens.sum() > 0 else None

    class Biased(Staged):
        def __init__(self):
            super().__init__()
            self.bias = nn.Parameter(torch.zeros(1))

    class Misspelt(Plain):
        pipeline_plan = ["embeding", "layers", "output"]

    class Twice(Plain):
        pipeline_plan = ["embedding", "layers", "layers.1", "output"]

    class Losing(Staged):
        def forward(self, batch):
            return loss(super().forward(batch[0]), batch[1])

    def sequential():
        return nn.Sequential(nn.Embedding(256, 16), Block(), Block(), Block(), nn.Linear(16, 256))

    def listed(loss_fn=None):
        layers = [LayerSpec(nn.Embedding, 256, 16), *(LayerSpec(Block) for _ in range(3)), LayerSpec(nn.Linear, 16, 256)]
        return PipelineModule(layers, loss_fn=loss_fn)

    def loss(outputs, targets):
        return F.cross_entropy(outputs.float().flatten(0, 1), targets.flatten())

    def losing():
        return listed(loss_fn=loss)

    class Weighing(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(256))

        def forward(self, outputs, targets):
            return loss(outputs * self.weight, targets)
"""


def stage(folder: Path, name: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Trains a model of `_STAGED` for some steps."""
    (folder / "staged.py").write_text(textwrap.dedent(_STAGED))
    chosen = (
        *SMALL,
        "precision=fp32",
        "train.accumulation_steps=2",
        "loss._target_=staged.loss",
        "launch.threads=1",
        *words,
    )
    last = {word.partition("=")[0]: word for word in chosen}
    given = [word for word in last.values() if word != "loss._target_=null"]
    return run_command(*given, f"hydra.run.dir={folder / name}", cwd=folder)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("Staged", ("+model.tied=true", "loss._target_=staged.Weighing")),
        ("Staged", ("topology.partition=products", "recompute=full")),  # the second stage has no block
        ("sequential", ("topology.schedule=interleaved", "topology.virtual_stages=2")),
        ("listed", ("recompute=full",)),
        ("losing", ("loss._target_=null",)),
    ],
)
def test_pipeline_stages_of_own_models_train_as_one_rank(tmp_path, model, words):
    target = f"model._target_=staged.{model}"
    schedule = [word for word in words if word.startswith("topology.")]
    rest = [word for word in words if word not in schedule]
    done = [
        stage(tmp_path, "one", target, *rest, "launch.ranks=1"),
        stage(tmp_path, "two", target, *rest, *schedule, "topology=pp2", "zero=stage3"),
    ]
    assert all(one.returncode == 0 for one in done), "".join(one.stdout + one.stderr for one in done)
    one, two = (read_summary(tmp_path / name) for name in ("one", "two"))
    assert two["world_size"] == 2 and two["parameters"] == one["parameters"]
    assert two["first_loss"] == pytest.approx(one["first_loss"], rel=1e-6)
    assert two["final_loss"] == pytest.approx(one["final_loss"], rel=1e-5) and one["final_loss"] < one["first_loss"]


def test_tensor_plans_of_own_models_act_on_stages_without_some_of_their_modules(tmp_path):
    words = ("task=plan", "topology=tp2_pp2", "topology.partition=products", "recompute=full")
    done = stage(tmp_path, "cut", "model._target_=staged.Cut", *words)
    assert done.returncode == 0, done.stderr
    refused = stage(tmp_path, "odd", "model._target_=staged.CutMisspelt", *words)
    assert "tensor plan layers.*.third: the model has no such module" in refused.stderr


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("Plain", "give the class an attribute pipeline_plan with the names of its modules"),
        (
            "Scaled",
            "its forward has the operation mul in place of the call of layers.1 with the output of the module before",
        ),
        ("Short", "its forward has a call of layers.2.first in place of the call of output"),
        ("Deciding", "its forward depends on values or sizes of its inputs"),
        ("Biased", "the parameters bias belong to none of its modules"),
        ("Misspelt", "the model has no module embeding; it has output, embedding, layers"),
        ("Twice", "layers.1 is there twice"),
        ("Losing", "a stage runs single modules of the model, so that its forward cannot compute the loss"),
    ],
)
def test_own_models_that_stages_cannot_run_are_refused(tmp_path, monkeypatch, model, message):
    (tmp_path / "staged.py").write_text(textwrap.dedent(_STAGED))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "staged", raising=False)
    words = ["loss._target_=staged.loss"] if model != "Losing" else []
    config = compose(f"model._target_=staged.{model}", *words, "topology=pp2", output_dir=tmp_path)
    with pytest.raises(ValueError, match=message):
        layered(build_model(config)[0])
