"""Tokens to text while they arrive, and texts that end an answer."""

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

_REPLACED = "\ufffd"
_BEFORE = 8  # tokens of a prompt's end that are decoded with the answer's first ones
_CHARACTER = 4  # tokens that a character has at most: one for each byte


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
    between prompt and answer. shows_special: special tokens are part of the text; shown: these are in any case. shows_stop: so is the stop text
    that ends it. first_stop: tokens before which none ends it. Stop texts are found in any case in the text with them, so
    that "<|im_end|>" ends an answer.

    A piece that ends in the middle of a character waits for the rest of it, one that may be the beginning of a stop text until that is
    decided. length: characters of the text so far, those that wait for a stop text included; a token begins where the text before it ends.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        stops: tuple[str, ...] = (),
        prompt: Sequence[int] = (),
        shows_special: bool = False,
        shown: Collection[str] = (),
        shows_stop: bool = False,
        first_stop: int = 0,
    ) -> None:
        self._shown, self._shows_stop, self._first_stop = shown, shows_stop, first_stop
        self._begin = min(len(prompt), _BEFORE)
        self._decoder, self._stops = decoder, tuple(stop for stop in stops if stop)
        self._special, self._shows_special = decoder.special, shows_special
        self._tokens = list(prompt[-_BEFORE:])
        self._context = 0  # tokens from here on are decoded: those before changed nothing of what follows
        self._decoded = len(self._tokens)  # tokens whose text is in `_waiting`, was returned, or is the prompt's
        self._before = ""  # text of the tokens from `_context` to `_decoded`
        self._is_before_known = False
        self._waiting = ""
        self._is_shown: list[bool] = []  # for each letter of `_waiting`
        self.stopped, self.length = False, 0

    def push(self, token: int) -> str:
        """Text that is certain after one more token. Empty after a stop text, see `stopped`."""
        self._tokens.append(token)
        if (text := self._special.get(token)) is not None:
            return self._release(text, is_shown=self._shows_special or text in self._shown)
        if (found := self._certain(len(self._tokens))) is not None:
            return found
        if len(self._tokens) - self._decoded < 4 * _CHARACTER:
            return ""
        # Broken characters: a whole one that began before the last tokens would have ended by now.
        return self._certain(len(self._tokens) - _CHARACTER, is_broken=True) or ""

    def finish(self) -> str:
        """The rest: the text that waited for more, a broken character as U+FFFD."""
        rest = (self._certain(len(self._tokens), is_broken=True) or "") + _shown(self._waiting, self._is_shown)
        self._waiting, self._is_shown = "", []
        return rest

    def _certain(self, stop: int, *, is_broken: bool = False) -> str | None:
        """Text of the tokens up to `stop`; None: they add nothing, or end in the middle of a character, unless `is_broken`."""
        if not self._is_before_known:
            self._before = self._decoder.decode(self._tokens[self._context : self._decoded])
            self._is_before_known = True
        after = self._decoder.decode(self._tokens[self._context : stop])
        if len(after) <= len(self._before) or (after.endswith(_REPLACED) and not is_broken):
            return None
        piece = after[len(self._before) :]
        self._context, self._decoded, self._is_before_known = self._decoded, stop, False
        return self._release(piece)

    def _release(self, piece: str, *, is_shown: bool = True) -> str:
        if self.stopped:
            return ""
        self.length += len(piece) * is_shown
        stops = self._stops if len(self._tokens) - self._begin > self._first_stop else ()
        text, marks = self._waiting + piece, [*self._is_shown, *[is_shown] * len(piece)]
        found = [(place, len(stop)) for stop in stops if (place := text.find(stop)) >= 0]
        if found:
            self.stopped, self._waiting, self._is_shown = True, "", []
            place, size = min(found)
            return _shown(text[: place + size * self._shows_stop], marks)
        keep = max((_overlap(text, stop) for stop in stops), default=0)
        self._waiting, self._is_shown = text[len(text) - keep :], marks[len(text) - keep :]
        return _shown(text[: len(text) - keep], marks)


def _shown(text: str, marks: Sequence[bool]) -> str:
    return "".join(letter for letter, is_shown in zip(text, marks, strict=False) if is_shown)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)
