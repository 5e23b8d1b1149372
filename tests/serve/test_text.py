"""Text streams: any cut into tokens gives the text, up to the first stop text."""

import random
from typing import ClassVar

import pytest

from ztk.serve.text import TextStream

TEXT = "naïve 日本語 🙂 e\u0301 END of it"


class Pieces:
    """A vocabulary of byte strings of different lengths."""

    special: ClassVar = {}

    def __init__(self, data: bytes, *, seed: int) -> None:
        chance, self.parts = random.Random(seed), []
        while data:
            size = chance.randint(1, 4)
            self.parts.append(data[:size])
            data = data[size:]

    def decode(self, tokens: list[int]) -> str:
        return b"".join(self.parts[token] for token in tokens).decode(errors="replace")


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize(
    "stops, expected",
    [
        ((), TEXT),
        (("END",), "naïve 日本語 🙂 e\u0301 "),
        (("zzz", "本語 🙂"), "naïve 日"),
        (("🙂 f", " of"), TEXT[:16]),
    ],
)
def test_pieces_are_the_text(seed, stops, expected):
    pieces = Pieces(TEXT.encode(), seed=seed)
    stream = TextStream(pieces, stops=stops)
    found = []
    for token in range(len(pieces.parts)):
        found.append(stream.push(token))
        assert "\ufffd" not in found[-1]
    text = "".join(found) + stream.finish()
    end = TEXT.find(" of") if stops == ("🙂 f", " of") else None
    assert text == (TEXT[:end] if end else expected)
    assert stream.stopped == bool(stops)


def test_a_broken_character_at_the_end_is_shown_as_such():
    pieces = Pieces("ab🙂".encode()[:-1], seed=1)
    stream = TextStream(pieces)
    assert "".join(stream.push(token) for token in range(len(pieces.parts))) in ("ab", "a", "")
    stream = TextStream(pieces)
    assert "".join([stream.push(token) for token in range(len(pieces.parts))] + [stream.finish()]) == "ab\ufffd"


def test_what_may_begin_a_stop_text_waits():
    pieces = Pieces(b"aENaEND", seed=0)
    pieces.parts = [bytes([byte]) for byte in b"aENaEND"]
    stream = TextStream(pieces, stops=("END",))
    assert [stream.push(token) for token in range(7)] == ["a", "", "", "ENa", "", "", ""]
    assert stream.stopped and stream.finish() == ""


class Words:
    """Like SentencePiece's decoders: a space before each word, but none at the beginning of the decoded text."""

    special: ClassVar = {4: "<end>", 5: "<tool>"}

    def decode(self, tokens: list[int]) -> str:
        return "".join((" of", " Paris", "ian", " it", "", "")[token] for token in tokens).removeprefix(" ")


@pytest.mark.parametrize("prompt", [[0], [3, 0], [0] * 20])
def test_an_answer_begins_with_the_space_behind_its_prompt(prompt):
    stream = TextStream(Words(), prompt=prompt)
    assert [stream.push(token) for token in (1, 2, 3)] == [" Paris", "ian", " it"] and stream.finish() == ""
    stream = TextStream(Words(), prompt=prompt, stops=("ian it",))
    assert "".join(stream.push(token) for token in (1, 2, 3)) == " Paris" and stream.stopped


@pytest.mark.parametrize(
    ("stops", "expected"),
    [
        ((), " Paris it"),
        (("<end>",), " Paris"),
        (("Paris<tool><end>",), " "),
        (("<tool>", "it"), " Paris"),
        (("<tool> it",), " Paris it"),
    ],
)
def test_a_stop_text_may_be_a_special_token(stops, expected):
    stream = TextStream(Words(), prompt=[0], stops=stops)
    assert "".join(stream.push(token) for token in (1, 5, 4, 3)) + stream.finish() == expected
    assert stream.stopped == (stops not in ((), ("<tool> it",)))
    shown = TextStream(Words(), prompt=[0], stops=stops, shows_special=True)
    found = "".join(shown.push(token) for token in (1, 5, 4, 3)) + shown.finish()
    assert found == " Paris<tool><end> it"[: len(found)] and shown.stopped == stream.stopped
    assert found.replace("<tool>", "").replace("<end>", "") == expected
