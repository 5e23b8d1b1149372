"""Conversations of several turns as tokens, with the text between two answers of the policy.

[Note: Joined turns] The tokens of a conversation are the prompt, the first answer as sampled, the environment's observation, the next
answer, and so on. An observation is formatted as the chat template formats it between the end of an answer and the beginning of the next,
and tokenised after the end token. The tokens are thus equal to the template's for the whole conversation, if its beginning does not
change when messages follow. Some templates change it (they drop reasoning of earlier turns, or strip white space). The sampled tokens are
then kept, because the policy's results are based on them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ztk.data import ByteTokenizer, SubwordTokenizer
from ztk.rl.align.formats import PROMPTS, unified
from ztk.rl.align.records import ANSWER_END, Prompt, chat_prompt, text_prompt
from ztk.rl.align.templates import ChatTemplate, Message

# A text, or messages.
Said = str | Sequence[Message]


@dataclass(frozen=True, kw_only=True, slots=True)
class Turns:
    """The format of conversations. by_template: uses the chat template of the tokenizer's folder, otherwise lines <|role|>. ends: tokens
    that end an answer.
    """

    tokenizer: ByteTokenizer | SubwordTokenizer
    by_template: bool
    ends: Sequence[int]

    def begin(self, prompt: Said, *, tools: Sequence[Any] | None = None) -> Prompt:
        """Returns the prompt of the first answer. Raises ValueError and ChatTemplateError as `chat_prompt` does."""
        if isinstance(prompt, str):
            return text_prompt(prompt, tokenizer=self.tokenizer)
        if isinstance(self.tokenizer, ByteTokenizer):
            return chat_prompt(prompt, stop=ANSWER_END, tools=tools)
        return chat_prompt(prompt, tokenizer=self.tokenizer, by_template=self.by_template, tools=tools)

    def answer(self, tokens: Tensor) -> str:
        """Returns the text of a sampled answer, int64 [n], without its end and special tokens."""
        ended = len(tokens) > 0 and int(tokens[-1]) in self.ends
        return self.tokenizer.decode(tokens[:-1] if ended else tokens)

    def between(self, said: Said, *, observed: Said, tools: Sequence[Any] | None = None) -> list[int]:
        """Returns the tokens between an answer to `said` and the next answer, which follows `observed`.

        Both are texts or both are messages.

        Raises ValueError for messages that the template rejects.
        """
        if isinstance(said, str):
            assert isinstance(observed, str), "the observation was checked"
            text, end = observed, self._end_text()
        elif self.by_template and isinstance(self.tokenizer, SubwordTokenizer):
            template = ChatTemplate.open(self.tokenizer.folder)
            assert not isinstance(observed, str), "the observation was checked"
            text, end = template.between(said, observed=observed, tools=tools), template.required_end()
        else:
            text, end = self.begin(observed).text, self._end_text()
        return self.tokenizer.read(end + text).tokens[len(self.tokenizer.read(end).tokens) :]

    def _end_text(self) -> str:
        return chr(ANSWER_END) if isinstance(self.tokenizer, ByteTokenizer) else self.tokenizer.end_text


def tools_of(record: Mapping[str, Any]) -> Sequence[Any] | None:
    """Returns the tools in a line of the data, or None."""
    return unified(record, purpose=PROMPTS).get("tools") if "tools" in record else None
