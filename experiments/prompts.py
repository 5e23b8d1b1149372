"""Prompts, their answers and rewards: made on the spot, or lines of a file."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ztk.align import ANSWER_END
from ztk.config import Config
from ztk.data import ByteTokenizer, SubwordTokenizer
from ztk.rollout import Samples, load_reward, score
from ztk.rollout.rewards import RewardFunction
from ztk.runtime.seed import generator

STOP, PAD = ANSWER_END, 0  # bytes of text are never 0
LETTERS, COUNT = "abcdefgh", 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """text: what the policy sees. answer: the right one, if it is known. record: what the reward function gets beside the texts."""

    text: str
    answer: str | None = None
    record: Mapping[str, Any] = field(default_factory=dict)

    @property
    def tokens(self) -> list[int]:
        return ByteTokenizer().encode(self.text).tolist()


def sorting(*, seed: int, number: int) -> Prompt:
    """Letters to be sorted: `dbace>` -> `abcde`. Prompt `number` of the endless sequence for `seed`."""
    drawn = torch.randint(len(LETTERS), (COUNT,), generator=generator(seed, "sorting", number)).tolist()
    letters = "".join(LETTERS[index] for index in drawn)
    return Prompt(text=f"{letters}>", answer="".join(sorted(letters)), record={"number": number})


def is_right(*, prompt: str, answer: str, record: Mapping[str, Any]) -> float:
    """1 for the letters of `prompt` in order, else 0."""
    return float(answer == "".join(sorted(prompt.removesuffix(">"))))


def wrong_answer(prompt: Prompt, *, seed: int, number: int) -> str:
    """As many letters as the right answer has, in an order of chance that is not the right one if there is another."""
    assert prompt.answer is not None
    letters = list(prompt.answer)
    for attempt in range(8):
        order = torch.randperm(len(letters), generator=generator(seed, "wrong", number, attempt)).tolist()
        answer = "".join(letters[index] for index in order)
        if answer != prompt.answer:
            break
    return answer


class Prompts:
    """The prompts of a run by number, as tokens of the model, and the reward of an answer to them. stop: the token that ends an answer."""

    def __init__(self, config: Config) -> None:
        """Raises ValueError for a file without prompts, a line that is none, and a reward function that cannot be loaded."""
        self._seed, self._timeout_seconds = config.train.seed, config.reward.timeout_seconds
        self.tokenizer = open_tokenizer(config)
        self.stop = STOP if isinstance(self.tokenizer, ByteTokenizer) else self.tokenizer.end
        self._records = None if config.rollout.task is not None else read_records(config.data.path)
        if self._records is not None:
            check_lengths(
                self._records,
                tokenizer=self.tokenizer,
                seq_len=config.data.seq_len,
                max_tokens=config.rollout.max_tokens,
            )
        self._reward: RewardFunction = (
            is_right if config.reward.function is None else load_reward(config.reward.function)
        )

    def __getitem__(self, number: int) -> Prompt:
        """Lines of a file come in another order in every pass over it."""
        if self._records is None:
            return sorting(seed=self._seed, number=number)
        epoch, index = divmod(number, len(self._records))
        order = torch.randperm(len(self._records), generator=generator(self._seed, "prompts", epoch))
        record = self._records[int(order[index])]
        return Prompt(text=record["prompt"], record=record)

    def save_tokenizer(self, folder: Path) -> None:
        """For those who take the trained model elsewhere; bytes need none."""
        if isinstance(self.tokenizer, SubwordTokenizer):
            self.tokenizer.save(folder)

    def tokens_of(self, prompt: Prompt) -> list[int]:
        """What the policy continues."""
        return self.tokenizer.encode(prompt.text).tolist()

    def answer_of(self, samples: Samples, *, row: int) -> str:
        """The text of an answer, without its end."""
        first = int(samples.prompt_lengths[row])
        last = first + int(samples.answer_lengths[row]) - int(samples.finished[row])
        return self.tokenizer.decode(samples.tokens[row, first:last])

    def describe(self) -> str:
        """How many prompts there are, and their lengths in tokens."""
        if self._records is None:
            return f"prompts: made on the spot, of {len(self[0].tokens)} tokens each"
        lengths = sorted(len(self.tokenizer.encode(record["prompt"])) for record in self._records)
        parts = {f"{percent}%": lengths[(len(lengths) - 1) * percent // 100] for percent in (0, 10, 50, 90, 100)}
        shown = ", ".join(f"{name} {length}" for name, length in parts.items())
        return f"prompts: {len(lengths)}, of as many tokens (quantiles): {shown}"

    def score(self, prompt: Prompt, *, answer: str) -> float | None:
        """The reward; None: the sample is left out. Raises RewardError."""
        return score(
            self._reward,
            prompt=prompt.text,
            answer=answer,
            record=prompt.record,
            timeout_seconds=self._timeout_seconds,
        )


def read_records(paths: list[str]) -> list[dict[str, Any]]:
    """The lines of all files, each a JSON object with a text `prompt`. Raises ValueError with file and line for others."""
    records = []
    for path in paths:
        for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), start=1):
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"data.path={path}, line {number}: not JSON ({error})") from None
            if not isinstance(record, dict) or not isinstance(record.get("prompt"), str) or not record["prompt"]:
                raise ValueError(f'data.path={path}, line {number}: must be an object with a text "prompt"')
            records.append(record)
    if not records:
        raise ValueError(f"data.path={paths}: no prompts; every line must be an object with a text 'prompt'")
    return records


def open_tokenizer(config: Config) -> ByteTokenizer | SubwordTokenizer:
    """That of `data.tokenizer`; built-in prompts are bytes."""
    if config.data.path is None or config.data.tokenizer in (None, "bytes"):
        return ByteTokenizer()
    return SubwordTokenizer.open(config.data.tokenizer)


def check_lengths(
    records: list[dict[str, Any]], *, tokenizer: ByteTokenizer | SubwordTokenizer, seq_len: int, max_tokens: int
) -> None:
    """Raises ValueError for a prompt without a token, and for one that leaves no room for an answer: none is cut."""
    counts = [len(tokenizer.encode(record["prompt"])) for record in records]
    shortest, longest = (records[counts.index(bound(counts))] for bound in (min, max))
    length = max(counts)
    if not min(counts):
        raise ValueError(f"the prompt {shortest['prompt']!r} has no token in data.tokenizer: give it a text")
    if length + max_tokens > seq_len:
        raise ValueError(
            f"the prompt {longest['prompt'][:40]!r}... of {length} tokens and rollout.max_tokens={max_tokens} do not fit into "
            f"data.seq_len={seq_len}: use data.seq_len={length + max_tokens}, or shorter prompts"
        )
