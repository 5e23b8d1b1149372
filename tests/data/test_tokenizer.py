"""Text to bytes and back."""

import pytest
import torch

from ztk.data import ByteTokenizer


@pytest.mark.parametrize("text", ["", "def f(x):\n    return x\n", "na\u00efve \u2211 \U0001f600"])
def test_round_trip(text):
    tokens = ByteTokenizer().encode(text)
    assert tokens.dtype == torch.int64
    assert len(tokens) == len(text.encode())
    assert ByteTokenizer().decode(tokens) == text


def test_broken_utf8_is_shown_and_other_tokens_refused():
    assert ByteTokenizer().decode(torch.tensor([65, 0xC3])) == "A\ufffd"
    with pytest.raises(ValueError, match="token 256 is not a byte"):
        ByteTokenizer().decode(torch.tensor([65, 256]))
