"""Tokens to text while they arrive, and texts that end an answer."""

from collections.abc import Mapping, Sequence
from typing import Protocol

_REPLACED = "\ufffd"
_BEFORE = 8  # tokens of a prompt's end that are decoded with the answer's first ones


class Decoder(Protocol):
    """Turns tokens into text."""

    @property
    def special(self) -> Mapping[int, str]:
        """The texts of special tokens, which `decode` leaves out."""
        ...

    def decode(self, tokens: list[int]) -> str:
        """The text of `tokens`; bytes that are no UTF-8 become U+FFFD."""
        ...


class TextStream:
    """The text of one answer, piece by piece. Joined pieces are the text of all tokens, up to the first stop text.

    prompt: the tokens before it. Decoders of SentencePiece leave out a space at the beginning of what they decode, which would be the one
    between prompt and answer. shows_special: special tokens are part of the text. Stop texts are found in any case in the text with them, so
    that "<|im_end|>" ends an answer.

    A piece that ends in the middle of a character waits for the rest of it, one that may be the beginning of a stop text until that is
    decided.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        stops: tuple[str, ...] = (),
        prompt: Sequence[int] = (),
        shows_special: bool = False,
    ) -> None:
        self._decoder, self._stops = decoder, tuple(stop for stop in stops if stop)
        self._special, self._shows_special = decoder.special, shows_special
        self._tokens = list(prompt[-_BEFORE:])
        self._context = 0  # tokens from here on are decoded: those before changed nothing of what follows
        self._decoded = len(self._tokens)  # tokens whose text is in `_waiting`, was returned, or is the prompt's
        self._waiting = ""
        self._is_shown: list[bool] = []  # for each letter of `_waiting`
        self.stopped = False

    def push(self, token: int) -> str:
        """Text that is certain after one more token. Empty after a stop text, see `stopped`."""
        self._tokens.append(token)
        if (text := self._special.get(token)) is not None:
            return self._release(text, is_shown=self._shows_special)
        before = self._decoder.decode(self._tokens[self._context : self._decoded])
        after = self._decoder.decode(self._tokens[self._context :])
        if len(after) <= len(before) or after.endswith(_REPLACED):
            return ""
        self._context, self._decoded = self._decoded, len(self._tokens)
        return self._release(after[len(before) :])

    def finish(self) -> str:
        """The rest: the text that waited for more, a broken character as U+FFFD."""
        before = self._decoder.decode(self._tokens[self._context : self._decoded])
        after = self._decoder.decode(self._tokens[self._context :])
        rest = self._release(after[len(before) :]) + _shown(self._waiting, self._is_shown)
        self._decoded, self._waiting, self._is_shown = len(self._tokens), "", []
        return rest

    def _release(self, piece: str, *, is_shown: bool = True) -> str:
        if self.stopped:
            return ""
        text, marks = self._waiting + piece, [*self._is_shown, *[is_shown] * len(piece)]
        found = [place for place in (text.find(stop) for stop in self._stops) if place >= 0]
        if found:
            self.stopped, self._waiting, self._is_shown = True, "", []
            return _shown(text[: min(found)], marks)
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._waiting, self._is_shown = text[len(text) - keep :], marks[len(text) - keep :]
        return _shown(text[: len(text) - keep], marks)


def _shown(text: str, marks: Sequence[bool]) -> str:
    return "".join(letter for letter, is_shown in zip(text, marks, strict=False) if is_shown)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)
