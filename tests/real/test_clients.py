"""Clients of a server of SmolLM2-135M-Instruct: lm-evaluation-harness next to its own class for transformers, and schemas on its tokenizer."""

import json
import random
from concurrent.futures import ThreadPoolExecutor

import jsonschema
import openai
import pytest

from tests.serve.test_server import start
from tests.serve.test_structured import random_schema
from tests.slow.harness import ANSWER, CHOICE, ROLLING, evaluated, write_tasks
from ztk.serve.models import open_model

pytestmark = pytest.mark.real

SCHEMAS = 20
PER_TOKEN = 1e-4  # of a log-likelihood in fp32, by two computations
DOCUMENTS = [
    {"question": "The capital of France is", "choices": [" Paris", " Rome", " Oslo"], "label": 0},
    {"question": "Two plus two is", "choices": [" four", " seven"], "label": 0},
    {"question": "Water freezes at", "choices": [" a hundred degrees", " zero degrees Celsius"], "label": 1},
    {"question": "A cat says", "choices": [" moo", " woof", " meow"], "label": 2},
]


@pytest.fixture(scope="module")
def served(folder):
    found = start(opened=open_model(str(folder)), max_sequences=8, max_model_len=1024)
    yield found
    found.stop()


def test_the_harness_has_the_numbers_of_transformers(served, folder, tmp_path):
    """ztk's own class for the harness, and its local-completions against the server, next to its class for transformers."""
    pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed")
    import ztk.serve.harness  # noqa: F401  # registers the model

    tasks = write_tasks(tmp_path, documents=DOCUMENTS, stop="\\n")
    names = [CHOICE, ROLLING, ANSWER]
    completions = {"model": served.opened.name, "base_url": f"{served.url}/v1/completions", "tokenizer": str(folder)}
    completions |= {"tokenizer_backend": "huggingface", "max_length": 512}
    wanted = evaluated(
        "hf", arguments={"pretrained": str(folder), "dtype": "float32", "max_length": 512}, tasks=names, folder=tasks
    )
    for model, arguments in (
        ("ztk", {"model": str(folder), "max_length": 512}),
        ("local-completions", completions),
    ):
        found = evaluated(model, arguments=arguments, tasks=names, folder=tasks)
        for (answers, metrics), (expected, numbers) in zip(
            *([each[name] for name in names] for each in (found, wanted)), strict=True
        ):
            assert close(answers, expected), (model, answers, expected)
            for name, value in numbers.items():
                assert not isinstance(value, float) or metrics[name] == pytest.approx(value, rel=1e-4), (model, name)


def close(found: object, expected: object) -> bool:
    """Texts and flags are equal, numbers within the bound."""
    if isinstance(expected, list | tuple):
        return len(found) == len(expected) and all(map(close, found, expected))
    return found == pytest.approx(expected, abs=PER_TOKEN) if isinstance(expected, float) else found == expected


def test_every_answer_to_random_schemas_is_valid(served):
    """As response_format of a chat, many at a time; an answer that ends by its length shows nothing."""
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
    chance = random.Random(3)
    schemas = [random_schema(chance) for _ in range(SCHEMAS)]

    def ask(number: int) -> tuple[str, str]:
        form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schemas[number], "strict": True}}
        found = client.chat.completions.create(
            model=served.opened.name,
            messages=[{"role": "user", "content": "Invent an example of this record as JSON."}],
            response_format=form,
            max_tokens=200,
            seed=number,
        )
        return found.choices[0].finish_reason, found.choices[0].message.content

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, range(SCHEMAS)))
    ended = 0
    for schema, (reason, text) in zip(schemas, answers, strict=True):
        if reason == "stop":
            jsonschema.validate(json.loads(text), schema)
            ended += 1
    assert ended >= SCHEMAS - 2
