"""Prompts with their answers and rewards, generated or read from a file."""

from collections.abc import Iterable
from pathlib import Path

import torch

from ztk.config import Config, evaluation_config, has_rewards, open_rewards
from ztk.config.generation import end_tokens, generation_file
from ztk.config.text import encoding_of
from ztk.core.runtime.seed import generator
from ztk.data import ByteTokenizer, SubwordTokenizer
from ztk.experiments.lengths import histogram
from ztk.experiments.tasks import TASKS, Task, name_of
from ztk.rl.align import ANSWER_END, Prompt, Truncation, answer_end, fitted, read_prompts
from ztk.rl.rollout import Samples
from ztk.rl.rollout.rewards import Reward, RewardFunctions

STOP, PAD = ANSWER_END, 0  # bytes of text are never 0


class Prompts:
    """The prompts of a run by number, as tokens. rewards: the reward functions. is_own_reward: whether they, or an environment, are the
    user's. stops: tokens that end an answer.
    """

    def __init__(self, config: Config) -> None:
        """Raises ValueError for a file without prompts, an invalid line, a reward function that cannot be loaded, and a text of
        rollout.stop that is not a token.
        """
        self._seed, self._orders = config.train.seed, dict[int, torch.Tensor]()
        self.encoding = encoding_of(config)
        self.tokenizer = self.encoding.tokenizer
        self._records = None if config.rollout.task is not None else self._read(config)
        end = answer_end(self._records or [], encoding=self.encoding)
        self.stops = with_other_ends([end], config=config, tokenizer=self.tokenizer)
        self._task: Task | None = None if config.rollout.task is None else TASKS[name_of(config)]
        self.is_own_reward = has_rewards(config) or config.rollout.environment is not None
        self.rewards = self._open_rewards(config)

    def _open_rewards(self, config: Config) -> RewardFunctions | None:
        """Returns the user's functions, or the task's own. None if only an environment or the model of `reward.path` gives rewards."""
        if has_rewards(config):
            return open_rewards(config)
        if self._task is None or self.is_own_reward:
            return None
        own = Reward(name=name_of(config), function=self._task.score)
        return RewardFunctions([own], timeout_seconds=config.reward.timeout_seconds)

    def _read(self, config: Config) -> list[Prompt]:
        data = config.data
        found = read_prompts(data.path, encoding=self.encoding, fields=data.fields)
        cut = None if data.truncate_prompts is None else Truncation(data.truncate_prompts.value)
        self.lengths = sorted(len(record.tokens) for record in found)  # before truncation
        assert config.rollout.max_tokens is not None, "the configuration is checked"
        return fitted(found, most=data.seq_len - config.rollout.max_tokens, seq_len=data.seq_len, cut=cut)

    def __getitem__(self, number: int) -> Prompt:
        """Returns a prompt. Lines of a file are reshuffled in every pass over it."""
        if self._records is None:
            assert self._task is not None, "the configuration is checked"
            return self._task.prompt(seed=self._seed, number=number)
        epoch, index = divmod(number, len(self._records))
        return self._records[int(self._order(epoch)[index])]

    def _order(self, epoch: int) -> torch.Tensor:
        """Returns the order of the lines in a pass. The last two are cached: one for training, one for evaluations or the next pass."""
        assert self._records is not None
        if epoch not in self._orders:
            order = torch.randperm(len(self._records), generator=generator(self._seed, "prompts", epoch))
            self._orders = dict([*self._orders.items(), (epoch, order)][-2:])
        return self._orders[epoch]

    @property
    def count(self) -> int | None:
        """Returns the number of prompts in the files, or None if prompts are generated."""
        return None if self._records is None else len(self._records)

    def save_tokenizer(self, folder: Path) -> None:
        """Saves the tokenizer for later use with the trained model. Bytes need none."""
        if isinstance(self.tokenizer, SubwordTokenizer):
            self.tokenizer.save(folder)

    def answer_of(self, samples: Samples, *, row: int) -> str:
        """Returns the text of an answer, without its end and special tokens."""
        return self.tokenizer.decode(samples.answer(row, with_end=False))

    def prompt_of(self, samples: Samples, *, row: int) -> str:
        """The text of a prompt, with its special tokens."""
        tokens = samples.tokens[row, : int(samples.prompt_lengths[row])]
        if isinstance(self.tokenizer, ByteTokenizer):
            return self.tokenizer.decode(tokens)
        return self.tokenizer.decode(tokens, shows_special=True)

    def drawn(self, samples: Samples, *, row: int) -> str:
        """Returns the text of an answer as sampled, with its end and special tokens; for bytes without the end."""
        if isinstance(self.tokenizer, ByteTokenizer):
            return self.answer_of(samples, row=row)
        return self.tokenizer.decode(samples.answer(row), shows_special=True)

    def describe(self) -> str:
        """Describes the number of prompts, their lengths in tokens, and the number of truncated ones."""
        if self._records is None:
            return "prompts: generated"
        lengths = self.lengths
        longest = max(len(record.tokens) for record in self._records)
        cut = sum(length > longest for length in lengths)
        return f"prompts: {len(lengths)}, {histogram(lengths)}" + (f"\n{cut} cut to {longest}" if cut else "")


def open_evaluation_prompts(config: Config, *, prompts: Prompts) -> Prompts | None:
    """Opens the prompts of `data.eval_path` with the functions of `reward.eval_functions`, if the run evaluates prompts between steps.

    Both default to training's. Raises ValueError as `Prompts`.
    """
    if not (config.rollout.eval_every or config.checkpoint.keep_best):
        return None
    own = evaluation_config(config)
    return prompts if own is None else Prompts(own)


def with_other_ends(
    ends: Iterable[int], *, config: Config, tokenizer: ByteTokenizer | SubwordTokenizer
) -> tuple[int, ...]:
    """Returns `ends`, the end tokens in the model's generation_config.json, and the tokens of `rollout.stop`.

    A model may have more end tokens than its chat template uses.

    Raises:
        ValueError: a text of `rollout.stop` with several tokens.
    """
    found = list(ends)
    if not isinstance(tokenizer, ByteTokenizer) and config.model.path is not None:
        found += end_tokens(generation_file(config.model.path))
    for text in config.rollout.stop or ():
        tokens = tokenizer.read(text).tokens
        if len(tokens) != 1:
            raise ValueError(
                f"rollout.stop: {text!r} has {len(tokens)} tokens, and an answer ends with one: name a text of one token, such as a "
                "special one"
            )
        found += tokens
    return tuple(dict.fromkeys(found))
