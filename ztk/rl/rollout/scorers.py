"""Clients of servers that score texts: `task=serve` with a reward model, and vLLM with a model for sequence classification.

Both answer `POST /classify`, whose `probs` with `use_activation=false` has the model's value. The fields are the same in vLLM 0.16 to 0.32.
"""

import http.client
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ztk.rl.rollout.clients import PROBE_SECONDS, Channel, Failed, Reply, ServerFault, Weights

SCORES = "scores"  # the version of all servers, whose weights do not change


@dataclass(frozen=True, kw_only=True, slots=True)
class Texts:
    """Texts to score. fields: `input`, texts or lists of tokens, or `messages`, one conversation. count: number of texts."""

    fields: Mapping[str, Any]
    count: int


class ScoreClient:
    """A server that scores. Its results are numbers."""

    def __init__(self, channel: Channel) -> None:
        self.channel, self.sent_bytes = channel, 0
        self._model = ""

    def look(self) -> str:
        """Returns `SCORES` if the server answers."""
        self._model = self.channel.request("GET", "/v1/models", seconds=PROBE_SECONDS)["data"][0]["id"]
        return SCORES

    def send(self, *, version: str, weights: Weights) -> None:
        """A fleet that scores sends no weights."""
        raise NotImplementedError("reward.servers keep their weights")

    def answer(self, given: Texts, *, version: str, connection: http.client.HTTPConnection) -> Reply:
        """Returns a number per text. Raises Failed for another number of them, and for one that is not finite."""
        body = {"model": self._model, "use_activation": False} | dict(given.fields)
        reply = self.channel.request("POST", "/classify", body=json.dumps(body).encode(), connection=connection)
        found = sorted(reply["data"], key=lambda one: one["index"])
        if len(found) != given.count:
            raise Failed(f"{self.channel.url} returned {len(found)} scores for {given.count} texts")
        return Reply(results=[self._value(one["probs"]) for one in found], versions={version})

    def _value(self, values: list[Any]) -> float:
        if len(values) != 1:
            raise ServerFault(
                f"reward.servers: {self.channel.url} has a model of {len(values)} labels; start it with a reward model, which has one"
            )
        if not isinstance(values[0], int | float) or not math.isfinite(values[0]):
            raise Failed(f"{self.channel.url} returned the score {values[0]}")
        return float(values[0])
