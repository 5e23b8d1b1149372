"""The least divergence from its reference that a policy needs for its reward, for a task with known answers."""

import torch
from torch import Tensor

from ztk.config import Config
from ztk.experiments.examples import HELD_OUT
from ztk.experiments.prompts import PAD, STOP
from ztk.experiments.reference import BaseModel, row_logprobs
from ztk.experiments.tasks import TASKS, name_of
from ztk.rl.align import Frontier
from ztk.train.engine import Engine

PROMPTS = 256  # number of prompts over which the closed form averages


def frontier_of(engine: Engine | BaseModel, *, config: Config) -> Frontier:
    """Computes the frontier of the run's task with `engine` as the first policy. A collective call."""
    return Frontier(right_probabilities(engine, config=config).clamp(1e-300, 1 - 1e-12))


def right_probabilities(engine: Engine | BaseModel, *, config: Config) -> Tensor:
    """Returns the probability of the right answer with its end to each of `PROMPTS` held-out prompts, at the temperature of rollouts:
    float64 [P].

    A collective call.
    """
    tokens, answers = _right_answers(config)
    temperature = config.rollout.temperature or 1.0
    size = config.train.micro_batch_size
    found = row_logprobs(engine, tokens=tokens, temperature=temperature, size=size)
    return (found.double() * answers).sum(1).exp()


def _right_answers(config: Config) -> tuple[Tensor, Tensor]:
    """Returns rows of prompt and right answer, int64 [P, T], and the mask of the answers' tokens, bool [P, T]."""
    task, seed = TASKS[name_of(config)], config.train.seed
    tokens = torch.full((PROMPTS, config.data.seq_len), PAD)
    answers = torch.zeros_like(tokens, dtype=torch.bool)
    for number, (row, mask) in enumerate(zip(tokens, answers, strict=True)):
        prompt = task.prompt(seed=seed, number=HELD_OUT + number)
        text = f"{prompt.text}{prompt.answer}{chr(STOP)}".encode()
        row[: len(text)] = torch.tensor(list(text))
        mask[len(prompt.text) : len(text)] = True
    return tokens, answers
