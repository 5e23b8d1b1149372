"""A submitted request, and the checks of its tokens and its adapter."""

from collections.abc import Iterable
from dataclasses import dataclass

from ztk.inference.policy import SamplingParams


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A submitted prompt. `id` is in every `Output` of its answers. adapter: its name, or None for the base."""

    id: int
    prompt: list[int]
    sampling: SamplingParams
    adapter: str | None = None


def check_tokens(prompt: list[int], *, limit: int, biased: Iterable[int] = (), vocabulary: int, max_len: int) -> None:
    """Raises ValueError for an empty prompt, a token outside the vocabulary, and more tokens than `max_len` with an answer of up to `limit`.
    biased: tokens that the sampling names."""
    if not prompt:
        raise ValueError("the prompt is empty: begin with the model's first token, or a newline")
    for kind in {*map(type, prompt), *map(type, biased)} - {int}:
        if issubclass(kind, bool) or not hasattr(kind, "__index__"):
            raise ValueError(f"a token is a {kind.__name__}: tokens are integers")
    odd = next((token for token in (*prompt, *biased) if not 0 <= token < vocabulary), None)
    if odd is not None:
        raise ValueError(f"token {odd} is outside the vocabulary of {vocabulary}")
    if len(prompt) + limit > max_len:
        raise ValueError(
            f"a prompt of {len(prompt)} tokens and an answer of up to {limit} are more than the {max_len} tokens of this model: "
            "shorten the prompt or lower max_tokens"
        )


def adapter_number(name: str | None, *, among: Iterable[str]) -> int:
    """The number of an adapter in spans, 0 of the base. Raises ValueError for a name that is not in `among`, a generator's adapters."""
    names = [None, *among]
    if name not in names:
        has = f"has {', '.join(map(str, names[1:]))}" if names[1:] else "has none"
        raise ValueError(f"adapter {name!r}: this generator {has}; pass Generator(adapters=), or name one of them")
    return names.index(name)
