"""The model of `reward.path`: a separate engine that never steps, trained by `task=reward` or a transformers model with its own tokenizer."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ztk.config import Config, config_with, is_text_model
from ztk.core.runtime import Process
from ztk.experiments.alignment import load_weights
from ztk.experiments.models import build, packs_texts
from ztk.experiments.prompts import PAD
from ztk.experiments.served_rewards import ServedReward
from ztk.hf.causal import transformers_module
from ztk.parallel.pipeline import MicroBatch
from ztk.rl.rollout import Samples, lay_out
from ztk.rl.rollout.rewards import Answered
from ztk.train.engine import Engine


class RewardModel:
    """A model trained by `task=reward`, which reads the policy's tokens."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def score(self, samples: Samples, *, answered: Answered, micro_batch: int) -> Tensor:
        """Returns the value at the last token of every answer, as in Bradley-Terry's loss: float64 [S] on the CPU.

        answered: the same answers as text. A collective call: every rank has the same number of answers.

        Raises:
            ValueError: a text that the model cannot read.
            FloatingPointError: a value that is not finite.
        """
        tokens, lengths = self._texts(samples, answered=answered)
        rows = [slice(first, first + micro_batch) for first in range(0, len(tokens), micro_batch)]
        found = self.values([(tokens[one], lengths[one]) for one in rows])
        if not found.isfinite().all():
            row = int((~found.isfinite()).nonzero()[0])
            raise FloatingPointError(f"the value of the model of reward.path is not finite {answered.where(row)}")
        return found

    def values(self, batches: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
        """Returns the values at the last tokens, float64 on the CPU. batches: tokens int64 [B, T] and lengths int64 [B] of each forward.

        A collective call.
        """
        engine, packs = self.engine, packs_texts(self.engine)

        def forward_of(tokens: Tensor, lengths: Tensor) -> MicroBatch:
            layout = lay_out(tokens, lengths=lengths, packs=packs, device=engine.process.device)
            return layout.micro_batch(
                lambda model: layout.forward(model).flatten().index_select(0, layout.at(lengths - 1))
            )

        with engine.evaluating():
            parts = engine.compute(forward_of(tokens, lengths) for tokens, lengths in batches)
        return torch.cat([part.cpu() for part in parts]).double()

    def _texts(self, samples: Samples, *, answered: Answered) -> tuple[Tensor, Tensor]:
        """Returns tokens, int64 [S, T], and lengths, int64 [S], of every prompt with its answer."""
        return samples.tokens, samples.lengths


class TextReward(RewardModel):
    """A transformers model for sequence classification with one label, which reads texts by its own tokenizer and chat template."""

    def __init__(self, engine: Engine, *, path: str, longest: int) -> None:
        """longest: tokens that the model reads at most."""
        super().__init__(engine)
        self._path, self._longest = path, longest
        self._tokenizer = tokenizer_of(path)

    def _texts(self, samples: Samples, *, answered: Answered) -> tuple[Tensor, Tensor]:
        texts = [self._tokens(answered, row=row) for row in range(len(answered))]
        lengths = torch.tensor([len(tokens) for tokens in texts])
        if (longest := int(lengths.max())) > self._longest:
            raise ValueError(
                f"reward.path={self._path}: reads {self._longest} tokens at most, and a text has {longest}: use a smaller rollout.max_tokens, "
                "or shorter prompts"
            )
        rows = torch.full((len(texts), longest), PAD)
        for row, tokens in zip(rows, texts, strict=True):
            row[: len(tokens)] = torch.tensor(tokens)
        return rows, lengths

    def _tokens(self, answered: Answered, *, row: int) -> list[int]:
        """Returns the tokens that transformers makes of the text. A chat template contains the special tokens."""
        answer, given = answered.answers[row], {"tokenizer": self._tokenizer, "key": f"reward.path={self._path}"}
        if not answered.is_chat[row]:
            return tokens_of(answered.texts[row] + answer, **given)
        record = answered.records[row]
        messages = [*record.get("prompt", record.get("messages")), *answered.messages(row)]
        return tokens_of(messages, tools=record.get("tools") or None, **given)


def tokenizer_of(path: str) -> Any:
    """Returns the tokenizer in a folder of transformers."""
    library: Any = transformers_module()
    return library.AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)


def tokens_of(text: str | Sequence[Any], *, tokenizer: Any, key: str, tools: Any = None) -> list[int]:
    """Returns the tokens that transformers makes of a text, or of a conversation by the chat template, which has the special tokens.

    key: names the model in the ValueError of a conversation without a chat template.
    """
    if isinstance(text, str):
        return tokenizer(text)["input_ids"]
    if not tokenizer.chat_template:
        raise ValueError(
            f"{key}: has no chat template, and prompts are messages: put chat_template into its tokenizer_config.json"
        )
    return tokenizer(tokenizer.apply_chat_template(list(text), tools=tools, tokenize=False), add_special_tokens=False)[
        "input_ids"
    ]


def open_reward_model(config: Config, *, process: Process) -> RewardModel | ServedReward | None:
    """Opens the model of `reward.path`, under the run's strategy unless `reward` differs, or `reward.servers`. A collective call. Returns None
    if there is neither.

    Raises:
        ValueError: a folder without a reward model.
        CheckpointError: a checkpoint of another model, such as one without an output layer of one value.
    """
    if config.reward.servers:
        return ServedReward(config)
    path = config.reward.path
    if path is None:
        return None
    options = {"process": process, "is_trained": False, "is_critic": True, "strategy": config.reward}
    if is_text_model(path):
        own = config_with(config, path=path, key="reward.path")
        return TextReward(build(own, **options), path=path, longest=own.model.max_seq_len)
    engine = build(config, **options)
    load_weights(config, engine=engine, path=path)
    return RewardModel(engine)
