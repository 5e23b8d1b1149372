"""Finds which of several texts a model considers the likeliest continuation of a prompt.

Prompt and choice are tokenised together, as in the model's training data. A token may then cross their boundary, or the last tokens of the
prompt may differ from the prompt's own tokens. All choices of an example are therefore scored from the first token in which any of them
differs from the prompt: they are conditioned on the same tokens, and the sum covers the same end of the prompt, if any, and the choice. If
the boundary is a token boundary for all choices, this is log p(choice | prompt), as in lm-evaluation-harness.
"""

from collections.abc import Callable
from dataclasses import dataclass

from ztk.inference.windows import Scorer


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedChoices:
    """context: tokens that all choices follow, one at least. endings: the tokens of each choice that count. is_cut: the beginning of the
    prompt was left out, because the model does not take as much."""

    context: list[int]
    endings: list[list[int]]
    is_cut: bool = False

    def cut_to(self, size: int) -> "EncodedChoices":
        """The same with the end of the context that fits into `size` tokens together with the longest choice.

        Raises:
            ValueError: a choice does not fit.
        """
        longest = max(map(len, self.endings))
        if longest >= size:
            raise ValueError(
                f"a choice has {longest} tokens, and the model is given {size} with one before it; shorten the choice"
            )
        room = size - longest
        if len(self.context) <= room:
            return self
        return EncodedChoices(context=self.context[-room:], endings=self.endings, is_cut=True)


def encode_choices(
    prompt: str, *, choices: list[str], encode: Callable[[str], list[int]], begin: tuple[int, ...], first: int | None
) -> EncodedChoices:
    """Tokens of a prompt with each choice. encode: without special tokens. begin: tokens before every text. first: the token before a
    choice that has nothing else before it.

    Raises:
        ValueError: a choice without a token, or nothing before the choices.
    """
    alone = encode(prompt)
    joined = [encode(prompt + choice) for choice in choices]
    if not all(joined):
        raise ValueError("a choice has no token; write its text")
    shared = min(min(_common(alone, tokens), len(tokens) - 1) for tokens in joined)
    context = [*begin, *joined[0][:shared]]
    if not context:
        if first is None:
            raise ValueError(
                "nothing is before the choices, and the tokenizer has neither a bos_token nor an eos_token; write a prompt"
            )
        context = [first]
    return EncodedChoices(context=context, endings=[tokens[shared:] for tokens in joined])


def score_choices(scorer: Scorer, *, examples: list[EncodedChoices]) -> list[list[float]]:
    """The log-likelihood, natural, of each choice of each example.

    Raises:
        ValueError: as `Scorer.score_ends` does.
        FloatingPointError: logits that are not finite.
    """
    found = iter(
        scorer.score_ends(
            [example.context + ending for example in examples for ending in example.endings],
            counts=[len(ending) for example in examples for ending in example.endings],
        )
    )
    return [[next(found) for _ in example.endings] for example in examples]


def _common(first: list[int], second: list[int]) -> int:
    """Length of the common beginning."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((place for place, (one, other) in pairs if one != other), min(len(first), len(second)))
