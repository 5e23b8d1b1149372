"""Evaluations between steps, the best checkpoint, early ends, guards as keys, and answers in full."""

import json
import math
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.experiments import test_alignment as alignment
from tests.ranks import RankFailed
from tests.rl.rollout.runs import REWARD, SMALL, OneRank, config_of, play, rows_of
from ztk.checkpoint.manifest import read_manifest
from ztk.config import ConfigError, Machine, compose
from ztk.core.launch import failure_of
from ztk.experiments import alignment as program
from ztk.experiments import grpo as loop
from ztk.experiments.best import Best
from ztk.experiments.completions import Lines
from ztk.rl.rollout import GuardPolicy, Guards, RolloutStopped
from ztk.rl.rollout.rewards import ANSWER_COLUMNS
from ztk.train import loop as train_loop

ONE = "def one(completions, **kwargs):\n    return [1.0] * len(completions)\n"
SAVES = ("checkpoint.every=1", "checkpoint.keep=1")


def composed(*words: str):
    return compose(*words, output_dir="/run", machine=Machine(gpus=0, cores=2))


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_prompts_are_evaluated_with_rewards_of_their_own(ranks, tmp_path):
    """Every second step, without a change of the losses."""
    (tmp_path / "one.py").write_text(ONE)
    (tmp_path / "train.jsonl").write_text("".join(f'{{"prompt": "{letter}="}}\n' for letter in "abcd"))
    (tmp_path / "eval.jsonl").write_text('{"prompt": "x="}\n{"prompt": "y="}\n')
    small = [word for word in SMALL if not word.startswith("warm_start.")]
    words = (
        "rollout.task=null",
        f"data.path={tmp_path}/train.jsonl",
        "rollout.stop_truncated_above=null",
        "launch.ranks=2",
    )
    (tmp_path / "mine.py").write_text(REWARD)
    evaluated = (
        "rollout.eval_every=2",
        f"data.eval_path={tmp_path}/eval.jsonl",
        f"reward.eval_functions=[{tmp_path}/one.py:one]",
    )
    for name, more in (("plain", ()), ("run", evaluated)):
        given = (f"reward.function={tmp_path}/mine.py:score", "warm_start.steps=0", *small, *words, *more)
        config = compose("task=grpo", *given, output_dir=str(tmp_path / name), machine=Machine(gpus=0, cores=2))
        (tmp_path / name).mkdir()
        ranks(2).run(play, config=config)
    rows = rows_of(tmp_path / "run")
    assert ["eval_reward" in row for row in rows] == [False, True, False, True]
    assert rows[1]["eval_reward"] == 1.0 != rows[1]["reward"] and 0 <= rows[1]["eval_truncated"] <= 1
    known = [{name: value for name, value in row.items() if not name.startswith("eval_")} for row in rows]
    assert known == rows_of(tmp_path / "plain")


@pytest.mark.parametrize("task", ["grpo", "ppo"])
def test_steps_in_which_all_answers_are_cut_learn_nothing(task, ranks, tmp_path):
    """Without a count in the loss there is no division by zero: the losses and gradients are 0. By default the run stops and names the key."""
    (tmp_path / "train.jsonl").write_text("".join(f'{{"prompt": "{letter}="}}\n' for letter in "abcd"))
    (tmp_path / "mine.py").write_text(REWARD)
    small = [word for word in SMALL if not word.startswith(("warm_start.", "rollout.max_tokens"))]
    given = (
        *("rollout.task=null", f"data.path={tmp_path}/train.jsonl", f"reward.function={tmp_path}/mine.py:score"),
        *("warm_start.steps=0", "rollout.max_tokens=1", "rollout.mask_truncated=true", "optimizer.weight_decay=0"),
        *("launch.ranks=2", "zero.stage=2"),
    )
    words = (*small, *given, "rollout.stop_truncated_above=null")
    config = compose(f"task={task}", *words, output_dir=str(tmp_path), machine=Machine(gpus=0, cores=2))
    ranks(2).run(play, config=config)
    rows = rows_of(tmp_path)
    assert len(rows) == 4 and all(row["truncated"] == 1 and row["loss"] == row["grad_norm"] == 0 for row in rows)
    config = compose(f"task={task}", *small, *given, output_dir=str(tmp_path), machine=Machine(gpus=0, cores=2))
    with pytest.raises(RankFailed, match="100% of the answers were cut at rollout.max_tokens=1: raise it"):
        ranks(2).run(play, config=config)


@pytest.mark.parametrize("higher", [True, False])
def test_the_best_checkpoint_is_kept_by_any_metric(higher, ranks, tmp_path):
    words = (
        *SAVES,
        "checkpoint.keep_best=true",
        "checkpoint.metric=eval_length",
        f"checkpoint.higher_is_better={higher}",
    )
    ranks(1).run(play, config=config_of("grpo", *words, "rollout.eval_every=1", folder=tmp_path))
    measured = [row["eval_length"] for row in rows_of(tmp_path)]
    kept = {read_manifest(path).step for path in (tmp_path / "checkpoints").glob("step*")}
    assert 4 in kept and measured[min(kept) - 1] == (max if higher else min)(measured)
    assert {read_manifest(path).step for path in (tmp_path / "reference").glob("step*")} >= kept


def test_a_metric_that_rows_lack_is_named(ranks, tmp_path):
    words = (*SAVES, "checkpoint.keep_best=true", "checkpoint.metric=eval_points")
    (found,) = ranks(1).run(play, config=config_of("grpo", *words, folder=tmp_path), fails=True)
    assert "checkpoint.metric=eval_points: rows have no such value; use one of clipped, " in found["error"]


def test_a_run_ends_when_nothing_improves(ranks, tmp_path):
    """The reward of evaluations is always 1, so the second and third evaluation improve nothing; a resumed run goes on counting."""
    (tmp_path / "one.py").write_text(ONE)
    words = (
        *("rollout.eval_every=1", "train.patience=2", "train.steps=6", *SAVES),
        f"reward.eval_functions=[{tmp_path}/one.py:one]",
    )
    ranks(1).run(play, config=config_of("grpo", *words, folder=tmp_path / "run"))
    assert [row["step"] for row in rows_of(tmp_path / "run")] == [1, 2, 3]
    first = config_of("grpo", *words, folder=tmp_path / "first", train__steps=2)
    ranks(1).run(play, config=first)
    second = config_of("grpo", *words, folder=tmp_path / "second", checkpoint__resume=str(tmp_path / "first"))
    ranks(1).run(play, config=second)
    assert rows_of(tmp_path / "second")[-1]["step"] == 3


def test_sft_keeps_the_best_and_ends_early(ranks, tmp_path):
    """The learning rate makes the loss grow: the first evaluation stays the best."""
    words = (
        *SAVES,
        "checkpoint.keep_best=true",
        "train.patience=2",
        "train.steps=9",
        "train.eval_every=1",
        "optimizer.lr=1.0",
    )
    config = alignment.config_of("sft", *words, folder=tmp_path, ranks=1)
    assert (config.checkpoint.metric, config.checkpoint.higher_is_better) == ("validation_loss", False)
    ranks(1).run(alignment.play, configs=[config])
    measured = [row["validation_loss"] for row in rows_of(tmp_path) if "validation_loss" in row]
    best = measured.index(min(measured))
    assert len(measured) == best + 3 < 9
    kept = {read_manifest(path).step for path in (tmp_path / "checkpoints").glob("step*")}
    assert kept == {best + 1, best + 3}


def test_an_interrupted_run_that_keeps_the_best_is_saved(monkeypatch):
    """The engine is not evaluated, so that the run is short, and its checkpoint contains no rank."""
    config = composed("task=dpo", "train.eval_every=50", "checkpoint.every=50", "checkpoint.keep_best=true")
    saved = []
    saver = SimpleNamespace(save=lambda **given: saved.append(given["metric"]))
    process = SimpleNamespace(mesh=OneRank(), world_size=1, local_world_size=1)
    engine: Any = SimpleNamespace(global_steps=0, process=process, read_metrics=dict, read_module_metrics=dict)

    def stop():
        raise InterruptedError

    interrupts = SimpleNamespace(agree=lambda ends: (True, False), stop=stop)
    monkeypatch.setattr(train_loop, "Interrupts", lambda process, **given: nullcontext(interrupts))
    monkeypatch.setattr(program, "open_saver", lambda config, engine: nullcontext(saver))
    monkeypatch.setattr(program, "seed_dropout", lambda config, **given: None)
    stream: Any = SimpleNamespace(next_step=lambda: SimpleNamespace(num_examples=1, num_tokens=1), state_dict=dict)
    reporter: Any = SimpleNamespace(aside=nullcontext, step=lambda **given: None, past=dict)
    found = program.Measured(loss=torch.zeros(()), sums={"accuracy": torch.ones(())})
    with pytest.raises(InterruptedError):
        program.train(
            config,
            engine=engine,
            stream=stream,
            reporter=reporter,
            train_step=lambda step: found,
            evaluate=dict,
            best=Best(config),
        )
    assert saved == [None]


def test_an_interrupted_rollout_run_is_saved_without_an_evaluation(monkeypatch):
    config = composed("task=grpo", *SMALL, "checkpoint.every=50", "checkpoint.keep_best=true")
    saved = []
    savers = SimpleNamespace(save=lambda *, data_state, extra, metric: saved.append(metric))

    def stop():
        raise InterruptedError

    def no_evaluation(run, *, prompts):
        raise AssertionError("evaluated after a signal")

    interrupts = SimpleNamespace(agree=lambda ends: (True, False), stop=stop)
    monkeypatch.setattr(train_loop, "Interrupts", lambda process, **given: nullcontext(interrupts))
    monkeypatch.setattr(loop, "Savers", lambda run: nullcontext(savers))
    monkeypatch.setattr(loop, "Texts", lambda run, first_step: SimpleNamespace(close=lambda: None))
    monkeypatch.setattr(loop, "seed_dropout", lambda config, **given: None)
    monkeypatch.setattr(loop, "open_evaluation_prompts", lambda config, prompts: prompts)
    monkeypatch.setattr(loop, "evaluate_prompts", no_evaluation)
    run: Any = SimpleNamespace(
        config=config, prompts=1, process=None, metrics={}, best=Best(config), ahead=None, state_dict=dict
    )
    process = SimpleNamespace(world_size=1, local_world_size=1)
    run.actor, run.buffer = (
        SimpleNamespace(global_steps=0, process=process),
        SimpleNamespace(is_used_up=False, position=0),
    )
    run.actor.read_metrics = dict
    run.actor.read_module_metrics = dict
    reporter: Any = SimpleNamespace(aside=nullcontext, step=lambda **given: None, past=dict)
    updated: Any = SimpleNamespace(entropy=1.0, metrics={}, loss=0.0, tokens=1)
    with pytest.raises(InterruptedError):
        loop.train(run, reporter=reporter, fill=lambda run, scored: None, update=lambda run: updated)
    assert saved == [None]


def test_better_is_less_or_more():
    config = composed("task=grpo", *SMALL, "rollout.eval_every=5", "train.patience=2")
    assert (config.checkpoint.metric, config.checkpoint.higher_is_better) == ("eval_reward", True)
    best = Best(config)
    found = [best.reason_to_end({"eval_reward": value}) for value in (0.1, 0.3, 0.3, 0.2)]
    assert found[:3] == [None] * 3
    assert found[3] == "train.patience=2: eval_reward was best at 0.3, 2 evaluations ago"
    assert Best(composed("task=grpo", *SMALL)).metric({}) is None


def test_a_value_that_is_not_finite_is_never_the_best():
    best = Best(composed("task=sft", "train.eval_every=5", "train.patience=2"))
    assert best.metric({"validation_loss": math.nan}) is None and best.metric({"validation_loss": math.inf}) is None
    found = [best.reason_to_end({"validation_loss": value}) for value in (0.5, math.nan, math.nan)]
    assert found[:2] == [None] * 2
    assert found[2] == "train.patience=2: validation_loss was best at 0.5, 2 evaluations ago"


def test_a_metric_that_only_some_rows_have_does_not_end_the_run():
    config = composed("task=grpo", *SMALL, "rollout.eval_every=5", "train.patience=3")
    best, resumed = Best(config), Best(config)
    with pytest.raises(ValueError, match="rows have no such value"):
        best.metric({"loss": 1.0})
    assert best.reason_to_end({"eval_reward": 0.5}) is None
    resumed.load_state_dict(json.loads(json.dumps(best.state_dict())))
    assert resumed.metric({"loss": 1.0}) is None


def test_a_metric_that_never_is_finite_ends_the_run_with_a_reason():
    best = Best(composed("task=sft", "train.eval_every=5", "train.patience=1"))
    said = "train.patience=1: validation_loss was not finite in 1 evaluations"
    assert best.reason_to_end({"validation_loss": math.nan}) == said


def test_a_resumed_run_drops_later_lines_and_a_torn_one(tmp_path):
    path = tmp_path / "completions.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"ste')
    Lines(path, first_step=2)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("task=grpo", "train.patience=2"), "use rollout.eval_every=25, or train.patience=null"),
        (("task=sft", "train.patience=2", "train.eval_every=0"), "use train.eval_every=25"),
        (("task=grpo", "data.eval_path=a.jsonl"), "data.eval_path=.* has no effect here"),
        (("task=grpo", "checkpoint.metric=reward"), "checkpoint.metric=reward has no effect here"),
        (
            ("task=grpo", "rollout.eval_every=1", "reward.eval_functions=[a]"),
            "reward.eval_functions=a: must be FILE.py",
        ),
    ],
)
def test_keys_without_effect_are_refused(words, said):
    with pytest.raises(ConfigError, match=said):
        composed(*words)


def test_thresholds_of_guards_are_keys():
    seen = {"kl": 0.5, "entropy": 1.0, "truncated": 0.95, "excluded": 0.0, "equal_groups": 1.0}
    assert "use rollout.stop_truncated_above=null" in Guards(GuardPolicy()).fault(seen, step=1, max_tokens=8)
    guards = Guards(GuardPolicy(truncated_above=None, equal_steps=2))
    assert guards.fault(seen, step=1, max_tokens=8) is None
    assert "for 2 steps all answers" in guards.fault(seen, step=2, max_tokens=8)
    guards = Guards(GuardPolicy(truncated_above=None, equal_steps=None))
    assert [guards.fault(seen, step=step, max_tokens=8) for step in range(9)] == [None] * 9


def test_a_run_that_a_guard_stops_shows_its_reason_alone():
    failure = failure_of(RolloutStopped("step 1: 100% of the answers were cut"), rank=0)
    assert not failure.trace and str(failure) == "rank 0: RolloutStopped: step 1: 100% of the answers were cut"
    assert "ValueError" in failure_of(ValueError("x"), rank=0).trace


LOGS = """
def letters(completions, log_extra, **kwargs):
    log_extra("upper", [text.upper() for text in completions])
    return [float(len(text)) for text in completions]

def none(completions, **kwargs):
    return [None] * len(completions)
"""


def test_all_answers_are_written_in_full(ranks, tmp_path):
    """Of all ranks in the order of their numbers, with each function's reward, as lines and as a table; a resumed run writes none twice."""
    parquet = pytest.importorskip("pyarrow.parquet")
    (tmp_path / "mine.py").write_text(LOGS)
    words = (
        "rollout.save_completions=true",
        "rollout.completions_file=answers.parquet",
        "checkpoint.every=2",
        f"reward.functions=[{tmp_path}/mine.py:letters,{tmp_path}/mine.py:none]",
    )

    def config(steps: int, **changes):
        found = config_of("grpo", *words, folder=tmp_path / "run", ranks=2, train__steps=steps, **changes)
        found.reward.function = None
        return found

    ranks(2).run(play, config=config(2))
    ranks(2).run(play, config=config(4, checkpoint__resume="auto"))
    rows = lines(tmp_path / "run" / "completions.jsonl")
    assert len(rows) == 2 * 16 and sorted({row["step"] for row in rows}) == [1, 3]
    for row in rows:
        assert row["rewards.letters"] == row["reward"] and row["rewards.none"] is None
        assert row["upper"] == row["answer"].upper()
    assert {name for name in rows[0] if not name.startswith("rewards.")} - {"upper"} <= set(ANSWER_COLUMNS)
    groups = [row["prompt"] for row in rows[:16]]
    assert groups == [prompt for prompt in dict.fromkeys(groups) for _ in range(4)]
    assert parquet.read_table(tmp_path / "run" / "answers.parquet").to_pylist() == rows


@pytest.mark.parametrize("name", ["answers.csv", "in/answers.parquet"])
def test_another_file_of_answers_is_refused(name):
    words = ("task=grpo", "rollout.save_completions=true", f"rollout.completions_file={name}")
    with pytest.raises(ConfigError, match="must be a name that ends in .parquet"):
        compose(*words, output_dir="/run", machine=Machine(gpus=0, cores=2))
