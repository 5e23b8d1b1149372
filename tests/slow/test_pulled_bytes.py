"""Bytes of the weights that servers pull from a trainer's shards, of a model whose tensors take several messages."""

import pytest

from tests.rl.rollout.test_published import LAYOUTS, draw, end, model_of, offer
from ztk.core.runtime.comm.pulls import CHUNK_BYTES
from ztk.nn import DecoderConfig

CONFIG = DecoderConfig(vocab_size=16384, dim=256, layers=6, heads=8, kv_heads=4, hidden_dim=768, max_seq_len=128)


@pytest.mark.parametrize(
    ("layout", "servers", "weights"),
    [("stage 3", 2, "stored"), ("stage 3, tp2", 4, "stored"), ("stage 3, tp2", 2, "int8"), ("stage 3, tp2", 4, "int8")],
)
def test_a_server_of_several_ranks_pulls_the_weights_once(ranks, tmp_path, show, layout, servers, weights):
    world, strategy = LAYOUTS[layout]
    sizes = [4 * value.numel() for value in model_of(seed=3, config=CONFIG).parameters()]
    addresses = ranks(world).run(offer, strategy=strategy, folder=tmp_path, config=CONFIG)[0]
    nbytes, is_equal = ranks(servers).run(draw, addresses=addresses, weights=weights, config=CONFIG)[0]
    largest = max(largest for _, largest in ranks(world).run(end))
    assert is_equal and sum(sizes) <= nbytes < 1.003 * sum(sizes)
    assert largest <= CHUNK_BYTES < max(sizes)
    text = (
        f"{layout}, {servers} ranks of a server, {weights}: {nbytes} of {sum(sizes)} bytes, {nbytes / sum(sizes):.4f}"
    )
    show(f"{text}; largest message {largest}, largest tensor {max(sizes)}")
