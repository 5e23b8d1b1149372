"""The rewards of `reward.servers`."""

import torch
from torch import Tensor

from ztk.config import Config
from ztk.experiments.servers import channels_of
from ztk.rl.rollout import Fleet, Samples
from ztk.rl.rollout.fleet import Work
from ztk.rl.rollout.rewards import Answered
from ztk.rl.rollout.scorers import SCORES, ScoreClient, Texts


class ServedReward:
    """A reward model on servers, which have its weights. They are asked for a micro-batch at a time, the least loaded one first."""

    def __init__(self, config: Config) -> None:
        """Raises ValueError as `channels_of`."""
        reward = config.reward
        assert reward.servers is not None and reward.servers_wait is not None, "the configuration is checked"
        variable = reward.servers_key_variable
        named = {"variable": variable, "key": "reward.servers_key_variable"}
        channels = channels_of(reward.servers, seconds=reward.servers_wait, **named)
        self._reads_text = reward.servers_input == "text"
        self.fleet = Fleet(
            [ScoreClient(channel) for channel in channels],
            sends=False,
            patience_seconds=reward.servers_wait,
            key="reward.servers",
            wait_key="reward.servers_wait",
        )
        self.fleet.publish(SCORES, weights=None)

    def score(self, samples: Samples, *, answered: Answered, micro_batch: int) -> Tensor:
        """Returns the value of every answer, float64 [S] on the CPU. answered: the same answers as text.

        Raises:
            ServersLost: no server has answered for `reward.servers_wait` seconds.
            ServerFault: a server refuses a text, or has no reward model.
        """
        works = self._texts(answered) if self._reads_text else _tokens(samples, micro_batch=micro_batch)
        parts = self.fleet.compute([Work(given=given, size=given.count) for given in works])
        return torch.tensor([value for part in parts for value in part], dtype=torch.float64)

    def close(self) -> None:
        """Ends the threads of the servers. Idempotent."""
        self.fleet.close()

    def _texts(self, answered: Answered) -> list[Texts]:
        """The server's tokenizer and chat template write a conversation, or the prompt with its answer."""
        return [
            Texts(fields=_conversation(answered, row=row) if is_chat else {"input": [text + answer]}, count=1)
            for row, (text, answer, is_chat) in enumerate(
                zip(answered.texts, answered.answers, answered.is_chat, strict=True)
            )
        ]


def _conversation(answered: Answered, *, row: int) -> dict[str, object]:
    record = answered.records[row]
    if record.get("tools"):
        raise ValueError(
            "reward.servers with reward.servers_input=text: servers do not take the tools of a record; use reward.path"
        )
    messages = [*record.get("prompt", record.get("messages")), *answered.messages(row)]
    return {"messages": messages, "add_generation_prompt": False, "add_special_tokens": False}


def _tokens(samples: Samples, *, micro_batch: int) -> list[Texts]:
    """A forward in the process of the policy has the rows of a request, so that a server's values have the same bits."""
    rows = [row[:length].tolist() for row, length in zip(samples.tokens, samples.lengths.tolist(), strict=True)]
    parts = [rows[first : first + micro_batch] for first in range(0, len(rows), micro_batch)]
    return [Texts(fields={"input": part}, count=len(part)) for part in parts]
