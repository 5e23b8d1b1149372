"""Environments of tests, as a user writes them."""

import asyncio


class Twice:
    """Repeats the prompt and rewards both answers."""

    def reset(self, prompt, **columns):
        self.prompt, self.turns = prompt, 0

    def step(self, answer):
        self.turns += 1
        return self.prompt, (sum(answer.encode()) % 7) / 7, self.turns == 2


class Endless(Twice):
    """Never ends by itself."""

    async def step(self, answer):
        await asyncio.sleep(0)
        observation, reward, _ = super().step(answer)
        return observation, reward, False


class Letters(Twice):
    """Rewards each of two answers for its share of the letter a."""

    def step(self, answer):
        self.turns += 1
        return self.prompt, answer.count("a") / max(1, len(answer)) / 2, self.turns == 2


class Tool:
    """Answers the first turn as a tool."""

    def reset(self, prompt, hint):
        self.turns = 0
        return [{"role": "system", "content": hint}, *prompt]

    async def step(self, answer):
        self.turns += 1
        return [{"role": "tool", "content": "four"}], None if self.turns == 1 else len(answer) / 10, self.turns == 2


def roles(completions):
    """The number of messages of each conversation; they are the policy's and the tool's in turn."""
    for messages in completions:
        assert [message["role"] for message in messages[:3]] == ["assistant", "tool", "assistant"][: len(messages)]
    return [float(len(messages)) for messages in completions]
