"""Prompts, checks, rewards and commands of `8_from_base_to_served.py`.

They are in a file of their own because the ranks of task=grpo import the rewards from a path.
"""

import hashlib
import json
import math
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import NormalDist
from typing import Any

import jsonschema

import ztk
from ztk.report.history import Runs
from ztk.report.statistics import CONFIDENCE
from ztk.report.status import Status, read_status

ROOT = Path(__file__).resolve().parents[1]

_ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
)
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
_NAMES = (
    "Ada Alan Alma Anna Boris Carla Clara David Dora Edith Emil Erik Fatima Felix Grace Hana Hugo Ida Igor Ines Ivan "
    "Jonas Karim Kofi Lea Leo Lina Luis Maria Marta Max Mila Nadia Nina Noah Olga Omar Oscar Paula Peter Rosa Sara "
    "Sofia Tariq Theo Vera Victor Wanda Yara Zoe"
)
_CITIES = (
    "Accra Athens Bergen Berlin Bogota Boston Cairo Delhi Dublin Geneva Hanoi Havana Kyoto Lagos Lima Lisbon London "
    "Lyon Madrid Milan Nairobi Oslo Paris Porto Prague Quito Rome Seoul Sofia Tokyo Tunis Vienna Warsaw Zurich"
)
# As tests/real/model.py finds it.
MODEL = Path(os.environ.get("ZTK_REAL_MODEL") or Path.home() / ".cache" / "ztk" / "smollm2").expanduser()


def _schema(**properties: dict) -> dict:
    """An object with exactly these properties."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


_TEXT, _WHOLE = {"type": "string"}, {"type": "integer"}
SCHEMA = _schema(person=_schema(name=_TEXT, age=_WHOLE), home=_schema(city=_TEXT))  # of people
KEYS = _schema(name=_TEXT, age=_WHOLE, city=_TEXT)  # of keys


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """How much a form of the notebook computes.

    largest: of the numbers that are added. people: descriptions to learn from. held_sums, held_people: prompts that are only asked;
    `held_people` with a schema, and as many with keys.
    chats, pairs: of an optimizer step. drawn: prompts that the tuned model answers for
    pairs. prompts, group: of a rollout. Steps are optimizer steps.
    """

    largest: int
    people: int
    held_sums: int
    held_people: int
    chats: int
    sft_steps: int
    lora_steps: int
    drawn: int
    pairs: int
    dpo_steps: int
    prompts: int
    group: int
    grpo_steps: int
    served: int


FULL = Sizes(
    largest=24, people=400, held_sums=100, held_people=40, chats=16, sft_steps=60, lora_steps=60, drawn=64, pairs=8,
    dpo_steps=5, prompts=8, group=8, grpo_steps=20, served=10,
)  # fmt: skip
QUICK = Sizes(
    largest=20, people=300, held_sums=60, held_people=30, chats=16, sft_steps=12, lora_steps=12, drawn=32, pairs=8,
    dpo_steps=6, prompts=4, group=8, grpo_steps=6, served=4,
)  # fmt: skip


def in_words(number: int) -> str:
    """Spells 0 to 99: `42` is `forty-two`."""
    small = _ONES.split()
    if number < len(small):
        return small[number]
    tens, ones = _TENS.split()[number // 10 - 2], number % 10
    return f"{tens}-{small[ones]}" if ones else tens


def sums(*, largest: int, held_out: int, seed: int) -> tuple[list[dict], list[dict]]:
    """Returns questions about sums of two numbers from 1 to `largest`: those to learn from, and `held_out` others.

    a + b and b + a are on the same side, so no held-out sum was ever seen.
    """
    chance = random.Random(seed)
    pairs = [(a, b) for a in range(1, largest + 1) for b in range(a, largest + 1)]
    chance.shuffle(pairs)
    # one question of each held-out pair, so that held-out questions are independent
    tested = [chance.choice([(a, b), (b, a)]) for a, b in pairs[:held_out]]
    learnt = [pair for a, b in pairs[held_out:] for pair in sorted({(a, b), (b, a)})]
    chance.shuffle(learnt)
    return [_sum(*pair) for pair in learnt], [_sum(*pair) for pair in tested]


def _sum(left: int, right: int) -> dict:
    question = f"What is {in_words(left)} plus {in_words(right)}?"
    return {"task": "sums", "messages": [_user(question)], "solution": in_words(left + right)}


def people(*, count: int, held_out: int, seed: int) -> tuple[list[dict], list[dict]]:
    """Returns descriptions of persons to be written as JSON. The names of the held-out ones occur in no prompt to learn from."""
    chance = random.Random(seed)
    names = _NAMES.split()
    chance.shuffle(names)
    tested, learnt = names[: len(names) // 3], names[len(names) // 3 :]
    return _people(count, names=learnt, chance=chance), _people(held_out, names=tested, chance=chance)


def _people(count: int, *, names: Sequence[str], chance: random.Random) -> list[dict]:
    drawn = {(name, age, city) for name in names for age in range(18, 90) for city in _CITIES.split()}
    return [_person(*one) for one in chance.sample(sorted(drawn), count)]


def _person(name: str, age: int, city: str) -> dict:
    question = f"{name} is {age} years old and lives in {city}. Write this as JSON."
    solution = json.dumps({"person": {"name": name, "age": age}, "home": {"city": city}})
    return {"task": "people", "messages": [_user(question)], "solution": solution}


def keyed(records: Iterable[dict]) -> list[dict]:
    """Returns the descriptions of `people` as a task of their own: the prompt names the keys of an object without others inside."""
    made = []
    for record in records:
        told = json.loads(record["solution"])
        question = record["messages"][0]["content"].replace(
            "Write this as JSON.", "Write this as JSON with the keys name, age and city, without any other text."
        )
        solution = json.dumps(told["person"] | told["home"])
        made.append({"task": "keys", "messages": [_user(question)], "solution": solution})
    return made


def _user(text: str) -> dict:
    return {"role": "user", "content": text}


def answered(records: Iterable[dict]) -> list[dict]:
    """Returns the conversations with their right answers, for task=sft."""
    return [{"messages": [*one["messages"], {"role": "assistant", "content": one["solution"]}]} for one in records]


def shuffled(records: Sequence[dict], *, seed: int) -> list[dict]:
    return random.Random(seed).sample(records, len(records))


def preferences(records: Sequence[dict], *, rejected: Sequence[str]) -> list[dict]:
    """Returns pairs for task=dpo: the right answer is better than the text in `rejected`. Texts that are right make no pair."""
    return [
        {"prompt": one["messages"], "chosen": one["solution"], "rejected": text}
        for one, text in zip(records, rejected, strict=True)
        if text.strip() and text.strip() != one["solution"]
    ]


def is_number(text: str) -> bool:
    """Whether the text is a number from 0 to 99 in words, and nothing else."""
    return text.strip() in map(in_words, range(100))


def follows(schema: dict, text: str) -> bool:
    """Whether the text is JSON that follows the schema, with any values."""
    return jsonschema.Draft202012Validator(schema).is_valid(_parsed(text))


def is_sum(text: str, *, solution: str) -> bool:
    """Whether the text is the number in words, and nothing else."""
    return text.strip() == solution


def is_object(text: str, *, solution: str) -> bool:
    """Whether the text is JSON with the keys and values of the solution, and no others."""
    return _parsed(text) == json.loads(solution)


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def reward_sum(completions: list, task: list[str], solution: list[str], **_: Any) -> list[float | None]:
    """The reward of task=grpo for sums; None for prompts of the other task."""
    return [
        float(is_sum(_text(one), solution=right)) if name == "sums" else None
        for one, name, right in zip(completions, task, solution, strict=True)
    ]


def reward_object(completions: list, task: list[str], solution: list[str], **_: Any) -> list[float | None]:
    """The reward of task=grpo for both tasks of JSON: 1 for the right object; 0.2 for JSON, and up to 0.5 more for keys with right values."""
    return [
        None if name == "sums" else _graded(_parsed(_text(one)), solution=json.loads(right))
        for one, name, right in zip(completions, task, solution, strict=True)
    ]


def _graded(found: Any, *, solution: dict) -> float:
    if found is None:
        return 0.0
    if found == solution:
        return 1.0
    own = found if isinstance(found, dict) else {}
    return 0.2 + 0.5 * sum(own.get(key) == value for key, value in solution.items()) / len(solution)


def _text(completion: str | list[dict]) -> str:
    """A completion is a text, or messages where the prompts are messages."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


CHECKS: dict[str, Callable[..., bool]] = {"sums": is_sum, "people": is_object, "keys": is_object}
FORMS: dict[str, Callable[[str], bool]] = {
    "sums": is_number,
    "people": partial(follows, SCHEMA),
    "keys": partial(follows, KEYS),
}


def write_lines(records: Iterable[dict], *, to: Path) -> Path:
    """Writes JSON lines. Returns the path: `to` and a digest of the lines, so that other lines are another value of a run's key."""
    text = "".join(json.dumps(one) + "\n" for one in records)
    path = to.with_stem(f"{to.stem}_{hashlib.sha256(text.encode()).hexdigest()[:8]}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def run_once(*words: str, folder: Path) -> Runs:
    """`ztk.run`, or the record of `folder` if that run is done.

    Raises:
        ValueError: the run that is done had other words.
    """
    if folder.exists() and read_status(folder) is Status.done:
        recorded = json.loads((folder / "overrides.json").read_text(encoding="utf-8"))
        given = dict(word.split("=", 1) for word in words)
        if changed := sorted(key for key in recorded.keys() | given if recorded.get(key) != given.get(key)):
            raise ValueError(f"{folder} is the result of other values of {', '.join(changed)}; delete it to run again")
        return ztk.load(folder)
    return ztk.run(*words, folder=folder, quiet=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """`successes` of `n` trials as a share, with its 95 % interval from `low` to `high`."""

    successes: int
    n: int
    low: float
    high: float

    @property
    def share(self) -> float:
        return self.successes / self.n

    def __str__(self) -> str:
        return f"{self.share:.3f} ({self.low:.3f} to {self.high:.3f}, n = {self.n})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Answers:
    """Greedy answers of a model to the held-out prompts. right, formed: the shares of right ones, and of ones with the right form, by task.
    weight_bytes: of the loaded model."""

    texts: list[str]
    tokens: list[list[int]]
    right: dict[str, Share]
    formed: dict[str, Share]
    weight_bytes: int


def ask(model: Path, *words: str, records: Sequence[dict], folder: Path, max_tokens: int = 40) -> Answers:
    """Answers the records with task=generate and checks the answers."""
    prompts = write_lines(records, to=folder.with_suffix(".jsonl"))
    done = run_once(
        "task=generate", f"inference.model={model}", f"inference.prompts={prompts}", "sampling.temperature=0",
        f"sampling.max_tokens={max_tokens}", *words, folder=folder,
    )  # fmt: skip
    lines = [json.loads(line) for line in (done.folder / "completions.jsonl").read_text().splitlines()]
    texts = [line["answers"][0]["text"] for line in lines]
    checked = [CHECKS[one["task"]](text, solution=one["solution"]) for one, text in zip(records, texts, strict=True)]
    formed = [FORMS[one["task"]](text) for one, text in zip(records, texts, strict=True)]
    return Answers(
        texts=texts,
        tokens=[line["answers"][0]["tokens"] for line in lines],
        right=_shares(records, checked),
        formed=_shares(records, formed),
        weight_bytes=int(done.runs.iloc[0]["weight_bytes"]),
    )


def share_interval(successes: int, *, n: int) -> Share:
    """Returns Wilson's score interval, which stays in 0 to 1 and has a width at 0 and n successes, too.

    Raises:
        ValueError: there is no trial, or successes are not between 0 and n.
    """
    if n < 1 or not 0 <= successes <= n:
        raise ValueError(f"successes={successes} of n={n}: n is 1 or more, and successes are 0 to n")
    z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    share, shrink = successes / n, 1 / (1 + z**2 / n)
    centre = shrink * (share + z**2 / (2 * n))
    reach = shrink * z * math.sqrt(share * (1 - share) / n + (z / (2 * n)) ** 2)
    low = centre - reach if successes else 0.0  # exact, where the difference would round
    high = centre + reach if successes < n else 1.0
    return Share(successes=successes, n=n, low=low, high=high)


def _shares(records: Sequence[dict], found: Sequence[bool]) -> dict[str, Share]:
    """The share of each task's answers that are `found`."""
    tasks: dict[str, list[bool]] = {}
    for record, one in zip(records, found, strict=True):
        tasks.setdefault(record["task"], []).append(one)
    return {task: share_interval(sum(each), n=len(each)) for task, each in tasks.items()}


def export(run: Path, *words: str, to: Path) -> Path:
    """`python -m ztk.checkpoint export`, once."""
    if not to.exists():
        subprocess.run(
            [sys.executable, "-m", "ztk.checkpoint", "export", str(run), str(to), *words], cwd=ROOT, check=True,
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
    return to


@contextmanager
def serving(model: Path, *words: str, folder: Path) -> Iterator[str]:
    """Serves the model with task=serve on a free port. Yields the address, and ends the server."""
    command = [sys.executable, str(ROOT / "run.py"), "task=serve", f"inference.model={model}", "serve.port=0", *words]
    process = subprocess.Popen(
        [*command, f"hydra.run.dir={folder}"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    try:
        printed = []
        for line in process.stdout:
            printed.append(line)
            if found := re.search(r"answers on (http://\S+)", line):
                yield found[1]
                return
        raise RuntimeError("the server ended:\n" + "".join(printed))
    finally:
        process.terminate()
        process.communicate()
