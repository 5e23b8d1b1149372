"""Draws answers with the servers of `rollout.servers`, in place of the run's own processes."""

import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from ztk.inference import SamplingParams
from ztk.rl.rollout.buffer import Samples
from ztk.rl.rollout.cached import sampling_of, write_answers
from ztk.rl.rollout.clients import LATE, Answer, Channel, Client, Draw
from ztk.rl.rollout.fleet import Fleet, Work
from ztk.rl.rollout.hybrid import Requests, TurnDraws
from ztk.rl.rollout.published import Publisher
from ztk.rl.rollout.weights import RolloutPolicy
from ztk.train.engine import Engine

_ROWS = 32  # answers of one request
_AFFINE = 64  # first tokens of a prompt, which choose its server
OpenClient = Callable[..., Client]


class Started(Protocol):
    """Servers that this process has started."""

    def close(self) -> None:
        """Ends them. Idempotent."""
        ...


class ServedRollouts:
    """Each rank, or one of those that share a model, asks the servers for its own answers. Rank 0 gives them the weights of a step.

    Rollouts that have begun go on with newer weights, so that servers have the newest ones alone. `Samples.steps` has the step of each token.
    Answers have the tokens that `CachedRollouts` draws where the servers compute with the same bits. Weights are written on the first samples
    after an optimizer step.
    """

    copies_weights = True

    def __init__(
        self,
        engine: Engine,
        *,
        channels: Sequence[Channel],
        open_client: OpenClient,
        publisher: Publisher,
        patience_seconds: float,
        started: Started | None = None,
    ) -> None:
        """open_client: makes the client of a server from its channel and the shapes of the parameters by name. publisher: publishes this
        engine's weights; this object closes it. patience_seconds: time without a server that answers. started: servers that end with this
        object. A collective call.
        """
        self._engine, self._publisher, self._started = engine, publisher, started
        # A server may have weights of the same step of another run.
        self._run = engine.comm.broadcast_object(uuid.uuid4().hex[:16], label="run of servers")
        self.fleet = Fleet(
            [open_client(channel, parameters=publisher.shapes) for channel in channels],
            sends=engine.comm.rank == 0,
            patience_seconds=patience_seconds,
            key="rollout.servers",
            wait_key="rollout.servers_wait",
        )
        self._step = -1  # policy step of the published weights

    @contextmanager
    def turns(self, *, policy: RolloutPolicy, requests: Requests, step: int) -> Iterator[TurnDraws]:
        """Prepares draws as `Rollouts.turns` does. Draws may be made on another thread, while the engine steps."""
        sampling = sampling_of(policy, keys=requests.keys(seed=policy.seed, step=step), as_trainer=True)
        oldest = self._publish()

        def draw(samples: Samples, limits: Tensor) -> None:
            rows, lengths = limits.nonzero().squeeze(1).tolist(), samples.lengths.tolist()
            prompts = [samples.tokens[row, : lengths[row]].tolist() for row in rows]
            own = [replace(sampling[row], max_tokens=int(limits[row])) for row in rows]
            answers = self._answers(prompts, sampling=own, oldest=oldest, late=requests.late)
            write_answers(answers, samples=samples, rows=rows)
            if requests.late is not None:
                _write_late(answers, samples=samples, rows=rows)
            _write_steps(answers, samples=samples, rows=rows, firsts=lengths)

        yield TurnDraws(draw=draw, go_on=bool)

    def _answers(
        self,
        prompts: Sequence[list[int]],
        *,
        sampling: Sequence[SamplingParams],
        oldest: str,
        late: threading.Event | None,
    ) -> list[Answer]:
        """Ranks that share a model have the same prompts, and one of them asks for all."""
        mesh = self._engine.process.mesh
        asks = mesh.is_alone or mesh.is_leader
        given = {"sampling": sampling, "oldest": oldest, "late": late}
        found = draw_by(self.fleet, prompts=prompts, **given) if asks else None
        return found if mesh.is_alone else mesh.gather_objects(found)[mesh.replica]

    def close(self) -> None:
        """Ends the threads of the servers and removes the files. Idempotent."""
        self.fleet.close()
        self._publisher.close()
        if self._started is not None:
            self._started.close()

    def _publish(self) -> str:
        """Makes the weights of now the ones to draw with, and returns their version. A collective call."""
        step = self._engine.global_steps
        version = f"{self._run}-{step}"
        if self._step != step:
            self._step = step
            self.fleet.publish(version, weights=self._publisher.publish(version))
        return version


def draw_by(
    fleet: Fleet,
    *,
    prompts: Sequence[list[int]],
    sampling: Sequence[SamplingParams],
    oldest: str | None = None,
    late: threading.Event | None = None,
) -> list[Answer]:
    """One answer to each prompt, in requests of one prompt each. oldest: the same as in `Fleet.compute`. late: event of `Draw`."""
    groups: dict[tuple[tuple[int, ...], int], list[int]] = {}
    for row, (prompt, own) in enumerate(zip(prompts, sampling, strict=True)):
        groups.setdefault((tuple(prompt), own.max_tokens), []).append(row)
    parts = [
        (prompt, rows[first : first + _ROWS])
        for (prompt, _), rows in groups.items()
        for first in range(0, len(rows), _ROWS)
    ]
    works = [
        Work(
            given=Draw(prompt=prompt, sampling=[sampling[row] for row in rows], late=late),
            size=len(rows),
            home=prompt[:_AFFINE],
        )
        for prompt, rows in parts
    ]
    found: dict[int, Answer] = {}
    for (_, rows), answers in zip(parts, fleet.compute(works, oldest=oldest), strict=True):
        found |= zip(rows, answers, strict=True)
    return [found[row] for row in range(len(prompts))]


def _write_late(answers: Sequence[Answer], *, samples: Samples, rows: Sequence[int]) -> None:
    if samples.late is None:
        samples.late = torch.zeros_like(samples.finished)
    samples.late[rows] = torch.tensor([answer.finish_reason == LATE for answer in answers], dtype=torch.bool)


def _write_steps(answers: Sequence[Answer], *, samples: Samples, rows: Sequence[int], firsts: Sequence[int]) -> None:
    """firsts: place of each row's first new token."""
    if samples.steps is None:
        samples.steps = torch.zeros_like(samples.tokens)
    for row, answer in zip(rows, answers, strict=True):
        steps = [int(version.rpartition("-")[2]) for version in answer.versions]
        samples.steps[row, firsts[row] : firsts[row] + len(steps)] = torch.tensor(steps, dtype=torch.int64)
