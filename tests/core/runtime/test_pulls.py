"""Tensors that other processes pull over gloo: values of any boxes, an address that is a secret, and processes that hang or are gone."""

import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager
from functools import partial

import pytest
import torch

from ztk.core.runtime.boxes import Box, boxes_of
from ztk.core.runtime.comm.pulls import CHUNK_BYTES, Held, Offer, address_of, pulled

STATE = {
    "matrix": torch.randn(3, 4),
    "half": torch.arange(5).bfloat16(),
    "none": torch.empty(0, 2),
    "scalar": torch.tensor(3.0),
}
SECONDS = 30.0


def full(name, value):
    return Held(
        name=name,
        full_shape=tuple(value.shape),
        box=Box(start=(0,) * value.dim(), shape=tuple(value.shape)),
        dtype=value.dtype,
        read=lambda: value,
    )


def in_shards(name, value, *, ranks):
    """The boxes that each of `ranks` holds of a tensor that is cut as ZeRO cuts it: by ranges of the flat tensor."""
    shape, size = tuple(value.shape), -(-value.numel() // ranks)
    for rank in range(ranks):
        boxes = boxes_of(shape, start=min(rank * size, value.numel()), stop=min((rank + 1) * size, value.numel()))
        yield [
            Held(name=name, full_shape=shape, box=box, dtype=value.dtype, read=partial(value.__getitem__, box.slices))
            for box in boxes
        ]


@contextmanager
def offered(state, *, ranks=1):
    """The offers of ranks, and their addresses."""
    held = [[full(name, own) for name, own in state.items()]]
    if ranks > 1:
        held = [[] for _ in range(ranks)]
        for name, own in state.items():
            for rank, boxes in enumerate(in_shards(name, own, ranks=ranks)):
                held[rank] += boxes
    with ExitStack() as stack:
        offers = [stack.enter_context(Offer(timeout_seconds=SECONDS)) for _ in held]
        for offer, own in zip(offers, held, strict=True):
            offer.publish("v1", held=own)
        yield offers, ",".join(address(offer) for offer in offers)


def address(offer, version="v1"):
    return address_of(offer.secret, host="127.0.0.1", port=offer.port, version=version)


def test_tensors_come_in_any_order_while_another_process_hangs():
    began = time.monotonic()
    with offered(STATE) as (_, where), ExitStack() as stack:
        hangs = stack.enter_context(pulled(where, timeout_seconds=SECONDS))
        assert torch.equal(hangs["half"], STATE["half"])
        with pulled(where, timeout_seconds=SECONDS) as source:
            assert source.shapes["half"] == ((5,), torch.bfloat16)
            for name in sorted(STATE, reverse=True):
                assert torch.equal(source[name], STATE[name])
            assert source.read_bytes == sum(own.nbytes for own in STATE.values())
    assert time.monotonic() - began < SECONDS


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_box_comes_from_the_ranks_that_hold_it_without_the_rest(ranks):
    wide = torch.randn(1100, 1500)  # several messages
    box = Box(start=(17, 1203), shape=(1050, 150))
    with offered({"wide": wide}, ranks=ranks) as (offers, where), pulled(where, timeout_seconds=SECONDS) as source:
        assert torch.equal(source.part("wide", box=box), wide[box.slices])
        assert source.read_bytes == 4 * box.numel
        assert source.largest_bytes <= CHUNK_BYTES and all(offer.largest_bytes <= CHUNK_BYTES for offer in offers)
        for axis in range(2):
            assert torch.equal(source.largest("wide", box=box, axis=axis), wide[box.slices].abs().amax(axis))
        assert source.read_bytes < 4 * box.numel + 4 * 30 * ranks * sum(box.shape)


def test_an_element_that_no_rank_or_several_hold_is_refused():
    twice = [full("matrix", STATE["matrix"])] * 2
    for held in (twice, next(in_shards("matrix", STATE["matrix"], ranks=2))):
        with Offer(timeout_seconds=SECONDS) as offer:
            offer.publish("v1", held=held)
            with (
                pytest.raises(ConnectionError, match="a part of matrix, or some of it twice"),
                pulled(address(offer), timeout_seconds=SECONDS),
            ):
                pass


def test_a_transfer_goes_on_with_its_version_and_later_ones_get_the_new():
    with offered(STATE) as ([offer], where), pulled(where, timeout_seconds=SECONDS) as before:
        offer.publish("v2", held=[full("matrix", STATE["matrix"] + 1)])
        assert torch.equal(before["matrix"], STATE["matrix"])
        with pulled(address(offer, "v2"), timeout_seconds=SECONDS) as after:
            assert torch.equal(after["matrix"], STATE["matrix"] + 1)
        with pytest.raises(ConnectionError, match="has newer ones"), pulled(where, timeout_seconds=SECONDS):
            pass


def test_an_offer_ends_while_a_process_hangs_and_that_one_learns_of_it():
    began = time.monotonic()
    with offered(STATE) as (_, where):
        hangs = pulled(where, timeout_seconds=SECONDS)
        source = hangs.__enter__()
        assert torch.equal(source["matrix"], STATE["matrix"])
    with pytest.raises(ConnectionError, match="is gone or late"):
        while time.monotonic() - began < SECONDS:
            source["matrix"]
    assert time.monotonic() - began < SECONDS


PULLS = """
import sys
from ztk.core.runtime.comm.pulls import pulled
with pulled(sys.argv[1], timeout_seconds=30.0) as source:
    source["half"]
    print("begun", flush=True)
    while True:
        source["wide"]
"""


def test_a_process_that_is_killed_in_a_transfer_ends_it_and_delays_no_other():
    wide = torch.randn(1100, 3000)  # several messages
    with offered(STATE | {"wide": wide}) as (_, where):
        process = subprocess.Popen([sys.executable, "-c", PULLS, where], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None and process.stdout.readline() == "begun\n"
        process.kill()
        process.wait()
        began = time.monotonic()
        with pulled(where, timeout_seconds=SECONDS) as source:
            assert torch.equal(source["wide"], wide)
        while any(thread.name == "ztk-offered" for thread in threading.enumerate()):
            assert time.monotonic() - began < SECONDS / 2, "the transfer to the killed process goes on"
            time.sleep(0.01)


def test_nothing_is_pulled_without_the_secret():
    with offered(STATE) as (_, own):
        where = own.partition("@")[2]
        for other in (f"gloo://guessed@{where}", "gloo://a@127.0.0.1:1"):
            with (
                pytest.raises(ConnectionError, match="no tensors are offered at"),
                pulled(other, timeout_seconds=0.5),
            ):
                pass
        with pytest.raises(ValueError, match="no address of offered tensors"), pulled(where, timeout_seconds=0.5):
            pass
