"""Runs of `task=grpo` and `task=ppo` on warm ranks, with a small model."""

import copy
import functools
import hashlib
import importlib
import json
import os
import tempfile
from contextlib import contextmanager
from enum import Enum
from pathlib import Path

import torch

from tests.parallel.topology.runs import alone
from ztk import checkpoint
from ztk.config import Config, Machine, compose
from ztk.config.keys import read, write
from ztk.core.runtime import Process
from ztk.experiments import grpo, policies, policy_run, rollouts
from ztk.experiments.models import full_values, warm_start
from ztk.report import plot
from ztk.rl.rollout import CachedRollouts
from ztk.train.engine import Engine
from ztk.train.engine.batches import BatchEngine

SMALL = (
    *("model.layers=2", "model.dim=32", "model.heads=2", "model.kv_heads=1", "model.hidden_dim=64"),
    *("rollout.prompts=4", "rollout.group_size=4", "rollout.max_tokens=6", "data.seq_len=12", "train.steps=4"),
    *("train.global_batch_size=8", "train.micro_batch_size=4"),  # two optimizer steps per rollout
    *("scheduler=constant", "scheduler.warmup_steps=0", "logger=disabled", "launch.device=cpu"),
    "zero.bucket_size=5000",  # several buckets; the gradients' norm adds up by bucket, so bits depend on it
    *("warm_start.steps=30", "warm_start.batch_size=16", "warm_start.lr=0.01"),  # so that answers end by themselves
)
# A reward under which an untrained model's answers differ.
REWARD = "def score(prompt, answer, record):\n    return (sum(answer.encode()) % 7) / 7\n"


@functools.cache
def composed(task: str, *overrides: str, ranks: int) -> Config:
    """A checked configuration."""
    given = (f"task={task}", *SMALL, *overrides, f"launch.ranks={ranks}")
    return compose(*given, output_dir="/run", machine=Machine(gpus=0, cores=2))


def config_of(task: str, *overrides: str, folder: Path, ranks: int = 1, reward: str = REWARD, **changes) -> Config:
    """A configuration for a run in `folder`.

    overrides: are composed, which takes a second. reward: the text of a file with `score`. changes: `zero__stage=3`; are written without a
    check.
    """
    config = copy.deepcopy(composed(task, *overrides, ranks=ranks))
    folder.mkdir(exist_ok=True)
    file = folder / "mine.py"
    file.write_text(reward)
    changes |= {"reward__function": f"{file}:score", "output_dir": str(folder)}
    for name, value in changes.items():
        key = name.replace("__", ".")
        kind = type(read(config, key=key))
        write(config, key=key, value=kind(value) if isinstance(value, str) and issubclass(kind, Enum) else value)
    return config


def rows_of(folder: Path) -> list[dict]:
    """The rows of a run's record, without times and counters."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    measured = ("seconds", "tokens_per_second", "memory.", "comm.", "io.", "time", "slowest")
    return [{k: v for k, v in row.items() if not any(word in k for word in measured)} for row in rows]


_warmed = {}  # of this process: the model and the number of steps -> the first weights


def shortened(config, *, process: Process):
    """The task's warm start in fp32, whose steps take longer than a run, once for all processes of a session. One rank computes it, so that
    runs on any number of ranks begin with equal bits: after sums in another order, some processors draw another token."""
    if not config.warm_start.steps:
        return None
    shape = hashlib.sha256(repr((config.model, config.warm_start.steps)).encode()).hexdigest()
    if shape not in _warmed:
        file = Path(tempfile.gettempdir(), f"warmed-{shape}.pt")
        if not file.exists():
            plain = copy.deepcopy(composed("grpo", ranks=1))
            plain.model, plain.warm_start = config.model, config.warm_start
            made = file.with_suffix(f".{os.getpid()}")
            torch.save(warm_start(plain, process=alone(process)), made)
            made.replace(file)
        _warmed[shape] = torch.load(file)
    return _warmed[shape]


@contextmanager
def dying(step: int):
    """The run ends after this step, when all models but the policy are saved; 0: it goes on."""
    save = checkpoint.Saver.save

    def save_or_die(self, **kwargs):
        if step and "data_state" in kwargs and self._engine.global_steps == step:
            raise InterruptedError("died in the middle of a save")
        return save(self, **kwargs)

    checkpoint.Saver.save = save_or_die
    try:
        yield
    finally:
        checkpoint.Saver.save = save


def play(
    process: Process,
    *,
    config: Config,
    planted: int = 0,
    dies: int = 0,
    fails: bool = False,
    kernels: bool | None = None,
) -> dict:
    """Runs the task to its end on this rank.

    planted: the number of a sample one of whose stored log-probabilities is changed by its last bit, in every rollout; 0: none. dies: see
    `dying`. fails: the error is returned, on one rank alone. cache: of rollout.engine=generator.
    """
    task = importlib.import_module(config.task.module)
    grpo.warm_start, rollouts.EVALUATED = shortened, 1
    policy_run.CachedRollouts = functools.partial(CachedRollouts, kernels=kernels)
    plot.plot_run = lambda folder: None
    drawn, references = [], []

    def fill(run, scored):
        task.fill(run, scored)
        samples = run.buffer.samples
        drawn.append(samples.to_json())
        if isinstance(run.reference, Engine):
            references.append(digest_of(full_values(run.reference)))
        for row in (samples.numbers == planted).nonzero().flatten().tolist() if planted else []:
            position = int(samples.prompt_lengths[row]) + 1
            samples.logprobs = samples.logprobs.clone()
            samples.logprobs[row, position] = torch.nextafter(samples.logprobs[row, position], torch.tensor(0.0))

    update = getattr(task, "update", task.update_policy)
    result = {"rollouts": drawn, "references": references}
    try:
        arranged = process.arrange(policies.topology(config))
        with dying(dies):
            result["summary"] = grpo.run_task(config, process=arranged, fill=fill, update=update)
    except Exception as error:
        if not fails or process.world_size > 1:
            raise
        result["error"] = f"{type(error).__name__}: {error}"
    finally:
        policy_run.CachedRollouts = CachedRollouts
    return result


class OneRank:
    """The mesh and the communicator of a process without others."""

    is_alone = is_leader = True
    replica, replicas, size = 0, 1, 1

    def gather_scalars(self, values, *, label):
        return values.unsqueeze(0)

    def gather_objects(self, value):
        return [value]


class Batches(BatchEngine):
    """The calls of an engine that are made of its others."""

    def compute(self, micro_batches):
        with torch.no_grad():
            return [batch.run(self) for batch in micro_batches]


def digest_of(values: dict[str, torch.Tensor]) -> str:
    joined = hashlib.sha256()
    for name in sorted(values):
        joined.update(values[name].numpy().tobytes())
    return joined.hexdigest()
