"""Converts tokens to text as they arrive, and finds stop texts."""

from collections.abc import Collection, Sequence

from ztk.serve.tokenizers import Tokenizer

_REPLACED = "\ufffd"
_BEFORE = 8  # last tokens of a prompt, decoded together with the answer's first ones
_CHARACTER = 4  # most tokens of a character: one per byte


class TextStream:
    """The text of one answer, piece by piece. Joined pieces are the text of all tokens, up to the first stop text.

    prompt: the tokens before it. SentencePiece decoders drop a space at the beginning of their input, which would be the space between
    prompt and answer.
    shows_special: includes special tokens in the text. shown: special tokens that are always included.
    shows_stop: includes the stop text. first_stop: number of tokens before which no stop text counts. Stop texts are matched against the
    text with special tokens, so that "<|im_end|>" can end an answer.

    A piece that ends in the middle of a character waits for the rest. A piece that may be the beginning of a stop text waits until that
    is decided.
    length: characters of the text so far, including those that wait for a stop text; a token begins where the text before it ends.
    """

    def __init__(
        self,
        decoder: Tokenizer,
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
        self._context = 0  # start of the tokens to decode; earlier ones do not affect the rest
        self._decoded = len(
            self._tokens
        )  # number of tokens whose text is in `_waiting`, was returned, or belongs to the prompt
        self._before = ""  # text of the tokens from `_context` to `_decoded`
        self._is_before_known = False
        self._waiting = ""
        self._is_shown: list[bool] = []  # for each letter of `_waiting`
        self.stopped, self.length = False, 0

    def push(self, token: int) -> str:
        """Adds a token. Returns the text that is certain now; empty after a stop text, see `stopped`."""
        self._tokens.append(token)
        if (text := self._special.get(token)) is not None:
            return self._release(text, is_shown=self._shows_special or text in self._shown)
        if (found := self._certain(len(self._tokens))) is not None:
            return found
        if len(self._tokens) - self._decoded < 4 * _CHARACTER:
            return ""
        # Broken characters: a complete one that began before the last tokens would have ended by now.
        return self._certain(len(self._tokens) - _CHARACTER, is_broken=True) or ""

    def finish(self) -> str:
        """Returns the waiting text, with a broken character as U+FFFD."""
        rest = (self._certain(len(self._tokens), is_broken=True) or "") + _shown(self._waiting, self._is_shown)
        self._waiting, self._is_shown = "", []
        return rest

    def _certain(self, stop: int, *, is_broken: bool = False) -> str | None:
        """Returns the text of the tokens up to `stop`. None if they add nothing, or end in the middle of a character, unless
        `is_broken`.
        """
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
        keep = max((overlap(text, mark=stop) for stop in stops), default=0)
        self._waiting, self._is_shown = text[len(text) - keep :], marks[len(text) - keep :]
        return _shown(text[: len(text) - keep], marks)


def _shown(text: str, marks: Sequence[bool]) -> str:
    return "".join(letter for letter, is_shown in zip(text, marks, strict=False) if is_shown)


def overlap(text: str, *, mark: str) -> int:
    """Returns the length of the longest end of `text` that is a beginning of `mark`, and not all of it."""
    return next((size for size in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:size])), 0)
