"""Random schedules of the same requests: neighbours, step sizes, shared prefixes, drafts, cancelled requests."""

import hashlib
import random
from collections.abc import Callable

import torch
from torch import nn

from tests.inference.models import VOCABULARY
from ztk.core.runtime.comm import Comm
from ztk.inference import Generator, InferencePolicy, SamplingParams

_SHARED = [(5 * i + 1) % VOCABULARY for i in range(90)]
REQUESTS = [
    ([7, 8, 9], SamplingParams(max_tokens=24, temperature=0.9, seed=1)),
    (_SHARED + [3], SamplingParams(max_tokens=16, temperature=0.7, top_p=0.9, seed=2)),
    (_SHARED[:70] + [4, 4], SamplingParams(max_tokens=20, temperature=0, prompt_logprobs=True)),
    (_SHARED + [5, 6], SamplingParams(max_tokens=12, temperature=1.2, top_k=20, n=2, seed=3)),
    ([11, 12] * 20, SamplingParams(max_tokens=30, temperature=0.2, seed=4, repetition_penalty=1.2)),
]


def fingerprint(tokens: list[int], logprobs: list[float]) -> str:
    return hashlib.sha256(repr((tokens, [value.hex() for value in logprobs])).encode()).hexdigest()[:16]


def alone(model: nn.Module, *, requests: list = REQUESTS, **policy: object) -> list[list[str]]:
    """Each request by itself, in a new engine, its prompt in one piece."""
    found = []
    for prompt, sampling in requests:
        answers = Generator(model, policy=InferencePolicy(**policy)).generate([prompt], sampling=sampling)[0]
        found.append([fingerprint(answer.tokens, answer.logprobs.tolist()) for answer in answers])
    return found


def run_schedule(
    model: nn.Module,
    *,
    seed: int,
    comm: Comm | None = None,
    requests: list = REQUESTS,
    watch: Callable[[Generator], None] = lambda generator: None,
    **policy: object,
) -> tuple[list[list[str]], Generator]:
    """All requests in one engine, in the order and at the steps that `seed` draws; and the engine.

    comm: of ranks that share the model, each of which makes the call; nothing is returned on those that follow. watch: is called after each
    step."""
    chance = random.Random(seed)
    generator = Generator(
        model,
        policy=InferencePolicy(
            max_sequences=chance.randint(1, 7),
            max_step_tokens=chance.choice([1, 3, 8, 17, 64, 65, 200, 512]),
            lookup_tokens=chance.choice([0, 0, 1, 3, 6]),
            **policy,
        ),
        comm=comm,
    )
    if generator.follows:
        generator.follow()
        return [], generator
    left = [(number, *request) for number, request in enumerate(requests)]
    chance.shuffle(left)
    neighbours = 4
    started: dict[int, int] = {}  # request of the engine -> number here
    answers: dict[tuple[int, int], tuple[list[int], list[float]]] = {}

    def step() -> None:
        for output in generator.step():
            if output.request_id in started:
                tokens, logprobs = answers.setdefault((started[output.request_id], output.sample), ([], []))
                tokens.append(output.token)
                logprobs.append(float(torch.tensor(output.logprob, dtype=torch.float32)))
        watch(generator)

    while left or generator.has_work:
        if left and chance.random() < 0.4:
            number, prompt, sampling = left.pop()
            started[generator.submit(prompt, sampling=sampling).id] = number
        if neighbours and chance.random() < 0.2:
            neighbours -= 1
            prompt = [chance.randrange(VOCABULARY) for _ in range(chance.randint(1, 100))]
            other = generator.submit(chance.choice([prompt, _SHARED]), sampling=SamplingParams(max_tokens=3))
            step()
            if chance.random() < 0.5:
                generator.cancel(other.id)
        step()
    generator.close()
    found = [
        [fingerprint(*answers[number, sample]) for sample in range(sampling.n)]
        for number, (_, sampling) in enumerate(requests)
    ]
    return found, generator
