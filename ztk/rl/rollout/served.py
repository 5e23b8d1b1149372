"""Draws answers with the servers of `rollout.servers`, in place of the run's own processes."""

import shutil
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from ztk.inference import SamplingParams
from ztk.rl.rollout.buffer import Samples
from ztk.rl.rollout.cached import Merged, sampling_of, write_answers
from ztk.rl.rollout.clients import Answer, Channel, Client, Draw
from ztk.rl.rollout.fleet import Fleet, Work
from ztk.rl.rollout.hybrid import Requests, TurnDraws
from ztk.rl.rollout.weights import RolloutPolicy
from ztk.train.engine import Engine

_PART_BYTES = 1 << 26  # of a file of weights, unless a tensor is larger
_ROWS = 32  # answers of one request
_AFFINE = 64  # first tokens of a prompt, which choose its server
Save = Callable[[dict[str, Tensor], Path], None]
OpenClient = Callable[..., Client]


class ServedRollouts:
    """Each rank asks the servers for its own answers. Rank 0 writes the weights of a step into files, one after the other, and sends them.

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
        folder: Path,
        save: Save,
        patience_seconds: float,
    ) -> None:
        """open_client: makes the client of a server from its channel and the shapes of the parameters by name. folder: holds the files of one
        step. save: writes safetensors. patience_seconds: time without a server that answers. A collective call.
        """
        self._source, self._folder, self._save = Merged(engine), folder, save
        self._leads = engine.comm.rank == 0
        # A server may have weights of the same step of another run.
        self._run = engine.comm.broadcast_object(uuid.uuid4().hex[:16], label="run of servers")
        shapes = {name: tuple(value.shape) for name, value in self._source.full_parameters()}
        self.fleet = Fleet(
            [open_client(channel, parameters=shapes) for channel in channels],
            sends=self._leads,
            patience_seconds=patience_seconds,
            key="rollout.servers",
            wait_key="rollout.servers_wait",
        )
        self._step = -1  # policy step of the files

    @contextmanager
    def turns(self, *, policy: RolloutPolicy, requests: Requests, step: int) -> Iterator[TurnDraws]:
        """Prepares draws as `Rollouts.turns` does. Draws may be made on another thread, while the engine steps."""
        sampling = sampling_of(policy, keys=requests.keys(seed=policy.seed, step=step), as_trainer=True)
        oldest = self._publish()

        def draw(samples: Samples, limits: Tensor) -> None:
            rows, lengths = limits.nonzero().squeeze(1).tolist(), samples.lengths.tolist()
            prompts = [samples.tokens[row, : lengths[row]].tolist() for row in rows]
            own = [replace(sampling[row], max_tokens=int(limits[row])) for row in rows]
            answers = draw_by(self.fleet, prompts=prompts, sampling=own, oldest=oldest)
            write_answers(answers, samples=samples, rows=rows)
            _write_steps(answers, samples=samples, rows=rows, firsts=lengths)

        yield TurnDraws(draw=draw, go_on=bool)

    def close(self) -> None:
        """Ends the threads of the servers and removes the files. Idempotent."""
        self.fleet.close()
        if self._leads:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _publish(self) -> str:
        """Makes the weights of now the ones to draw with, and returns their version. A collective call."""
        engine = self._source.engine
        version = f"{self._run}-{engine.global_steps}"
        if self._step == engine.global_steps:
            return version
        self._step = engine.global_steps
        folder, before = self._folder / version, [*self._folder.glob("*")] if self._leads else []
        if self._leads:
            folder.mkdir(parents=True)
        part, size, count = dict[str, Tensor](), 0, 0
        for name, value in self._source.full_parameters():
            if not self._leads:
                continue
            part[name] = value.detach().to("cpu", copy=True).contiguous()
            size += part[name].nbytes
            if size >= _PART_BYTES:
                self._save(part, folder / f"{count:05}.safetensors")
                part, size, count = {}, 0, count + 1
        if part:
            self._save(part, folder / f"{count:05}.safetensors")
        self.fleet.publish(version, folder=folder if self._leads else None)
        for old in before:
            shutil.rmtree(old, ignore_errors=True)
        return version


def draw_by(
    fleet: Fleet, *, prompts: Sequence[list[int]], sampling: Sequence[SamplingParams], oldest: str | None = None
) -> list[Answer]:
    """One answer to each prompt, in requests of one prompt each. oldest, errors: those of `Fleet.compute`."""
    groups: dict[tuple[tuple[int, ...], int], list[int]] = {}
    for row, (prompt, own) in enumerate(zip(prompts, sampling, strict=True)):
        groups.setdefault((tuple(prompt), own.max_tokens), []).append(row)
    parts = [
        (prompt, rows[first : first + _ROWS])
        for (prompt, _), rows in groups.items()
        for first in range(0, len(rows), _ROWS)
    ]
    works = [
        Work(given=Draw(prompt=prompt, sampling=[sampling[row] for row in rows]), size=len(rows), home=prompt[:_AFFINE])
        for prompt, rows in parts
    ]
    found: dict[int, Answer] = {}
    for (_, rows), answers in zip(parts, fleet.compute(works, oldest=oldest), strict=True):
        found |= zip(rows, answers, strict=True)
    return [found[row] for row in range(len(prompts))]


def _write_steps(answers: Sequence[Answer], *, samples: Samples, rows: Sequence[int], firsts: Sequence[int]) -> None:
    """firsts: place of each row's first new token."""
    if samples.steps is None:
        samples.steps = torch.zeros_like(samples.tokens)
    for row, answer in zip(rows, answers, strict=True):
        steps = [int(version.rpartition("-")[2]) for version in answer.versions]
        samples.steps[row, firsts[row] : firsts[row] + len(steps)] = torch.tensor(steps, dtype=torch.int64)
