"""Conversations of several turns as tokens, with the text between two answers of the policy.

[Note: Joined turns] The tokens of a conversation are the prompt, the first answer as sampled, the environment's observation, the next
answer, and so on. An observation is formatted as the chat template formats it between the end of an answer and the beginning of the next,
and tokenised after the end token. The tokens are thus equal to the template's for the whole conversation, if its beginning does not
change when messages follow. Some templates change it (they drop reasoning of earlier turns, or strip white space). The sampled tokens are
then kept, because the policy's results are based on them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ztk.rl.align.encoding import Encoding, Said
from ztk.rl.align.formats import PROMPTS, unified


def tokens_between(said: Said, *, observed: Said, encoding: Encoding, tools: Sequence[Any] | None = None) -> list[int]:
    """Returns the tokens between an answer to `said` and the next answer, which follows `observed`.

    Both are texts or both are messages.

    Raises ValueError for messages that the template rejects.
    """
    if isinstance(said, str):
        assert isinstance(observed, str), "the observation was checked"
        text, end = observed, encoding.end
    elif (template := encoding.template) is not None:
        assert not isinstance(observed, str), "the observation was checked"
        text, end = template.between(said, observed=observed, tools=tools), template.required_end()
    else:
        text, end = encoding.prompt(observed).text, encoding.end
    read = encoding.tokenizer.read
    return read(end + text).tokens[len(read(end).tokens) :]


def tools_of(record: Mapping[str, Any]) -> Sequence[Any] | None:
    """Returns the tools in a line of the data, or None."""
    return unified(record, purpose=PROMPTS).get("tools") if "tools" in record else None
