"""Evaluates a policy on held-out prompts: the reward of sampled and of greedy answers, and the KL divergence."""

import torch
from torch import Tensor

from ztk.config import Config
from ztk.data import ByteTokenizer
from ztk.experiments.examples import HELD_OUT
from ztk.experiments.prompts import PAD, STOP
from ztk.experiments.reference import BaseModel, row_logprobs
from ztk.experiments.tasks import TASKS, name_of
from ztk.rl.rollout import (
    CachedRollouts,
    Requests,
    RolloutPolicy,
    Samples,
    TrainerRollouts,
    generate,
    has_engine_attention,
)
from ztk.train.engine import Engine

PROMPTS = 256  # over all ranks
GREEDY = 1e-6  # a temperature at which the largest logit has all probability
LONGEST = 8  # tokens of an answer


class Answers:
    """Answers to the built-in task, whose rewards are exact. There are no measurements for records of a file."""

    def __init__(
        self, config: Config, *, engine: Engine, reference: Engine | BaseModel | None, packs: bool = False
    ) -> None:
        """reference: the engine for the divergence, which is not measured without one. packs: see `ztk.experiments.packing`."""
        self._config, self._engine, self._reference, self._packs = config, engine, reference, packs
        is_exact = packs and has_engine_attention(engine.module)
        self._drawer = CachedRollouts(engine) if is_exact else TrainerRollouts(engine)
        process, size = engine.process, config.train.micro_batch_size
        # In full micro-batches; a remainder is ignored.
        replica, replicas = process.mesh.replica, process.mesh.replicas
        per_rank = -(-PROMPTS // (replicas * size)) * size
        self._numbers = torch.arange(per_rank) * replicas + replica

    def measure(self) -> dict[str, float]:
        """Returns `reward` of sampled and `greedy_reward` of greedy answers, and `kl` in nats per sampled answer. A collective call."""
        if self._config.data.path is not None:
            return {}
        sampled, greedy = self._drawn(temperature=1.0), self._drawn(temperature=GREEDY)
        found = {"reward": sampled.rewards, "greedy_reward": greedy.rewards}
        if self._reference is not None:
            found["kl"] = self._divergence(sampled)
        counted = self._numbers < PROMPTS
        own = torch.stack([values[counted].double().sum() for values in found.values()])
        totals = self._engine.process.mesh.gather_scalars(own.to(self._engine.process.device), label="answers").sum(0)
        totals /= PROMPTS
        return dict(zip(found, totals.tolist(), strict=True))

    def _drawn(self, *, temperature: float) -> Samples:
        config = self._config
        task = TASKS[name_of(config)]
        prompts = [task.prompt(seed=config.train.seed, number=HELD_OUT + int(number)) for number in self._numbers]
        longest = max(len(prompt.tokens) for prompt in prompts)
        policy = RolloutPolicy(
            length=config.data.seq_len,
            micro_batch=config.train.micro_batch_size,
            max_tokens=min(LONGEST, config.data.seq_len - longest),
            stops=(STOP,),
            pad=PAD,
            temperature=temperature,
            seed=config.train.seed,
            packs=self._packs,
        )
        requests = Requests(
            prompts=[prompt.tokens for prompt in prompts],
            numbers=self._numbers,
            prompt_numbers=self._numbers,
            copies=torch.zeros_like(self._numbers),
        )
        samples = generate(self._drawer, policy=policy, requests=requests, step=0)
        for row, prompt in enumerate(prompts):
            answer = ByteTokenizer().decode(samples.answer(row, with_end=False))
            samples.rewards[row] = task.score(prompt=prompt.text, answer=answer, record={})
        return samples

    def _divergence(self, samples: Samples) -> Tensor:
        """Returns log policy - log reference of every answer, float64 [S]. Its mean estimates the KL divergence."""
        assert self._reference is not None
        size = self._config.train.micro_batch_size
        reference = row_logprobs(self._reference, tokens=samples.tokens, temperature=1.0, size=size)
        return ((samples.logprobs - reference) * samples.answer_mask).double().sum(1)
