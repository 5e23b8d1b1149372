"""`rollout.staleness=1`: a rollout is drawn with the weights from before the updates that run meanwhile, and the loss is corrected for it."""

import importlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from tests.rl.rollout.runs import config_of, play, rows_of, shortened
from tests.rl.rollout.test_environments import LONG
from ztk.config import ConfigError, Machine, compose
from ztk.core.policies.rollout import CorrectionName, RolloutEngineName, RolloutIdentity
from ztk.core.runtime import Process
from ztk.experiments import grpo, policies, rollouts
from ztk.experiments.grpo import update_policy
from ztk.experiments.models import full_values
from ztk.experiments.policy_run import open_run
from ztk.experiments.prompts import Prompts
from ztk.experiments.rollouts import drawing_of
from ztk.report import plot
from ztk.rl.rollout import Ahead, CachedRollouts, EnvironmentFault

PLAYED = ("rollout.environment=tests.rl.rollout.played:Twice", *LONG)


def config_ahead(*overrides: str, folder, lr: float = 3e-3, **options):
    config = config_of("grpo", "rollout.staleness=1", *overrides, folder=folder, **options)
    config.optimizer.lr, config.rollout.stop_truncated_above = lr, None
    if overrides:
        config.reward.function = None
    return config


@contextmanager
def before_draws_ahead(call: Callable[[], None]):
    """Calls a function on the thread that draws ahead, after the weights are copied and before each draw."""
    turns = CachedRollouts.turns

    @contextmanager
    def with_call(self, **options):
        with turns(self, **options) as draws:

            def draw(*given):
                if threading.current_thread().name == "ztk-ahead":
                    call()
                return draws.draw(*given)

            yield replace(draws, draw=draw)

    CachedRollouts.turns = with_call
    try:
        yield
    finally:
        CachedRollouts.turns = turns


def play_late(process: Process, *, config) -> list[tuple[bool, bool]]:
    """A run that draws each rollout ahead, after the first of the preceding updates. Returns whether its tokens equal draws from the weights
    before these updates, and draws from the weights after them."""
    task = importlib.import_module(config.task.module)
    grpo.warm_start, rollouts.EVALUATED = shortened, 1
    plot.plot_run = lambda folder: None
    updated, snapshots, drawn = threading.Event(), [], []

    def after_an_update():
        assert updated.wait(60), "the run did not update while the next rollout was drawn"

    def fill(run, scored):
        task.fill(run, scored)
        updated.clear()
        snapshots.append(full_values(run.actor))
        drawn.append(run.buffer.samples)

    def update(run):
        found = update_policy(run)
        updated.set()
        return found

    with before_draws_ahead(after_an_update):
        grpo.run_task(config, process=process.arrange(policies.topology(config)), fill=fill, update=update)
    found = []
    for number, samples in enumerate(drawn):
        equal = []
        for values in (snapshots[max(0, number - 1)], snapshots[number]):
            run = open_run(
                config,
                process=process,
                prompts=Prompts(config),
                first_values=values,
                lr_table=policies.learning_rates(config),
            )
            run.rollouts = number
            equal.append(torch.equal(drawing_of(run)().samples.tokens, samples.tokens))
            run.close()
        found.append(tuple(equal))
    return found


def test_answers_are_drawn_during_updates_with_the_weights_from_before_them(ranks, tmp_path):
    [found] = ranks(1).run(play_late, config=config_ahead(folder=tmp_path, train__steps=6))
    assert found == [(True, True), (True, False), (True, False)]
    rows = rows_of(tmp_path)
    assert (
        abs(rows[0]["rollout_k3"]) < 1e-9 and rows[2]["rollout_k3"] > 1e-6
    )  # the second rollout is drawn before any update
    assert rows[4]["rollout_k3"] > 1e-6 and rows[4]["rollout_outside"] > 0


def play_waiting(process: Process, *, config) -> dict:
    """A run that waits for each rollout that is drawn ahead."""
    start = Ahead.start

    def and_wait(self, draw, **options):
        start(self, draw, **options)
        self.wait()

    Ahead.start = and_wait
    try:
        return play(process, config=config)
    finally:
        Ahead.start = start


@pytest.mark.parametrize(("overrides", "world_size"), [((), 1), (PLAYED, 2)], ids=["answers", "environment"])
def test_a_resumed_run_and_one_that_waits_equal_the_one_that_overlaps(overrides, world_size, ranks, tmp_path):
    options = {"ranks": world_size, "train__steps": 6, "checkpoint__every": 3}
    straight = ranks(world_size).run(play, config=config_ahead(*overrides, folder=tmp_path / "a", **options))
    waiting = ranks(world_size).run(play_waiting, config=config_ahead(*overrides, folder=tmp_path / "b", **options))
    saved = str(tmp_path / "a" / "checkpoints" / "step-000003")
    config = config_ahead(*overrides, folder=tmp_path / "c", checkpoint__resume=saved, **options)
    resumed = ranks(world_size).run(play, config=config)
    rows = rows_of(tmp_path / "a")
    assert rows_of(tmp_path / "b") == rows and rows_of(tmp_path / "c") == rows[3:]
    digests = {result[0]["summary"]["loss_digest"] for result in (straight, waiting, resumed)}
    assert len(digests) == 1 and rows[-1]["loss"] != rows[0]["loss"]


def play_failing(process: Process, *, config) -> tuple[str, float]:
    """The second rollout that is drawn ahead fails; the error, and the seconds from there to the end of the run."""
    failed, calls = [], []

    def fails():
        calls.append(1)
        if len(calls) == 2:
            failed.append(time.monotonic())
            raise FloatingPointError("the policy's logits are not finite")

    with before_draws_ahead(fails):
        found = play(process, config=config, fails=True)
    return found["error"], time.monotonic() - failed[0]


def test_an_exception_of_the_thread_ends_the_run_with_its_cause(ranks, tmp_path):
    config = config_ahead(folder=tmp_path, train__steps=40)
    [(error, seconds)] = ranks(1).run(play_failing, config=config)
    assert error == "FloatingPointError: the policy's logits are not finite"
    assert seconds < 5 and len(rows_of(tmp_path)) <= 4  # the fault is raised after the step during which it happened


def play_stopped(process: Process, *, config) -> tuple[str, list[str]]:
    """The first update fails while the next rollout is drawn, which never ends. Returns the error and the threads that are left."""
    update, drawing = grpo.update_policy, threading.Event()

    def endless():
        while True:
            drawing.set()
            time.sleep(0.01)

    def failing(run):
        assert drawing.wait(60), "the next rollout is not drawn during updates"
        raise ArithmeticError("no update")

    grpo.update_policy = failing
    try:
        with before_draws_ahead(endless):
            found = play(process, config=config, fails=True)
    finally:
        grpo.update_policy = update
    return found["error"], [thread.name for thread in threading.enumerate() if thread.name == "ztk-ahead"]


def test_an_error_of_the_run_ends_the_rollout_that_is_drawn(ranks, tmp_path):
    assert ranks(1).run(play_stopped, config=config_ahead(folder=tmp_path)) == [("ArithmeticError: no update", [])]


def test_rollouts_stay_in_order_until_they_are_dropped():
    held, gate = Ahead(), threading.Event()
    assert held.first() is None and held.state_dict(gather=lambda value: [value], updates=1) == []
    held.drop()
    drawn, second = object(), object()
    held.start(lambda: (gate.wait(10), drawn)[1])
    held.start(lambda: second)
    held.check()  # returns while the first is under way
    gate.set()
    assert held.first() is drawn and held.first() is drawn and held.wait() == [drawn, second]
    held.drop()
    assert held.first() is second and len(held) == 1
    held.drop()

    def fails():
        raise EnvironmentFault("mine")

    held.start(fails)
    with pytest.raises(EnvironmentFault, match="mine"):
        held.first()


def test_a_run_that_ends_while_a_rollout_is_drawn_shows_its_exception():
    """And is not aborted because a thread computes while the interpreter ends."""
    script = (
        "import time, torch\n"
        "from ztk.rl.rollout.ahead import Ahead\n"
        "def draw():\n"
        "    x, end = torch.randn(300, 300), time.monotonic() + 1.5\n"
        "    while time.monotonic() < end:\n"
        "        x = torch.tanh(x @ x)\n"
        "Ahead().start(draw)\n"
        "time.sleep(0.3)\n"
        "raise KeyboardInterrupt\n"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert found.stderr.rstrip().endswith("KeyboardInterrupt"), found.stderr
    assert found.returncode != -signal.SIGABRT


def composed(*words: str):
    return compose("task=grpo", *words, output_dir="/run", machine=Machine(gpus=0, cores=2))


def test_engine_identity_and_correction_follow_from_it():
    rollout = composed("rollout.staleness=1").rollout
    assert (rollout.engine, rollout.identity) == (RolloutEngineName.generator, RolloutIdentity.corrected)
    assert rollout.correction is CorrectionName.token_truncate and rollout.correction_max == 2.0
    rollout = composed().rollout
    assert (rollout.staleness, rollout.engine, rollout.identity) == (
        0,
        RolloutEngineName.generator,
        RolloutIdentity.exact,
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("rollout.identity=exact", "rollout.staleness=1: answers are .* so rollout.identity=exact cannot be promised; use"),
        ("rollout.engine=trainer", "rollout.staleness=1: with rollout.engine=trainer answers are drawn with the weights that are updated"),
        ("rollout.tensor=2 launch.ranks=2", "use rollout.tensor=1 instead of 2, or rollout.staleness=0"),
    ],
)  # fmt: skip
def test_what_cannot_draw_ahead_is_refused(words, said):
    with pytest.raises(ConfigError, match=said):
        composed("rollout.staleness=1", *words.split())


WAITING = """
import asyncio
from pathlib import Path

calls = []


{kind} score(completions, trainer_state, log_metric):
    calls.append(trainer_state.global_step)
    file, rows = Path(__file__).with_name("metrics.jsonl"), 0
    while {waits} and len(calls) == 3 and rows <= trainer_state.global_step:  # the rollout that was drawn ahead
        rows = len(file.read_text().splitlines()) if file.exists() else 0
        await asyncio.sleep(0.02)
    log_metric("updates", float(rows))
    return [len(set(text)) / 8 for text in completions]
"""


def test_coroutines_reward_answers_next_to_updates(ranks, tmp_path):
    """The coroutine ends after an update that comes after the draw of its answers, and its rewards equal a plain function's."""
    found = {}
    for name, text in (
        ("async", WAITING.format(kind="async def", waits=True)),
        ("plain", WAITING.format(kind="def", waits=False).replace("        await asyncio.sleep(0.02)\n", "")),
    ):
        config = config_of("grpo", "rollout.staleness=1", folder=tmp_path / name, reward=text)
        ranks(1).run(play, config=config)
        found[name] = rows_of(tmp_path / name)
    assert [row.pop("updates") for row in found["async"]] == [0, 0, 1, 1]
    assert [row.pop("updates") for row in found["plain"]] == [0] * 4
    assert found["async"] == found["plain"]
