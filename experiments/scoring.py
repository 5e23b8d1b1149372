"""Scores texts over HTTP with a reward model: the program of `task=serve` for a run of `task=reward` or a transformers reward model."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ztk.config import Config, config_with, is_text_model
from ztk.core.policies.precision import DType
from ztk.core.runtime import Process
from ztk.experiments.alignment import load_weights
from ztk.experiments.models import build
from ztk.experiments.prompts import PAD
from ztk.experiments.reward_models import RewardModel, tokenizer_of, tokens_of
from ztk.serve.scores import Scorer


class EngineScorer(Scorer):
    """A reward model in an engine of this process, which reads texts with the folder's tokenizer. See `Scorer`."""

    def __init__(self, model: RewardModel, *, config: Config, path: str) -> None:
        """config: has the model of `path`."""
        self._model, self._path = model, path
        self._tokenizer: Any = tokenizer_of(path) if is_text_model(path) else None
        self.vocabulary, self.longest = config.model.vocab_size, config.model.max_seq_len

    def tokens(self, text: str | Sequence[dict[str, Any]]) -> list[int]:
        """Returns the tokens of a text or of a conversation. Raises ValueError without a tokenizer or a chat template."""
        key = f"inference.model={self._path}"
        if self._tokenizer is None:
            raise ValueError(
                f"{key}: has no tokenizer of its own: send lists of tokens, by reward.servers_input=tokens"
            )
        return tokens_of(text, tokenizer=self._tokenizer, key=key)

    def values(self, texts: Sequence[Sequence[int]]) -> list[float]:
        """Returns the value at the last token of each text, by one forward."""
        lengths = torch.tensor([len(one) for one in texts])
        rows = torch.full((len(texts), int(lengths.max())), PAD)
        for row, tokens in zip(rows, texts, strict=True):
            row[: len(tokens)] = torch.tensor(tokens)
        return self._model.values([(rows, lengths)]).tolist()


def open_scorer(config: Config, *, process: Process) -> EngineScorer:
    """Opens the reward model of `inference.model`, in fp32 on a CPU and in bf16 on a GPU.

    Raises:
        ValueError: a folder without a model.
        CheckpointError: a checkpoint of another model.
    """
    path = config.inference.model
    assert path is not None, "the configuration is checked"
    own = config_with(copy.deepcopy(config), path=path, key="inference.model")
    own.precision = replace(own.precision, dtype=DType.fp32 if process.device.type == "cpu" else DType.bf16)
    own.data.seq_len = own.model.max_seq_len
    engine = build(own, process=process, is_trained=False, is_critic=True)
    if not is_text_model(path):
        load_weights(own, engine=engine, path=path)
    return EngineScorer(RewardModel(engine), config=own, path=str(Path(path)))
