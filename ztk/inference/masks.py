"""Masks of the tokens that a draw may take, from the sets and the code of a request and the grammar of its answer, as packed bits.

A mask is int32 [ceil(V / 32)] on the CPU: bit t % 32 of word t // 32 allows token t. The host makes it from its own data, so a
device receives bits and returns nothing.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from ztk.inference.policy import GrammarState, SamplingParams

_WORD = 32


class NothingDrawn(ValueError):
    """The request allows no token, or its own code fails. Only this request ends."""


def masks_tokens(sampling: SamplingParams) -> bool:
    """Whether draws use a mask of `packed_mask`."""
    has_sets = bool(sampling.allowed_token_ids or sampling.bad_words or sampling.min_tokens)
    return has_sets or sampling.grammar is not None or sampling.token_mask is not None


def packed_mask(sampling: SamplingParams, *, state: GrammarState | None, answer: list[int], size: int) -> Tensor | None:
    """int32 [words]: the tokens that may follow `answer` in a vocabulary of `size`, or None where nothing is masked.

    state: the answer's, if the request has a grammar.

    Raises:
        NothingDrawn: no token is left, or the grammar or the token mask fails.
    """
    words = None
    if state is not None:
        words = _of_grammar(state, answer=answer, size=size)
        if words is None:
            return None
    if sampling.allowed_token_ids:
        words = _both(words, _of_tokens(sampling.allowed_token_ids, size=size))
    if sampling.token_mask is not None:
        words = _both(words, pack(_allowed(sampling.token_mask, answer=answer, size=size)))
    if banned := _banned(sampling, answer=answer):
        words = torch.full((_words(size),), -1, dtype=torch.int32) if words is None else words.clone()
        for token in banned:
            words[token // _WORD] &= ~_bits(torch.device("cpu"))[token % _WORD]
    if words is not None and not words.any():
        raise NothingDrawn(
            "no token is left to draw: allowed_token_ids, bad_words, min_tokens, token_mask and the grammar of the request exclude each other"
        )
    return words


def refused_by(masks: list[Tensor | None], *, size: int, device: torch.device | None = None) -> Tensor:
    """bool [R, size] on the device, by default the CPU: the tokens that the mask of each row leaves out, none where there is no mask."""
    every = torch.full((_words(size),), -1, dtype=torch.int32)
    packed = torch.stack([every if mask is None else mask[: len(every)] for mask in masks])
    packed = packed if device is None else packed.to(device)
    return _eights(packed.device).take(packed.view(torch.uint8).long()).view(torch.bool)[:, :size]


def pack(allowed: Tensor) -> Tensor:
    """bool [V] as a mask."""
    padded = torch.zeros(_words(len(allowed)) * _WORD, dtype=torch.int32)
    padded[: len(allowed)] = allowed
    return (padded.view(-1, _WORD) * _bits(padded.device)).sum(1, dtype=torch.int32)


def _both(words: Tensor | None, other: Tensor) -> Tensor:
    return other if words is None else words & other


def _allowed(mask: Callable[[list[int]], Tensor], *, answer: list[int], size: int) -> Tensor:
    """bool [size]. The mask is the caller's code: its errors end only this request."""
    try:
        allowed = mask(answer)
    except Exception as error:  # noqa: BLE001
        raise NothingDrawn(f"sampling.token_mask failed: {type(error).__name__}: {error}") from error
    if not isinstance(allowed, Tensor) or allowed.dtype != torch.bool or allowed.shape != (size,):
        shown = f"{allowed.dtype} {list(allowed.shape)}" if isinstance(allowed, Tensor) else type(allowed).__name__
        raise NothingDrawn(f"sampling.token_mask returned {shown}: must be bool [{size}], the tokens of the vocabulary")
    if not allowed.any():
        raise NothingDrawn("sampling.token_mask allows no token: let it allow one, the end token for example")
    return allowed


def _of_grammar(state: GrammarState, *, answer: list[int], size: int) -> Tensor | None:
    """Returns the grammar's mask in as many words as the vocabulary needs, or None where the grammar does not lead to `answer`."""
    try:
        words = state.mask(answer)
    except Exception as error:  # noqa: BLE001  # a grammar is the request's
        raise NothingDrawn(f"the grammar of the request fails: {error}") from error
    if words is None or len(words) >= _words(size):
        return None if words is None else words[: _words(size)]
    return torch.cat([words, words.new_zeros(_words(size) - len(words))])


@functools.lru_cache(maxsize=64)
def _of_tokens(tokens: tuple[int, ...], *, size: int) -> Tensor:
    allowed = torch.zeros(size, dtype=torch.bool)
    allowed[list(tokens)] = True
    return pack(allowed)


def _banned(sampling: SamplingParams, *, answer: list[int]) -> list[int]:
    """The last tokens of bad words whose other tokens end the answer, and ends that would come too early."""
    banned = [word[-1] for word in sampling.bad_words if len(word) == 1 or answer[1 - len(word) :] == list(word[:-1])]
    return [*banned, *(sampling.stop_token_ids if len(answer) < sampling.min_tokens else ())]


def _words(size: int) -> int:
    return -(-size // _WORD)


@functools.cache
def _eights(device: torch.device) -> Tensor:
    """A table from a mask's byte to the eight bools of its refused tokens, as one int64: [256]."""
    with torch.inference_mode(False):
        zeros = (torch.arange(256).unsqueeze(1) >> torch.arange(8)) & 1 == 0
        return zeros.view(torch.int64).flatten().to(device)


@functools.cache
def _bits(device: torch.device) -> Tensor:
    """The bits 1, 2, 4, ... and the sign bit: int32 [32]."""
    with torch.inference_mode(False):
        return torch.tensor([1 << bit for bit in range(_WORD - 1)] + [-(1 << (_WORD - 1))], dtype=torch.int32).to(
            device
        )
