"""SmolLM2-135M-Instruct answers as transformers does: greedy tokens in memory, streamed, and over HTTP with the chat template, where one rank
answers, or two."""

import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import openai
import pytest
import torch
import transformers

from ztk.core.policies.offload import OffloadPolicy
from ztk.core.policies.tier import Tier
from ztk.inference import Generator, InferencePolicy, SamplingParams
from ztk.serve.models import Opened, open_model

pytestmark = pytest.mark.real

ROOT = Path(__file__).resolve().parents[2]
TOKENS = 200
QUESTIONS = (
    "What is the capital of France?",
    "Write a short poem about the sea.",
    "Explain gravity to a child.",
    "List five fruits.",
    "What is 12 plus 30?",
    "Who wrote Romeo and Juliet?",
    "Translate 'good morning' into Spanish.",
    "Write a Python function that adds two numbers.",
    "Why is the sky blue?",
    "Give me three tips for better sleep.",
    "What does HTTP stand for?",
    "Describe a cat in one sentence.",
    "How do plants make food?",
    "Name the planets of the solar system.",
    "What is a prime number?",
    "Write a haiku about autumn.",
    "How many days are in a leap year?",
    "Summarise the story of Cinderella.",
    "What is the difference between a list and a tuple in Python?",
    "Write an e-mail that asks for a day off.",
)


@pytest.fixture(scope="module")
def opened(folder) -> Opened:
    return open_model(str(folder))


@pytest.fixture(scope="module")
def prompts(opened) -> list[list[int]]:
    return [opened.tokenizer.chat([{"role": "user", "content": question}]) for question in QUESTIONS]


def greedy(generator: Generator, *, prompts: list[list[int]], count: int, ends: tuple[int, ...]) -> list[list[int]]:
    sampling = SamplingParams(max_tokens=count, temperature=0, stop_token_ids=ends)
    return [answer.tokens for [answer] in generator.generate(prompts, sampling=sampling)]


def expected_of(opened: Opened, *, prompts: list[list[int]], count: int) -> Iterator[list[int]]:
    """transformers' greedy tokens, the end token included."""
    for prompt in prompts:
        tokens = torch.tensor([prompt])
        found = opened.module.generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=count, do_sample=False, pad_token_id=0,
            eos_token_id=list(opened.ends),
        )  # fmt: skip
        yield found[0, len(prompt) :].tolist()


@pytest.fixture(scope="module")
def expected(opened, prompts) -> list[list[int]]:
    transformers.logging.set_verbosity_error()
    return list(expected_of(opened, prompts=prompts, count=TOKENS))


@pytest.fixture(scope="module")
def in_memory(opened) -> Generator:
    return Generator(opened.module, policy=InferencePolicy(max_model_len=512))


def test_twenty_answers_of_200_tokens_equal_transformers(opened, prompts, expected, in_memory):
    found = greedy(in_memory, prompts=prompts, count=TOKENS, ends=opened.ends)
    assert found == expected
    assert sum(len(answer) == TOKENS for answer in found) >= 5  # most end before
    assert "Paris" in opened.tokenizer.decode(found[0])


def test_streamed_layers_answer_alike(opened, prompts, expected, tmp_path):
    offload = OffloadPolicy(parameters=Tier.nvme, nvme_path=str(tmp_path))
    policy = InferencePolicy(offload=offload, memory_bytes=500_000_000, max_model_len=512)
    generator = Generator(opened.module, policy=policy)
    assert greedy(generator, prompts=prompts, count=TOKENS, ends=opened.ends) == expected


@contextmanager
def serving(folder: Path, *, out: Path, words: tuple[str, ...]) -> Iterator[str]:
    """The address of a process that serves the model."""
    command = [sys.executable, str(ROOT / "run.py"), "task=serve", f"inference.model={folder}", "serve.port=0"]
    command += [f"hydra.run.dir={out}", *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        lines = []
        for line in process.stdout:
            lines.append(line)
            if found := re.search(r"answers on (http://\S+)", line):
                yield found[1]
                return
        raise AssertionError("".join(lines))
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("words", [(), ("topology.tensor=2", "launch.threads=1")], ids=["one rank", "two ranks"])
def test_the_server_chats_alike(folder, opened, expected, tmp_path, words):
    """Messages go through the model's chat template on the server. Two ranks have 6 and 3 of its query heads."""
    with serving(folder, out=tmp_path, words=words) as address:
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
        [model] = client.models.list()

        def answer_to(question: str) -> str:
            messages = [{"role": "user", "content": question}]
            found = client.chat.completions.create(model=model.id, messages=messages, max_tokens=TOKENS, temperature=0)
            return found.choices[0].message.content

        with ThreadPoolExecutor(len(QUESTIONS)) as pool:
            found = list(pool.map(answer_to, QUESTIONS))
    texts = [opened.tokenizer.decode([token for token in answer if token not in opened.ends]) for answer in expected]
    assert found == texts
