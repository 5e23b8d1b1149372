"""Rewards by a transformers model for sequence classification with one label, which has its own tokenizer and chat template."""

from typing import Any

import torch
from torch import Tensor

from experiments.learned_reward import end_values
from experiments.models import build
from experiments.prompts import PAD
from ztk.config import Config, config_with
from ztk.core.runtime import Process
from ztk.hf.causal import transformers_module
from ztk.rl.rollout.rewards import Answered
from ztk.train.engine import Engine


class TextReward:
    """The model of `reward.path`, in an engine under the run's strategy unless `reward` differs."""

    def __init__(self, config: Config, *, process: Process) -> None:
        """A collective call. Raises ValueError for a folder without such a model."""
        path = config.reward.path
        assert path is not None, "the configuration is checked"
        own = config_with(config, path=path, key="reward.path")
        self.engine: Engine = build(own, process=process, is_trained=False, is_critic=True, strategy=config.reward)
        self._path, self._longest = path, own.model.max_seq_len
        library: Any = transformers_module()
        self._tokenizer: Any = library.AutoTokenizer.from_pretrained(
            path, local_files_only=True, trust_remote_code=False
        )

    def score(self, answered: Answered, *, micro_batch: int) -> Tensor:
        """Returns the value of every prompt with its answer, float64 [S]. A collective call: every rank has the same number of answers.

        Raises:
            ValueError: a text that is too long for the model, or prompts of messages and no chat template.
            FloatingPointError: a value that is not finite.
        """
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
        found = end_values(self.engine, tokens=rows, lengths=lengths, micro_batch=micro_batch)
        if not found.isfinite().all():
            row = int((~found.isfinite()).nonzero()[0])
            raise FloatingPointError(f"the value of the model of reward.path is not finite {answered.where(row)}")
        return found

    def _tokens(self, answered: Answered, *, row: int) -> list[int]:
        """Returns the tokens that transformers makes of the text. A chat template contains the special tokens."""
        answer = answered.answers[row]
        if not answered.is_chat[row]:
            return self._tokenizer(answered.texts[row] + answer)["input_ids"]
        if not self._tokenizer.chat_template:
            raise ValueError(
                f"reward.path={self._path}: has no chat template, and prompts are messages: put chat_template into its tokenizer_config.json"
            )
        record = answered.records[row]
        messages = [*record.get("prompt", record.get("messages")), *answered.messages(row)]
        text = self._tokenizer.apply_chat_template(messages, tools=record.get("tools") or None, tokenize=False)
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]
