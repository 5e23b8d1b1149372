"""Runs users' environments, which respond to a policy's turns: one instance per sample, called with time limits and checks.

class Environment:
    def reset(self, prompt, **columns): ...  # -> the first prompt, a text or messages, or None for the prompt of the data
    def step(self, answer): ...  # -> observation, reward, done

Both may be `async def`: the calls of all samples are then awaited together. Plain methods are called one after another.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

from ztk.rl.align.encoding import Prompt, Said
from ztk.rl.rollout.calls import NUMBER, Call, Calls, asked, number_of
from ztk.rl.rollout.rewards import OWN_FIELDS, RewardError

_RETURNS = "return observation, reward, done"


class EnvironmentFault(RewardError):
    """An environment failed. The message has the sample, the turn and the user's exception."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """observation: a text or messages, or None at the end of an episode. reward: None if the turn has none."""

    observation: Said | None
    reward: float | None
    done: bool


@dataclass(kw_only=True, slots=True)
class Episode:
    """The conversation of one sample with its environment.

    number: the sample's. record: the line of the data. tools: offered by the chat template. said: the conversation so far, a text or
    messages. prompt: length of the prompt in `said`, in characters or messages. outcome: done, max_turns or max_tokens; "" until the end.
    """

    number: int
    record: Mapping[str, Any]
    said: Said
    tools: Sequence[Any] | None = None
    environment: Any = None
    prompt: int = 0
    rewards: list[float | None] = field(default_factory=list)
    outcome: str = ""

    @classmethod
    def of(cls, prompt: Prompt, *, number: int) -> Self:
        """Begins an episode with the text that the policy gets, or the messages of the record, to which `read_prompts` adds them."""
        if not prompt.is_chat:
            return cls(number=number, record=prompt.record, said=prompt.text)
        return cls(number=number, record=prompt.record, said=prompt.record["prompt"], tools=prompt.tools)

    @property
    def turns(self) -> int:
        """The number of steps so far."""
        return len(self.rewards)

    @property
    def reward(self) -> float:
        """The sum of the steps' rewards; NaN if no step had one."""
        found = [reward for reward in self.rewards if reward is not None]
        return math.fsum(found) if found else math.nan

    @property
    def asked(self) -> Said:
        """The prompt."""
        return self.said[: self.prompt]

    @property
    def answered(self) -> Said:
        """The conversation after the prompt."""
        return self.said[self.prompt :]

    def to_json(self) -> dict[str, Any]:
        """Returns the conversation, its rewards and its end, without environment and record."""
        return {name: getattr(self, name) for name in ("number", "said", "prompt", "rewards", "outcome")}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Restores the result of `to_json`."""
        return cls(record={}, **values)

    def extend(self, answer: str, *, observed: Said | None = None) -> None:
        """Adds a turn of the policy and the observation after it."""
        if isinstance(self.said, str):
            self.said += answer + (observed or "")
        else:
            self.said = [*self.said, {"role": "assistant", "content": answer}, *(observed or [])]


class Environments:
    """Creates environments and calls them for many samples at once. make: a class without required arguments. name: shown in errors."""

    def __init__(self, make: Callable[[], Any], *, name: str, timeout_seconds: float) -> None:
        """timeout_seconds: the time limit of one call."""
        self._make, self._name = make, name
        self._calls = Calls(seconds=timeout_seconds, fault=EnvironmentFault)

    def reset(self, episodes: Sequence[Episode]) -> None:
        """Creates an environment per episode, and replaces `said` with the result of its `reset`, which gets the record's other fields.

        Raises:
            EnvironmentFault: an environment raised, exceeded the time limit, or returned something other than a text, messages or None.
        """
        for episode in episodes:
            episode.environment = self._made(episode)
        calls = []
        for episode in episodes:
            function = episode.environment.reset
            columns = {name: value for name, value in episode.record.items() if name not in OWN_FIELDS}
            given = asked(function, given={**columns, "prompt": deepcopy(episode.said)})
            calls.append(self._call(function, episode=episode, method="reset", arguments=given))
        found = self._calls.start(calls)()
        for episode, value in zip(episodes, found, strict=True):
            if value is not None:
                episode.said = self._said(value, episode=episode, method="reset", as_prompt=True)
            episode.prompt = len(episode.said)

    def step(self, episodes: Sequence[Episode], *, answers: Sequence[str]) -> list[Step]:
        """Returns the result of each environment for its answer, and adds the reward to its episode.

        Raises:
            EnvironmentFault: as in `reset`, or a step returned something other than an observation, a finite reward or None, and a bool.
        """
        calls = [
            self._call(partial(episode.environment.step, answer), episode=episode, method="step", answer=answer)
            for episode, answer in zip(episodes, answers, strict=True)
        ]
        found = self._calls.start(calls)()
        steps = [self._checked(value, episode=episode) for value, episode in zip(found, episodes, strict=True)]
        for episode, step in zip(episodes, steps, strict=True):
            episode.rewards.append(step.reward)
        return steps

    def refused(self, episode: Episode, *, error: ValueError) -> EnvironmentFault:
        """The fault of an observation that cannot be written behind the conversation."""
        return EnvironmentFault(f"{self._name}: the observation of {_where(episode, turn=episode.turns)}: {error}")

    def _made(self, episode: Episode) -> Any:
        [made] = self._calls.start([self._call(self._make, episode=episode, method="its class")])()
        for method in ("reset", "step"):
            if not callable(getattr(made, method, None)):
                raise EnvironmentFault(f"{self._name} has no method {method}: write reset(prompt) and step(answer)")
        return made

    def _call(
        self, function: Callable, *, episode: Episode, method: str, answer: str | None = None, **given: Any
    ) -> Call:
        """answer: a step's, for errors."""
        where = _where(episode) if answer is None else f"{_where(episode)}, answer {answer!r}"
        return Call(said=f"{self._name}: {method}", where=where, function=function, **given)

    def _checked(self, value: Any, *, episode: Episode) -> Step:
        said = f"{self._name}: step returned {value!r}, {_where(episode)}"
        if not isinstance(value, tuple | list) or len(value) != 3:
            raise EnvironmentFault(f"{said}: {_RETURNS}")
        observation, reward, done = value
        try:
            number = None if reward is None else number_of(reward)
        except TypeError as kind:
            raise EnvironmentFault(f"{said}: the reward is {kind}; it must be {NUMBER}") from None
        if type(done).__name__ not in ("bool", "bool_"):  # numpy's has its own type
            raise EnvironmentFault(f"{said}: done is a {type(done).__name__}; it must be True or False")
        if done:
            return Step(observation=None, reward=number, done=True)
        return Step(observation=self._said(observation, episode=episode, method="step"), reward=number, done=False)

    def _said(self, value: Any, *, episode: Episode, method: str, as_prompt: bool = False) -> Said:
        """Checks a text or messages, in the form of the conversation. In a conversation of messages, a text becomes a user's message."""
        said = f"{self._name}: {method} returned {value!r}, {_where(episode)}"
        is_text = isinstance(episode.said, str)
        if isinstance(value, str) and value:
            return value if is_text else [{"role": "user", "content": value}]
        if not isinstance(value, list) or not value or not all(_is_message(entry) for entry in value):
            fix = (
                "the prompt as text or messages, or None"
                if as_prompt
                else "an observation as text or messages, or done=True"
            )
            raise EnvironmentFault(f"{said}: return {fix}")
        if is_text and not as_prompt:
            raise EnvironmentFault(f"{said}: the prompt is a text, so return a text, or write prompts as messages")
        return value


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str)


def _where(episode: Episode, *, turn: int | None = None) -> str:
    """turn: the one that is under way, unless it is given."""
    number = episode.turns + 1 if turn is None else turn
    return f"sample {episode.number}, turn {number}, record {dict(episode.record)!r}"
