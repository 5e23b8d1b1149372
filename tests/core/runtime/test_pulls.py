"""Tensors that other processes pull over gloo: values, an address that is a secret, and processes that hang or are gone."""

import time
from contextlib import ExitStack

import pytest
import torch

from ztk.core.runtime.comm.pulls import Offer, pulled

STATE = {
    "matrix": torch.randn(3, 4),
    "half": torch.arange(5).bfloat16(),
    "none": torch.empty(0, 2),
    "scalar": torch.tensor(3.0),
}
SECONDS = 30.0


def offer_of(state):
    shapes = {name: (tuple(own.shape), own.dtype) for name, own in state.items()}
    return Offer(shapes, read=state.__getitem__, host="127.0.0.1", timeout_seconds=SECONDS)


def test_tensors_come_in_any_order_while_another_process_hangs():
    began = time.monotonic()
    with offer_of(STATE) as offer, ExitStack() as stack:
        hangs = stack.enter_context(pulled(offer.address, timeout_seconds=SECONDS))
        assert torch.equal(hangs["half"], STATE["half"])
        with pulled(offer.address, timeout_seconds=SECONDS) as source:
            assert source.shapes["half"] == ((5,), torch.bfloat16)
            for name in sorted(STATE, reverse=True):
                assert torch.equal(source[name], STATE[name])
    assert offer.sent_bytes == sum(own.nbytes for own in STATE.values()) + STATE["half"].nbytes
    assert time.monotonic() - began < SECONDS


def test_an_offer_ends_while_a_process_hangs_and_that_one_learns_of_it():
    began = time.monotonic()
    with offer_of(STATE) as offer:
        hangs = pulled(offer.address, timeout_seconds=SECONDS)
        source = hangs.__enter__()
        assert torch.equal(source["matrix"], STATE["matrix"])
    with pytest.raises(ConnectionError, match="is gone or late"):
        while time.monotonic() - began < SECONDS:
            source["matrix"]
    assert time.monotonic() - began < SECONDS


def test_nothing_is_pulled_without_the_secret():
    with offer_of(STATE) as offer:
        where = offer.address.partition("@")[2]
        for address in (f"gloo://guessed@{where}", "gloo://a@127.0.0.1:1"):
            with (
                pytest.raises(ConnectionError, match="no tensors are offered at"),
                pulled(address, timeout_seconds=0.5),
            ):
                pass
        with pytest.raises(ValueError, match="no address of offered tensors"), pulled(where, timeout_seconds=0.5):
            pass
